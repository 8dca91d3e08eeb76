# SPDX-License-Identifier: Apache-2.0
"""The part of ``equality.py`` that fits a test run: P = 2, eager and with CUDA graphs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SCRIPT = Path(__file__).with_name("equality.py")


@pytest.mark.parametrize(
    ("model", "backend"),
    [
        ("gqa", "FLASH_ATTN"),
        ("gqa", "TRITON_ATTN"),
        ("gqa", "FLASHINFER"),
        ("mla", "FLASH_ATTN_MLA"),
        ("mla", "FLASHMLA"),
        ("mla", "TRITON_MLA"),
        ("sparse", "FLASH_ATTN_MLA_SPARSE"),
        ("sparse", "FLASHMLA_SPARSE"),
        ("moe", "FLASH_ATTN"),
        ("glm4_moe", "FLASH_ATTN"),
        ("gpt_oss", "FLASH_ATTN"),
    ],
)
def test_answers_are_as_good_as_with_one_rank(model: str, backend: str, tmp_path: Path) -> None:
    options = ["--models", model, "--backends", backend, "--sizes", "2"]
    options += ["--graphs", "eager", "FULL_AND_PIECEWISE"]
    run = subprocess.run(
        [sys.executable, SCRIPT, *options, "--folder", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout

# SPDX-License-Identifier: Apache-2.0
"""The parts of ``equality.py`` and ``offload.py`` that fit a test run: P = 2."""

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
FOLDER = Path(__file__).parent


def require_success(script: str, *options: str | Path) -> None:
    run = subprocess.run(
        [sys.executable, FOLDER / script, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout


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
    require_success("equality.py", *options, "--folder", tmp_path)


@pytest.mark.parametrize("model", ["gqa", "mla"])
def test_what_was_offloaded_comes_back(model: str, tmp_path: Path) -> None:
    require_success("offload.py", "--models", model, "--folder", tmp_path)

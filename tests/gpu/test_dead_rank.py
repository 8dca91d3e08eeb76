# SPDX-License-Identifier: Apache-2.0
"""A rank that dies while the others wait for its KV on the GPU takes the engine with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.e2e.processes import end_session, remaining, session

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SCRIPT = Path(__file__).with_name("dead_rank.py")
RUN_TIMEOUT_S = 240


@pytest.mark.parametrize("exchange", ["peer", "gather"])
def test_no_rank_waits_for_a_dead_one(exchange: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, SCRIPT, exchange],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "1"},
        )
    try:
        assert process.wait(RUN_TIMEOUT_S) == 0, log.read_text()[-6000:]
        assert remaining(session(process.pid)) == []
    finally:
        end_session(process.pid)

# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that take hours refuse what they would leave out."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import REPO_ROOT


def test_unknown_layouts_are_refused() -> None:
    command = [sys.executable, "benchmarks/ttft_gpus.py", "--layouts", "PCP2", "PCP2 other"]
    run = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert "unknown --layouts ['PCP2 other']; there are ['PCP2'," in run.stderr

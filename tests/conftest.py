# SPDX-License-Identifier: Apache-2.0
"""Checkpoints for tests that start engines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest

REPO_ROOT = Path(__file__).resolve().parents[1]

Checkpoints: TypeAlias = Callable[[str], Path]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Return what finds a checkpoint's folder by name: "smollm2", or a random one."""
    folder = tmp_path_factory.mktemp("checkpoints")

    @cache
    def checkpoint(name: str) -> Path:
        if name == "smollm2":
            command = [sys.executable, "examples/demo/smollm2.py"]
            path = subprocess.run(
                command, cwd=REPO_ROOT, check=True, stdout=subprocess.PIPE, text=True
            )
            return Path(path.stdout.strip())
        from tests.checkpoints import save_random_checkpoint

        return save_random_checkpoint(name, folder)

    return checkpoint

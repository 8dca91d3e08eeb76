# SPDX-License-Identifier: Apache-2.0
"""Checkpoints for tests that start engines, and a process that interprets Triton kernels."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.e2e.processes import ENV

REPO_ROOT = Path(__file__).resolve().parents[1]

Checkpoints: TypeAlias = Callable[[str], Path]
Interpreter: TypeAlias = Callable[..., Any]


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


@contextmanager
def interpreting_process() -> Iterator[Interpreter]:
    """Call functions in a process that interprets Triton kernels: Triton decides it on import."""
    trial = pytest.importorskip("vllm_cpu_trial", reason="the CPU trial is not installed")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=trial.register) as pool:
        with pytest.MonkeyPatch.context() as environment:
            for name, value in {**ENV, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
                environment.setenv(name, value)
            # It starts with the first task, and keeps its environment to itself.
            pool.submit(os.getpid).result()
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result()


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Call functions in the one process that interprets Triton kernels for most tests."""
    with interpreting_process() as run:
        yield run


@pytest.fixture
def call(request: pytest.FixtureRequest) -> Interpreter:
    """Call functions where Triton kernels run: here if there is a GPU, else interpreted."""
    import torch

    if torch.cuda.is_available():
        return lambda function, *args, **kwargs: function(*args, **kwargs)
    run: Interpreter = request.getfixturevalue("interpreter")
    return run

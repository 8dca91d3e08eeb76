# SPDX-License-Identifier: Apache-2.0
"""A process in which Triton's kernels are interpreted."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeAlias

import pytest

from tests.e2e.processes import ENV

Interpreter: TypeAlias = Callable[..., Any]


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Call functions in a process that interprets Triton kernels: Triton decides it on import."""
    trial = pytest.importorskip("vllm_cpu_trial", reason="the CPU trial is not installed")
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {**ENV, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
            environment.setenv(name, value)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, initializer=trial.register) as pool:
            yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result()

# SPDX-License-Identifier: Apache-2.0
"""Engines that start side by side and are measured one after the other.

Starting takes most of the time that an engine is there for. What is measured must have the machine
to itself, so a group of engines starts, and once all of them are idle each one gets its turn.
"""

from __future__ import annotations

import os
import select
import sys
import time
from subprocess import PIPE, Popen
from typing import Any

_READY_FD = "BENCHMARK_READY_FD"


class Turn:
    """A subprocess that calls ``wait_for_turn``, seen from the process that started it."""

    def __init__(self, command: list[str], environ: dict[str, str], **options: Any) -> None:
        self._ready, ready_end = os.pipe()
        variables = {**environ, _READY_FD: str(ready_end)}
        self.process = Popen(
            command, stdin=PIPE, pass_fds=[ready_end], env=variables, text=True, **options
        )
        os.close(ready_end)

    def wait_until_ready(self, deadline: float | None) -> None:
        """Wait until it waits for its turn, has ended, or ``time.monotonic()`` is past that."""
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        select.select([self._ready], [], [], seconds)
        os.close(self._ready)

    def give(self) -> None:
        """Let it go on."""
        assert self.process.stdin is not None
        self.process.stdin.close()


def wait_for_turn() -> None:
    """Say that this process is ready, and wait for its turn, if it was started to take one."""
    ready_end = os.environ.pop(_READY_FD, None)
    if ready_end is not None:
        os.close(int(ready_end))
        sys.stdin.read()

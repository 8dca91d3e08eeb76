# SPDX-License-Identifier: Apache-2.0
"""Engines that start side by side and are measured one after the other.

Starting takes most of the time that an engine is there for. What is measured must have the machine
to itself, so a group of engines starts, and once all of them are idle each one gets its turn.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from subprocess import Popen
from typing import Any

_FD = "BENCHMARK_TURN_FD"
# Taken away at once: an engine's own processes have no part in it.
_descriptor = os.environ.pop(_FD, None)


class Turn:
    """A subprocess that calls ``wait_for_turn``, seen from the process that started it."""

    def __init__(self, command: list[str], environ: dict[str, str], **options: Any) -> None:
        # Not the standard input: what a GPU's engine imports may replace that.
        self._socket, theirs = socket.socketpair()
        with theirs:
            variables = {**environ, _FD: str(theirs.fileno())}
            self.process = Popen(command, pass_fds=[theirs.fileno()], env=variables, **options)

    def wait_until_ready(self, deadline: float | None) -> None:
        """Wait until it waits for its turn, has ended, or ``time.monotonic()`` is past that."""
        if deadline is not None:
            # Zero would mean not to wait at all, and be another error.
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        # Who waits for its end finds out why there was no answer.
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            self._socket.recv(1)

    def give(self) -> None:
        """Let it go on."""
        self._socket.close()


def wait_for_turn() -> None:
    """Say that this process is ready, and wait for its turn, if it was started to take one."""
    if _descriptor is not None:
        with socket.socket(fileno=int(_descriptor)) as turn:
            turn.send(b"1")
            turn.recv(1)

# SPDX-License-Identifier: Apache-2.0
"""vLLM in child processes, which never outlive the test that started them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pkgutil
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 600
RANKS_TIMEOUT_S = 120
STOP_TIMEOUT_S = 20
LOG_TAIL = 6_000

ENV = {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    # There may be more ranks than cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Stock workers do not end by themselves; this is how long the executor waits for it.
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
FORKS_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Eager engines too compile a function of the embedding, with TP > 1 in each rank anew: 35 s.
    "TORCHDYNAMO_DISABLE": "1",
}


def exit_codes(ranks: Sequence[BaseProcess]) -> list[int | None]:
    """Run processes to their end; those that are not there in two minutes are killed."""
    for process in ranks:
        process.start()
    deadline = time.monotonic() + RANKS_TIMEOUT_S
    try:
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()


@contextlib.contextmanager
def child(
    *command: str | Path, log: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a session of its own, and end the session on the way out."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=REPO_ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENV, **(env or {})},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        end_session(process.pid)
        process.wait()


def session(leader: int) -> dict[int, str]:
    """Return the processes of a session: their ids, and the names that they gave themselves."""
    members = {}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        # Others come and go.
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if os.getsid(pid) == leader:
                members[pid] = (folder / "cmdline").read_text().rstrip("\0 ")
    return members


def remaining(pids: Iterable[int]) -> list[int]:
    """Return the processes that do not end within ``STOP_TIMEOUT_S``."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    return [pid for pid in pids if not _ends(pid, deadline)]


def _ends(pid: int, deadline: float) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0] != []
    finally:
        os.close(descriptor)


def end_session(leader: int) -> None:
    """Give the processes of a session time to remove their shared memory, then kill the rest."""
    if remaining(session(leader)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)


class Forks:
    """Processes that have imported vLLM when they start.

    Engine cores are in the process that asks for them, so that their steps can be taken by hand.
    """

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.e2e.engine", "vllm.v1.worker.cpu_worker"])
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**ENV, **FORKS_ENV}.items():
                patch.setenv(name, value)
            forkserver.ensure_running()

    def run(self, target: str, *arguments: Path, log: Path) -> None:
        """Run a "module:function" to its end, in a session of its own.

        Raises:
            RuntimeError: It failed, or hangs; the message ends with the tail of its log.
        """
        process = self._context.Process(target=_in_session, args=(log, target, *arguments))
        process.start()
        assert process.pid is not None
        try:
            process.join(RUN_TIMEOUT_S)
            if process.is_alive():
                process.terminate()
        finally:
            end_session(process.pid)
        require_success(target, process.exitcode, log)


def _in_session(log: Path, target: str, *arguments: Path) -> None:
    os.setsid()
    with log.open("wb") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    pkgutil.resolve_name(target)(*arguments)


def require_success(name: str, status: int | None, log: Path) -> None:
    """Raise RuntimeError with the tail of the log unless a status is 0; None is a timeout."""
    if status != 0:
        tail = log.read_text(errors="replace")[-LOG_TAIL:]
        raise RuntimeError(f"{name} ended with status {status}, {log}:\n{tail}")


def run_module(module: str, *arguments: str | Path, log: Path) -> None:
    """Run a module of the tests to its end.

    Raises:
        RuntimeError: It failed; the message ends with the tail of its log.
        subprocess.TimeoutExpired: It hangs.
    """
    with child(sys.executable, "-m", module, *arguments, log=log) as process:
        require_success(module, process.wait(RUN_TIMEOUT_S), log)

# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` as a child process that ends with the block that started it."""

import asyncio
import contextlib
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

MODEL_NAME = "SmolLM2-135M-Instruct"
START_TIMEOUT_S = 360
STOP_TIMEOUT_S = 8


class ChildError(RuntimeError):
    """A child process ended or stayed silent; the message names its log."""


@dataclass(frozen=True, slots=True)
class Device:
    """Where the ranks of one server run.

    Attributes:
        num_ranks: The PCP size.
        name: For people.
        env: Environment of the server, beside that of this process.
        flags: Flags of ``vllm serve``.
    """

    num_ranks: int
    name: str
    env: Mapping[str, str]
    flags: Sequence[str]


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers requests at ``url``."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]


def choose_device(size: int) -> Device:
    """Return where ``size`` ranks run: a GPU each, or on a CPU build of vLLM a core each.

    Raises:
        ValueError: This is a GPU build of vLLM and there are fewer GPUs than ranks.
    """
    if "cpu" not in importlib.metadata.version("vllm"):
        import torch

        if torch.cuda.device_count() < size:
            raise ValueError(
                f"{size} ranks need {size} GPUs, got {torch.cuda.device_count()}. "
                f"Set --sizes to at most that, or install vLLM's CPU build to run on CPU cores."
            )
        return Device(size, f"{size} x {torch.cuda.get_device_name(0)}", {}, ())
    cores = _cores()
    enough = len(cores) >= size
    cpus = [str(cpu) for cpu in cores[:size]]
    env = {
        "TRITON_INTERPRET": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(cpus) if enough else "nobind",
    }
    name = f"CPU {', '.join(cpus)}"
    if not enough:
        name += f", shared by {size} ranks: too few cores for a speed-up"
    elif size > 1:
        name += ", one rank each"
    return Device(size, name, env, ("--enforce-eager",))


def _cores() -> list[int]:
    """Return the CPUs that this process may use, one of each physical core first."""
    usable = sorted(os.sched_getaffinity(0))
    seen: dict[str, int] = {}
    turn = {}
    for cpu in usable:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = siblings.read_text() if siblings.exists() else str(cpu)
        turn[cpu] = seen.get(core, 0)
        seen[core] = turn[cpu] + 1
    return sorted(usable, key=lambda cpu: (turn[cpu], cpu))


@contextlib.contextmanager
def child(
    command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a session of its own; end it, and all that it started, on the way out."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    # Asked to end, vLLM's processes remove their shared memory; killed, they leave it behind.
    try:
        process.terminate()
        if not _ends_within(process, STOP_TIMEOUT_S):
            os.killpg(process.pid, signal.SIGTERM)
            _ends_within(process, STOP_TIMEOUT_S)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
    except ProcessLookupError:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


@contextlib.asynccontextmanager
async def serve(checkpoint: Path, device: Device, log: Path) -> AsyncIterator[Server]:
    """Serve a checkpoint in float32 with one PCP rank for each of the device's.

    Raises:
        ChildError: The server ended before it was ready, or was not ready in time.
    """
    port = _free_port()
    command: list[str | Path] = [
        Path(sys.executable).with_name("vllm"),
        *("serve", checkpoint),
        *("--served-model-name", MODEL_NAME),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prefill-context-parallel-size", str(device.num_ranks)),
        *("--dtype", "float32"),
        *("--max-num-batched-tokens", "8192", "--max-num-seqs", "16"),
        *("--kv-cache-memory-bytes", str(768 << 20), "--gpu-memory-utilization", "0.1"),
        "--enable-prompt-tokens-details",
        *device.flags,
    ]
    env = {
        # What P > 1 runs on, chosen for P = 1 too, so that P is all that differs.
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        # Serves /collective_rpc, where the ranks' counters are read.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **device.env,
    }
    with child(command, log, env) as process:
        server = Server(f"http://127.0.0.1:{port}", log, process)
        await _wait_until_ready(server)
        yield server


async def _wait_until_ready(server: Server) -> None:
    # A proxy that the environment names has no business with this machine's own address.
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
        for _ in range(START_TIMEOUT_S * 2):
            if server.process.poll() is not None:
                raise ChildError(
                    f"vllm serve ended with status {server.process.returncode}, see {server.log}"
                )
            with contextlib.suppress(httpx.TransportError):
                if (await client.get("/health")).is_success:
                    return
            await asyncio.sleep(0.5)
    raise ChildError(f"vllm serve was not ready after {START_TIMEOUT_S} s, see {server.log}")


async def rank_counters(server: Server) -> list[dict[str, int]]:
    """Return each rank's counters since start-up (the worker method ``pcp_stats``)."""
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
        reply = await client.post("/collective_rpc", json={"method": "pcp_stats"}, timeout=60)
    reply.raise_for_status()
    counters: list[dict[str, int]] = reply.json()["results"]
    return counters


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port

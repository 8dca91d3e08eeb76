# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: where a number was measured, its spread, and how it is kept."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

REPO_ROOT = Path(__file__).resolve().parents[1]
# Parts of the names of kernels that move data between GPUs or wait for them: NCCL's, vLLM's own
# all-reduce, and what copies between KV caches.
COMMUNICATION = (
    "nccl",
    "cross_device_reduce",
    "all_reduce",
    "allreduce",
    "multimem",
    "_copy_slots_kernel",
    "_meet_kernel",
)


def communicates(kernel: str) -> bool:
    """Say whether a kernel of this name communicates."""
    return any(part in kernel.lower() for part in COMMUNICATION)


def environment() -> dict[str, Any]:
    """Return what a reader needs to judge or repeat a measurement.

    Returns:
        ``date`` (UTC), ``command``, ``commit`` (what BENCHMARK_COMMIT says, of a copy;
        else that of the checkout, which ends in ``-dirty`` if files differ from it; or None),
        ``cpu``, ``cores`` (those this process may use), ``gpus`` (name and driver of each),
        ``python``, and the versions of ``numpy``, ``torch`` and ``vllm`` (None if not installed).
    """
    script, *arguments = sys.argv
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", os.path.relpath(script, REPO_ROOT), *arguments]),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": _gpus(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("numpy", "torch", "vllm")},
    }


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Return median, 10th and 90th percentile, standard deviation and number of some samples."""
    p10, median, p90 = np.percentile(samples, [10, 50, 90])
    return {
        "median": float(median),
        "p10": float(p10),
        "p90": float(p90),
        "std": float(np.std(samples)),
        "n": len(samples),
    }


def print_table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print columns aligned to the right, floats with three decimals."""
    cells = [
        [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row]
        for row in (headers, *rows)
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def write_json(path: str | Path, name: str, rows: Sequence[dict[str, Any]], **extra: Any) -> None:
    """Write one result: the benchmark's name, the environment, anything extra, and its rows."""
    result = {"name": name, "environment": environment(), **extra, "rows": list(rows)}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(result, indent=2) + "\n")


def cuda_event() -> torch.cuda.Event:
    """Return an event that tells times on the GPU."""
    import torch

    return torch.cuda.Event(enable_timing=True)


def _commit() -> str | None:
    described = _output("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    return os.environ.get("BENCHMARK_COMMIT", described)


def _output(*command: str) -> str | None:
    """Return what a command prints in the checkout, None if it fails or does not exist."""
    try:
        result = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _gpus() -> list[str]:
    names = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return names.splitlines() if names else []


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

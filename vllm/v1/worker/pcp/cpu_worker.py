# SPDX-License-Identifier: Apache-2.0
"""CPU worker for prefill context parallelism."""

from __future__ import annotations

# First: importing the stock worker replaces CUDA calls that the runner, imported by the mixin,
# binds by name.
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.pcp.mixin import PCPWorkerMixin


class PCPCPUWorker(PCPWorkerMixin, CPUWorker):
    """One rank on its own CPU cores."""

# SPDX-License-Identifier: Apache-2.0
"""Workers that profile their memory and then hold no KV cache: an engine of them only reports.

All ranks are on GPU 0, and each is shown the memory as though it had the GPU to itself: what torch
has reserved on this rank, and its share of what is not torch's (contexts, NCCL's buffers).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from one_gpu import OneGpuWorker

from vllm.distributed.parallel_state import get_world_group
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker.pcp.gpu_worker import OneGpuPCPWorker
from vllm.v1.worker.worker_base import CompilationTimes

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _WorkerBase
else:
    _WorkerBase = object


def apart(measure: Callable[[MemorySnapshot], None]) -> Callable[[MemorySnapshot], None]:
    """Return a way to measure memory that leaves out what other ranks have on the GPU.

    Collectives: a barrier and an all_gather of objects on the CPU group of the world.
    """

    def measure_apart(snapshot: MemorySnapshot) -> None:
        group = get_world_group()
        # Nobody allocates from here on until all have measured.
        dist.barrier(group=group.cpu_group)
        measure(snapshot)
        reserved = [0] * group.world_size
        dist.all_gather_object(reserved, snapshot.torch_memory, group=group.cpu_group)
        snapshot.non_torch_memory = (snapshot.cuda_memory - sum(reserved)) // group.world_size
        snapshot.cuda_memory = snapshot.torch_memory + snapshot.non_torch_memory
        snapshot.free_memory = snapshot.total_memory - snapshot.cuda_memory

    return measure_apart


class ReportOnlyMixin(_WorkerBase):
    """Over a worker that shares its GPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        MemorySnapshot.measure = apart(MemorySnapshot.measure)  # type: ignore[method-assign, assignment]
        super().__init__(*args, **kwargs)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate nothing."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Run nothing."""
        return CompilationTimes(language_model=0.0, encoder=0.0)


class ReportOnlyWorker(ReportOnlyMixin, OneGpuWorker):
    """Stock vLLM's."""


class ReportOnlyPCPWorker(ReportOnlyMixin, OneGpuPCPWorker):
    """A rank of PCP."""

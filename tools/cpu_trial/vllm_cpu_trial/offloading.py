# SPDX-License-Identifier: Apache-2.0
"""Offloading of the KV cache to CPU memory where the cache lies there already.

Symptom: "CPU Offloading is currently only supported on CUDA-alike and XPU GPUs", and of the simple
connector, that streams have no ``priority_range``. Cause: both copy with CUDA, on its streams. What
decides which blocks are copied when is vLLM's own. It can go when vLLM offloads from CPUs.

A copy is made at the end of the time that it takes, and rank r takes r polls more than rank 0. So
there are wrong tokens when somebody reads what is not there yet, writes over what is still to be
copied, or does not wait for all ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Has to come before the modules of the runner: they copy bindings that it replaces.
import vllm.v1.worker.cpu.shm  # noqa: F401  # isort: skip

import torch

from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.simple_kv_offload import worker as simple_worker


class Copy:
    """A copy that is under way, with the questions that one asks a CUDA event."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy: Callable[[], None] | None = copy
        self._num_polls = torch.distributed.get_rank()

    def query(self) -> bool:
        """Return whether it has been made."""
        self._num_polls -= 1
        if self._num_polls < 0:
            self.synchronize()
        return self._copy is None

    def synchronize(self) -> None:
        """Make it."""
        if self._copy is not None:
            self._copy()
            self._copy = None


class TorchOffloadingWorker(OffloadingWorker):
    """The native connector's copies.

    Args:
        kv_caches: The KV cache.
        block_size_factor: Blocks of it in a block of the CPU tier.
        num_blocks: Blocks of the CPU tier.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, block_size_factor: int, num_blocks: int
    ) -> None:
        self.kv_caches = kv_caches
        self.block_size_factor = block_size_factor
        self._offloaded = [
            torch.zeros((num_blocks, block_size_factor, cache.page_size_bytes), dtype=torch.int8)
            for cache in kv_caches.tensors
        ]
        self._copies: dict[int, Copy] = {}

    def submit_store(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Begin to copy blocks of the cache to the CPU tier."""
        return self._submit(job_id, src_spec, dst_spec, stores=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Begin to copy blocks of the CPU tier to the cache."""
        return self._submit(job_id, dst_spec, src_spec, stores=False)

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that are done and were not returned before."""
        finished = [job_id for job_id, copy in self._copies.items() if copy.query()]
        for job_id in finished:
            del self._copies[job_id]
        return [TransferResult(job_id, success=True) for job_id in finished]

    def wait(self, job_ids: set[int]) -> None:
        """Wait for some jobs, of which others may have been returned."""
        for job_id in self._copies.keys() & job_ids:
            self._copies[job_id].synchronize()

    def _submit(
        self, job_id: int, cache_spec: LoadStoreSpec, cpu_spec: LoadStoreSpec, *, stores: bool
    ) -> bool:
        assert isinstance(cache_spec, GPULoadStoreSpec)
        assert isinstance(cpu_spec, BlockIDsLoadStoreSpec)
        places = list(self._places(cache_spec, cpu_spec))

        def copy() -> None:
            for group, block, cpu_block, part in places:
                for ref in self.kv_caches.group_data_refs[group]:
                    cached = self.kv_caches.tensors[ref.tensor_idx].tensor[block]
                    offloaded = self._offloaded[ref.tensor_idx][cpu_block, part]
                    source, target = (cached, offloaded) if stores else (offloaded, cached)
                    target[: ref.page_size_bytes].copy_(source[: ref.page_size_bytes])

        self._copies[job_id] = Copy(copy)
        return True

    def _places(
        self, cache_spec: GPULoadStoreSpec, cpu_spec: BlockIDsLoadStoreSpec
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield for each block: its group, its number, and its block and place in the CPU tier."""
        blocks, cpu_blocks = iter(cache_spec.block_ids), iter(cpu_spec.block_ids)
        for group, num_blocks in enumerate(cache_spec.group_sizes):
            first, cpu_block = cache_spec.block_indices[group], -1
            for index in range(first, first + num_blocks):
                part = index % self.block_size_factor
                if part == 0 or index == first:
                    cpu_block = next(cpu_blocks)
                yield group, next(blocks), cpu_block, part


class TorchCopyBackend:
    """The simple connector's copies."""

    def init(
        self,
        gpu_caches: dict[str, torch.Tensor],
        cpu_caches: dict[str, torch.Tensor],
        *_: Any,
    ) -> None:
        """Take the KV cache and the CPU tier, ``[num_blocks, bytes]`` of each tensor."""
        self._pairs = [(gpu_caches[name], cpu_caches[name]) for name in gpu_caches]

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Copy]],
        wait_event: object = None,
    ) -> None:
        """Begin to copy blocks."""

        def copy() -> None:
            for cached, offloaded in self._pairs:
                source, target = (cached, offloaded) if is_store else (offloaded, cached)
                target[dst_blocks] = source[src_blocks]

        events_list.append((event_idx, Copy(copy)))


class Stream(torch.cuda.Stream):
    """A stream of the CPU build, where nothing runs beside anything."""

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and the highest priority."""
        return 0, 0


def get_worker(self: CPUOffloadingSpec, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
    """Return what copies; vLLM's own refuses CPUs."""
    return TorchOffloadingWorker(kv_caches, self.block_size_factor, self.num_blocks)


REPLACEMENTS: Sequence[tuple[object, str, object]] = (
    (CPUOffloadingSpec, "get_worker", get_worker),
    (simple_worker, "DmaCopyBackend", TorchCopyBackend),
    (torch.cuda, "Stream", Stream),
)

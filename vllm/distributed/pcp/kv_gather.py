# SPDX-License-Identifier: Apache-2.0
"""Gathers one layer's new KV rows of all PCP ranks into memory that is allocated once.

A layer takes this rank's share of the buffer with ``begin``, fills it, and gets everybody's rows
back from ``finish``. The rows are bytes: what is in them (keys beside values, quantised or not) is
the backend's business.

On GPUs the gather is one in-place NCCL all-gather on the current stream. CPU ranks of one host
write into shared memory and meet at a barrier, so that nothing is copied a second time.
"""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod

import torch
import torch.distributed as dist

from vllm.distributed.parallel_state import GroupCoordinator, get_pcp_group
from vllm.distributed.pcp.collectives import pynccl_communicator


class KVGather(ABC):
    """One buffer for the gathers of all layers, used in stream order.

    Attributes:
        identity: ``[max_num_tokens]`` int64, 0, 1, 2, ..., for kernels that want a slot mapping.
        num_buffer_bytes: Bytes of the buffer.
        num_gathered_bytes: Bytes gathered since start, padding included, over all layers.
    """

    num_buffer_bytes: int

    def __init__(self, group: GroupCoordinator, max_num_tokens: int, device: torch.device) -> None:
        self.pcp_world_size = group.world_size
        self.pcp_rank = group.rank_in_group
        self.identity = torch.arange(max_num_tokens, dtype=torch.int64, device=device)
        self.num_gathered_bytes = 0

    def begin(self, num_tokens: int, row_bytes: int) -> torch.Tensor:
        """Return ``[num_tokens, row_bytes]`` uint8, a view for this rank's rows.

        Args:
            num_tokens: Rows of each rank, padding included; the same on all ranks.
            row_bytes: Bytes of a row, a multiple of 16.
        """
        self._rows = self._buffer()[: self.pcp_world_size * num_tokens * row_bytes]
        self._rows = self._rows.view(self.pcp_world_size * num_tokens, row_bytes)
        self._own_rows = self._rows[self.pcp_rank * num_tokens : (self.pcp_rank + 1) * num_tokens]
        return self._own_rows

    def finish(self) -> torch.Tensor:
        """Return ``[P * num_tokens, row_bytes]`` uint8, a view until the next ``begin``.

        Collectives: one all_gather (GPU) or one barrier (CPU) on the PCP group.
        """
        self._exchange(self._rows, self._own_rows)
        self.num_gathered_bytes += self._rows.numel()
        return self._rows

    @property
    def rows(self) -> torch.Tensor:
        """The rows that the last ``finish`` returned, until the next ``begin``."""
        return self._rows

    @abstractmethod
    def _buffer(self) -> torch.Tensor:
        """Return the flat uint8 buffer to fill next."""

    @abstractmethod
    def _exchange(self, rows: torch.Tensor, own_rows: torch.Tensor) -> None:
        """Make the rows of all ranks visible in ``rows``, of which ``own_rows`` is a view."""


class DeviceKVGather(KVGather):
    """All-gather in place through the device communicator of the group."""

    def __init__(
        self, group: GroupCoordinator, max_num_tokens: int, max_row_bytes: int, device: torch.device
    ) -> None:
        super().__init__(group, max_num_tokens, device)
        self.num_buffer_bytes = group.world_size * max_num_tokens * max_row_bytes
        self._device_buffer = torch.empty(self.num_buffer_bytes, dtype=torch.uint8, device=device)
        self._group = group.device_group
        self._pynccl = pynccl_communicator(group)

    def _buffer(self) -> torch.Tensor:
        return self._device_buffer

    def _exchange(self, rows: torch.Tensor, own_rows: torch.Tensor) -> None:
        if self._pynccl is None:
            dist.all_gather_into_tensor(rows, own_rows, group=self._group)
        else:
            self._pynccl.all_gather(rows, own_rows)


class SharedMemoryKVGather(KVGather):
    """Two alternating buffers in shared memory, one barrier a layer.

    A rank that is ahead fills the other buffer; to come back to this one it has to pass the next
    barrier, which the slowest rank enters only after it has read this one.
    """

    def __init__(self, group: GroupCoordinator, max_num_tokens: int, max_row_bytes: int) -> None:
        super().__init__(group, max_num_tokens, torch.device("cpu"))
        num_bytes = group.world_size * max_num_tokens * max_row_bytes
        self.num_buffer_bytes = 2 * num_bytes
        self._memory = _shared_memory(group, self.num_buffer_bytes)
        both = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._buffers = (both[:num_bytes], both[num_bytes : 2 * num_bytes])
        self._turn = 0
        self._group = group.cpu_group

    def _buffer(self) -> torch.Tensor:
        self._turn ^= 1
        return self._buffers[self._turn]

    def _exchange(self, rows: torch.Tensor, own_rows: torch.Tensor) -> None:
        dist.barrier(group=self._group)


def _shared_memory(group: GroupCoordinator, num_bytes: int) -> mmap.mmap:
    """Map one piece of shared memory into all ranks of a group on one host.

    It never has a name, so that it vanishes with the last rank, however they end.

    Collectives: one object broadcast and one barrier on the group.
    """
    descriptor = -1
    if group.rank_in_group == 0:
        descriptor = os.memfd_create("vllm_pcp_kv_gather")
        os.ftruncate(descriptor, num_bytes)
    path = group.broadcast_object(f"/proc/{os.getpid()}/fd/{descriptor}", src=0)
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), num_bytes)
    dist.barrier(group=group.cpu_group)
    if group.rank_in_group == 0:
        os.close(descriptor)
    return memory


_kv_gather: KVGather | None = None


def init_kv_gather(max_num_tokens: int, max_row_bytes: int, device: torch.device) -> KVGather:
    """Create this process's gather.

    Args:
        max_num_tokens: Most rows of a rank in a partitioned step.
        max_row_bytes: Most bytes of a token's new KV in a layer.
        device: Where the KV cache lies.

    Collectives: those of ``SharedMemoryKVGather`` on CPU, none on GPU. Every rank must call it.
    """
    global _kv_gather
    group = get_pcp_group()
    if device.type == "cpu":
        _kv_gather = SharedMemoryKVGather(group, max_num_tokens, max_row_bytes)
    else:
        _kv_gather = DeviceKVGather(group, max_num_tokens, max_row_bytes, device)
    return _kv_gather


def get_kv_gather() -> KVGather:
    """Return this process's gather; ``init_kv_gather`` has been called."""
    assert _kv_gather is not None, "the KV gather is used before the model runner created it"
    return _kv_gather

# SPDX-License-Identifier: Apache-2.0
"""The KV caches of all PCP ranks, in reach of each other's kernels: instead of a gather.

With D = 1 every rank keeps the same KV at the same slots. So a rank may write its new KV to its own
cache, with the backend's own writer, and copy those bytes to the caches of the others: nothing is
packed, gathered and written a second time. Caches are opened through CUDA's IPC, on GPUs of one
host that NVLink connects.

Ranks meet twice. Before a partitioned step writes anything: a rank may be some steps ahead, and
vLLM gives slots to a new request that a slower rank still reads for an old one. And in every layer,
between the copies and attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from vllm.distributed.parallel_state import GroupCoordinator, get_pcp_group
from vllm.distributed.pcp.peer_kernels import copy_slots, meet
from vllm.platforms import current_platform

Handle = tuple[Any, ...]
TEST_WORD = 0x5EED


class PeerCaches:
    """What this rank writes to the caches of the others.

    Args:
        caches: Tensors of the KV cache, on every rank of the same shapes and in the same order.
        device: Where they lie.
        group: The ranks.

    Attributes:
        num_copied_bytes: Bytes copied to other ranks since start, padding included, by all ranks.

    Raises:
        RuntimeError: A rank cannot open the memory of another one, or what it writes there does not
            arrive; on every rank alike.

    Collectives: five of objects on the CPU group.
    """

    def __init__(
        self, caches: Iterable[torch.Tensor], device: torch.device, group: GroupCoordinator
    ) -> None:
        self.pcp_world_size = group.world_size
        self.pcp_rank = group.rank_in_group
        self.num_copied_bytes = 0
        self._device = device
        # A cache of a layer -> its bytes, and where each rank has it.
        self._layers: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        # Of each rank: how often it has met this one; then, how often this rank has met others.
        self._pad = torch.zeros(self.pcp_world_size + 1, dtype=torch.int32, device=device)
        own = {tensor.untyped_storage().data_ptr(): tensor for tensor in (self._pad, *caches)}
        storages = [tensor.untyped_storage() for tensor in own.values()]
        self._storages = open_storages(storages, device, group)
        self._starts = {
            start: [of_rank[index].data_ptr() for of_rank in self._storages]
            for index, start in enumerate(own)
        }
        self._pads = self._addresses(self._pad)
        self._check(group)

    def _addresses(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``[P]`` int64 on the device, where each rank has what this one has in a tensor."""
        start = tensor.untyped_storage().data_ptr()
        offset = tensor.data_ptr() - start
        addresses = [start_of_rank + offset for start_of_rank in self._starts[start]]
        return torch.tensor(addresses, dtype=torch.int64, device=self._device)

    def _check(self, group: GroupCoordinator) -> None:
        """Write a word to each rank, and see that all of theirs have come."""
        pad_of_rank = [
            torch.empty(0, dtype=torch.int32, device=self._device).set_(of_rank[0])
            for of_rank in self._storages
        ]
        for pad in pad_of_rank:
            pad[self.pcp_rank] = TEST_WORD + self.pcp_rank
        self._synchronize()
        agree(None, group)
        words = self._pad[: self.pcp_world_size].tolist()
        expected = [TEST_WORD + rank for rank in range(self.pcp_world_size)]
        agree(None if words == expected else f"{words} arrived instead of {expected}", group)
        self._pad.zero_()
        self._synchronize()
        agree(None, group)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def begin_step(self) -> None:
        """Wait on the device until all ranks have come to this step.

        Collectives: a meeting of the PCP ranks.
        """
        meet(self._pads, self.pcp_rank)

    def own_slots(self, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Return ``[L]`` of a partitioned step's ``[P * L]`` slots: where this rank's rows go."""
        return slot_mapping.view(self.pcp_world_size, -1)[self.pcp_rank]

    def copy(self, cache: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy the KV at some slots of this rank's cache to those of the others, and wait for them.

        Args:
            cache: ``[num_blocks, 2, block_size, num_kv_heads, head_size]`` of any type and strides;
                without the second axis; or of latents, ``[num_blocks, block_size, row]``.
            slots: ``[L]`` int64, this rank's; -1 is left alone.

        Collectives: a meeting of the PCP ranks.
        """
        # Layers of different shapes may lie at one address.
        key = (cache.data_ptr(), cache.shape, cache.stride())
        if key not in self._layers:
            view = cache.view(torch.uint8)
            view = view.unsqueeze(2) if view.dim() == 3 else view
            view = view.unsqueeze(1) if view.dim() == 4 else view
            self._layers[key] = (view, self._addresses(cache))
        view, bases = self._layers[key]
        copy_slots(view, slots, bases, self.pcp_rank)
        meet(self._pads, self.pcp_rank)
        row_bytes = view.shape[1] * view.shape[3] * view.shape[4]
        self.num_copied_bytes += self.pcp_world_size * slots.shape[0] * row_bytes

    def close(self) -> None:
        """Leave the memory of other ranks: it is not given back while it is open."""
        self._storages.clear()


def open_storages(
    storages: list[torch.UntypedStorage], device: torch.device, group: GroupCoordinator
) -> list[list[torch.UntypedStorage]]:
    """Return the storages of every rank, ``[rank][index]``, as this rank's device addresses them.

    Args:
        storages: This rank's; as many, and of the same sizes, on every rank.
        device: Where they lie.
        group: The ranks.

    Raises:
        RuntimeError: They cannot be opened; on every rank alike.

    Collectives: two of objects on the CPU group.
    """
    handles: list[Handle] = []
    error = _missing_link(device, group)
    if error is None:
        try:
            handles = [storage._share_cuda_() for storage in storages]
            torch.cuda.synchronize(device)
        except RuntimeError as raised:
            error = str(raised)
    of_ranks: list[Any] = [None] * group.world_size
    dist.all_gather_object(of_ranks, (error, handles), group=group.cpu_group)
    errors = [error for error, _ in of_ranks if error is not None]
    if errors:
        raise RuntimeError(errors[0])
    opened, error = [], None
    try:
        for rank, (_, theirs) in enumerate(of_ranks):
            is_own = rank == group.rank_in_group
            opened.append(storages if is_own else [_open(handle, device) for handle in theirs])
    except RuntimeError as raised:
        error = str(raised)
    agree(error, group)
    return opened


def _open(handle: Handle, device: torch.device) -> torch.UntypedStorage:
    # By this rank's device, whichever it lies on, and without the event that tells when it may be
    # read: nobody reads before all ranks have met.
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(
        device.index, *handle[1:-1], False
    )
    return storage


def _missing_link(device: torch.device, group: GroupCoordinator) -> str | None:
    """Return why ranks should not write to each other's memory, if they should not.

    Collectives: one of objects on the CPU group.
    """
    devices: list[Any] = [None] * group.world_size
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    physical = current_platform.visible_device_id_to_physical_device_id(device.index)
    dist.all_gather_object(devices, (uuid, physical), group=group.cpu_group)
    physical_ids = sorted({physical for _, physical in devices})
    if len({uuid for uuid, _ in devices}) == 1:
        return None
    if not current_platform.is_fully_connected(physical_ids):
        return f"GPUs {physical_ids} are not all connected by NVLink"
    return None


def agree(error: str | None, group: GroupCoordinator) -> None:
    """Wait for all ranks.

    Args:
        error: What went wrong on this rank, if something did.
        group: The ranks.

    Raises:
        RuntimeError: What went wrong on the first rank on which something did.

    Collectives: one of objects on the CPU group.
    """
    errors: list[Any] = [None] * group.world_size
    dist.all_gather_object(errors, error, group=group.cpu_group)
    for message in filter(None, errors):
        raise RuntimeError(message)


_peer_caches: PeerCaches | None = None


def init_peer_caches(caches: Iterable[torch.Tensor], device: torch.device) -> PeerCaches:
    """Create this process's way into the caches of the others.

    Collectives: those of ``PeerCaches`` on the PCP group.
    """
    global _peer_caches
    _peer_caches = PeerCaches(caches, device, get_pcp_group())
    return _peer_caches


def get_peer_caches() -> PeerCaches | None:
    """Return what ``init_peer_caches`` created, None where KV is gathered."""
    return _peer_caches

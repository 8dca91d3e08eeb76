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

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from vllm.distributed.parallel_state import GroupCoordinator, get_pcp_group
from vllm.distributed.pcp.peer_kernels import copy_slots, meet, slot_parts
from vllm.platforms import current_platform

Handle = tuple[Any, ...]
TEST_WORD = 0x5EED
# For the first meeting, at start-up; it takes some microseconds.
MEETING_TIMEOUT_SECONDS = 60.0


class PeerCaches:
    """What this rank writes to the caches of the others.

    Args:
        caches: Tensors of the KV cache, on every rank of the same shapes and in the same order.
        device: Where they lie.
        group: The ranks.

    Attributes:
        num_gathered_bytes: As of ``KVGather``: bytes of the rows that all ranks copied, each row
            once, padding included.

    Raises:
        RuntimeError: A rank cannot open the memory of another one, or what it writes there does not
            arrive; on every rank alike.

    Collectives: ten of objects on the CPU group, and a meeting for each of the caches.
    """

    def __init__(
        self, caches: Iterable[torch.Tensor], device: torch.device, group: GroupCoordinator
    ) -> None:
        self.pcp_world_size = group.world_size
        self.pcp_rank = group.rank_in_group
        self.num_gathered_bytes = 0
        self._device = device
        # A cache of a layer -> its bytes, and where each rank has it.
        self._layers: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        # Of each rank: how often it has met this one; then, how often this rank has met others.
        self._pad = torch.zeros(self.pcp_world_size + 1, dtype=torch.int32, device=device)
        caches = list(caches)
        own = {tensor.untyped_storage().data_ptr(): tensor for tensor in (self._pad, *caches)}
        storages = [tensor.untyped_storage() for tensor in own.values()]
        self._storages = open_storages(storages, device, group)
        self._starts = {
            start: [of_rank[index].data_ptr() for of_rank in self._storages]
            for index, start in enumerate(own)
        }
        self._pads = self._addresses(self._pad)
        self._check_words(group)
        self._check_copies(caches, group)

    def _addresses(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``[P]`` int64 on the device, where each rank has what this one has in a tensor."""
        start = tensor.untyped_storage().data_ptr()
        offset = tensor.data_ptr() - start
        addresses = [start_of_rank + offset for start_of_rank in self._starts[start]]
        return torch.tensor(addresses, dtype=torch.int64, device=self._device)

    def _check_words(self, group: GroupCoordinator) -> None:
        """Write a word to each rank, and see that all of theirs have come."""
        with together(group):
            for of_rank in self._storages:
                pad = torch.empty(0, dtype=torch.int32, device=self._device).set_(of_rank[0])
                pad[self.pcp_rank] = TEST_WORD + self.pcp_rank
            self._synchronize()
        with together(group):
            words = self._pad[: self.pcp_world_size].tolist()
            expected = [TEST_WORD + rank for rank in range(self.pcp_world_size)]
            if words != expected:
                raise RuntimeError(f"{words} arrived instead of {expected}")
        with together(group):
            self._pad.zero_()
            self._synchronize()

    def _check_copies(self, caches: list[torch.Tensor], group: GroupCoordinator) -> None:
        """Copy nothing once, which compiles kernels, and see that all ranks meet."""
        with together(group):
            slots = torch.full((1,), -1, dtype=torch.int64, device=self._device)
            for cache in caches:
                self.copy(cache, slots)
            if self._device.type == "cuda":
                wait_for_meetings()
        self.num_gathered_bytes = 0

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
            self._layers[key] = (slot_parts(cache), self._addresses(cache))
        parts, bases = self._layers[key]
        copy_slots(parts, slots, bases, self.pcp_rank)
        meet(self._pads, self.pcp_rank)
        row_bytes = parts.shape[1] * parts.shape[3] * parts.shape[4]
        self.num_gathered_bytes += self.pcp_world_size * slots.shape[0] * row_bytes

    def close(self) -> None:
        """Leave the memory of other ranks: it is not given back while it is open."""
        self._layers.clear()
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

    Collectives: six of objects on the CPU group.
    """
    require_links(device, group)
    own_rank = group.rank_in_group
    of_ranks: list[Any] = [None] * group.world_size
    # For each rank one of its own: who closes what was opened is counted.
    handles: list[list[Handle]] = []
    with together(group):
        for rank in range(group.world_size):
            shared = [] if rank == own_rank else [storage._share_cuda_() for storage in storages]
            handles.append(shared)
        torch.cuda.synchronize(device)
    dist.all_gather_object(of_ranks, handles, group=group.cpu_group)
    opened: list[list[torch.UntypedStorage]] = []
    with together(group):
        for rank, theirs in enumerate(of_ranks):
            for_us: list[Handle] = theirs[own_rank]
            opened.append(
                storages if rank == own_rank else [_open(handle, device) for handle in for_us]
            )
    return opened


def _open(handle: Handle, device: torch.device) -> torch.UntypedStorage:
    # By this rank's device, whichever it lies on, and without the event that tells when it may be
    # read: nobody reads before all ranks have met.
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(
        device.index, *handle[1:-1], False
    )
    return storage


def require_links(device: torch.device, group: GroupCoordinator) -> bool:
    """Check that NVLink connects the GPUs of all ranks, unless they are one.

    Returns:
        Whether there are several.

    Raises:
        RuntimeError: It does not; on every rank alike.

    Collectives: three of objects on the CPU group.
    """
    gpus: list[Any] = [None] * group.world_size
    gpu = ("", 0)
    with together(group):
        physical_id = current_platform.visible_device_id_to_physical_device_id(device.index)
        gpu = (str(torch.cuda.get_device_properties(device).uuid), physical_id)
    dist.all_gather_object(gpus, gpu, group=group.cpu_group)
    with together(group):
        physical_ids = sorted({physical_id for _, physical_id in gpus})
        is_one = len({uuid for uuid, _ in gpus}) == 1
        if not is_one and not current_platform.is_fully_connected(physical_ids):
            raise RuntimeError(f"GPUs {physical_ids} are not all connected by NVLink")
    return not is_one


def wait_for_meetings() -> None:
    """Wait for what the current stream has to do, but not for ever.

    Raises:
        RuntimeError: It is not done in time.
    """
    done = torch.cuda.Event()
    done.record()
    deadline = time.monotonic() + MEETING_TIMEOUT_SECONDS
    while not done.query():
        if time.monotonic() > deadline:
            raise RuntimeError(f"ranks have not met in {MEETING_TIMEOUT_SECONDS:.0f} s")
        time.sleep(0.001)


@contextmanager
def together(group: GroupCoordinator) -> Iterator[None]:
    """Run a part of what all ranks do, and wait for all of them; what fails on one, fails on all.

    Raises:
        RuntimeError: What went wrong on the first rank on which something did.

    Collectives: one of objects on the CPU group.
    """
    error = None
    try:
        yield
    except Exception as raised:  # noqa: BLE001  (the other ranks wait)
        error = f"{type(raised).__name__}: {raised}"
    errors: list[Any] = [None] * group.world_size
    dist.all_gather_object(errors, error, group=group.cpu_group)
    for message in filter(None, errors):
        raise RuntimeError(message)


_peer_caches: PeerCaches | None = None


def check_reach(device: torch.device) -> None:
    """See that all ranks can write to each other's memory.

    Raises:
        RuntimeError: They cannot; on every rank alike.

    Collectives: those of ``PeerCaches`` on the PCP group, of no cache.
    """
    PeerCaches((), device, get_pcp_group()).close()


def init_peer_caches(caches: Iterable[torch.Tensor], device: torch.device) -> PeerCaches:
    """Create this process's way into the caches of the others.

    Collectives: those of ``PeerCaches`` on the PCP group.
    """
    global _peer_caches
    _peer_caches = PeerCaches(caches, device, get_pcp_group())
    return _peer_caches


def close_peer_caches() -> None:
    """Leave the caches of the others, if they were opened."""
    global _peer_caches
    if _peer_caches is not None:
        _peer_caches.close()
        _peer_caches = None


def get_peer_caches() -> PeerCaches | None:
    """Return what ``init_peer_caches`` created, None where KV is gathered."""
    return _peer_caches

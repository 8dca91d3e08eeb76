# SPDX-License-Identifier: Apache-2.0
"""What ranks write to each other's caches arrives there, and nowhere else, before it is read.

On CPUs kernels are interpreted. Ranks are then caches of one process, or processes that share
memory; on a GPU they are processes that open each other's memory.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.conftest import Interpreter
from tests.e2e.processes import exit_codes

P = 3
NUM_BLOCKS, BLOCK_SIZE = 5, 16
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE
# Shape of a cache, and in which order its axes lie in memory. Rows of many sizes: up to what a
# program copies at once, more, and no power of two.
LAYOUTS = {
    "tokens first": ((NUM_BLOCKS, 2, BLOCK_SIZE, 3, 40), (0, 1, 2, 3, 4)),
    "heads first": ((NUM_BLOCKS, 2, BLOCK_SIZE, 3, 40), (0, 1, 3, 2, 4)),
    "halves first": ((NUM_BLOCKS, 2, BLOCK_SIZE, 2, 64), (1, 0, 2, 3, 4)),
    "one head": ((NUM_BLOCKS, 2, BLOCK_SIZE, 1, 8), (0, 1, 2, 3, 4)),
    "wide": ((NUM_BLOCKS, 2, BLOCK_SIZE, 20, 128), (0, 1, 2, 3, 4)),
    "keys beside values": ((NUM_BLOCKS, BLOCK_SIZE, 2, 96), (0, 1, 2, 3)),
    "latents": ((NUM_BLOCKS, BLOCK_SIZE, 576), (0, 1, 2)),
}
ROUNDS = 12


def random_cache(layout: str, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return a cache of random bytes whose memory has room before it and behind."""
    shape, order = LAYOUTS[layout]
    sizes = [shape[axis] for axis in order]
    num_bytes = torch.Size(sizes).numel() * dtype.itemsize
    memory = torch.randint(0, 256, (num_bytes + 512,), dtype=torch.uint8, device=device)
    inverse = [order.index(axis) for axis in range(len(order))]
    return memory[256:-256].view(dtype).view(sizes).permute(inverse)


def slot_view(cache: torch.Tensor) -> torch.Tensor:
    """Return ``[num_slots, ...]`` bytes, a copy."""
    tokens = 2 if cache.dim() == 5 else 1
    return cache.view(torch.uint8).movedim(tokens, 1).flatten(0, 1).clone()


def memory_of(cache: torch.Tensor) -> torch.Tensor:
    """Return all bytes around a cache, a copy."""
    memory = torch.empty(0, dtype=torch.uint8, device=cache.device)
    return memory.set_(cache.untyped_storage()).clone()


def copied(layout: str, dtype: torch.dtype, device: str) -> None:
    """Let the second of three ranks copy some slots, and check every byte of all three."""
    from vllm.distributed.pcp import peer_caches

    torch.manual_seed(0)
    caches = [random_cache(layout, dtype, device) for _ in range(P)]
    before = [slot_view(cache) for cache in caches]
    outside = [memory_of(cache)[[*range(256), *range(-256, 0)]] for cache in caches]
    # More than a program copies.
    slots = torch.randperm(NUM_SLOTS, device=device)[:71]
    slots[::4] = -1
    peers: Any = object.__new__(peer_caches.PeerCaches)
    peers.pcp_world_size, peers.pcp_rank, peers.num_gathered_bytes = P, 1, 0
    peers._device, peers._layers, peers._pads = torch.device(device), {}, None
    starts = [cache.untyped_storage().data_ptr() for cache in caches]
    peers._starts = {starts[1]: starts}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_caches, "meet", lambda *_: None)
        peers.copy(caches[1], slots)
    written = slots[slots >= 0]
    for rank, cache in enumerate(caches):
        expected = before[rank]
        expected[written] = before[1][written]
        assert torch.equal(slot_view(cache), expected), f"rank {rank}"
        assert torch.equal(memory_of(cache)[[*range(256), *range(-256, 0)]], outside[rank])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_are_copied_to_all_ranks_and_nothing_else(
    call: Interpreter, layout: str, dtype: torch.dtype
) -> None:
    call(copied, layout, dtype, "cuda" if torch.cuda.is_available() else "cpu")


def peers_in_one_process(monkeypatch: pytest.MonkeyPatch, caches: list[list[torch.Tensor]]) -> Any:
    """Return rank 0's way into the caches of ranks that are not there."""
    from vllm.distributed.pcp import peer_caches

    pads = [torch.zeros(P + 1, dtype=torch.int32) for _ in range(P)]

    def open_storages(own: list[Any], *_: Any) -> list[list[Any]]:
        storages = [[tensor.untyped_storage() for tensor in of_rank] for of_rank in caches]
        unique = [list({s.data_ptr(): s for s in of_rank}.values()) for of_rank in storages]
        rest = [[pad.untyped_storage(), *of] for pad, of in zip(pads, unique, strict=True)]
        assert [s.data_ptr() for s in own[1:]] == [s.data_ptr() for s in rest[0][1:]]
        return [own, *rest[1:]]

    def gather_errors(errors: list[Any], error: str | None, group: Any) -> None:
        errors[0] = error
        # The others write their words, too.
        own = peers._pad
        if own[0] == peer_caches.TEST_WORD:
            own[1:P] = peer_caches.TEST_WORD + torch.arange(1, P) + peers.deviation

    monkeypatch.setattr(peer_caches, "open_storages", open_storages)
    monkeypatch.setattr(dist, "all_gather_object", gather_errors)
    peers: Any = object.__new__(peer_caches.PeerCaches)
    peers.deviation = 0
    return peers


def layers_of_one_memory() -> None:
    """Two layers lie in one piece of memory, a third one elsewhere."""
    from vllm.distributed.pcp import peer_caches

    shape = (NUM_BLOCKS, 2, BLOCK_SIZE, 2, 32)
    caches = []
    for rank in range(P):
        both = torch.full((2, *shape), float(rank))
        caches.append([both[0], both[1], torch.full(shape, float(rank))])
    group: Any = SimpleNamespace(world_size=P, rank_in_group=0, cpu_group=None)
    with pytest.MonkeyPatch.context() as patch:
        peers = peers_in_one_process(patch, caches)
        met: list[torch.Tensor] = []
        patch.setattr(peer_caches, "meet", lambda pads, rank: met.append(pads))
        peers.__init__(caches[0], torch.device("cpu"), group)
        assert not peers._pad.any()
        slots = torch.tensor([3, -1, 17])
        for layer in (1, 2):
            caches[0][layer][:] = 7 + layer
            peers.copy(caches[0][layer], slots)
        for of_rank in caches[1:]:
            for layer, cache in enumerate(of_rank):
                expected = torch.full_like(cache, float(of_rank[0].max()))
                if layer:
                    expected[0, :, 3] = expected[1, :, 1] = 7 + layer
                assert torch.equal(cache, expected), layer
        # Each layer once at the start, when nothing is copied.
        assert len(met) == 3 + 2
        assert peers.num_gathered_bytes == 2 * P * 3 * 2 * 2 * 32 * 4
        peers.begin_step()
        assert len(met) == 3 + 3
        # What another rank writes does not arrive.
        peers.deviation = 1
        with pytest.raises(RuntimeError, match="arrived instead of"):
            peers.__init__(caches[0], torch.device("cpu"), group)


def test_a_layer_is_found_in_the_memory_of_each_rank(interpreter: Interpreter) -> None:
    interpreter(layers_of_one_memory)


def answers_of_ranks(others: dict[type, Any]) -> Any:
    """Return a gather of objects of two ranks; the other one answers by the type of an object."""

    def gather(objects: list[Any], own: Any, group: Any) -> None:
        objects[:] = [own, others.get(type(own))]

    return gather


TWO_RANKS: Any = SimpleNamespace(world_size=2, rank_in_group=0, cpu_group=None)


@pytest.mark.parametrize("fails_here", [True, False])
@pytest.mark.parametrize("fails_there", [True, False])
def test_what_fails_on_one_rank_fails_on_all(
    monkeypatch: pytest.MonkeyPatch, fails_here: bool, fails_there: bool
) -> None:
    """A rank that went on alone would wait for the other one for ever."""
    from vllm.distributed.pcp.peer_caches import together

    there = "ValueError: there" if fails_there else None
    gather = answers_of_ranks({str: there, type(None): there})
    monkeypatch.setattr(dist, "all_gather_object", gather)

    def run() -> None:
        with together(TWO_RANKS):
            if fails_here:
                raise KeyError("here")

    if fails_here or fails_there:
        with pytest.raises(RuntimeError, match="KeyError: 'here'" if fails_here else there):
            run()
    else:
        run()


@pytest.mark.parametrize(
    ("uuid", "is_connected", "is_refused"),
    [("here", False, False), ("there", True, False), ("there", False, True)],
)
def test_ranks_copy_over_nvlink_or_on_one_gpu(
    monkeypatch: pytest.MonkeyPatch, uuid: str, is_connected: bool, is_refused: bool
) -> None:
    from vllm.distributed.pcp import peer_caches

    asked: list[list[int]] = []

    def is_fully_connected(ids: list[int]) -> bool:
        asked.append(ids)
        return is_connected

    platform = SimpleNamespace(
        visible_device_id_to_physical_device_id=lambda index: index + 3,
        is_fully_connected=is_fully_connected,
    )
    monkeypatch.setattr(peer_caches, "current_platform", platform)
    here = SimpleNamespace(uuid="here")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: here)
    monkeypatch.setattr(dist, "all_gather_object", answers_of_ranks({tuple: (uuid, 0)}))
    device = torch.device("cuda", 1)
    if is_refused:
        with pytest.raises(RuntimeError, match=r"GPUs \[0, 4\] are not all connected by NVLink"):
            peer_caches.require_links(device, TWO_RANKS)
    else:
        assert peer_caches.require_links(device, TWO_RANKS) == (uuid == "there")
    assert asked == ([] if uuid == "here" else [[0, 4]])


@pytest.mark.parametrize("queries", [[True], [False, False, True], None])
def test_a_meeting_at_the_start_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, queries: list[bool] | None
) -> None:
    from vllm.distributed.pcp import peer_caches

    answers = iter(queries or ())
    done = SimpleNamespace(record=lambda: None, query=lambda: next(answers, False))
    monkeypatch.setattr(torch.cuda, "Event", lambda: done)
    if queries is None:
        monkeypatch.setattr(peer_caches, "MEETING_TIMEOUT_SECONDS", 0.01)
        with pytest.raises(RuntimeError, match="ranks have not met"):
            peer_caches.wait_for_meetings()
    else:
        peer_caches.wait_for_meetings()
        assert next(answers, None) is None


def meet_and_read(rank: int, pads: list[torch.Tensor], words: torch.Tensor) -> None:
    """Write, meet, read what all have written; meet again before the next round."""
    import vllm_cpu_trial

    vllm_cpu_trial.register()
    from vllm.distributed.pcp.peer_kernels import meet

    addresses = torch.tensor([pad.data_ptr() for pad in pads])
    for number in range(1, ROUNDS + 1):
        words[rank] = number
        meet(addresses, rank)
        assert words.tolist() == [number] * P
        meet(addresses, rank)


def test_nobody_reads_before_all_have_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of meetings wrap around."""
    pytest.importorskip("vllm_cpu_trial", reason="the CPU trial is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pads = [torch.full((P + 1,), 2**31 - ROUNDS, dtype=torch.int32) for _ in range(P)]
    words = torch.zeros(P, dtype=torch.int64)
    for tensor in (*pads, words):
        tensor.share_memory_()
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=meet_and_read, args=(rank, pads, words), daemon=True)
        for rank in range(P)
    ]
    assert exit_codes(ranks) == [0] * P
    for pad in pads:
        assert pad.tolist() == [ROUNDS - 2**31] * (P + 1)


def write_to_peers(rank: int, folder: Path) -> None:
    """Be one of the ranks on one GPU: copy a part of the slots to all, and see what comes."""
    from vllm.distributed.pcp.peer_caches import PeerCaches

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=P)
    group: Any = SimpleNamespace(world_size=P, rank_in_group=rank, cpu_group=dist.group.WORLD)
    shape = (NUM_BLOCKS, 2, BLOCK_SIZE, 2, 64)
    caches = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2)]
    peers = PeerCaches(caches, device, group)
    slots = torch.arange(rank, NUM_SLOTS, P, device=device)
    owner = (torch.arange(NUM_SLOTS, device=device) % P).view(NUM_BLOCKS, 1, BLOCK_SIZE, 1, 1)
    for number in range(100):
        peers.begin_step()
        for layer, cache in enumerate(caches):
            value = 3.0 * (number % 50) + layer
            cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = value + rank
            peers.copy(cache, slots)
            assert torch.equal(cache.float(), (value + owner).expand(shape).float()), number
    torch.cuda.synchronize()
    peers.close()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_ranks_of_one_gpu_open_each_others_memory(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=write_to_peers, args=(rank, tmp_path), daemon=True)
        for rank in range(P)
    ]
    assert exit_codes(ranks) == [0] * P

# SPDX-License-Identifier: Apache-2.0
"""What each rank runs, and what comes back, on batches of real tensors; ranks played one after the
other.

The hidden row of a token is (token, position, seq_len of its row, block table of its row), so that
a row that comes from the wrong place, or was run with another row's metadata, shows.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from vllm.distributed.pcp.kv_shards import UNSHARED, KVShards
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.pcp import copies
from vllm.v1.worker.gpu.pcp import manager as manager_module
from vllm.v1.worker.gpu.pcp.copies import copy_to_device
from vllm.v1.worker.gpu.pcp.manager import PCPManager, PCPStep, logits_tokens

BLOCK_SIZE = 4
# (scheduled, computed before, prefilling): decodes, short prefills, long ones with and without a
# prefix.
BATCHES = {
    "one prefill": [(11, 0, True)],
    # With two and four ranks no row is padding.
    "even prefill": [(16, 0, True)],
    "prefix of one": [(9, 1, True)],
    "mixed": [
        (1, 30, False),
        (1, 5, False),
        (2, 0, True),
        (3, 8, True),
        (17, 12, True),
        (40, 0, True),
    ],
    "many prefills": [(n, n % 3 * 4, True) for n in range(8, 30)],
}


def make_batch(requests: list[tuple[int, int, bool]]) -> InputBatch:
    """Return a global batch; request-state rows are in another order than the batch."""
    scheduled, computed, prefilling = (np.array(column) for column in zip(*requests, strict=True))
    scheduled, computed = scheduled.astype(np.int32), computed.astype(np.int32)
    num_reqs, num_tokens = len(requests), int(scheduled.sum())
    buffers = InputBuffers(num_reqs, num_tokens, torch.device("cpu"))
    batch = InputBatch.make_dummy(num_reqs, num_tokens, buffers)
    batch.num_scheduled_tokens = scheduled
    batch.query_start_loc_np = np.concatenate([[0], np.cumsum(scheduled)]).astype(np.int32)
    batch.query_start_loc = torch.from_numpy(batch.query_start_loc_np.copy())
    batch.seq_lens = torch.from_numpy(scheduled + computed)
    batch.num_computed_tokens_np = computed
    batch.num_computed_prefill_tokens_np = computed
    batch.prefill_len_np = np.where(prefilling, scheduled + computed, computed).astype(np.int32)
    batch.is_prefilling_np = prefilling.astype(np.bool_)
    batch.idx_mapping_np = np.arange(num_reqs, dtype=np.int32)[::-1].copy()
    batch.idx_mapping = torch.from_numpy(batch.idx_mapping_np.copy())
    batch.positions = torch.cat(
        [torch.arange(c, c + n) for n, c in zip(scheduled.tolist(), computed.tolist(), strict=True)]
    )
    batch.input_ids = torch.randperm(1000)[:num_tokens].to(torch.int32)
    batch.logits_indices = batch.query_start_loc[1:] - 1
    return batch


@pytest.fixture(params=[(), (16, 32, 48)], ids=["no graphs", "graphs"])
def ranks(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[PCPManager]]:
    """Return what makes managers of all ranks of a group that is not there.

    Before and after graphs of some numbers of rows were captured.
    """
    # No pinned memory without a GPU.
    monkeypatch.setattr(copies, "async_copy_to_gpu", lambda array, device: torch.from_numpy(array))

    def make(size: int, interleave: int | None = None) -> list[PCPManager]:
        """Make them share the KV cache in runs of ``interleave`` tokens, or not."""
        config: Any = types.SimpleNamespace(
            scheduler_config=types.SimpleNamespace(max_num_batched_tokens=4096, max_num_seqs=64),
            parallel_config=types.SimpleNamespace(cp_kv_cache_interleave_size=1),
        )
        managers = []
        for rank in range(size):
            group = types.SimpleNamespace(world_size=size, rank_in_group=rank)
            shards = KVShards(size, rank, interleave or 1) if interleave else UNSHARED
            monkeypatch.setattr(manager_module, "get_pcp_group", lambda group=group: group)
            monkeypatch.setattr(manager_module, "kv_shards", lambda _, shards=shards: shards)
            managers.append(PCPManager(config, torch.device("cpu")))
            managers[-1].graphs.allocate(max(request.param, default=0), torch.device("cpu"))
            managers[-1].graphs.num_rows = np.array(request.param)
        return managers

    return make


def partition(managers: list[PCPManager], batch: InputBatch) -> list[PCPStep]:
    steps = [manager.partition_batch(batch) for manager in managers]
    partitioned = [step for step in steps if step is not None]
    assert len(partitioned) == len(managers)
    return partitioned


def block_tables(batch: InputBatch) -> torch.Tensor:
    """Return ``[num_reqs, 32]``: block 100 * request + i."""
    return torch.arange(batch.num_reqs)[:, None] * 100 + torch.arange(32)


def slots(batch: InputBatch) -> torch.Tensor:
    """Return ``[1, num_tokens]``, slots as the block tables have them."""
    request = np.repeat(np.arange(batch.num_reqs), batch.num_scheduled_tokens)
    block = block_tables(batch)[torch.from_numpy(request), batch.positions // BLOCK_SIZE]
    return (block * BLOCK_SIZE + batch.positions % BLOCK_SIZE)[None]


def run(step: PCPStep, manager: PCPManager) -> torch.Tensor:
    """Return the ``[L, 4]`` hidden rows of a rank."""
    local = step.local_batch
    batch = step.global_batch
    (tables,), _ = manager.prepare_attn(step, (block_tables(batch),), slots(batch))
    hidden = torch.full((local.num_tokens_after_padding, 4), -7)
    hidden[:, 0], hidden[:, 1] = local.input_ids, local.positions
    for row in range(local.num_reqs):
        start, stop = local.query_start_loc[row : row + 2].tolist()
        hidden[start:stop, 2] = local.seq_lens[row] - (stop - start) - local.positions[start]
        hidden[start:stop, 3] = tables[row, 0] // 100
    return hidden


def expected(batch: InputBatch) -> torch.Tensor:
    """Return the ``[num_tokens, 4]`` hidden rows of one rank: seq_len ends with the row, own
    blocks."""
    request = torch.from_numpy(np.repeat(np.arange(batch.num_reqs), batch.num_scheduled_tokens))
    columns = (batch.input_ids.long(), batch.positions, torch.zeros_like(request), request)
    return torch.stack(columns, dim=1)


def gather_over(monkeypatch: pytest.MonkeyPatch, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run a collective that each rank calls once: all put in, then each gets everything."""
    sent: list[torch.Tensor] = []

    def put(rows: torch.Tensor) -> torch.Tensor:
        sent.append(rows)
        return rows.repeat(len(calls), 1)

    monkeypatch.setattr(manager_module, "gather_rows", put)
    for call in calls:
        call()
    assert len({rows.shape for rows in sent}) == 1, "ranks sent different shapes"
    monkeypatch.setattr(manager_module, "gather_rows", lambda rows: torch.cat(sent))
    return [call() for call in calls]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_hidden_rows_come_back_in_order(
    ranks: Callable[[int], list[PCPManager]], monkeypatch: pytest.MonkeyPatch, name: str, size: int
) -> None:
    managers, batch = ranks(size), make_batch(BATCHES[name])
    steps = partition(managers, batch)
    pairs = list(zip(managers, steps, strict=True))
    calls = [partial(m.restore_hidden_states, s, run(s, m)) for m, s in pairs]
    for restored in gather_over(monkeypatch, calls):
        assert torch.equal(restored, expected(batch))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_sampling_sees_the_rows_tokens_and_positions_of_the_global_batch(
    ranks: Callable[[int], list[PCPManager]], monkeypatch: pytest.MonkeyPatch, name: str, size: int
) -> None:
    """The sampler reads hidden rows, tokens and positions at ``logits_indices``."""
    managers, batch = ranks(size), make_batch(BATCHES[name])
    steps = partition(managers, batch)
    pairs = list(zip(managers, steps, strict=True))
    calls = [partial(m.restore_for_sampling, s, run(s, m)) for m, s in pairs]
    for hidden, seen in gather_over(monkeypatch, calls):
        at = seen.logits_indices
        assert torch.equal(hidden[at], expected(batch)[batch.logits_indices])
        assert torch.equal(seen.positions[at], batch.positions[batch.logits_indices])
        assert torch.equal(seen.input_ids[at], batch.input_ids[batch.logits_indices])
        assert seen.query_start_loc is batch.query_start_loc
        assert seen.idx_mapping is batch.idx_mapping


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_the_rows_that_are_sampled_from_can_come_alone(
    ranks: Callable[[int], list[PCPManager]], monkeypatch: pytest.MonkeyPatch, name: str, size: int
) -> None:
    """Each is known by its place, its row, and how much of that row it does not see."""
    managers, batch = ranks(size), make_batch(BATCHES[name])
    steps = partition(managers, batch)
    calls = []
    for manager, step in zip(managers, steps, strict=True):
        sampled, local = step.sampled, step.local_batch
        hidden = run(step, manager)[sampled.send_idx.long()]
        row, num_behind = sampled.rows()
        seen = local.seq_lens[row.long()] - num_behind
        assert torch.equal(seen, (local.positions[sampled.send_idx.long()] + 1).to(seen.dtype))
        (tables,), _ = manager.prepare_attn(step, (block_tables(batch),), slots(batch))
        assert torch.equal(tables[row.long(), 0] // 100, hidden[:, 3])
        sampled.is_partial = sampled.is_applied = True
        calls.append(partial(manager.restore_for_sampling, step, hidden))
    for hidden, batch_seen in gather_over(monkeypatch, calls):
        at = batch_seen.logits_indices
        assert torch.equal(hidden[at], expected(batch)[batch.logits_indices])
    # Each is called twice here.
    assert {manager.snapshot()["num_sampled_steps"] for manager in managers} == {2}


def test_rows_that_were_left_out_are_not_taken_for_computed(
    ranks: Callable[[int], list[PCPManager]],
) -> None:
    managers, batch = ranks(2), make_batch(BATCHES["mixed"])
    (step, _) = partition(managers, batch)
    step.sampled.is_partial = True
    with pytest.raises(AssertionError, match="rows were left out that are read"):
        managers[0].restore_for_sampling(step, run(step, managers[0]))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_gathered_rows_write_each_slot_once(
    ranks: Callable[[int], list[PCPManager]], name: str, size: int
) -> None:
    """The row that carries a token's KV carries that token's slot; all others carry -1."""
    managers, batch = ranks(size), make_batch(BATCHES[name])
    steps = partition(managers, batch)
    tokens = torch.cat([step.local_batch.input_ids for step in steps])
    slot_of = dict(zip(batch.input_ids.tolist(), slots(batch)[0].tolist(), strict=True))
    for manager, step in zip(managers, steps, strict=True):
        mapping = manager.prepare_slot_mappings(step, slots(batch))[0]
        assert mapping.shape == tokens.shape
        written = mapping >= 0
        pairs = zip(tokens[written].tolist(), mapping[written].tolist(), strict=True)
        assert all(slot_of[token] == slot for token, slot in pairs)
        assert sorted(mapping[written].tolist()) == sorted(slot_of.values())


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_ranks_that_share_know_how_much_of_each_row_they_keep(
    ranks: Callable[..., list[PCPManager]], name: str, size: int, interleave: int
) -> None:
    managers, batch = ranks(size, interleave), make_batch(BATCHES[name])
    for rank, step in enumerate(partition(managers, batch)):
        local = step.local_batch
        assert local.dcp_local_seq_lens is not None
        for seq_len, num_kept in zip(
            local.seq_lens.tolist(), local.dcp_local_seq_lens.tolist(), strict=True
        ):
            kept = [token for token in range(seq_len) if token // interleave % size == rank]
            assert num_kept == len(kept)


def test_a_step_of_decodes_is_left_alone(ranks: Callable[[int], list[PCPManager]]) -> None:
    managers = ranks(2)
    batch = make_batch([(1, 30, False), (1, 5, False), (3, 0, True)])
    assert [manager.partition_batch(batch) for manager in managers] == [None, None]
    assert managers[0].snapshot()["num_partitioned_steps"] == 0
    assert managers[0].snapshot()["num_steps"] == 1


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", BATCHES)
def test_counters_hold_what_each_rank_ran(
    ranks: Callable[[int], list[PCPManager]], name: str, size: int
) -> None:
    managers, batch = ranks(size), make_batch(BATCHES[name])
    partition(managers, batch)
    steps = partition(managers, batch)
    for manager, step in zip(managers, steps, strict=True):
        local = step.local_batch
        num_tokens = int(local.num_scheduled_tokens.sum())
        assert manager.snapshot() == {
            "num_steps": 2,
            "num_partitioned_steps": 2,
            "num_scheduled_tokens": 2 * batch.num_tokens,
            "num_local_tokens": 2 * num_tokens,
            "num_padding_tokens": 2 * (local.num_tokens_after_padding - num_tokens),
            "num_sampled_steps": 0,
            "num_gathered_bytes": 0,
        }
        manager.reset_stats()
        assert set(manager.snapshot().values()) == {0}


def test_rank_0_logs_its_counters_once_an_interval(
    ranks: Callable[[int], list[PCPManager]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        manager_module.logger, "info", lambda text, *args: lines.append(text % args)
    )
    now = 1000.0
    monkeypatch.setattr(manager_module, "time", types.SimpleNamespace(monotonic=lambda: now))
    managers, batch = ranks(2), make_batch(BATCHES["mixed"])
    for _ in range(3):
        partition(managers, batch)
    assert len(lines) == 1
    assert "P=2, num_steps=1, num_partitioned_steps=1" in lines[0]
    now += manager_module.LOG_INTERVAL_SECONDS
    partition(managers, batch)
    assert len(lines) == 2
    assert "num_partitioned_steps=4" in lines[1]


def test_logits_of_a_request_are_its_last_tokens() -> None:
    """With draft tokens a request has several logits."""
    batch = make_batch([(3, 9, False), (2, 9, False), (5, 0, True)])
    batch.cu_num_logits_np = np.array([0, 3, 4, 5], dtype=np.int32)
    assert logits_tokens(batch).tolist() == [0, 1, 2, 4, 9]


def test_dummy_slots_gather_and_write_nothing(ranks: Callable[[int], list[PCPManager]]) -> None:
    mapping = ranks(3)[1].get_dummy_slot_mappings(2, 5)
    assert mapping.shape == (2, 15)
    assert mapping.unique().tolist() == [-1]


@pytest.mark.usefixtures("ranks")
def test_index_arrays_start_aligned() -> None:
    arrays = [np.arange(n, dtype=np.int32) for n in (5, 1, 8, 3)]
    copies = copy_to_device(*arrays, device=torch.device("cpu"))
    first = copies[0].data_ptr()
    assert [(copy.data_ptr() - first) % 16 for copy in copies] == [0, 0, 0, 0]
    assert all(copy.tolist() == array.tolist() for copy, array in zip(copies, arrays, strict=True))


def test_the_manager_refuses_what_admission_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("vllm.plugins.pcp.admission.validate_config", seen.append)
    config: Any = object()
    PCPManager.validate_config(config)
    assert seen == [config]


@pytest.mark.parametrize(("max_local_tokens", "num_rows"), [(4096, 6), (5, 5)])
def test_where_ranks_copy_to_each_other_their_rows_are_even(
    ranks: Callable[..., list[PCPManager]], max_local_tokens: int, num_rows: int
) -> None:
    """A rank's slots then begin where its first one's do, as kernels are compiled for; but no
    buffer is exceeded for it."""
    peers: Any = object()
    managers = ranks(2)
    for manager in managers:
        manager.graphs.num_rows = np.array((), dtype=np.int64)
        manager.max_local_tokens = max_local_tokens
    batch = make_batch([(9, 0, True)])
    assert [step.local_batch.num_tokens_after_padding for step in partition(managers, batch)] == [
        5,
        5,
    ]
    for manager in managers:
        manager.peer_caches = peers
    steps = partition(managers, batch)
    assert [step.local_batch.num_tokens_after_padding for step in steps] == [num_rows] * 2

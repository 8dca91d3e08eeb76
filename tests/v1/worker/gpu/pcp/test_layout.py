# SPDX-License-Identifier: Apache-2.0
"""Claims about the layout.

They are held against a per-token oracle on many batches, and must catch every mutant of layout.py.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import ModuleType

import numpy as np
import pytest

from vllm.v1.worker.gpu.pcp import layout

from . import oracle
from .oracle import Batch, Request

LAYOUT_FILE = Path(inspect.getsourcefile(layout) or "")
SIZES = [2, 3, 4, 5, 6, 7, 8, 16, 64]
# More than 10,000 in all.
NUM_BATCHES = dict.fromkeys(SIZES, 1400) | {16: 500, 64: 100}


@dataclass(frozen=True)
class Case:
    """A batch, what the oracle expects of it and what the layout made of it, arrays as lists."""

    batch: Batch
    tokens: list[tuple[int, int]]
    expected: oracle.Expected
    plan: layout.PartitionPlan
    # [rank][row] (request, first token, tokens).
    rows: list[list[tuple[int, int, int]]]
    # [rank][local token] (request, token), and whether the rank owns it.
    local_tokens: list[list[tuple[int, int]]]
    is_owned: list[list[bool]]
    # [gathered row] global token, or -1; [global token] gathered row.
    slot_idx: list[int]
    restore_idx: list[int]


def plan_batch(batch: Batch, module: ModuleType = layout) -> layout.PartitionPlan | None:
    plan: layout.PartitionPlan | None = module.plan_partition(
        np.array([r.num_scheduled for r in batch.requests], dtype=np.int32),
        np.array([r.num_computed for r in batch.requests], dtype=np.int32),
        np.array([r.is_prefilling for r in batch.requests], dtype=np.bool_),
        pcp_world_size=batch.pcp_world_size,
    )
    return plan


def make_case(batch: Batch, module: ModuleType = layout) -> Case | None:
    """Plan the batch; None, for the layout as for the oracle, if it is to be left as it is."""
    expected, plan = oracle.expect(batch), plan_batch(batch, module)
    assert (plan is None) == (expected is None)
    if expected is None or plan is None:
        return None
    rows = [
        list(zip(*columns, strict=True))
        for columns in zip(
            plan.row_req.tolist(), plan.row_offset.tolist(), plan.row_len.tolist(), strict=True
        )
    ]
    return Case(
        batch=batch,
        tokens=batch.tokens(),
        expected=expected,
        plan=plan,
        rows=rows,
        local_tokens=[
            [(r, t) for r, start, n in row for t in range(start, start + n)] for row in rows
        ],
        is_owned=[
            [owned for (_, _, n), owned in zip(row, row_is_owned, strict=True) for _ in range(n)]
            for row, row_is_owned in zip(rows, plan.row_is_owned.tolist(), strict=True)
        ],
        slot_idx=plan.slot_idx.tolist(),
        restore_idx=plan.restore_idx().tolist(),
    )


def gather(case: Case) -> list[tuple[int, tuple[int, int]] | None]:
    """All-gather: every rank's local tokens, marked with the rank, then its padding."""
    gathered: list[tuple[int, tuple[int, int]] | None] = []
    for rank, local_tokens in enumerate(case.local_tokens):
        num_padding = case.plan.num_tokens_after_padding - len(local_tokens)
        assert num_padding >= 0
        gathered += [(rank, token) for token in local_tokens] + [None] * num_padding
    return gathered


def each_rank_has_its_rows(case: Case) -> None:
    """Partitioned queries are covered once, as the oracle says; all ranks have replicated rows."""
    covered: Counter[tuple[int, int]] = Counter()
    for rank, rows in enumerate(case.rows):
        assert sorted(rows) == sorted(case.expected.replicated | case.expected.partitioned[rank])
        assert all(num_tokens > 0 for _, _, num_tokens in rows)
        covered.update(case.local_tokens[rank])
    for r, token in case.tokens:
        is_partitioned = case.batch.is_partitioned(case.batch.requests[r])
        assert covered.pop((r, token)) == (1 if is_partitioned else case.batch.pcp_world_size)
    assert not covered


def rows_stand_in_attention_order(case: Case) -> None:
    """Decodes, rows with context, rows at the start of their request; decodes as in the batch."""
    decodes = [r for r, request in enumerate(case.batch.requests) if not request.is_prefilling]
    assert case.plan.num_decodes == len(decodes)
    for rows in case.rows:
        assert [r for r, _, _ in rows[: len(decodes)]] == decodes
        prefills = rows[len(decodes) :]
        has_context = [case.batch.requests[r].num_computed + start > 0 for r, start, _ in prefills]
        assert has_context == sorted(has_context, reverse=True)


def rows_behind_cached_tokens_stand_first(case: Case) -> None:
    """Replicated ones ahead of partitioned ones, as many of each on every rank."""
    requests = case.batch.requests
    is_cached = [request.num_computed > 0 for request in requests]
    is_replicated = [not case.batch.is_partitioned(request) for request in requests]
    split, stop = case.plan.num_replicated_cached_rows, case.plan.num_cached_rows
    ends = [request.num_computed + request.num_scheduled for request in requests]
    assert case.plan.num_cached_tokens.tolist() == [request.num_computed for request in requests]
    assert case.plan.req_end.tolist() == ends
    for rows in case.rows:
        assert all(is_cached[r] and is_replicated[r] for r, _, _ in rows[:split])
        assert all(is_cached[r] and not is_replicated[r] for r, _, _ in rows[split:stop])
        assert not any(is_cached[r] for r, _, _ in rows[stop:])
        assert [r for r, _, _ in rows[:stop]] == [r for r, _, _ in case.rows[0][:stop]]


def local_tokens_follow_the_rows(case: Case) -> None:
    plan = case.plan
    for rank, rows in enumerate(case.rows):
        local_tokens = [case.tokens[token] for token in plan.gather_idx(rank)]
        num_local_tokens = len(case.local_tokens[rank])
        assert plan.num_local_tokens[rank] == num_local_tokens
        assert local_tokens[:num_local_tokens] == case.local_tokens[rank]
        assert local_tokens[num_local_tokens:] == [(0, 0)] * (len(local_tokens) - num_local_tokens)
        query_start_loc = plan.query_start_loc(rank).tolist()
        assert query_start_loc == [sum(n for _, _, n in rows[:i]) for i in range(len(rows) + 1)]
        assert [case.tokens[token] for token in plan.row_token[rank]] == [
            (r, t) for r, t, _ in rows
        ]


def every_token_has_one_owner(case: Case) -> None:
    owned = [
        token
        for tokens, is_owned in zip(case.local_tokens, case.is_owned, strict=True)
        for token, owns in zip(tokens, is_owned, strict=True)
        if owns
    ]
    assert sorted(owned) == case.tokens


def every_slot_has_one_writer(case: Case) -> None:
    """The writer is the token's owner; padding and copies write nowhere."""
    writes: list[int] = []
    length = case.plan.num_tokens_after_padding
    assert len(case.slot_idx) == case.batch.pcp_world_size * length
    for rank, (tokens, is_owned) in enumerate(zip(case.local_tokens, case.is_owned, strict=True)):
        slots = case.slot_idx[rank * length : (rank + 1) * length]
        assert slots[len(tokens) :] == [-1] * (length - len(tokens))
        for slot, token, owns in zip(slots, tokens, is_owned, strict=False):
            if owns:
                assert case.tokens[slot] == token
                writes.append(slot)
            else:
                assert slot == -1
    assert sorted(writes) == list(range(len(case.tokens)))


def restore_undoes_partition(case: Case) -> None:
    """Each token comes back, and from its owner: copies may differ in a bit."""
    gathered = gather(case)
    assert len(case.restore_idx) == len(case.tokens)
    for token, row in zip(case.tokens, case.restore_idx, strict=True):
        source = gathered[row]
        assert source is not None
        rank, restored = source
        assert restored == token
        assert case.is_owned[rank][row - rank * case.plan.num_tokens_after_padding]


def requested_tokens_come_back(case: Case) -> None:
    """From their owners, in the order requested, in a gather no longer than one rank needs."""
    rng = Random(len(case.tokens))
    all_tokens = list(range(len(case.tokens)))
    last_tokens = [i for i, token in enumerate([*case.tokens[1:], (-1, 0)]) if token[1] == 0]
    for requested in (
        last_tokens,
        all_tokens[:1],
        rng.sample(all_tokens, len(all_tokens) // 2 + 1),
    ):
        restore = case.plan.plan_restore(np.array(requested, dtype=np.int32))
        gathered = [
            (rank, case.local_tokens[rank][local_token])
            for rank, send_idx in enumerate(restore.send_idx.tolist())
            for local_token in send_idx
        ]
        owners = [row // case.plan.num_tokens_after_padding for row in case.restore_idx]
        received = [gathered[row] for row in restore.recv_idx]
        assert received == [(owners[token], case.tokens[token]) for token in requested]
        assert restore.num_rows == max(Counter(owners[token] for token in requested).values())
        assert restore.send_idx.shape == (case.batch.pcp_world_size, restore.num_rows)
        assert restore.send_idx.dtype == restore.recv_idx.dtype == np.int32


def shapes_agree_on_all_ranks(case: Case) -> None:
    """Whatever can size a collective or a buffer is one number of the plan."""
    plan, size = case.plan, case.batch.pcp_world_size
    num_replicated = len(case.expected.replicated)
    shape = (size, num_replicated + 2 * (len(case.batch.requests) - num_replicated))
    for name in ("row_req", "row_offset", "row_len", "row_token", "row_is_owned"):
        array = getattr(plan, name)
        assert array.shape == shape
        assert array.dtype == (np.bool_ if name == "row_is_owned" else np.int32)
    assert plan.pcp_world_size == size
    assert plan.num_tokens == len(case.tokens)
    assert plan.num_tokens_after_padding == max(plan.num_local_tokens)
    assert type(plan.num_tokens) is type(plan.num_tokens_after_padding) is int
    assert (
        plan.num_local_tokens.dtype == plan.slot_idx.dtype == plan.restore_idx().dtype == np.int32
    )
    for rank in range(size):
        assert plan.query_start_loc(rank).shape == (shape[1] + 1,)
        assert plan.gather_idx(rank).shape == (plan.num_tokens_after_padding,)
        assert plan.query_start_loc(rank).dtype == plan.gather_idx(rank).dtype == np.int32


CLAIMS: tuple[Callable[[Case], None], ...] = (
    each_rank_has_its_rows,
    rows_stand_in_attention_order,
    rows_behind_cached_tokens_stand_first,
    local_tokens_follow_the_rows,
    every_token_has_one_owner,
    every_slot_has_one_writer,
    restore_undoes_partition,
    requested_tokens_come_back,
    shapes_agree_on_all_ranks,
)
each_claim = pytest.mark.parametrize("claim", CLAIMS, ids=[claim.__name__ for claim in CLAIMS])


def hold(claim: Callable[[Case], None], cases: list[Case]) -> None:
    for case in cases:
        try:
            claim(case)
        except AssertionError as error:
            error.add_note(repr(case.batch))
            raise


def partitioned_cases(batches: Iterator[Batch]) -> list[Case]:
    return [case for batch in batches if (case := make_case(batch))]


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"P{size}")
def random_cases(request: pytest.FixtureRequest) -> list[Case]:
    return partitioned_cases(oracle.random_batches(request.param, NUM_BATCHES[request.param]))


@each_claim
def test_random_batches(claim: Callable[[Case], None], random_cases: list[Case]) -> None:
    hold(claim, random_cases)


def test_enough_random_batches() -> None:
    assert sum(NUM_BATCHES.values()) >= 10_000


@pytest.mark.parametrize("pcp_world_size", SIZES)
def test_random_batches_meet_every_edge(pcp_world_size: int) -> None:
    requests = Counter(
        (request.num_scheduled, request.is_prefilling, request.num_computed > 0)
        for batch in oracle.random_batches(pcp_world_size, NUM_BATCHES[pcp_world_size])
        for request in batch.requests
    )
    for length in oracle.edge_lengths(pcp_world_size):
        assert requests[length, True, False]
        assert requests[length, True, True]
    assert any(length > 1 and not prefills for length, prefills, _ in requests)


@pytest.fixture(scope="module", params=[2, 3, 4, 8, 16], ids=lambda size: f"P{size}")
def short_cases(request: pytest.FixtureRequest) -> list[Case]:
    """Every length up to 4P+1, fresh or behind a prefix, alone or between other requests."""
    size = request.param
    decode = Request(1, 9, is_prefilling=False)
    surroundings: list[tuple[tuple[Request, ...], tuple[Request, ...]]] = [
        ((), ()),
        ((decode,), (decode,)),
        ((decode, Request(2 * size)), (Request(2 * size - 1),)),
    ]
    return partitioned_cases(
        Batch(size, (*before, Request(length, prefix), *after))
        for length in range(1, 4 * size + 2)
        for prefix in (0, 1, 16)
        for before, after in surroundings
    )


@each_claim
def test_every_short_length(claim: Callable[[Case], None], short_cases: list[Case]) -> None:
    hold(claim, short_cases)


@pytest.fixture(scope="module")
def large_cases() -> list[Case]:
    rng = Random(0)
    mixed = [
        Request(rng.randint(1, 300), rng.choice([0, 64]))
        if rng.random() < 0.5
        else Request(1, 7, False)
        for _ in range(256)
    ]
    alone = Request(8191, 1000)
    return partitioned_cases(
        Batch(size, requests) for size in (2, 7, 8, 16) for requests in ((*mixed,), (alone,))
    )


@each_claim
def test_large_batches(claim: Callable[[Case], None], large_cases: list[Case]) -> None:
    hold(claim, large_cases)


@pytest.mark.parametrize(
    "requests",
    [
        (Request(7),),
        (Request(7, 100), Request(1)),
        (Request(1, 9, False), Request(7)),
        (Request(8, 9, False),),
        (Request(1, 9, False), Request(100, 9, False)),
    ],
)
def test_leaves_a_step_without_long_prefill_alone(requests: tuple[Request, ...]) -> None:
    assert plan_batch(Batch(4, requests)) is None


def test_worked_example() -> None:
    """The drawing in the module docstring, letter by letter."""
    plan = plan_batch(Batch(2, (Request(7),)))
    assert plan is not None
    letters = np.array(list("ABCDEFG"))
    assert plan.num_local_tokens.tolist() == [3, 4]
    assert plan.num_tokens_after_padding == 4
    assert plan.row_offset.tolist() == [[5, 0], [1, 3]]
    assert plan.row_len.tolist() == [[2, 1], [2, 2]]
    assert [plan.query_start_loc(rank).tolist() for rank in (0, 1)] == [[0, 2, 3], [0, 2, 4]]
    assert "".join(letters[plan.gather_idx(0)[:3]]) == "FGA"
    assert "".join(letters[plan.gather_idx(1)]) == "BCDE"
    assert plan.slot_idx.tolist() == [5, 6, 0, -1, 1, 2, 3, 4]
    assert plan.restore_idx().tolist() == [2, 4, 5, 6, 7, 0, 1]
    assert "".join(np.array(list("FGA_BCDE"))[plan.restore_idx()]) == "ABCDEFG"
    restore = plan.plan_restore(np.array([6], dtype=np.int32))
    assert (restore.send_idx.tolist(), restore.recv_idx.tolist()) == ([[1], [0]], [0])


def test_products_beyond_int32() -> None:
    """No product of a chunk and a query length overflows."""
    size, num_scheduled = 1024, 1_200_000
    plan = plan_batch(Batch(size, (Request(num_scheduled),)))
    assert plan is not None
    assert plan.row_len.sum() == num_scheduled
    assert set(plan.row_len.ravel().tolist()) <= {585, 586}


@pytest.mark.parametrize("seed", range(20))
def test_many_prompts_give_ranks_equally_many_tokens(seed: int) -> None:
    rng = Random(seed)
    plan = plan_batch(Batch(4, tuple(Request(rng.randint(5, 200)) for _ in range(64))))
    assert plan is not None
    assert plan.num_local_tokens.max() / plan.num_local_tokens.mean() <= 1.02


@pytest.mark.parametrize("pcp_world_size", range(2, 9))
@pytest.mark.parametrize("num_computed", [0, 1, 1024, 30_000])
def test_long_prefill_gives_ranks_equal_causal_area(pcp_world_size: int, num_computed: int) -> None:
    for num_scheduled in (*range(1000, 1033), 1999, 8192):
        case = make_case(Batch(pcp_world_size, (Request(num_scheduled, num_computed),)))
        assert case is not None
        areas = [oracle.causal_area(case.batch, tokens) for tokens in case.local_tokens]
        assert max(areas) * pcp_world_size / sum(areas) <= 1.01


def max_local_tokens_is_a_bound(pcp_world_size: int, module: ModuleType = layout) -> None:
    for budget, max_num_seqs in [(512, 1), (512, 8), (2048, 16), (2048, 256), (8192, 256)]:
        bound = module.max_local_tokens(budget, max_num_seqs, pcp_world_size)
        assert bound <= budget
        for batch in adversarial_batches(pcp_world_size, budget, max_num_seqs):
            plan = plan_batch(batch, module)
            num_tokens = sum(request.num_scheduled for request in batch.requests)
            assert (plan.num_tokens_after_padding if plan else num_tokens) <= bound, batch


def adversarial_batches(pcp_world_size: int, budget: int, max_num_seqs: int) -> Iterator[Batch]:
    """Yield batches that fill the budget: many requests of an awkward length, the rest in one."""
    one_token = Request(1, 9, is_prefilling=False)
    for length in oracle.edge_lengths(pcp_world_size):
        for other in (Request(length), one_token):
            num_others = min(max_num_seqs - 1, budget // other.num_scheduled)
            requests = [other] * num_others
            rest = budget - sum(request.num_scheduled for request in requests)
            yield Batch(pcp_world_size, (*requests, Request(rest)) if rest else (*requests,))


@pytest.mark.parametrize("pcp_world_size", SIZES)
def test_max_local_tokens_is_a_bound(pcp_world_size: int) -> None:
    max_local_tokens_is_a_bound(pcp_world_size)


def test_max_local_tokens_of_one_long_prompt_is_its_share() -> None:
    assert layout.max_local_tokens(8192, 1, 2) <= 4096 + 3


def test_plan_has_no_input_that_differs_between_ranks() -> None:
    """Only the global batch enters: in particular no request-state rows."""
    parameters = inspect.signature(layout.plan_partition).parameters
    assert list(parameters) == [
        "num_scheduled_tokens",
        "num_computed_tokens",
        "is_prefilling",
        "pcp_world_size",
        "pad",
    ]


def test_ranks_run_as_many_rows_as_they_are_padded_to() -> None:
    scheduled, computed = np.array([2, 21], dtype=np.int32), np.array([0, 4], dtype=np.int32)
    prefilling = np.array([True, True])
    plan = layout.plan_partition(
        scheduled, computed, prefilling, pcp_world_size=2, pad=lambda rows: rows + 5
    )
    assert plan is not None
    assert plan.num_tokens_after_padding == plan.num_local_tokens.max() + 5
    for rank in range(2):
        assert plan.gather_idx(rank).shape == (plan.num_tokens_after_padding,)
    assert plan.slot_idx.shape == (2 * plan.num_tokens_after_padding,)
    assert sorted(plan.slot_idx[plan.slot_idx >= 0].tolist()) == list(range(23))


def test_inputs_are_left_alone() -> None:
    arrays = [
        np.array([3, 40], dtype=np.int32),
        np.array([9, 0], dtype=np.int32),
        np.array([False, True]),
    ]
    for array in arrays:
        array.flags.writeable = False
    assert layout.plan_partition(*arrays, pcp_world_size=4) is not None


RUN_ALONE = """
import importlib.util, sys
import numpy as np

before = set(sys.modules)
spec = importlib.util.spec_from_file_location("layout", sys.argv[1])
layout = sys.modules["layout"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(layout)
loaded = {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
print(sorted(loaded - {"numpy", "layout"}), "torch" in sys.modules)
plan = layout.plan_partition(
    np.array([1, 50, 9, 3], dtype=np.int32),
    np.array([8, 0, 0, 5], dtype=np.int32),
    np.array([False, True, True, True]),
    pcp_world_size=3,
)
for name in plan.__slots__:
    print(name, np.array(getattr(plan, name)).tolist())
"""


def test_needs_numpy_only_and_is_the_same_in_every_process() -> None:
    """Processes with other hash seeds, as the ranks of an engine are."""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", RUN_ALONE, str(LAYOUT_FILE)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0].splitlines()[0] == "[] False"
    assert outputs[0] == outputs[1]


# Name: (text of layout.py, what replaces it). Each must make some claim fail.
MUTATIONS = {
    "longer chunks first": ("np.minimum(size, 2 * size - num_longer)", "np.zeros_like(num_longer)"),
    "longer chunks not counted": ("chunk * base + num_longer_before", "chunk * base"),
    "tail of another pair": ("2 * size - 1 - pair", "size + pair"),
    "rotates backwards": ("rank - np.arange(num_part)", "rank + np.arange(num_part)"),
    "does not rotate": ("rank - np.arange(num_part)", "rank - np.zeros(num_part, dtype=int)"),
    "partitions one token too late": (">= 2 * pcp_world_size", "> 2 * pcp_world_size"),
    "partitions too early": (">= 2 * pcp_world_size", ">= pcp_world_size"),
    "partitions decodes": ("is_prefilling & (", "("),
    "every rank owns copies": ("np.arange(num_repl) % size == rank", "True"),
    "no rank owns copies": ("np.arange(num_repl) % size == rank", "False"),
    "every copy writes": ("where=row_is_owned", "where=True"),
    "forgets the cached prefix": ("num_computed_tokens[req] > 0", "row_offset[0] > 0"),
    "forgets the step's own context": ("(row_offset > 0)", "False"),
    "replicated among partitioned": ("region[:num_repl] -=", "region[:num_repl] -= 0 *"),
    "decodes among prefills": ("region *= is_prefilling[req]", "pass"),
    "rows not sorted": ("np.argsort(region - (", "np.argsort(0 * region - 0 * ("),
    "rows not offset in the batch": ("first_token[row_req] + row_offset", "first_token[row_req]"),
    "padding is not skipped": (
        "padded_len[:, width] = num_tokens_after_padding -",
        "padded_len[:, width] = 0 *",
    ),
    "padding by the first rank": ("int(num_local_tokens.max())", "int(num_local_tokens[0])"),
    "rows start at their end": (
        "np.cumsum(row_len, dtype=np.int32) - row_len",
        "np.cumsum(row_len, dtype=np.int32)",
    ),
    "query starts shifted": ("out=sums[1:]", "out=sums[:-1]"),
    "restores by the gather": (
        "return restore_idx[:-1]",
        "return self.slot_idx[: self.num_tokens]",
    ),
    "sends gathered rows": ("send_idx[rank, row] = local_token", "send_idx[rank, row] = gathered"),
    "sends too few rows": ("int(per_rank.max())", "int(per_rank.min())"),
    "no room for replicated rows": ("share + max_num_seqs *", "share + 0 *"),
    "receives in rank order": ("rank * num_rows + row", "(rank * num_rows + row)[by_rank]"),
}


def layout_with(monkeypatch: pytest.MonkeyPatch, target: str, replacement: str) -> ModuleType:
    source = LAYOUT_FILE.read_text()
    assert target in source, f"layout.py no longer has {target!r}; adapt the mutation"
    mutant = ModuleType("mutant_layout")
    monkeypatch.setitem(sys.modules, mutant.__name__, mutant)
    exec(compile(source.replace(target, replacement), mutant.__name__, "exec"), mutant.__dict__)
    return mutant


def survives(mutant: ModuleType) -> bool:
    """Whether all claims hold; a mutant that trips over itself does not survive either."""
    try:
        for size in (2, 3, 4):
            max_local_tokens_is_a_bound(size, mutant)
            for batch in oracle.random_batches(size, 60):
                if case := make_case(batch, mutant):
                    for claim in CLAIMS:
                        claim(case)
    except (AssertionError, IndexError, ValueError):
        return False
    return True


@pytest.mark.parametrize("name", MUTATIONS)
def test_claims_catch_mutation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not survives(layout_with(monkeypatch, *MUTATIONS[name]))


def test_claims_hold_without_mutation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert survives(layout_with(monkeypatch, "NO_SLOT = -1", "NO_SLOT = -1"))

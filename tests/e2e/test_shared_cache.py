# SPDX-License-Identifier: Apache-2.0
"""Ranks that share the KV cache, D > 1, answer as one rank does that has all of it.

MLA, and GQA on FLASH_ATTN, whose kernels are twins in torch on CPUs; the one rank runs CPU_ATTN.
"""

from __future__ import annotations

from typing import TypeAlias

import pytest

from tests.e2e.compare import Pair
from tests.e2e.conftest import SHARED_SCENARIOS, SHARED_SIZES, Engines, Sharing
from tests.e2e.scenarios import REMAINDERS

pytestmark = pytest.mark.slow

# Model, P, TP, D, tokens in a row (a block has 32 with D = 2 and 16 with D = 4), prefix caching,
# the version of FLASH_ATTN, whether ranks are forked (spawned ones differ in the order of their
# sets), and what a rank has of the experts. TP ranks that share the cache of GQA must want the same
# KV head.
CASES = (
    ("deepseek_v2", 2, 1, 2, 1, True, None, False),
    ("deepseek_v2", 2, 1, 2, 16, False, None, True, "replicated"),
    ("deepseek_v2", 4, 1, 4, 16, True, None),
    ("deepseek_v2", 2, 2, 2, 16, True, None),
    ("deepseek_v2", 2, 2, 4, 1, True, None),
    ("qwen3", 2, 1, 2, 1, True, 2, False),
    ("qwen3", 2, 1, 2, 32, False, 3),
    ("qwen3", 4, 1, 4, 16, True, 3),
    ("qwen3", 2, 2, 2, 16, True, 2),
    ("qwen3_mqa", 2, 2, 4, 1, True, 3),
)
# Prefills of MLA gather what is cached, those of GQA the queries of rows that are split.
GATHERING = ("chunked_prefill", "mixed_batches", "prefix_hits")
# Of results of decodes, and with GQA of prefills.
MERGES = {
    "deepseek_v2": "all_reduce dcp",
    "qwen3": "all_to_all_single dcp",
    "qwen3_mqa": "all_to_all_single dcp",
}

Case: TypeAlias = tuple[str, int, int, Sharing]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def case(request: pytest.FixtureRequest) -> Case:
    """Return the model, P, TP and what is shared."""
    name, pcp, tp, *sharing = request.param
    return name, pcp, tp, Sharing(*sharing)


@pytest.fixture(scope="module")
def pair(case: Case, engines: Engines) -> Pair:
    """Return what one rank and the case give."""
    return engines.sharing_pair(*case)


def test_answers(pair: Pair) -> None:
    for name in SHARED_SCENARIOS:
        pair.require_same(name)


def test_prefixes_are_found(pair: Pair, case: Case) -> None:
    hits = [request["num_cached_tokens"] for request in pair.require_same("prefix_hits")]
    num_cached = 4 * SHARED_SIZES.block_size if case[3].caches_prefixes else 0
    assert hits == [0] + [num_cached] * len(REMAINDERS)


def test_capacity_is_d_times_that_of_a_rank(pair: Pair) -> None:
    """A rank's blocks have a D-th of the tokens, and there are as many of them."""
    expected = SHARED_SIZES.num_blocks * SHARED_SIZES.block_size
    assert pair.several.num_kv_cache_tokens == pair.one.num_kv_cache_tokens == expected


def test_ranks_issue_the_same_collectives_and_hold_the_same_bits(pair: Pair, case: Case) -> None:
    pair.require_same_collectives()
    for name, scenario in pair.several.scenarios.items():
        first = scenario.collectives[0]
        assert any(line.startswith("hidden_states") for line in first)
        if name in GATHERING:
            assert any(line.startswith("all_gather_into_tensor dcp") for line in first)
        assert any(line.startswith(MERGES[case[0]]) for line in first)


def test_flash_attention_where_nothing_is_shared(engines: Engines) -> None:
    """Its own code gathers keys and values for the cache, and writes them."""
    pair = engines.sharing_pair("qwen3", 2, 1, Sharing(flash_attn_version=2))
    for name in SHARED_SCENARIOS:
        pair.require_same(name)

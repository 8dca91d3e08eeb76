# SPDX-License-Identifier: Apache-2.0
"""Ranks that share the KV cache, D > 1, answer as one rank does that has all of it."""

from __future__ import annotations

import pytest

from tests.e2e.compare import Pair
from tests.e2e.conftest import SHARED_SCENARIOS, SHARED_SIZES, Engines, Sharing
from tests.e2e.scenarios import REMAINDERS

pytestmark = pytest.mark.slow

# P, TP, D, tokens in a row (a block has 32 with D = 2 and 16 with D = 4), prefix caching.
CASES = (
    (2, 1, 2, 1, True),
    (2, 1, 2, 16, False),
    (4, 1, 4, 16, True),
    (2, 2, 2, 16, True),
    (2, 2, 4, 1, True),
)


@pytest.fixture(
    scope="module", params=CASES, ids=lambda case: "pcp{}-tp{}-dcp{}-{}-{}".format(*case)
)
def case(request: pytest.FixtureRequest) -> tuple[int, int, Sharing]:
    """Return P, TP and what is shared."""
    pcp, tp, *sharing = request.param
    return pcp, tp, Sharing(*sharing)


@pytest.fixture(scope="module")
def pair(case: tuple[int, int, Sharing], engines: Engines) -> Pair:
    """Return what one rank and the case give."""
    return engines.sharing_pair("deepseek_v2", *case)


def test_answers(pair: Pair) -> None:
    for name in SHARED_SCENARIOS:
        pair.require_same(name)


def test_prefixes_are_found(pair: Pair, case: tuple[int, int, Sharing]) -> None:
    hits = [request["num_cached_tokens"] for request in pair.require_same("prefix_hits")]
    num_cached = 4 * SHARED_SIZES.block_size if case[2].caches_prefixes else 0
    assert hits == [0] + [num_cached] * len(REMAINDERS)


def test_capacity_is_d_times_that_of_a_rank(pair: Pair) -> None:
    """A rank's blocks have a D-th of the tokens, and there are as many of them."""
    expected = SHARED_SIZES.num_blocks * SHARED_SIZES.block_size
    assert pair.several.num_kv_cache_tokens == pair.one.num_kv_cache_tokens == expected


def test_ranks_issue_the_same_collectives_and_hold_the_same_bits(pair: Pair) -> None:
    for scenario in pair.several.scenarios.values():
        first, *others = scenario.collectives
        assert all(other == first for other in others)
        assert any(line.startswith("hidden_states") for line in first)
        # Prefills gather, decodes merge.
        assert any(line.startswith("all_gather_into_tensor dcp") for line in first)
        assert any(line.startswith("all_reduce dcp") for line in first)

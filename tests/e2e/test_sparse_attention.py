# SPDX-License-Identifier: Apache-2.0
"""Models that choose which tokens to attend to choose, and answer, as with P = 1."""

from __future__ import annotations

import pytest

from tests.e2e.compare import Pair
from tests.e2e.conftest import (
    SHARED_SPARSE_SCENARIOS,
    SPARSE_SCENARIOS,
    Engines,
    Sharing,
)

pytestmark = pytest.mark.slow

# Queries and keys are scored in FP8. A last bit decides how a value is rounded, in thousands of
# choices once which of two tokens is attended to, and so a bit of an answer's log-probabilities.
TOLERANCE = 1e-2

# Checkpoint, P, TP, what a rank has of the experts.
CASES = (
    ("deepseek_v32", 2, 1, "ep"),
    ("deepseek_v32", 4, 1, "ep"),
    ("deepseek_v32_2048", 3, 1, "width"),
    ("glm_moe_dsa", 2, 1, "width"),
)
# Checkpoint, P, TP, how ranks share both caches: D, tokens in a row.
SHARED_CASES = (
    ("glm_moe_dsa", 2, 1, Sharing(2, 1)),
    ("glm_moe_dsa", 2, 2, Sharing(4, 16)),
)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "{}-pcp{}-tp{}".format(*case[:3]))
def pair(request: pytest.FixtureRequest, engines: Engines) -> Pair:
    """Return what one rank and the case give."""
    name, pcp, tp, experts = request.param
    return engines.pair(name, pcp, tp, experts)


@pytest.fixture(
    scope="module",
    params=SHARED_CASES,
    ids=lambda case: "{}-pcp{}-tp{}-dcp{.dcp}".format(*case),
)
def shared_pair(request: pytest.FixtureRequest, engines: Engines) -> Pair:
    """Return what one rank and ranks that share the KV cache give."""
    return engines.sharing_pair(*request.param)


@pytest.mark.parametrize("name", SHARED_SPARSE_SCENARIOS)
def test_answers_over_shared_caches(shared_pair: Pair, name: str) -> None:
    shared_pair.require_same(name, TOLERANCE)
    require_same_choices(shared_pair, name)


def test_ranks_that_share_caches_issue_the_same_collectives(shared_pair: Pair) -> None:
    shared_pair.require_same_collectives()


@pytest.mark.parametrize("name", SPARSE_SCENARIOS)
def test_answers(pair: Pair, name: str) -> None:
    pair.require_same(name, TOLERANCE)


@pytest.mark.parametrize("name", SPARSE_SCENARIOS)
def test_queries_attend_to_the_same_tokens(pair: Pair, name: str) -> None:
    require_same_choices(pair, name)


def test_ranks_issue_the_same_collectives_and_hold_the_same_bits(pair: Pair) -> None:
    pair.require_same_collectives()


def require_same_choices(pair: Pair, name: str) -> None:
    """Assert that queries attended to the same tokens, but for a tie in thousands."""
    one, several = (run.scenarios[name].choices for run in (pair.one, pair.several))
    assert len(one) > 100
    assert several.keys() == one.keys()
    others = [key for key, choice in several.items() if choice != one[key]]
    assert len(others) <= 1 + len(one) // 1000, others

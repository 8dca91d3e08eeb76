# SPDX-License-Identifier: Apache-2.0
"""Models with MLA and with experts, whole ones to a rank or parts of each, answer as with P = 1."""

from __future__ import annotations

import pytest

from tests.e2e.compare import Pair
from tests.e2e.conftest import EXPERT_SCENARIOS, LATENT_SCENARIOS, Engines
from tests.e2e.scenarios import REMAINDERS

pytestmark = pytest.mark.slow

# Checkpoint, P, TP, whether ranks have whole experts.
LATENT_CASES = (
    ("deepseek_v2", 2, 1, False),
    ("deepseek_v2", 2, 1, True),
    ("deepseek_v2", 3, 1, False),
    ("deepseek_v2", 4, 1, True),
    ("deepseek_v2", 2, 2, False),
    ("deepseek_v2", 2, 2, True),
    ("deepseek_v3", 3, 1, True),
)
EXPERT_CASES = (
    ("qwen3_moe", 2, 1, False),
    ("qwen3_moe", 3, 1, True),
    ("qwen3_moe", 4, 1, False),
    ("qwen3_moe", 2, 2, True),
    ("mixtral", 2, 1, True),
    ("glm4_moe", 2, 1, False),
    ("gpt_oss", 2, 1, True),
)
SCENARIOS_OF = dict.fromkeys(LATENT_CASES, LATENT_SCENARIOS) | dict.fromkeys(
    EXPERT_CASES, EXPERT_SCENARIOS
)


@pytest.fixture(
    scope="module",
    params=SCENARIOS_OF,
    ids=lambda case: "{}-pcp{}-tp{}-{}".format(*case[:3], "ep" if case[3] else "no-ep"),
)
def case(request: pytest.FixtureRequest) -> tuple[str, int, int, bool]:
    """Return a checkpoint, P, TP, and whether ranks have whole experts."""
    chosen: tuple[str, int, int, bool] = request.param
    return chosen


@pytest.fixture(scope="module")
def pair(case: tuple[str, int, int, bool], engines: Engines) -> Pair:
    """Return what one rank and the case give."""
    name, pcp, tp, ep = case
    return engines.pair(name, pcp, tp, ep=ep)


def test_answers(pair: Pair, case: tuple[str, int, int, bool]) -> None:
    for name in SCENARIOS_OF[case]:
        pair.require_same(name)


def test_prefixes_are_found(pair: Pair) -> None:
    hits = [request["num_cached_tokens"] for request in pair.require_same("prefix_hits")]
    assert hits == [0] + [4 * pair.sizes.block_size] * len(REMAINDERS)


def test_ranks_issue_the_same_collectives_and_hold_the_same_bits(pair: Pair) -> None:
    for scenario in pair.several.scenarios.values():
        first, *others = scenario.collectives
        assert len(first) > 0
        assert any(line.startswith("hidden_states") for line in first)
        assert all(other == first for other in others)

# SPDX-License-Identifier: Apache-2.0
"""Models with MLA and with experts, whatever a rank has of them, answer as with P = 1."""

from __future__ import annotations

import pytest

from tests.e2e.compare import Pair
from tests.e2e.conftest import EXPERT_SCENARIOS, LATENT_SCENARIOS, Engines
from tests.e2e.results import Experts
from tests.e2e.scenarios import REMAINDERS

pytestmark = pytest.mark.slow

# Checkpoint, P, TP, what a rank has of the experts.
LATENT_CASES = (
    ("deepseek_v2", 2, 1, "width"),
    ("deepseek_v2", 2, 1, "ep"),
    ("deepseek_v2", 3, 1, "width"),
    ("deepseek_v2", 4, 1, "ep"),
    ("deepseek_v2", 2, 2, "width"),
    ("deepseek_v2", 2, 2, "ep"),
    ("deepseek_v2", 2, 2, "replicated"),
    ("deepseek_v3", 3, 1, "ep"),
)
EXPERT_CASES = (
    ("qwen3_moe", 2, 1, "width"),
    ("qwen3_moe", 3, 1, "ep"),
    ("qwen3_moe", 4, 1, "width"),
    ("qwen3_moe", 2, 2, "ep"),
    ("qwen3_moe", 3, 1, "replicated"),
    ("mixtral", 2, 1, "ep"),
    ("glm4_moe", 2, 1, "width"),
    ("gpt_oss", 2, 1, "ep"),
)
SCENARIOS_OF = dict.fromkeys(LATENT_CASES, LATENT_SCENARIOS) | dict.fromkeys(
    EXPERT_CASES, EXPERT_SCENARIOS
)


@pytest.fixture(
    scope="module",
    params=SCENARIOS_OF,
    ids=lambda case: "{}-pcp{}-tp{}-{}".format(*case),
)
def case(request: pytest.FixtureRequest) -> tuple[str, int, int, Experts]:
    """Return a checkpoint, P, TP, and what a rank has of the experts."""
    chosen: tuple[str, int, int, Experts] = request.param
    return chosen


@pytest.fixture(scope="module")
def pair(case: tuple[str, int, int, Experts], engines: Engines) -> Pair:
    """Return what one rank and the case give."""
    name, pcp, tp, experts = case
    return engines.pair(name, pcp, tp, experts)


def test_answers(pair: Pair, case: tuple[str, int, int, Experts]) -> None:
    for name in SCENARIOS_OF[case]:
        pair.require_same(name)


def test_prefixes_are_found(pair: Pair) -> None:
    hits = [request["num_cached_tokens"] for request in pair.require_same("prefix_hits")]
    assert hits == [0] + [4 * pair.sizes.block_size] * len(REMAINDERS)


def test_ranks_issue_the_same_collectives_and_hold_the_same_bits(pair: Pair) -> None:
    pair.require_same_collectives()
    for scenario in pair.several.scenarios.values():
        assert any(line.startswith("hidden_states") for line in scenario.collectives[0])


def test_outputs_of_experts_are_added_up_over_pcp_unless_each_rank_has_all(
    pair: Pair, case: tuple[str, int, int, Experts]
) -> None:
    operations = {
        tuple(line.split()[:2])
        for scenario in pair.several.scenarios.values()
        for line in scenario.collectives[0]
    }
    sums = {("reduce_scatter_tensor", "pcp"), ("all_reduce", "pcp")}
    assert operations & sums == (set() if case[3] == "replicated" else sums)

# SPDX-License-Identifier: Apache-2.0
"""Ranks that offload their KV cache answer as one rank does that computes all anew."""

from __future__ import annotations

import pytest

from tests.e2e.compare import TOLERANCE, require_same_answer
from tests.e2e.conftest import SHARED_SIZES, Engines
from tests.e2e.results import ScenarioResults
from tests.e2e.scenarios import num_evicted_blocks

pytestmark = pytest.mark.slow

# Model, P, TP, D, what offloads.
CASES = (
    ("qwen3", 2, 2, 1, "native"),
    ("gemma3", 2, 1, 1, "native"),
    ("deepseek_v2", 2, 1, 1, "native, two blocks at a time"),
    ("deepseek_v2", 2, 1, 2, "native, two blocks at a time"),
    ("qwen3", 2, 1, 2, "simple, late"),
    ("deepseek_v2", 2, 2, 4, "simple"),
    ("deepseek_v32", 2, 1, 1, "native"),
)


@pytest.fixture(
    scope="module", params=CASES, ids=lambda case: "{}-pcp{}-tp{}-dcp{}-{}".format(*case)
)
def runs(
    request: pytest.FixtureRequest, engines: Engines
) -> tuple[ScenarioResults, ScenarioResults]:
    """Return what one rank gives that offloads nothing, and what the case gives."""
    one, several = engines.offloading_results(*request.param)
    return one.scenarios["evicted_prefixes"], several.scenarios["evicted_prefixes"]


def test_answers(runs: tuple[ScenarioResults, ScenarioResults]) -> None:
    one, several = runs
    for index, answers in enumerate(zip(one.requests, several.requests, strict=True)):
        require_same_answer(*answers, where=f"request {index}", tolerance=TOLERANCE)


def test_evicted_prefixes_are_loaded(runs: tuple[ScenarioResults, ScenarioResults]) -> None:
    one, several = runs
    num_tokens = num_evicted_blocks(SHARED_SIZES) * SHARED_SIZES.block_size
    cached = [request["num_cached_tokens"] for request in several.requests if request]
    assert cached == [0, 0, 0, 0, 0, num_tokens, 0, num_tokens]
    # None of them was in the KV cache itself.
    assert several.num_loaded_tokens == 2 * num_tokens
    assert not any(request["num_cached_tokens"] for request in one.requests if request)


def test_prefills_are_split(runs: tuple[ScenarioResults, ScenarioResults]) -> None:
    for rank in runs[1].stats:
        assert 0 < rank["num_partitioned_steps"] < rank["num_steps"]

# SPDX-License-Identifier: Apache-2.0
"""Ranks that offload their KV cache answer as one rank does that computes all anew."""

from __future__ import annotations

import pytest

from tests.e2e.compare import TOLERANCE, require_same_answer
from tests.e2e.conftest import OFFLOADED_SCENARIOS, SHARED_SIZES, Engines
from tests.e2e.results import EngineResults
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
def runs(request: pytest.FixtureRequest, engines: Engines) -> tuple[EngineResults, EngineResults]:
    """Return what one rank gives that offloads nothing, and what the case gives."""
    return engines.offloading_results(*request.param)


@pytest.mark.parametrize("name", OFFLOADED_SCENARIOS)
def test_answers(runs: tuple[EngineResults, EngineResults], name: str) -> None:
    one, several = (run.scenarios[name] for run in runs)
    for index, answers in enumerate(zip(one.requests, several.requests, strict=True)):
        require_same_answer(*answers, where=f"{name}, request {index}", tolerance=TOLERANCE)
    # Blocks of requests that were aborted, or put off, are free again.
    assert several.kv_cache_usage == 0


def test_requests_are_put_off_where_those_of_one_rank_are(
    runs: tuple[EngineResults, EngineResults],
) -> None:
    one, several = (run.scenarios["preemption"].num_preemptions > 0 for run in runs)
    assert several == one


def test_evicted_prefixes_are_loaded(runs: tuple[EngineResults, EngineResults]) -> None:
    one, several = (run.scenarios["evicted_prefixes"] for run in runs)
    num_tokens = num_evicted_blocks(SHARED_SIZES) * SHARED_SIZES.block_size
    cached = [request["num_cached_tokens"] for request in several.requests if request]
    assert cached == [0, 0, 0, 0, 0, num_tokens, 0, num_tokens]
    # None of them was in the KV cache itself.
    assert several.num_loaded_tokens == 2 * num_tokens
    assert not any(request["num_cached_tokens"] for request in one.requests if request)


def test_aborted_requests_were_waiting_for_their_prefixes(
    runs: tuple[EngineResults, EngineResults], request: pytest.FixtureRequest
) -> None:
    several = runs[1].scenarios["aborted_loads"]
    is_aborted = [answer is None for answer in several.requests]
    assert is_aborted == [False] * 5 + [True, True, False, False]
    num_tokens = num_evicted_blocks(SHARED_SIZES) * SHARED_SIZES.block_size
    # Four ranks under the simple connector have no blocks for them in time: they wait for those.
    num_loads = 2 if request.node.callspec.params["runs"][-1] == "simple" else 4
    assert several.num_loaded_tokens == num_loads * num_tokens


def test_prefills_are_split(runs: tuple[EngineResults, EngineResults]) -> None:
    for rank in runs[1].scenarios["evicted_prefixes"].stats:
        assert 0 < rank["num_partitioned_steps"] < rank["num_steps"]

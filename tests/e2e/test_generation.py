# SPDX-License-Identifier: Apache-2.0
"""P = 2, 3, 4 and TP=2 x P=2 give the tokens of P = 1, whatever users do with an engine."""

from __future__ import annotations

import json

import pytest

from tests.e2e.compare import Pair
from tests.e2e.conftest import PREFILL_SCENARIOS, Engines
from tests.e2e.scenarios import REMAINDERS, SHORT

pytestmark = pytest.mark.slow

# Nine heads do not divide by TP = 2.
CASES = (
    ("qwen3", 2, 1),
    ("qwen3", 3, 1),
    ("qwen3", 4, 1),
    ("qwen3", 2, 2),
    ("smollm2", 2, 1),
    ("smollm2", 3, 1),
    ("smollm2", 4, 1),
)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "{}-pcp{}-tp{}".format(*case))
def case(request: pytest.FixtureRequest) -> tuple[str, int, int]:
    """Return a checkpoint, P and TP."""
    chosen: tuple[str, int, int] = request.param
    return chosen


@pytest.fixture(scope="module")
def pair(case: tuple[str, int, int], engines: Engines) -> Pair:
    """Return what P = 1 and the case give."""
    return engines.pair(*case)


def test_only_engines_of_several_ranks_are_changed(pair: Pair, case: tuple[str, int, int]) -> None:
    _, pcp, tp = case
    assert (pair.one.num_ranks, pair.one.num_pcp_ranks) == (1, 0)
    assert (pair.several.num_ranks, pair.several.num_pcp_ranks) == (pcp * tp, pcp * tp)


def test_more_than_60_prompts_are_greedy(pair: Pair) -> None:
    finished = [
        request.is_greedy and result is not None and request.aborted is None
        for name, scenario in pair.several.scenarios.items()
        for request, result in zip(pair.requests(name), scenario.requests, strict=True)
    ]
    assert sum(finished) >= 60


def test_prompts_of_at_least_2p_tokens_are_split_and_shorter_ones_not(pair: Pair) -> None:
    pair.require_same("short_prompts_alone")
    num_split = sum(num_tokens >= 2 * pair.pcp for num_tokens in SHORT)
    assert pair.num_partitioned_steps("short_prompts_alone") == num_split


def test_short_prompts_beside_decodes(pair: Pair) -> None:
    pair.require_same("short_prompts_beside_decodes")


def test_chunked_prefill(pair: Pair) -> None:
    pair.require_same("chunked_prefill")
    assert pair.num_partitioned_steps("chunked_prefill") >= 4


def test_mixed_batches(pair: Pair) -> None:
    pair.require_same("mixed_batches")


def test_prefix_hits_leave_any_remainder(pair: Pair) -> None:
    requests = pair.require_same("prefix_hits")
    prefix = 4 * pair.sizes.block_size
    hits = [request["num_cached_tokens"] for request in requests]
    assert hits == [0] + [prefix] * len(REMAINDERS)


def test_preemption_under_kv_pressure(pair: Pair) -> None:
    pair.require_same("preemption")
    assert pair.several.scenarios["preemption"].num_preemptions > 0


def test_aborts_leave_the_others_alone_and_free_their_blocks(pair: Pair) -> None:
    requests = pair.require_same("aborts")
    reasons = [request and request["outputs"][0]["finish_reason"] for request in requests]
    assert reasons == ["length", None, None, None, "length"]


def test_max_num_seqs_prefills_in_one_step(pair: Pair) -> None:
    pair.require_same("concurrent_prefills")
    assert pair.num_partitioned_steps("concurrent_prefills") == 1
    expected = sum(len(request.prompt) for request in pair.requests("concurrent_prefills"))
    for rank in pair.several.scenarios["concurrent_prefills"].stats:
        assert rank["num_scheduled_tokens"] == expected


def test_several_samples_of_a_prompt(pair: Pair) -> None:
    requests = pair.require_same("parallel_samples")
    assert [len(request["outputs"]) for request in requests] == [3, 2]


def test_seeded_samples(pair: Pair) -> None:
    pair.require_same("seeds")


def test_unseeded_samples(pair: Pair) -> None:
    pair.require_same("unseeded")


def test_penalties_and_logit_processors(pair: Pair) -> None:
    pair.require_same("penalties")


def test_stop_strings(pair: Pair) -> None:
    requests = pair.require_same("stop_strings")
    assert "stop" in [request["outputs"][0]["finish_reason"] for request in requests]


def test_logprobs(pair: Pair) -> None:
    requests = pair.require_same("logprobs")
    # The sampled token is the likeliest, and so one of the five.
    assert {len(position) for position in requests[0]["outputs"][0]["logprobs"]} == {5}


def test_prompt_logprobs(pair: Pair) -> None:
    requests = pair.require_same("prompt_logprobs")
    for request, asked in zip(requests[:2], pair.requests("prompt_logprobs")):
        assert len(request["prompt_logprobs"]) == len(asked.prompt)


def test_structured_output(pair: Pair) -> None:
    requests = pair.require_same("structured_output")
    for request in requests[:2]:
        answer = json.loads(request["outputs"][0]["text"])
        assert answer.keys() == {"pet", "old"}


def test_ranks_issue_the_same_collectives(pair: Pair) -> None:
    pair.require_same_collectives()


@pytest.mark.parametrize("name", PREFILL_SCENARIOS)
def test_five_ranks(engines: Engines, name: str) -> None:
    engines.pair("qwen3", 5).require_same(name)

# SPDX-License-Identifier: Apache-2.0
"""Ranks whose steps are scheduled before the last one is known, as on GPUs, answer as P = 1."""

from __future__ import annotations

import dataclasses

import pytest

from tests.e2e.compare import TOLERANCE, Pair, require_same_answer
from tests.e2e.conftest import Engines

pytestmark = pytest.mark.slow

CASES = (("qwen3", 2, 1), ("deepseek_v2", 3, 1))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "{}-pcp{}-tp{}".format(*case))
def pair(request: pytest.FixtureRequest, engines: Engines) -> Pair:
    """Return what one rank gives, a step after the other, and what several ranks give."""
    name, pcp, tp = request.param
    spec = engines.spec(name, pcp, tp)
    several = engines.results_of(dataclasses.replace(spec, is_async=True))
    return Pair(engines.results(name, 1, 1), several, pcp, spec.sizes)


def test_steps_are_scheduled_ahead(pair: Pair) -> None:
    assert pair.several.is_async
    assert not pair.one.is_async


def test_answers_are_those_of_one_rank(pair: Pair) -> None:
    assert pair.several.scenarios.keys() == pair.one.scenarios.keys()
    for name, scenario in pair.several.scenarios.items():
        assert pair.num_partitioned_steps(name) > 0
        answers = zip(
            pair.requests(name),
            pair.one.scenarios[name].requests,
            scenario.requests,
            strict=True,
        )
        for index, (request, expected, actual) in enumerate(answers):
            # Which token an abort comes after is not for certain.
            if request.aborted is None:
                where = f"{name}, request {index}"
                require_same_answer(expected, actual, where=where, tolerance=TOLERANCE)


def test_preemption_happens_and_nothing_stays_behind(pair: Pair) -> None:
    assert pair.several.scenarios["preemption"].num_preemptions > 0
    assert {scenario.kv_cache_usage for scenario in pair.several.scenarios.values()} == {0}


def test_ranks_issue_the_same_collectives(pair: Pair) -> None:
    pair.require_same_collectives()

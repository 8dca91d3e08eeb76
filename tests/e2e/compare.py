# SPDX-License-Identifier: Apache-2.0
"""Holds what P ranks give against what one gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.e2e.results import EngineResults
from tests.e2e.scenarios import Request, Sizes, scenarios

# fp32; the logprobs of the tokens and the elements of embeddings of length 1.
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Pair:
    """What two engines gave that were asked the same.

    Attributes:
        one: Results of one rank.
        several: Results of several ranks.
        pcp: Ranks among them that a prefill is split over.
        sizes: Of both engines.
    """

    one: EngineResults
    several: EngineResults
    pcp: int
    sizes: Sizes

    def requests(self, name: str) -> list[Request]:
        """Return the requests of a scenario, with other tokens in the prompts."""
        return scenarios(self.sizes, range(256))[name]

    def require_same(self, name: str, tolerance: float = TOLERANCE) -> list[Any]:
        """Assert that a scenario split prefills and gave the same; return what requests gave.

        The number of ranks may decide neither tokens nor scheduling.

        Args:
            name: Of the scenario.
            tolerance: Of log-probabilities, and of the elements of embeddings.
        """
        expected, actual = self.one.scenarios[name], self.several.scenarios[name]
        assert self.num_partitioned_steps(name) > 0
        # A grammar is compiled beside the steps, and takes its time.
        assert actual.num_steps == expected.num_steps or name == "structured_output"
        assert actual.num_preemptions == expected.num_preemptions
        assert actual.kv_cache_usage == expected.kv_cache_usage == 0
        for index, requests in enumerate(zip(expected.requests, actual.requests, strict=True)):
            where = f"{name}, request {index}"
            require_same_request(*requests, where=where, tolerance=tolerance)
        return actual.requests

    def require_same_collectives(self) -> None:
        """Assert that all ranks issued the same, and sampled from the same bits."""
        for name, scenario in self.several.scenarios.items():
            first, *others = scenario.collectives
            assert first, name
            for rank in others:
                assert rank == first, name

    def num_partitioned_steps(self, name: str) -> int:
        """Return the partitioned steps of a scenario, of which all ranks know."""
        counts = {rank["num_partitioned_steps"] for rank in self.several.scenarios[name].stats}
        assert len(counts) == 1
        return counts.pop()


def require_same_request(expected: Any, actual: Any, *, where: str, tolerance: float) -> None:
    """Assert that two requests gave the same tokens, or embeddings, and found as much in caches."""
    if expected is not None and actual is not None:
        assert actual["num_cached_tokens"] == expected["num_cached_tokens"], where
    require_same_answer(expected, actual, where=where, tolerance=tolerance)


def require_same_answer(expected: Any, actual: Any, *, where: str, tolerance: float) -> None:
    """Assert that two requests gave the same, whatever was found in caches."""
    if expected is None or actual is None:
        assert expected == actual, where
        return
    if "embedding" in expected:
        pairs = zip(expected["embedding"], actual["embedding"], strict=True)
        assert max(abs(a - b) for a, b in pairs) < tolerance, where
        return
    prompts = (expected["prompt_logprobs"], actual["prompt_logprobs"])
    require_close(*prompts, where=where, tolerance=tolerance)
    for old, new in zip(expected["outputs"], actual["outputs"], strict=True):
        for what in ("tokens", "text", "finish_reason", "stop_reason"):
            assert new[what] == old[what], f"{where}: {what}"
        require_close(old["logprobs"], new["logprobs"], where=where, tolerance=tolerance)


def require_close(
    expected: list[dict[str, float]] | None,
    actual: list[dict[str, float]] | None,
    *,
    where: str,
    tolerance: float,
) -> None:
    """Assert that logprobs are of the same tokens and nearly equal."""
    if expected is None or actual is None:
        assert expected == actual, where
        return
    for position, (old, new) in enumerate(zip(expected, actual, strict=True)):
        assert new.keys() == old.keys(), f"{where}, position {position}"
        for token in old:
            difference = abs(new[token] - old[token])
            assert difference < tolerance, f"{where}, position {position}: {difference}"

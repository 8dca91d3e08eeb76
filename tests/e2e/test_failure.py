# SPDX-License-Identifier: Apache-2.0
"""A rank that dies ends an offline engine with an error; an engine that lacks a part is noticed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.e2e.compare import Pair
from tests.e2e.conftest import Engines
from tests.e2e.processes import Forks, remaining, run_module
from tests.e2e.results import EngineResults

pytestmark = pytest.mark.slow


def test_killed_rank_ends_the_engine_with_an_error(engines: Engines, tmp_path: Path) -> None:
    spec, outcome, log = (tmp_path / name for name in ("spec", "outcome", "log"))
    engines.spec("qwen3", 2, 1).save(spec)
    run_module("tests.e2e.killed_rank", spec, outcome, log=log)
    result = json.loads(outcome.read_text())
    assert result["error"] is not None
    assert result["seconds"] < 30
    assert "Worker proc VllmWorker-1 died unexpectedly" in log.read_text()
    assert remaining(result["pids"]) == []


class Mutants:
    """Runs an engine of two ranks that lacks a part."""

    def __init__(self, engines: Engines, forks: Forks, folder: Path) -> None:
        self.engines = engines
        self.forks = forks
        self.folder = folder

    def run(self, mutant: str) -> Path:
        """Run a function of ``tests.e2e.mutants`` and return what it wrote."""
        spec, outcome, log = (self.folder / name for name in ("spec", "outcome", "log"))
        whole = self.engines.spec("qwen3", 2, 1)
        chosen = ("short_prompts_alone", "chunked_prefill")
        dataclasses.replace(whole, scenarios=chosen, forks=True).save(spec)
        self.forks.run(f"tests.e2e.mutants:{mutant}", spec, outcome, log=log)
        return outcome

    def pair(self, mutant: str) -> Pair:
        """Return what one rank and the mutant give."""
        one = self.engines.results("qwen3", 1, 1)
        sizes = self.engines.spec("qwen3", 2, 1).sizes
        return Pair(one, EngineResults.load(self.run(mutant)), 2, sizes)


@pytest.fixture
def mutants(engines: Engines, forks: Forks, tmp_path: Path) -> Mutants:
    """Return what runs mutants."""
    return Mutants(engines, forks, tmp_path)


def test_engine_core_that_sees_p_is_refused_at_startup(mutants: Mutants) -> None:
    refusal = mutants.run("without_scheduler_view").read_text()
    assert refusal == "the engine core sees prefill_context_parallel_size=2"


def test_engine_core_that_sees_p_would_be_silently_wrong(mutants: Mutants) -> None:
    pair = mutants.pair("without_scheduler_view_or_assertion")
    pair.require_same("short_prompts_alone")
    with pytest.raises(AssertionError, match="tokens"):
        pair.require_same("chunked_prefill")


def test_keys_and_values_that_are_not_gathered_are_noticed(mutants: Mutants) -> None:
    pair = mutants.pair("without_gather")
    for name in ("short_prompts_alone", "chunked_prefill"):
        with pytest.raises(AssertionError, match="tokens"):
            pair.require_same(name)

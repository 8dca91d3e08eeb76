# SPDX-License-Identifier: Apache-2.0
"""A real model answers questions of the arithmetic set with P = 2 as it does with P = 1."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conftest import Checkpoints
from tests.e2e.processes import ENV
from tests.evals.gsm8k.run_configs import Configuration, Files, Outcome, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("cpu" not in version("vllm"), reason="the ranks are CPU processes"),
]
GSM8K = Path(__file__).with_name("gsm8k")
FILES = Files(str(GSM8K / "arithmetic.jsonl"), str(GSM8K / "arithmetic_examples.jsonl"))


def evaluate(checkpoint: Path, pcp_world_size: int, folder: Path) -> Outcome:
    configuration = Configuration(
        model=str(checkpoint),
        server_args={
            "prefill-context-parallel-size": pcp_world_size,
            "dtype": "float32",
            "enforce-eager": True,
            # Smaller than what prompts share, so that most of each is found in the prefix cache.
            "block-size": 16,
            "max-model-len": 1024,
            "max-num-seqs": 20,
            "kv-cache-memory-bytes": 768 << 20,
            "gpu-memory-utilization": 0.1,
        },
        accuracy_threshold=0.2,
        num_questions=20,
        num_shots=8,
        max_tokens=32,
    )
    return run(configuration, folder, files=FILES, env=ENV)


def test_answers_with_two_ranks_are_those_of_one(checkpoints: Checkpoints, tmp_path: Path) -> None:
    outcomes = [evaluate(checkpoints("smollm2"), size, tmp_path / f"pcp{size}") for size in (1, 2)]
    assert [outcome.shortcomings for outcome in outcomes] == [[], []]
    one, two = (
        {reply.question: reply.completion for reply in outcome.report.replies}
        for outcome in outcomes
    )
    assert two == one

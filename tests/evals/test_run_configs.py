# SPDX-License-Identifier: Apache-2.0
"""The configurations, and what the runner makes of servers that do not do as they should."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.evals.gsm8k import run_configs
from tests.evals.gsm8k.gsm8k_eval import Report, Settings
from tests.evals.gsm8k.run_configs import (
    Configuration,
    Files,
    Outcome,
    require_gpus,
    run,
)
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

GSM8K = Path(run_configs.__file__).parent
FILES = Files(str(GSM8K / "arithmetic.jsonl"), str(GSM8K / "arithmetic_examples.jsonl"))
CONFIGS = sorted((GSM8K / "configs").glob("*.yaml"))
MODELS = ("DeepSeek-V2-Lite-Chat", "Qwen3-30B-A3B")
LAYOUTS = {"TP2-PCP2": (2, 2), "TP1-PCP4": (1, 4)}


def engine_args(configuration: Configuration) -> EngineArgs:
    """Return what vLLM reads from the command that starts a server."""
    _, serve, model, *flags = configuration.command(8000)
    assert serve == "serve"
    # Those of the server alone.
    engine_flags = flags[flags.index("8000") + 1 :]
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args: EngineArgs = EngineArgs.from_cli_args(
        parser.parse_args(["--model", model, *engine_flags])
    )
    return args


def configuration(**changes: Any) -> Configuration:
    return dataclasses.replace(Configuration.read(CONFIGS[0]), num_questions=2, **changes)


def outcome(accuracy: float, num_partitioned_steps: list[int], **changes: Any) -> Outcome:
    report = Report(Settings(), {}, {"accuracy": accuracy}, [])
    ranks = [{"num_partitioned_steps": number} for number in num_partitioned_steps]
    return Outcome(configuration(accuracy_threshold=0.5, **changes), report, ranks)


def test_each_model_has_each_layout() -> None:
    names = itertools.product(MODELS, LAYOUTS, ("-EP", ""))
    expected = {f"{model}-{layout}{ep}" for model, layout, ep in names}
    assert {path.stem for path in CONFIGS} == expected


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_configuration_is_what_its_name_says(path: Path) -> None:
    configuration = Configuration.read(path)
    args = engine_args(configuration)
    name = path.stem.removesuffix("-EP")
    model, layout = next((m, x) for m in MODELS for x in LAYOUTS if name == f"{m}-{x}")
    assert configuration.model.endswith(f"/{model}")
    assert args.model == configuration.model
    ranks = (args.tensor_parallel_size, args.prefill_context_parallel_size)
    assert ranks == LAYOUTS[layout]
    assert args.enable_expert_parallel == path.stem.endswith("-EP")
    assert configuration.num_gpus == 4
    assert 0.5 < configuration.accuracy_threshold < 1


def test_good_outcome_has_no_shortcoming() -> None:
    assert outcome(0.5, [3, 3, 3, 3]).shortcomings == []
    alone = {"prefill-context-parallel-size": 1}
    assert outcome(0.5, [], server_args=alone).shortcomings == []


@pytest.mark.parametrize(
    ("accuracy", "num_partitioned_steps", "shortcoming"),
    [
        (0.49, [3, 3, 3, 3], "the accuracy is 0.490, below 0.5"),
        (0.9, [0, 0, 0, 0], "no step was partitioned, so each rank did all of the work"),
        (0.9, [3, 3], "2 ranks answer, not 4"),
    ],
)
def test_shortcoming_is_named(
    accuracy: float, num_partitioned_steps: list[int], shortcoming: str
) -> None:
    assert outcome(accuracy, num_partitioned_steps).shortcomings == [shortcoming]


def test_server_that_does_not_start_names_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(self: Configuration, port: int) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit(3)"]

    monkeypatch.setattr(Configuration, "command", command)
    with pytest.raises(RuntimeError, match=r"ended with status 3, see .*server\.log"):
        run(configuration(), tmp_path, files=FILES)


def test_no_server_is_started_without_questions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        run(configuration(), tmp_path, files=Files("nowhere.jsonl"))
    assert list(tmp_path.iterdir()) == []


def test_too_few_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ValueError, match="4 GPUs are needed, got 3"):
        require_gpus(configuration())


def test_model_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def hf_hub_download(model: str, file: str) -> None:
        raise FileNotFoundError("no network")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    with pytest.raises(ValueError, match="The model nobody/nothing cannot be had: no network"):
        require_gpus(configuration(model="nobody/nothing"))


def test_model_in_a_folder_is_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    require_gpus(configuration(model=str(tmp_path)))


def test_command_line_ends_with_2_where_gpus_lack(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["run_configs", str(CONFIGS[0])])
    assert run_configs.main() == 2
    assert "error: 4 GPUs are needed, got 0." in capsys.readouterr().out

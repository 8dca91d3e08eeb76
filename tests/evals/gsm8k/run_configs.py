# SPDX-License-Identifier: Apache-2.0
"""Starts the server of each configuration in turn and evaluates it.

    python -m tests.evals.gsm8k.run_configs tests/evals/gsm8k/configs/*.yaml --folder evals

Exit status: 0 if all are as accurate as they should be and split prefills over their ranks, 1 if
not, 2 if one could not be run: too few GPUs, neither data set nor files, no model, no server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import openai
import yaml
from tqdm import tqdm

from tests.evals.gsm8k.gsm8k_eval import Report, Settings, evaluate, lines, load

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples" / "demo"))

from vllm_serve import ChildError, Server, child, rank_counters

# A model may have to be fetched first.
START_TIMEOUT_S = 3600
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Configuration:
    """A model, how it is served, and what is expected of it.

    Attributes:
        model: What ``vllm serve`` takes: a name on the Hugging Face Hub, or a folder.
        server_args: Flags of ``vllm serve`` without dashes in front; true for a flag alone.
        accuracy_threshold: The lowest accuracy that passes.
    """

    model: str
    server_args: dict[str, Any]
    accuracy_threshold: float
    num_questions: int
    num_shots: int
    max_tokens: int

    @classmethod
    def read(cls, path: Path) -> Configuration:
        """Return the configuration of a file."""
        text = path.read_text(encoding="utf-8")
        fields: dict[str, Any] = yaml.safe_load(text)  # type: ignore[no-untyped-call]  # no stubs
        return cls(**fields)

    @property
    def pcp_world_size(self) -> int:
        """P."""
        return int(self.server_args.get("prefill-context-parallel-size", 1))

    @property
    def num_gpus(self) -> int:
        """Ranks, each of which needs a GPU."""
        return self.pcp_world_size * int(self.server_args.get("tensor-parallel-size", 1))

    def command(self, port: int) -> list[str]:
        """Return what starts the server."""
        vllm = Path(sys.executable).with_name("vllm")
        command = [str(vllm), "serve", self.model, "--host", HOST, "--port", str(port)]
        for flag, value in self.server_args.items():
            command += [f"--{flag}"] if value is True else [f"--{flag}", str(value)]
        return command

    def settings(self, port: int, files: Files) -> Settings:
        """Return what is asked."""
        return Settings(
            host=HOST,
            port=port,
            questions=files.questions,
            few_shot=files.few_shot,
            num_questions=self.num_questions,
            num_shots=self.num_shots,
            max_tokens=self.max_tokens,
        )


@dataclass(frozen=True, slots=True)
class Files:
    """Where questions and examples come from, if not from the data set."""

    questions: str | None = None
    few_shot: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """An evaluation, and the counters of the server's ranks where P > 1."""

    configuration: Configuration
    report: Report
    ranks: Sequence[dict[str, int]]

    @property
    def shortcomings(self) -> list[str]:
        """What is not as it should be."""
        found = []
        accuracy, threshold = self.report.metrics["accuracy"], self.configuration.accuracy_threshold
        if accuracy < threshold:
            found.append(f"the accuracy is {accuracy:.3f}, below {threshold}")
        if len(self.ranks) != self.configuration.num_gpus and self.configuration.pcp_world_size > 1:
            found.append(f"{len(self.ranks)} ranks answer, not {self.configuration.num_gpus}")
        if any(rank["num_partitioned_steps"] == 0 for rank in self.ranks):
            found.append("no step was partitioned, so each rank did all of the work")
        return found


def require_gpus(configuration: Configuration) -> None:
    """Raise ValueError if there are fewer GPUs than ranks, or the model is not to be had."""
    import torch

    if (num_gpus := torch.cuda.device_count()) < configuration.num_gpus:
        raise ValueError(f"{configuration.num_gpus} GPUs are needed, got {num_gpus}.")
    if problem := _problem_of_model(configuration.model):
        raise ValueError(f"The model {configuration.model} cannot be had: {problem}")


# Offline without HF_HUB_OFFLINE it takes half a minute to find out.
@cache
def _problem_of_model(model: str) -> str | None:
    from huggingface_hub import hf_hub_download

    if not Path(model).is_dir():
        try:
            hf_hub_download(model, "config.json")
        except (OSError, ValueError) as error:
            return str(error)
    return None


def run(
    configuration: Configuration,
    folder: Path,
    *,
    files: Files = Files(),
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """Serve a configuration and evaluate it.

    Args:
        configuration: What to serve and ask.
        folder: Gets ``report.json`` and the server's log.
        files: Questions and examples.
        env: Of the server, beside that of this process.

    Raises:
        ValueError: There are no questions.
        ChildError: The server ended before it was ready, or was not ready in time.
        openai.APIError: A request failed.
    """
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    settings = configuration.settings(port, files)
    # Before the server is started for nothing.
    load(settings)
    folder.mkdir(parents=True, exist_ok=True)
    with serve(configuration, port, folder / "server.log", env or {}) as server:
        report = asyncio.run(evaluate(settings))
        ranks = asyncio.run(rank_counters(server)) if configuration.pcp_world_size > 1 else []
    report.save(
        folder / "report.json",
        configuration=asdict(configuration),
        package=version("vllm-prefill-context-parallel"),
        ranks=ranks,
    )
    return Outcome(configuration, report, ranks)


@contextlib.contextmanager
def serve(
    configuration: Configuration, port: int, log: Path, env: Mapping[str, str]
) -> Iterator[Server]:
    """Run a configuration's server while the block lasts.

    Raises:
        ChildError: The server ended before it was ready, or was not ready in time.
    """
    # Serves /collective_rpc, where the ranks' counters are read.
    server_env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", **env}
    with child(configuration.command(port), log, server_env) as process:
        server = Server(f"http://{HOST}:{port}", log, process)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_ready(server):
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(0.5)
                raise ChildError(f"vllm serve ended with status {status}, see {log}")
            if time.monotonic() > deadline:
                raise ChildError(f"vllm serve was not ready after {START_TIMEOUT_S} s, see {log}")
        yield server


def _is_ready(server: Server) -> bool:
    # A proxy that the environment names has no business with this machine's own address.
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{server.url}/health", trust_env=False).is_success
    return False


def main() -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configurations", type=Path, nargs="+", metavar="CONFIG.yaml")
    parser.add_argument("--questions", metavar="FILE.jsonl", help="instead of the data set")
    parser.add_argument("--few-shot", metavar="FILE.jsonl", help="examples to choose from")
    parser.add_argument("--folder", type=Path, default=Path("evals"), help="for logs and JSON")
    args = parser.parse_args()
    files = Files(args.questions, args.few_shot)
    status = 0
    for path in args.configurations:
        tqdm.write(f"\n{path.stem}")
        configuration = Configuration.read(path)
        try:
            require_gpus(configuration)
            outcome = run(configuration, args.folder / path.stem, files=files)
        except (ValueError, ChildError, openai.APIError) as error:
            tqdm.write(f"error: {error}")
            return 2
        tqdm.write(lines(outcome.report.metrics))
        for shortcoming in outcome.shortcomings:
            tqdm.write(f"failed: {shortcoming}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())

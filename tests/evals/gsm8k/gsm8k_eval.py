# SPDX-License-Identifier: Apache-2.0
"""Accuracy of a running OpenAI-compatible server on GSM8K, or on other questions of its form.

    python tests/evals/gsm8k/gsm8k_eval.py --port 8000 [--num-questions 200] [--json result.json]

Each question goes to the completions endpoint behind a few answered examples; the last number of
what comes back, up to the line of its first ``####``, is the answer. Without ``--questions`` the
data set is fetched with the package ``datasets``. A file has a JSON object a line:
``{"question": "...", "answer": "...\\n#### 42"}``.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import platform
import random
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any

import openai
from tqdm import tqdm

DATASET = ("openai/gsm8k", "main")
MARK = "####"
# What a model that goes on after its answer writes next, in most cases.
STOP = ("Question:",)
TIMEOUT_S = 3600
# A minus behind a word, a digit or a bracket subtracts; commas separate groups of three.
NUMBER = re.compile(
    r"((?<![\w)])[-\u2212])?\$?((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What is asked, and of whom; the fields are the flags of the command line."""

    host: str = "127.0.0.1"
    port: int = 8000
    model: str | None = None
    questions: str | None = None
    few_shot: str | None = None
    num_questions: int | None = None
    num_shots: int = 5
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    max_concurrency: int = 64

    def __post_init__(self) -> None:
        if self.max_concurrency < 1:
            raise ValueError(f"--max-concurrency must be at least 1, got {self.max_concurrency}.")

    @property
    def url(self) -> str:
        """Where the server is."""
        scheme = "" if "://" in self.host else "http://"
        return f"{scheme}{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its solution, of which what follows ``####`` is the answer."""

    question: str
    answer: str

    @property
    def number(self) -> Decimal | None:
        """The answer."""
        return last_number(self.answer.rpartition(MARK)[2])


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server made of a question.

    Attributes:
        index: Of the question among all that there were to choose from.
        expected: The right answer.
        answer: The server's; None if it gave no number.
        completion: What the answer was taken from.
        finish_reason: Why it ends there.
        latency_s: From the request to its whole completion.
    """

    index: int
    question: str
    expected: Decimal
    answer: Decimal | None
    completion: str
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    latency_s: float

    @property
    def is_correct(self) -> bool:
        """Whether the answer is the right one."""
        return self.answer == self.expected


@dataclass(frozen=True, slots=True)
class Report:
    """An evaluation: what was asked, how it went, and of which versions."""

    settings: Settings
    versions: dict[str, str | None]
    metrics: dict[str, float]
    replies: list[Reply]

    def save(self, path: Path, **extra: Any) -> None:
        """Write JSON; numbers that are answers become strings, so that they stay as they are."""
        replies = [{**asdict(reply), "is_correct": reply.is_correct} for reply in self.replies]
        text = json.dumps({**asdict(self), **extra, "replies": replies}, indent=2, default=str)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="utf-8")


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text, None if there is none.

    ``$``, separators of thousands and a full stop behind the number are no part of it.
    """
    numbers = NUMBER.findall(text)
    if not numbers:
        return None
    sign, digits = numbers[-1]
    return Decimal(f"{'-' if sign else ''}{digits.replace(',', '')}")


def given_answer(completion: str) -> Decimal | None:
    """Return the answer that a completion gives, None if it has no number.

    Chat models add remarks after ``#### 42``, with numbers in them, until they run out of tokens.
    """
    steps, mark, rest = completion.partition(MARK)
    line, _, _ = rest.partition("\n")
    return last_number(steps + mark + line)


def build_prompt(examples: Iterable[Question], question: str) -> str:
    """Return a question behind answered examples, up to where its answer begins."""
    shots = "".join(f"Question: {shot.question}\nAnswer: {shot.answer}\n\n" for shot in examples)
    return f"{shots}Question: {question}\nAnswer:"


def read_questions(path: str | Path) -> list[Question]:
    """Return the questions of a JSONL file.

    Raises:
        ValueError: There is no such file, no line in it, or one without question or answer.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    questions = []
    for row, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            question = Question(str(fields["question"]), str(fields["answer"]))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f'{path}:{row} is not {{"question": "...", "answer": "..."}} ({error!r})'
            ) from error
        if MARK not in question.answer or question.number is None:
            raise ValueError(f"{path}:{row}: the answer does not end in '{MARK} NUMBER'")
        questions.append(question)
    if not questions:
        raise ValueError(f"{path} is empty")
    return questions


def fetch_questions(split: str) -> list[Question]:
    """Return a split of the data set, "train" or "test".

    Raises:
        ValueError: It cannot be had.
    """
    try:
        datasets = importlib.import_module("datasets")
        rows = datasets.load_dataset(*DATASET, split=split)
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(
            f"The data set {DATASET[0]} cannot be had ({type(error).__name__}: {error}). "
            "Install the package datasets and go online, or pass --questions FILE.jsonl and "
            "--few-shot FILE.jsonl."
        ) from error
    return [Question(row["question"], row["answer"]) for row in rows]


def draw(what: str, questions: Sequence[Question], number: int, seed: int) -> list[int]:
    """Return the places of so many questions, at least one, in ascending order.

    Raises:
        ValueError: There are not so many.
    """
    if not 1 <= number <= len(questions):
        raise ValueError(f"{what} must be from 1 to {len(questions)} here, got {number}.")
    return sorted(random.Random(seed).sample(range(len(questions)), number))


def load(settings: Settings) -> tuple[dict[int, Question], list[Question]]:
    """Return the questions to ask, by their place among all, and the examples in front of each.

    Raises:
        ValueError: There are not so many, a file is not as it should be, or there is neither file
            nor data set.
    """
    if settings.questions is None:
        questions = fetch_questions("test")
    else:
        questions = read_questions(settings.questions)
    number = len(questions) if settings.num_questions is None else settings.num_questions
    chosen = {i: questions[i] for i in draw("--num-questions", questions, number, settings.seed)}
    if settings.num_shots == 0:
        return chosen, []
    if settings.few_shot is not None:
        examples = read_questions(settings.few_shot)
    elif settings.questions is None:
        examples = fetch_questions("train")
    else:
        raise ValueError("With --questions pass --few-shot FILE.jsonl too, or --num-shots 0.")
    shots = draw("--num-shots", examples, settings.num_shots, settings.seed)
    return chosen, [examples[i] for i in shots]


async def evaluate(settings: Settings) -> Report:
    """Ask all questions, at most ``max_concurrency`` at a time.

    Raises:
        ValueError: As ``load``.
        openai.APIError: A request failed; the ones that are left are given up.
    """
    questions, examples = load(settings)
    # A proxy that the environment names has no business between a server and its evaluation.
    async with (
        openai.AsyncOpenAI(
            base_url=f"{settings.url}/v1",
            # The variable that vllm serve takes its key from.
            api_key=os.environ.get("VLLM_API_KEY", "none"),
            max_retries=0,
            timeout=TIMEOUT_S,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        ) as client,
    ):
        model = settings.model or (await client.models.list()).data[0].id
        versions = {
            "python": platform.python_version(),
            "openai": version("openai"),
            "model": model,
            "server": await _server_version(client, settings.url),
        }
        slots = asyncio.Semaphore(settings.max_concurrency)
        start = time.perf_counter()
        with tqdm(total=len(questions), unit="question") as progress:

            async def answer(index: int, question: Question) -> Reply:
                async with slots:
                    reply = await _ask(client, model, settings, examples, index, question)
                progress.update()
                return reply

            replies = await asyncio.gather(*(answer(*item) for item in questions.items()))
    return Report(settings, versions, summarise(replies, time.perf_counter() - start), replies)


async def _server_version(client: openai.AsyncOpenAI, url: str) -> str | None:
    # Not a part of the interface: others than vLLM need not serve it.
    try:
        reply = await client.get(f"{url}/version", cast_to=dict[str, Any])
    except openai.NotFoundError:
        return None
    return str(reply["version"])


async def _ask(
    client: openai.AsyncOpenAI,
    model: str,
    settings: Settings,
    examples: Sequence[Question],
    index: int,
    question: Question,
) -> Reply:
    start = time.perf_counter()
    completion = await client.completions.create(
        model=model,
        prompt=build_prompt(examples, question.question),
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        seed=settings.seed,
        stop=list(STOP),
    )
    latency_s = time.perf_counter() - start
    (choice,) = completion.choices
    expected, usage = question.number, completion.usage
    assert expected is not None
    assert usage is not None, "a completion came without usage"
    return Reply(
        index,
        question.question,
        expected,
        given_answer(choice.text),
        choice.text,
        choice.finish_reason,
        usage.prompt_tokens,
        usage.completion_tokens,
        latency_s,
    )


def summarise(replies: Sequence[Reply], seconds: float) -> dict[str, float]:
    """Return the metrics of an evaluation that took so many seconds."""
    latencies = [reply.latency_s for reply in replies]
    num_output_tokens = sum(reply.num_output_tokens for reply in replies)
    return {
        "num_questions": len(replies),
        "accuracy": fmean(reply.is_correct for reply in replies),
        "invalid_rate": fmean(reply.answer is None for reply in replies),
        "seconds": seconds,
        "num_output_tokens": num_output_tokens,
        "output_tokens_per_s": num_output_tokens / seconds,
        "latency_mean_s": fmean(latencies),
        "latency_median_s": median(latencies),
        "latency_max_s": max(latencies),
    }


def lines(metrics: dict[str, float]) -> str:
    """Return metrics for people, one a line."""
    return "\n".join(f"{name:<20} {round(value, 3):>12,}" for name, value in metrics.items())


def main() -> None:
    """Run the command line."""
    defaults = Settings()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--questions", metavar="FILE.jsonl", help="instead of the data set")
    add("--few-shot", metavar="FILE.jsonl", help="examples to choose from (the training split)")
    add("--num-questions", type=int, help="drawn by --seed (all)")
    add("--num-shots", type=int, default=defaults.num_shots, help="drawn by --seed (%(default)s)")
    add("--max-tokens", type=int, default=defaults.max_tokens, help="of an answer (%(default)s)")
    add("--host", default=defaults.host, help="(%(default)s)")
    add("--port", type=int, default=defaults.port, help="(%(default)s)")
    add("--model", help="(the first that the server names)")
    add("--temperature", type=float, default=defaults.temperature, help="(%(default)s)")
    add("--seed", type=int, default=defaults.seed, help="(%(default)s)")
    add("--max-concurrency", type=int, default=defaults.max_concurrency, help="(%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write settings, metrics and every reply")
    arguments = vars(parser.parse_args())
    target = arguments.pop("json")
    try:
        report = asyncio.run(evaluate(Settings(**arguments)))
    except ValueError as error:
        sys.exit(f"error: {error}")
    except openai.APIError as error:
        sys.exit(f"error: {arguments['host']}:{arguments['port']}: {error}")
    tqdm.write(lines(report.metrics))
    if target is not None:
        report.save(target)


if __name__ == "__main__":
    main()

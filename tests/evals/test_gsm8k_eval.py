# SPDX-License-Identifier: Apache-2.0
"""The evaluation against a server in this process, whose answers are known."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from aiohttp import web

from tests.evals.gsm8k import gsm8k_eval
from tests.evals.gsm8k.gsm8k_eval import (
    Question,
    Report,
    Settings,
    build_prompt,
    evaluate,
    given_answer,
    last_number,
    load,
    read_questions,
)

TIMEOUT_S = 30
GSM8K = Path(gsm8k_eval.__file__).parent
EXAMPLES = [Question(f"What is {i} plus 1?", f"{i} + 1 = {i + 1}\n#### {i + 1}") for i in range(4)]
# The fake server knows the sum of two numbers, and what to say instead of a wrong answer.
QUESTIONS = [Question(f"What is {i} plus 100?", f"#### {i + 100}") for i in range(12)]


class FakeServer:
    """Adds the two numbers of the last question of a prompt; odd ones it gets wrong or evades."""

    def __init__(self, num_together: int = 1) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.num_running = self.most_running = 0
        self.has_failed = False
        self.version: str | None = "0.1"
        self.port = 0
        self._together = asyncio.Barrier(num_together)

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        # Lets nothing through until so many requests are here.
        await asyncio.wait_for(self._together.wait(), TIMEOUT_S)
        self.num_running -= 1
        if self.has_failed:
            return web.json_response({"error": {"message": "out of order"}}, status=500)
        number = int(re.findall(r"What is (\d+) plus", body["prompt"])[-1])
        text = f" {number} + 100\n#### {number + 100}\nTo 1 more!"
        if number % 4 == 1:
            text = " #### 7"
        elif number % 4 == 3:
            text = " I do not know."
        return web.json_response(
            {
                "id": "",
                "object": "text_completion",
                "created": 0,
                "model": body["model"],
                "choices": [{"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}],
                "usage": {"prompt_tokens": 50, "completion_tokens": 10, "total_tokens": 60},
            }
        )

    async def models(self, request: web.Request) -> web.Response:
        model = {"id": "adder", "object": "model", "created": 0, "owned_by": "tests"}
        return web.json_response({"object": "list", "data": [model]})

    async def tell_version(self, request: web.Request) -> web.Response:
        if self.version is None:
            raise web.HTTPNotFound
        return web.json_response({"version": self.version})

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/version", self.tell_version)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = runner.addresses[0][1]
            yield
        finally:
            await runner.cleanup()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    return {
        "questions": write(tmp_path / "questions.jsonl", QUESTIONS),
        "few_shot": write(tmp_path / "examples.jsonl", EXAMPLES),
    }


def write(path: Path, questions: Iterable[Question]) -> str:
    lines = [json.dumps({"question": q.question, "answer": q.answer}) for q in questions]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def ask(server: FakeServer, **settings: Any) -> Report:
    async def ask_all() -> Report:
        async with server.run():
            return await evaluate(Settings(port=server.port, **settings))

    return asyncio.run(ask_all())


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 42", "42"),
        ("3 + 4 = 7 apples.", "7"),
        ("It costs $1,234.50.", "1234.5"),
        ("She owes -$5", "-5"),
        ("It is $-5", "-5"),
        ("It is \u22125 degrees", "-5"),
        ("10-3", "3"),
        ("(2)-3", "3"),
        ("- 3", "3"),
        ("5,6", "6"),
        ("1,2345", "2345"),
        ("12,345,678 people", "12345678"),
        ("a half, .5", "0.5"),
        ("**18**", "18"),
        ("50%", "50"),
        ("3/4", "4"),
        ("007", "7"),
        ("twelve", None),
        ("", None),
    ],
)
def test_last_number_is_found(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("completion", "number"),
    [
        (" 1 + 2 = 3\n#### 3", 3),
        (" 1 + 2 = 3\n#### 3\n\nIs 4 right? No, 5.", 3),
        (" #### The answer is 3.", 3),
        (" 1 + 2 = 3\n####\n4", 3),
        (" It is 2, no, 3", 3),
        (" I give up.\n####", None),
    ],
)
def test_what_follows_the_answer_does_not_count(completion: str, number: int | None) -> None:
    assert given_answer(completion) == number


def test_answers_compare_as_numbers() -> None:
    assert given_answer("#### 1,500.00") == Question("", "#### 1500").number


def test_prompt_is_examples_and_then_the_question() -> None:
    prompt = build_prompt([Question("One?", "1\n#### 1"), Question("Two?", "2\n#### 2")], "Three?")
    assert prompt == (
        "Question: One?\nAnswer: 1\n#### 1\n\n"
        "Question: Two?\nAnswer: 2\n#### 2\n\n"
        "Question: Three?\nAnswer:"
    )


def test_metrics_are_those_of_the_answers(files: dict[str, str]) -> None:
    report = ask(FakeServer(), **files, num_shots=2)
    metrics = report.metrics
    assert metrics["num_questions"] == 12
    assert metrics["accuracy"] == 0.5
    assert metrics["invalid_rate"] == 0.25
    assert metrics["num_output_tokens"] == 120
    assert metrics["output_tokens_per_s"] == pytest.approx(120 / metrics["seconds"])
    latencies = [reply.latency_s for reply in report.replies]
    assert 0 < min(latencies) <= metrics["latency_median_s"] <= metrics["latency_max_s"]
    assert metrics["latency_max_s"] == max(latencies) < metrics["seconds"]
    assert [reply.index for reply in report.replies] == list(range(12))
    assert [reply.expected for reply in report.replies] == list(range(100, 112))


def test_request_carries_the_settings(files: dict[str, str]) -> None:
    server = FakeServer()
    ask(
        server,
        **files,
        num_questions=1,
        num_shots=1,
        max_tokens=33,
        temperature=0.5,
        seed=7,
        model="other",
    )
    (body,) = server.bodies
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("other", 33, 0.5)
    assert (body["seed"], body["stop"]) == (7, ["Question:"])


def test_same_seed_asks_the_same(files: dict[str, str]) -> None:
    def prompts(seed: int) -> list[str]:
        server = FakeServer()
        ask(server, **files, num_questions=6, num_shots=2, seed=seed, max_concurrency=1)
        return [body["prompt"] for body in server.bodies]

    assert prompts(1) == prompts(1)
    assert prompts(1) != prompts(2)


def test_so_many_requests_run_together(files: dict[str, str]) -> None:
    server = FakeServer(num_together=4)
    ask(server, **files, num_shots=1, max_concurrency=4)
    assert server.most_running == 4


def test_failed_request_ends_the_evaluation(files: dict[str, str]) -> None:
    server = FakeServer()
    server.has_failed = True
    with pytest.raises(openai.InternalServerError, match="out of order"):
        ask(server, **files, num_shots=1)


def test_server_need_not_tell_its_version(files: dict[str, str]) -> None:
    server = FakeServer()
    versions = []
    for server.version in ("0.1", None):
        versions.append(ask(server, **files, num_questions=1, num_shots=1).versions)
    assert [version["server"] for version in versions] == ["0.1", None]
    assert versions[0]["model"] == "adder"


def test_command_line_writes_json(
    files: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server, target = FakeServer(), tmp_path / "out" / "result.json"

    async def evaluate_here(settings: Settings) -> Report:
        async with server.run():
            return await evaluate(replace(settings, port=server.port))

    monkeypatch.setattr(gsm8k_eval, "evaluate", evaluate_here)
    options = f"--questions {files['questions']} --few-shot {files['few_shot']} --num-shots 3"
    monkeypatch.setattr(sys, "argv", ["eval", *options.split(), "--json", str(target)])
    gsm8k_eval.main()
    result = json.loads(target.read_text())
    assert set(result) == {"settings", "versions", "metrics", "replies"}
    assert result["settings"]["num_shots"] == 3
    assert [reply["is_correct"] for reply in result["replies"]] == [True, False] * 6
    wrong, evaded = result["replies"][1], result["replies"][3]
    assert (wrong["expected"], wrong["answer"], evaded["answer"]) == ("101", "7", None)
    printed = capsys.readouterr().out
    assert re.search(r"^accuracy +0\.5$", printed, re.MULTILINE)
    assert re.search(r"^invalid_rate +0\.25$", printed, re.MULTILINE)


def test_command_line_names_the_server_that_is_not_there(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = f"--questions {files['questions']} --num-shots 0 --port 1"
    monkeypatch.setattr(sys, "argv", ["eval", *options.split()])
    with pytest.raises(SystemExit, match=r"^error: 127\.0\.0\.1:1: Connection error\.$"):
        gsm8k_eval.main()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_questions": 13}, "--num-questions must be from 1 to 12 here, got 13"),
        ({"num_questions": 0}, "--num-questions must be from 1 to 12 here, got 0"),
        ({"num_shots": 5}, "--num-shots must be from 1 to 4 here, got 5"),
        ({"few_shot": None}, "pass --few-shot FILE.jsonl too, or --num-shots 0"),
        ({"questions": "nowhere.jsonl"}, "nowhere.jsonl cannot be read"),
    ],
)
def test_questions_that_are_not_there_are_refused(
    files: dict[str, str], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(Settings(**{**files, **settings}))


def test_no_concurrency_is_refused() -> None:
    with pytest.raises(ValueError, match="--max-concurrency must be at least 1, got 0"):
        Settings(max_concurrency=0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "is empty"),
        ("{", ":1 is not"),
        ('{"question": "Who?"}', ":1 is not .*KeyError"),
        ("[]", ":1 is not .*TypeError"),
        ('{"question": "Who?", "answer": "42"}', ":1: the answer does not end in '#### NUMBER'"),
        ('{"question": "Who?", "answer": "#### me"}', ":1: the answer does not end"),
    ],
)
def test_file_that_holds_no_questions_is_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(ValueError, match=message):
        read_questions(path)


def test_data_set_is_used_without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {"test": QUESTIONS, "train": EXAMPLES}

    def load_dataset(name: str, part: str, split: str) -> list[dict[str, str]]:
        assert (name, part) == ("openai/gsm8k", "main")
        return [{"question": q.question, "answer": q.answer} for q in splits[split]]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    questions, examples = load(Settings(num_shots=4))
    assert list(questions.values()) == QUESTIONS
    assert examples == EXAMPLES


@pytest.mark.parametrize("error", [ConnectionError("no network"), FileNotFoundError(), None])
def test_data_set_out_of_reach_is_one_error(
    monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    def load_dataset(name: str, part: str, split: str) -> None:
        assert error is not None
        raise error

    package = SimpleNamespace(load_dataset=load_dataset)
    # None stands for a package that is not installed.
    monkeypatch.setitem(sys.modules, "datasets", package if error else None)
    with pytest.raises(ValueError, match=r"openai/gsm8k cannot be had .*pass --questions FILE"):
        load(Settings())


def test_arithmetic_is_right() -> None:
    operations = {"+": "__add__", "-": "__sub__", "*": "__mul__", "/": "__truediv__"}
    questions = read_questions(GSM8K / "arithmetic.jsonl")
    examples = read_questions(GSM8K / "arithmetic_examples.jsonl")
    assert (len(questions), len(examples)) == (40, 8)
    assert len({q.question for q in (*questions, *examples)}) == 48
    for question in (*questions, *examples):
        step = re.search(r"(\S+) ([-+*/]) (\S+) = ", question.answer)
        assert step is not None, question
        left, right = (Decimal(step[i].replace(",", "")) for i in (1, 3))
        result = getattr(left, operations[step[2]])(right)
        assert result == question.number == last_number(question.answer.partition("####")[0])

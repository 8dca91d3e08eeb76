# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` with P = 2, as its clients see it; the last test kills it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.conftest import Checkpoints
from tests.e2e.conftest import RANDOM_SIZES, Engines
from tests.e2e.processes import child, remaining, session
from tests.e2e.scenarios import random_tokens, scenarios

pytestmark = pytest.mark.slow

VLLM = Path(sys.executable).with_name("vllm")
START_TIMEOUT_S = 300
TIMEOUT_S = 60
GREEDY = {"temperature": 0.0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}


@dataclass(frozen=True, slots=True)
class Server:
    """A server, and a client of it."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]
    http: httpx.Client
    completions: Any

    def metric(self, name: str) -> float:
        """Return the present value of a metric that has no labels but the engine's."""
        metrics = self.http.get("/metrics").raise_for_status().text
        (value,) = re.findall(rf"^{name}{{.*}} (.*)$", metrics, re.MULTILINE)
        return float(value)

    def wait_for_metric(self, name: str, expected: float) -> None:
        """Ask for a metric until it has a value."""
        deadline = time.monotonic() + TIMEOUT_S
        while (value := self.metric(name)) != expected:
            assert time.monotonic() < deadline, f"{name} is {value}"


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server that is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command: list[str | Path] = [
        *(VLLM, "serve", checkpoints("qwen3")),
        *("--served-model-name", "qwen3", "--host", "127.0.0.1", "--port", str(port)),
        *("--prefill-context-parallel-size", "2"),
        *("--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", str(RANDOM_SIZES.max_model_len)),
        *("--max-num-batched-tokens", str(RANDOM_SIZES.max_num_batched_tokens)),
        *("--kv-cache-memory-bytes", str(64 << 20), "--gpu-memory-utilization", "0.1"),
    ]
    log = tmp_path_factory.mktemp("server") / "log"
    url = f"http://127.0.0.1:{port}"
    # Serves /collective_rpc, where the ranks' counters are read.
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    # A proxy that the environment names has no business with this machine's own address.
    direct = openai.DefaultHttpxClient(trust_env=False)
    with (
        child(*command, log=log, env=env) as process,
        httpx.Client(base_url=url, trust_env=False, timeout=TIMEOUT_S) as http,
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", http_client=direct) as client,
    ):
        wait_until_ready(process, http, log)
        yield Server(url, log, process, http, client.completions)


def wait_until_ready(process: subprocess.Popen[bytes], http: httpx.Client, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            if http.get("/health").is_success:
                return
        except httpx.TransportError:
            pass
        try:
            process.wait(0.5)
        except subprocess.TimeoutExpired:
            continue
        break
    pytest.fail(f"the server is not ready:\n{log.read_text()[-6000:]}")


def num_partitioned_steps(server: Server) -> int:
    reply = server.http.post("/collective_rpc", json={"method": "pcp_stats"})
    ranks = reply.raise_for_status().json()["results"]
    assert len(ranks) == 2
    return int(ranks[0]["num_partitioned_steps"])


def test_tokens_are_those_of_one_rank_offline(server: Server, engines: Engines) -> None:
    before = num_partitioned_steps(server)
    requests = scenarios(RANDOM_SIZES, random_tokens())["chunked_prefill"]
    expected = engines.results("qwen3", 1, 1).scenarios["chunked_prefill"].requests
    for request, result in zip(requests, expected, strict=True):
        assert result is not None
        answer = server.completions.create(
            model="qwen3", prompt=request.prompt, max_tokens=4, **GREEDY
        )
        assert answer.choices[0].token_ids == result["outputs"][0]["tokens"]
    assert num_partitioned_steps(server) > before


def test_streaming_gives_the_same_text(server: Server) -> None:
    before = num_partitioned_steps(server)
    request = {"model": "qwen3", "prompt": "Streams. " * 40, "max_tokens": 12, **GREEDY}
    whole = server.completions.create(**request).choices[0]
    chunks = [chunk.choices[0] for chunk in server.completions.create(**request, stream=True)]
    assert len(chunks) > 4
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert num_partitioned_steps(server) > before


def test_client_that_disconnects_frees_its_request(server: Server) -> None:
    num_tokens = server.metric("vllm:generation_tokens_total")
    stream = server.completions.create(
        model="qwen3", prompt="Leaves. " * 30, max_tokens=700, stream=True, **GREEDY
    )
    next(iter(stream))
    assert server.metric("vllm:num_requests_running") == 1
    stream.close()
    server.wait_for_metric("vllm:num_requests_running", 0)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.metric("vllm:generation_tokens_total") < num_tokens + 700


def test_prompt_over_the_limit_gets_vllms_own_400(server: Server) -> None:
    prompt = random_tokens()[: RANDOM_SIZES.max_model_len + 1]
    with pytest.raises(openai.BadRequestError, match="maximum context length") as refusal:
        server.completions.create(model="qwen3", prompt=prompt, max_tokens=1)
    assert refusal.value.status_code == 400


def test_bench_serve(server: Server, checkpoints: Checkpoints, tmp_path: Path) -> None:
    before = num_partitioned_steps(server)
    log = tmp_path / "log"
    command: list[str | Path] = [
        *(VLLM, "bench", "serve", "--backend", "openai", "--base-url", server.url),
        *("--model", "qwen3", "--tokenizer", checkpoints("qwen3")),
        *("--dataset-name", "random", "--random-input-len", "100", "--random-output-len", "4"),
        *("--num-prompts", "4", "--ignore-eos", "--disable-tqdm"),
    ]
    with child(*command, log=log, env={"NO_PROXY": "127.0.0.1"}) as process:
        status = process.wait(START_TIMEOUT_S)
    report = log.read_text()
    assert status == 0, report
    assert re.search(r"Successful requests: +4\b", report), report
    assert num_partitioned_steps(server) > before


def test_killed_rank_ends_the_server_and_leaves_nothing_behind(server: Server) -> None:
    processes = session(server.process.pid)
    (victim,) = (pid for pid, name in processes.items() if name == "VLLM::Worker_PCP1")
    stream = server.completions.create(
        model="qwen3", prompt="Dies. " * 40, max_tokens=700, stream=True, **GREEDY
    )
    next(iter(stream))
    os.kill(victim, signal.SIGKILL)
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        list(stream)
    server.process.wait(TIMEOUT_S)
    log = server.log.read_text()
    assert "Worker proc VllmWorker-1 died unexpectedly" in log
    assert "EngineDeadError" in log
    assert remaining(processes) == []

# SPDX-License-Identifier: Apache-2.0
"""When ranks add up rows by reading each other's memory: with a stand-in for what does so, on GPUs
with vLLM's kernel."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.pcp import direct_all_reduce as direct

MOST_ROWS = 8


class Direct:
    """Doubles rows, if there are few."""

    def __init__(self, group: object, device: torch.device) -> None:
        self.group, self.disabled = group, device.type == "meta"
        self._IS_CAPTURING = self.is_closed = False
        self.num_registrations = 0

    def custom_all_reduce(self, rows: torch.Tensor) -> torch.Tensor | None:
        return 2 * rows if len(rows) <= MOST_ROWS else None

    def register_graph_buffers(self) -> None:
        assert not self._IS_CAPTURING
        self.num_registrations += 1

    def close(self) -> None:
        self.is_closed = True


def fail(*_: object) -> bool:
    raise RuntimeError("GPUs [0, 2] are not all connected by NVLink")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Direct]]:
    """Return what is made; other ranks say what this one says."""
    made: list[Direct] = []

    def make(*args: Any) -> Direct:
        made.append(Direct(*args))
        return made[-1]

    monkeypatch.setattr(direct, "CustomAllreduce", make)
    monkeypatch.setattr(direct, "get_pcp_group", lambda: SimpleNamespace(cpu_group="cpu"))
    monkeypatch.setattr(direct, "pynccl_communicator", lambda _: object())
    monkeypatch.setattr(direct, "require_links", lambda *_: True)
    monkeypatch.setattr(direct, "check_reach", lambda _: None)
    monkeypatch.setattr(direct, "do_all_ranks", lambda is_so: is_so)
    yield made
    direct.close_direct_all_reduce()


def test_few_rows_are_added_up_directly(made: list[Direct]) -> None:
    direct.init_direct_all_reduce(torch.device("cpu"))
    rows = torch.ones(MOST_ROWS, 4)
    summed = direct.direct_all_reduce(rows)
    assert summed is not None
    assert torch.equal(summed, 2 * rows)
    assert direct.direct_all_reduce(torch.ones(MOST_ROWS + 1, 4)) is None
    assert made[0].group == "cpu"
    direct.close_direct_all_reduce()
    assert made[0].is_closed
    assert direct.direct_all_reduce(rows) is None


def test_graphs_are_captured_with_it_looking(made: list[Direct]) -> None:
    with direct.captured_all_reduces():
        pass
    direct.init_direct_all_reduce(torch.device("cpu"))
    with direct.captured_all_reduces():
        is_capturing = made[0]._IS_CAPTURING
    assert (is_capturing, made[0]._IS_CAPTURING) == (True, False)
    assert made[0].num_registrations == 1


def test_ranks_exchange_nothing_after_an_error_in_capture(made: list[Direct]) -> None:
    direct.init_direct_all_reduce(torch.device("cpu"))
    with pytest.raises(RuntimeError), direct.captured_all_reduces():
        fail()
    assert not made[0]._IS_CAPTURING
    assert made[0].num_registrations == 0


@pytest.mark.parametrize(
    "why",
    [
        "option",
        "environment",
        "no NCCL",
        "no NVLink",
        "out of reach",
        "one GPU for all",
        "another rank cannot",
        "this one cannot",
    ],
)
def test_all_ranks_do_or_none(
    made: list[Direct], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    device = torch.device("meta" if why == "this one cannot" else "cpu")
    if why == "option":
        monkeypatch.setattr(parallel_state, "_ENABLE_CUSTOM_ALL_REDUCE", False)
    elif why == "environment":
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    elif why == "no NCCL":
        monkeypatch.setattr(direct, "pynccl_communicator", lambda _: None)
    elif why == "no NVLink":
        monkeypatch.setattr(direct, "require_links", fail)
    elif why == "out of reach":
        monkeypatch.setattr(direct, "check_reach", fail)
    elif why == "one GPU for all":
        monkeypatch.setattr(direct, "require_links", lambda *_: False)
    elif why == "another rank cannot":
        monkeypatch.setattr(direct, "do_all_ranks", lambda _: False)
    direct.init_direct_all_reduce(device)
    assert direct.direct_all_reduce(torch.ones(1, 4)) is None
    # vLLM's own look at GPUs fails where there are fewer than ranks.
    assert [each.is_closed for each in made] == [True] * (why == "this one cannot")


def rows_of(rank: int, number: int, device: torch.device) -> torch.Tensor:
    """Return a rank's rows of a step."""
    generator = torch.Generator().manual_seed(2 * number + rank)
    return torch.randn(64, 2048, generator=generator).bfloat16().to(device)


def add_up(rank: int, folder: Path) -> None:
    """Be one of two ranks, each on a GPU of its own: add up rows, and those of a CUDA graph."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(2, rank, f"file://{folder}/store", rank, "nccl")
        parallel_state.initialize_model_parallel(prefill_context_model_parallel_size=2)
    direct.init_direct_all_reduce(device)

    def expected(number: int) -> torch.Tensor:
        own, other = (rows_of(each, number, device).float() for each in (0, 1))
        return (own + other).bfloat16()

    summed = direct.direct_all_reduce(rows_of(rank, 0, device))
    assert summed is not None
    assert torch.equal(summed, expected(0))
    graph, rows = torch.cuda.CUDAGraph(), rows_of(rank, 0, device)
    with direct.captured_all_reduces(), torch.cuda.graph(graph):
        moved = rows + 0
        summed = direct.direct_all_reduce(moved)
    assert summed is not None
    for number in range(1, 50):
        rows.copy_(rows_of(rank, number, device))
        graph.replay()
        assert torch.equal(summed, expected(number)), number
    assert direct.direct_all_reduce(torch.zeros(2**22, dtype=torch.bfloat16, device=device)) is None
    torch.cuda.synchronize()
    direct.close_direct_all_reduce()
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_get_the_same_sums(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=add_up, args=(rank, tmp_path), daemon=True) for rank in (0, 1)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(120)
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()

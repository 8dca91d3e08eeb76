# SPDX-License-Identifier: Apache-2.0
"""When ranks add up rows by reading each other's memory, and when by NCCL: with stand-ins for both,
on GPUs with vLLM's kernel."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.e2e.processes import exit_codes
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.pcp import all_reduce

MOST_ROWS = 8
GROUP = SimpleNamespace(cpu_group="cpu", device_group="device")


class Nccl:
    """Has three times a rank's rows; gets addresses, so strides must be right by then."""

    @staticmethod
    def all_reduce(rows: torch.Tensor) -> torch.Tensor:
        assert rows.is_contiguous()
        return 3 * rows


class Direct:
    """Doubles rows, if there are few."""

    def __init__(self, group: object, device: torch.device) -> None:
        self.group, self.disabled = group, device.type == "meta"
        self._IS_CAPTURING = self.is_closed = False
        self.num_registrations = 0

    def custom_all_reduce(self, rows: torch.Tensor) -> torch.Tensor | None:
        assert rows.is_contiguous()
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

    monkeypatch.setattr(all_reduce, "CustomAllreduce", make)
    monkeypatch.setattr(all_reduce, "get_pcp_group", lambda: GROUP)
    monkeypatch.setattr(all_reduce, "pynccl_communicator", lambda _: Nccl)
    monkeypatch.setattr(all_reduce, "require_links", lambda *_: True)
    monkeypatch.setattr(all_reduce, "check_reach", lambda _: None)
    monkeypatch.setattr(all_reduce, "do_all_ranks", lambda is_so: is_so)
    yield made
    all_reduce.close_direct_all_reduce()


def rows(num_rows: int) -> torch.Tensor:
    """Return rows that are not contiguous."""
    return torch.ones(num_rows, 8)[:, ::2]


def is_direct() -> bool:
    return bool((all_reduce.all_reduce_rows(rows(1)) == 2).all())


def test_few_rows_are_added_up_directly(made: list[Direct]) -> None:
    all_reduce.init_direct_all_reduce(torch.device("cpu"))
    few, many = rows(MOST_ROWS), rows(MOST_ROWS + 1)
    assert torch.equal(all_reduce.all_reduce_rows(few), 2 * few)
    assert torch.equal(all_reduce.all_reduce_rows(many), 3 * many)
    assert made[0].group == "cpu"
    all_reduce.close_direct_all_reduce()
    assert made[0].is_closed
    assert torch.equal(all_reduce.all_reduce_rows(few), 3 * few)


def test_graphs_are_captured_with_it_looking(made: list[Direct]) -> None:
    with all_reduce.captured_all_reduces():
        pass
    all_reduce.init_direct_all_reduce(torch.device("cpu"))
    with all_reduce.captured_all_reduces():
        is_capturing = made[0]._IS_CAPTURING
    assert (is_capturing, made[0]._IS_CAPTURING) == (True, False)
    assert made[0].num_registrations == 1


def test_ranks_exchange_nothing_after_an_error_in_capture(made: list[Direct]) -> None:
    all_reduce.init_direct_all_reduce(torch.device("cpu"))
    with pytest.raises(RuntimeError), all_reduce.captured_all_reduces():
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
        "this one's is disabled",
        "another rank's is disabled",
    ],
)
def test_all_ranks_do_or_none(
    made: list[Direct], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    is_made = why.endswith("is disabled")
    device = torch.device("meta" if why == "this one's is disabled" else "cpu")
    if why == "option":
        monkeypatch.setattr(parallel_state, "_ENABLE_CUSTOM_ALL_REDUCE", False)
    elif why == "environment":
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    elif why == "no NCCL":
        # As with Gloo.
        monkeypatch.setattr(all_reduce, "pynccl_communicator", lambda _: None)
        monkeypatch.setattr(dist, "all_reduce", lambda rows, group: rows.mul_(3))
    elif why == "no NVLink":
        monkeypatch.setattr(all_reduce, "require_links", fail)
    elif why == "out of reach":
        monkeypatch.setattr(all_reduce, "check_reach", fail)
    elif why == "one GPU for all":
        monkeypatch.setattr(all_reduce, "require_links", lambda *_: False)
    elif why == "another rank cannot":
        monkeypatch.setattr(all_reduce, "do_all_ranks", lambda _: False)
    elif why == "another rank's is disabled":
        answers = iter([True, False])
        monkeypatch.setattr(all_reduce, "do_all_ranks", lambda _: next(answers))
    all_reduce.init_direct_all_reduce(device)
    assert not is_direct()
    # vLLM's own look at GPUs fails where there are fewer than ranks.
    assert [each.is_closed for each in made] == [True] * is_made


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
    all_reduce.init_direct_all_reduce(device)

    def expected(number: int) -> torch.Tensor:
        own, other = (rows_of(each, number, device).float() for each in (0, 1))
        return (own + other).bfloat16()

    assert all_reduce._direct is not None
    assert torch.equal(all_reduce.all_reduce_rows(rows_of(rank, 0, device)), expected(0))
    graph, rows = torch.cuda.CUDAGraph(), rows_of(rank, 0, device)
    with all_reduce.captured_all_reduces(), torch.cuda.graph(graph):
        summed = all_reduce.all_reduce_rows(rows + 0)
    for number in range(1, 50):
        rows.copy_(rows_of(rank, number, device))
        graph.replay()
        assert torch.equal(summed, expected(number)), number
    # Too many to be read.
    many = torch.full((2**22,), rank + 1.0, dtype=torch.bfloat16, device=device)
    assert (all_reduce.all_reduce_rows(many) == 3).all()
    torch.cuda.synchronize()
    all_reduce.close_direct_all_reduce()
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_get_the_same_sums(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=add_up, args=(rank, tmp_path), daemon=True) for rank in (0, 1)]
    assert exit_codes(ranks) == [0, 0]

# SPDX-License-Identifier: Apache-2.0
"""What reaches NCCL, with a stand-in for it: it gets addresses, so strides must be right by then.

Collectives of real ranks are tested where they are used.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vllm.distributed.pcp import collectives

PCP_WORLD_SIZE = 3


class Nccl:
    """Has this rank's rows from every rank; writes down its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.streams: list[Any] = []

    def group_start(self) -> None:
        self.calls.append("group_start")

    def group_end(self) -> None:
        self.calls.append("group_end")

    def all_gather(self, output: torch.Tensor, own: torch.Tensor, stream: Any = None) -> None:
        self._record("all_gather", output, own, stream=stream)
        output.copy_(torch.cat([own] * PCP_WORLD_SIZE))

    def reduce_scatter(self, output: torch.Tensor, rows: torch.Tensor, stream: Any = None) -> None:
        self._record("reduce_scatter", output, rows, stream=stream)
        output.copy_(rows[: len(output)] * PCP_WORLD_SIZE)

    def _record(self, name: str, *tensors: torch.Tensor, stream: Any = None) -> None:
        assert all(tensor.is_contiguous() for tensor in tensors), name
        self.calls.append(name)
        self.streams.append(stream)


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_all_ranks_do_or_none(monkeypatch: pytest.MonkeyPatch, own: bool, others: bool) -> None:
    world: Any = SimpleNamespace(cpu_group=object())

    def all_reduce(answer: torch.Tensor, operation: Any, group: object) -> None:
        assert operation == dist.ReduceOp.MIN
        assert group is world.cpu_group
        answer.clamp_(max=int(others))

    monkeypatch.setattr(collectives, "get_world_group", lambda: world)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    assert collectives.do_all_ranks(own) == (own and others)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    """Put a stand-in where the PCP group has its NCCL communicator."""
    nccl = Nccl()
    group: Any = SimpleNamespace(world_size=PCP_WORLD_SIZE)
    monkeypatch.setattr(collectives, "get_pcp_group", lambda: group)
    monkeypatch.setattr(collectives, "pynccl_communicator", lambda _: nccl)
    return nccl


def strided(num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows that are not contiguous."""
    return torch.arange(2 * num_rows * width).view(num_rows, 2 * width)[:, :width].to(dtype)


def test_tensors_are_gathered_in_one_group(nccl: Nccl) -> None:
    tensors = (strided(4, 6, torch.bfloat16), strided(4, 5, torch.float32)[:, ::2])
    gathered = collectives.gather_together(*tensors)
    assert nccl.calls == ["group_start", "all_gather", "all_gather", "group_end"]
    for actual, tensor in zip(gathered, tensors, strict=True):
        assert torch.equal(actual, torch.cat([tensor] * PCP_WORLD_SIZE))
        assert actual.dtype == tensor.dtype


def test_rows_are_scattered_by_one_call(nccl: Nccl) -> None:
    rows = strided(2 * PCP_WORLD_SIZE, 6, torch.bfloat16)
    assert torch.equal(collectives.reduce_scatter_rows(rows), PCP_WORLD_SIZE * rows[:2])
    assert nccl.calls == ["reduce_scatter"]


def test_runs_beside_the_current_stream_once_that_has_its_inputs(nccl: Nccl) -> None:
    forks: list[tuple[torch.Tensor, ...]] = []
    side: Any = SimpleNamespace(stream="side", fork=lambda *inputs: forks.append(inputs))
    rows = strided(2 * PCP_WORLD_SIZE, 6, torch.bfloat16)
    gathered = collectives.gather_together(rows, rows[:, 1:], side=side)
    own = collectives.reduce_scatter_rows(gathered[0], side)
    assert nccl.streams == ["side"] * 3
    # What is read is contiguous by then, and kept.
    assert [len(inputs) for inputs in forks] == [2, 1]
    assert all(tensor.is_contiguous() for inputs in forks for tensor in inputs)
    assert own.shape == rows.shape

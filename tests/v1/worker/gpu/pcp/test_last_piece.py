# SPDX-License-Identifier: Apache-2.0
"""The last piece of a model runs on sampled rows, and otherwise as ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.compilation import cuda_graph
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.compilation.piecewise_backend import PiecewiseBackend
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.pcp.step import REPLICATED, StepState, set_step_state
from vllm.v1.worker.gpu.pcp.last_piece import LastPiece

WIDTH = 8
SIZES = [24, 16]


class Piece(PiecewiseBackend):
    """A piece, compiled from a function; ``numbers`` are the numbers of rows that it got."""

    def __init__(self, function: Callable[..., Any], **flags: bool) -> None:
        self.function = function
        self.is_last_graph, self.is_full_graph, self.is_encoder_compilation = True, False, False
        vars(self).update(flags)

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def wrap(piece: Piece, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the stock wrapper, where no graph is replayed."""
    wrapper: Any = object.__new__(CUDAGraphWrapper)
    wrapper.runnable, wrapper.runtime_mode = piece, CUDAGraphMode.PIECEWISE
    context = SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode.NONE, batch_descriptor=None)
    monkeypatch.setattr(cuda_graph, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(cuda_graph, "get_forward_context", lambda: context)
    CUDAGraphWrapper._all_instances.add(wrapper)
    return wrapper


@pytest.fixture(autouse=True)
def _no_other_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(CUDAGraphWrapper, "_all_instances", type(CUDAGraphWrapper._all_instances)())
    yield
    set_step_state(REPLICATED)


def layer(attended: torch.Tensor, weight: torch.Tensor, num_rows: int, residual: Any) -> Any:
    """Project, add, and check what it was told."""
    assert attended.shape[0] == num_rows == residual.shape[0]
    return attended @ weight + residual


def arguments(num_rows: int) -> list[Any]:
    """Return what ``layer`` gets; the weight has as many rows as one of the sizes."""
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))
    attended = torch.randn(num_rows, 16, generator=generator)
    return [attended, weight, num_rows, torch.randn(num_rows, WIDTH, generator=generator)]


def watch(wrapper: Any, make: Callable[[int], list[Any]] = arguments) -> bool:
    """Let a piece be taken over, and watched."""
    piece = LastPiece.take_over()
    assert piece is not None
    assert piece is wrapper
    for num_rows in SIZES:
        piece(*make(num_rows))
    return bool(piece.settle(SIZES))


def test_sampled_rows_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = wrap(Piece(layer), monkeypatch)
    assert watch(wrapper)
    for num_rows in (16, 24, 40):
        sampled: Any = SimpleNamespace(
            send_idx=torch.tensor([num_rows - 1, 0, 5, 0], dtype=torch.int32), is_applied=False
        )
        set_step_state(REPLICATED)
        whole = wrapper(*arguments(num_rows))
        assert whole.shape == (num_rows, WIDTH)
        set_step_state(StepState(is_partitioned=True, sampled=sampled))
        assert torch.equal(wrapper(*arguments(num_rows)), whole[sampled.send_idx.long()])
        assert sampled.is_applied


def test_a_step_that_wants_all_rows_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = wrap(Piece(layer), monkeypatch)
    assert watch(wrapper)
    set_step_state(StepState(is_partitioned=True))
    assert wrapper(*arguments(16)).shape == (16, WIDTH)


NOT_UNDERSTOOD: dict[str, Callable[[int], list[Any]]] = {
    "rows that are not the first dimension": lambda n: [*arguments(n), torch.zeros(2, n)],
    "twice the number of rows": lambda n: [*arguments(n), 2 * n],
    "twice as many rows": lambda n: [*arguments(n), torch.zeros(2 * n, 3)],
    "rows with gaps": lambda n: [*arguments(n), torch.zeros(n, 6)[:, :3]],
    "rows of other widths": lambda n: [*arguments(n), torch.zeros(n, n // 8)],
    "no rows": lambda n: [n],
    "another number of arguments": lambda n: [*arguments(n), *[None] * (n // 8)],
}


@pytest.mark.parametrize("name", NOT_UNDERSTOOD)
def test_what_is_not_understood_is_left_as_it_was(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = wrap(Piece(lambda *args: args), monkeypatch)
    assert not watch(wrapper, NOT_UNDERSTOOD[name])
    assert type(wrapper) is CUDAGraphWrapper
    sampled: Any = SimpleNamespace(send_idx=torch.tensor([3]), is_applied=False)
    set_step_state(StepState(is_partitioned=True, sampled=sampled))
    args = NOT_UNDERSTOOD[name](16)
    returned: Any = wrapper(*args)
    assert all(a is b for a, b in zip(returned, args, strict=True))
    assert not sampled.is_applied


@pytest.mark.parametrize("num_rows", [[], [24], [24, 24]])
def test_one_size_does_not_tell_rows_from_weights(
    num_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = wrap(Piece(layer), monkeypatch)
    piece = LastPiece.take_over()
    assert piece is not None
    for n in num_rows:
        piece(*arguments(n))
    assert not piece.settle(num_rows)
    assert type(wrapper) is CUDAGraphWrapper


@pytest.mark.parametrize(
    "flags",
    [{"is_last_graph": False}, {"is_full_graph": True}, {"is_encoder_compilation": True}],
    ids=lambda flags: next(iter(flags)),
)
def test_other_pieces_are_left_alone(
    flags: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = wrap(Piece(layer, **flags), monkeypatch)
    assert LastPiece.take_over() is None
    assert type(wrapper) is CUDAGraphWrapper


def test_of_two_models_none_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    wrappers = [wrap(Piece(layer), monkeypatch) for _ in range(2)]
    assert LastPiece.take_over() is None
    assert all(type(wrapper) is CUDAGraphWrapper for wrapper in wrappers)

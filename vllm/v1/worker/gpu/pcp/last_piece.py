# SPDX-License-Identifier: Apache-2.0
"""The last layer of a partitioned step, for the rows that logits are computed from.

Of what comes out of the last layer a step reads the rows that it samples from, one of a request.
The keys and values of all rows are in the cache by then; so the last attention layer can attend for
those rows alone, and what is behind it, a projection, an MLP or experts and norms, can leave the
others out. That is a layer, of all that a prefill takes, less its keys and values.

vLLM compiles a model in pieces between attention layers, and calls each through a wrapper that
captures and replays CUDA graphs. The wrapper of the last piece takes rows out of the arguments that
have some. Which arguments do is watched while graphs of several sizes are captured: their first
dimension is the number of rows, every time. If an argument is anything but rows, a number of rows
or the same every time, nothing is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.distributed.pcp.step import get_step_state

# What an argument is: rows, a number of rows, or neither.
ROWS, NUM_ROWS, FIXED = "rows", "num_rows", "fixed"


class LastPiece(CUDAGraphWrapper):
    """In place of the stock wrapper of a model's last piece; see ``take_over``."""

    runnable: Callable[..., Any]
    _calls: list[tuple[Any, ...]]
    _kinds: list[str] | None

    @classmethod
    def take_over(cls) -> LastPiece | None:
        """Turn the stock wrapper into one of these that watches, or return None.

        None if no model was compiled in pieces that graphs are captured of, or several were.
        """
        wrappers = [w for w in CUDAGraphWrapper._all_instances if _is_last_piece(w.runnable)]
        if len(wrappers) != 1:
            return None
        (piece,) = wrappers
        piece.__class__ = cls
        assert isinstance(piece, cls)
        piece._calls, piece._kinds = [], None
        return piece

    def settle(self, num_rows: list[int]) -> bool:
        """Stop watching, and say whether rows will be left out; if not, be the stock wrapper again.

        Args:
            num_rows: Rows of each call since ``take_over``.
        """
        calls, self._calls = self._calls, []
        kinds = [] if len(calls) != len(num_rows) else _kinds(calls, num_rows)
        if ROWS not in kinds:
            self.__class__ = CUDAGraphWrapper  # type: ignore[assignment]
            return False
        self._kinds = kinds
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the piece on its arguments or, in a step that says so, on the sampled rows of them.

        Collectives: those of the layer, as ever, of fewer rows.
        """
        sampled = get_step_state().sampled
        if self._kinds is None:
            self._calls.append(tuple(_describe(arg) for arg in args))
        if self._kinds is None or sampled is None:
            return super().__call__(*args, **kwargs)
        assert not kwargs
        index = sampled.send_idx
        picked = [
            arg.index_select(0, index)
            if kind == ROWS
            else index.shape[0]
            if kind == NUM_ROWS
            else arg
            for kind, arg in zip(self._kinds, args, strict=True)
        ]
        sampled.is_applied = True
        # No graph is of so few rows, or reads them where they are.
        return self.runnable(*picked)


def _is_last_piece(runnable: object) -> bool:
    # Imports all of vLLM's compiler passes.
    from vllm.compilation.piecewise_backend import PiecewiseBackend

    return (
        isinstance(runnable, PiecewiseBackend)
        and runnable.is_last_graph
        and not runnable.is_full_graph
        and not runnable.is_encoder_compilation
    )


def _describe(arg: object) -> Any:
    """Return what of an argument is compared between calls."""
    if not isinstance(arg, torch.Tensor):
        return arg
    # Rows that were picked have no gaps; the piece was compiled for those of its argument.
    return (tuple(arg.shape), arg.is_contiguous())


def _kinds(calls: list[tuple[Any, ...]], num_rows: list[int]) -> list[str]:
    """Return what each argument is, by the calls; nothing if that does not tell."""
    if len(set(num_rows)) < 2 or len({len(call) for call in calls}) != 1:
        return []
    kinds = []
    for values in zip(*calls, strict=True):
        if all(value == values[0] for value in values):
            kinds.append(FIXED)
        elif all(
            isinstance(value, int) and value == n for value, n in zip(values, num_rows, strict=True)
        ):
            kinds.append(NUM_ROWS)
        elif (
            all(
                isinstance(value, tuple) and value == ((n, *value[0][1:]), True)
                for value, n in zip(values, num_rows, strict=True)
            )
            and len({value[0][1:] for value in values}) == 1
        ):
            kinds.append(ROWS)
        else:
            return []
    return kinds

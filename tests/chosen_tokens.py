# SPDX-License-Identifier: Apache-2.0
"""A worker extension that writes down which tokens the indexers of a sparse model choose."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase

    _Extended = WorkerBase
else:
    _Extended = object

# Of one query in one layer: the layer, the request, the query's position, those of its choice.
Choice: TypeAlias = tuple[str, str, int, list[int]]


class ChosenTokens(_Extended):
    """Worker methods for ``collective_rpc``, of an engine that is given this class by name."""

    def record_choices(self) -> None:
        """Write down choices from here on, this rank's own rows alone."""
        from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

        self._choices: list[Choice] = []
        runner: Any = self.model_runner
        runner.prepare_inputs = self._noting_batch(runner.prepare_inputs)
        for module in runner.get_model().modules():
            if isinstance(module, SparseAttnIndexer):
                module.register_forward_hook(self._record)

    def take_choices(self) -> list[Choice]:
        """Return, and forget, the choices since the last call."""
        taken, self._choices = self._choices, []
        return taken

    def _noting_batch(self, prepare_inputs: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(prepare_inputs)
        def note(*args: Any) -> Any:
            self._batch = prepare_inputs(*args)
            return self._batch

        return note

    def _record(self, module: Any, inputs: object, output: torch.Tensor) -> None:
        batch = self._batch
        reqs = [
            req
            for req, num_tokens in zip(batch.req_ids, batch.num_scheduled_tokens, strict=False)
            for _ in range(num_tokens)
        ]
        layer = module.k_cache.prefix
        for req, position, row in zip(
            reqs, batch.positions.tolist(), output.tolist(), strict=False
        ):
            self._choices.append((layer, req, position, [token for token in row if token >= 0]))

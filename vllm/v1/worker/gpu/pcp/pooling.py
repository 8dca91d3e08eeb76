# SPDX-License-Identifier: Apache-2.0
"""Embeddings on Model Runner V2, as the model's own pooler has them.

vLLM 0.25.1 serves pooling models with the other runner. Its V2 pooling runner takes the last token
and normalises it, whatever was asked for; admission keeps away what that gets wrong for a whole
model, and this class what it gets wrong for a request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.v1.worker.gpu.pool.pooling_runner import PoolingRunner

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState


class EmbeddingRunner(PoolingRunner):
    """The stock runner, and requests with ``use_activation=False``.

    Attributes:
        raw_req_ids: Requests whose embedding is not normalised.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.raw_req_ids: set[str] = set()
        pooler: Any = self.model.pooler
        head = pooler.poolers_by_task["embed"].head
        if head.projector is not None:
            raise NotImplementedError(
                "Prefill context parallelism does not support embedding models with a projection "
                f"behind the pooler (got {head}). Set --prefill-context-parallel-size 1."
            )

    def add_requests(self, requests: Iterable[NewRequestData]) -> None:
        """Note what new requests ask for."""
        for request in requests:
            params = request.pooling_params
            if params is not None and params.use_activation is False:
                self.raw_req_ids.add(request.req_id)

    def pool(
        self, hidden_states: torch.Tensor, input_batch: InputBatch, req_states: RequestState
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``[num_reqs, hidden_size]`` embeddings, and which requests are complete."""
        embeddings, is_valid = super().pool(hidden_states, input_batch, req_states)
        is_raw = [req_id in self.raw_req_ids for req_id in input_batch.req_ids]
        if any(is_raw):
            mask = torch.tensor(is_raw, device=embeddings.device)[:, None]
            embeddings = torch.where(mask, hidden_states[input_batch.logits_indices], embeddings)
        return embeddings, is_valid

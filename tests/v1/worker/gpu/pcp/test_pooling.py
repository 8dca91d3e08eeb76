# SPDX-License-Identifier: Apache-2.0
"""Embeddings come as each request asks for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.v1.worker.gpu.pcp.pooling import EmbeddingRunner


def make_model(projector: object = None) -> Any:
    head = SimpleNamespace(projector=projector)
    pooler = SimpleNamespace(poolers_by_task={"embed": SimpleNamespace(head=head)})
    return SimpleNamespace(pooler=pooler)


def request(req_id: str, use_activation: bool | None) -> Any:
    params = SimpleNamespace(use_activation=use_activation)
    return SimpleNamespace(req_id=req_id, pooling_params=params)


def test_only_requests_that_ask_for_it_are_not_normalised() -> None:
    runner = EmbeddingRunner(make_model())
    runner.add_requests([request("a", None), request("b", False), request("c", True)])
    hidden = torch.tensor([[9.0, 9.0], [3.0, 4.0], [6.0, 8.0], [0.0, 2.0]])
    batch: Any = SimpleNamespace(
        req_ids=["a", "b", "c"],
        logits_indices=torch.tensor([1, 2, 3]),
        idx_mapping=torch.tensor([2, 0, 1]),
        seq_lens=torch.tensor([5, 6, 7]),
    )
    states: Any = SimpleNamespace(prompt_len=SimpleNamespace(gpu=torch.tensor([6, 8, 5])))
    embeddings, is_valid = runner.pool(hidden, batch, states)
    assert torch.allclose(embeddings, torch.tensor([[0.6, 0.8], [6.0, 8.0], [0.0, 1.0]]))
    assert is_valid is not None
    assert is_valid.tolist() == [True, True, False]


def test_refuses_a_projection_behind_the_pooler() -> None:
    with pytest.raises(NotImplementedError, match="projection"):
        EmbeddingRunner(make_model(projector=torch.nn.Identity()))

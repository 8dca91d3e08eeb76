# SPDX-License-Identifier: Apache-2.0
"""Replicated experts are laid out as those of a rank of P = 1."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.config import ParallelConfig
from vllm.model_executor.layers.fused_moe import config, layer
from vllm.model_executor.layers.pcp.replicated_experts import wrap_make_parallel_config


@pytest.mark.parametrize("tp", [1, 4])
def test_a_layer_is_shared_by_tp_ranks_alone(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(world_size=3, rank_in_group=2)
    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    for module in (config, layer):
        monkeypatch.setattr(module, "get_pcp_group", lambda: group)
        monkeypatch.setattr(module, "get_dp_group", lambda: alone)
    monkeypatch.setattr(layer, "get_tensor_model_parallel_world_size", lambda: tp)
    monkeypatch.setattr(config, "get_tensor_model_parallel_rank", lambda: tp - 1)
    sizes: dict[str, Any] = dict.fromkeys(("tp_size", "dp_size", "pcp_size"))
    sizes |= {"is_sequence_parallel": False, "parallel_config": ParallelConfig()}

    shared = layer.make_parallel_config(**sizes)
    assert (shared.pcp_size, shared.tp_size, shared.tp_rank) == (3, 3 * tp, 3 * tp - 1)
    replicated = wrap_make_parallel_config(layer.make_parallel_config)(**sizes)
    assert (replicated.pcp_size, replicated.tp_size, replicated.tp_rank) == (1, tp, tp - 1)
    assert not replicated.use_ep

# SPDX-License-Identifier: Apache-2.0
"""Which graphs a partitioned step replays, and what they read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm.config.compilation import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.worker.gpu.pcp import graphs as graphs_module
from vllm.v1.worker.gpu.pcp.graphs import (
    EAGER_OPS,
    PartitionedBatchDescriptor,
    PartitionGraphs,
)
from vllm.v1.worker.gpu.pcp.layout import max_local_tokens, plan_partition


@pytest.fixture
def graphs() -> PartitionGraphs:
    graphs = PartitionGraphs()
    graphs.allocate(512, torch.device("cpu"))
    graphs.num_rows = np.array([256, 512])
    return graphs


def test_rows_are_padded_to_the_next_graph(graphs: PartitionGraphs) -> None:
    assert [graphs.pad(n) for n in (1, 256, 257, 512, 513)] == [256, 256, 512, 512, 513]


def test_nothing_is_padded_before_capture() -> None:
    assert PartitionGraphs().pad(7) == 7


def test_sizes_are_those_that_a_rank_can_have() -> None:
    assert PartitionGraphs.sizes(40) == [40]
    assert PartitionGraphs.sizes(255) == [64, 128, 255]
    assert PartitionGraphs.sizes(700) == [64, 128, 256, 512, 700]
    assert PartitionGraphs.sizes(512) == [64, 128, 256, 512]


@pytest.mark.parametrize(("budget", "num_decodes"), [(8192, 1), (8192, 64), (8192, 256), (2048, 1)])
def test_decodes_beside_a_full_chunk_fit_into_a_graph(budget: int, num_decodes: int) -> None:
    """Of a server under load, that is what steps are."""
    plan = plan_partition(
        np.array([1] * num_decodes + [budget - num_decodes], dtype=np.int32),
        np.array([100] * num_decodes + [0], dtype=np.int32),
        np.array([False] * num_decodes + [True]),
        pcp_world_size=2,
    )
    assert plan is not None
    sizes = PartitionGraphs.sizes(max_local_tokens(budget, 1024, 2))
    assert plan.num_tokens_after_padding <= sizes[-1]


def test_graphs_read_at_a_fixed_place(graphs: PartitionGraphs) -> None:
    ids, positions = torch.arange(1000, dtype=torch.int32), torch.arange(1000, 2000)
    index = torch.arange(999, 999 - 256, -1, dtype=torch.int32)
    own_ids, own_positions = graphs.select_inputs(ids, positions, index)
    assert own_ids.tolist() == index.tolist()
    assert own_positions.tolist() == (index + 1000).tolist()
    assert own_ids.data_ptr() == graphs.input_ids.data_ptr()
    assert own_positions.data_ptr() == graphs.positions.data_ptr()
    # Nothing is replayed for other numbers of rows.
    own_ids, _ = graphs.select_inputs(ids, positions, index[:100])
    assert own_ids.tolist() == index[:100].tolist()
    assert own_ids.data_ptr() != graphs.input_ids.data_ptr()


def test_partitioned_steps_share_no_graph_with_others() -> None:
    """Layers of experts exchange rows in the ones and not in the others."""
    assert PartitionedBatchDescriptor(num_tokens=256) != BatchDescriptor(num_tokens=256)
    graphs = {BatchDescriptor(num_tokens=256): 0, PartitionedBatchDescriptor(num_tokens=256): 1}
    assert graphs[PartitionedBatchDescriptor(num_tokens=256)] == 1


def test_the_forward_pass_is_switched_only_where_there_is_a_graph(
    graphs: PartitionGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    context: Any = SimpleNamespace(
        cudagraph_runtime_mode=CUDAGraphMode.NONE, batch_descriptor=BatchDescriptor(300)
    )
    monkeypatch.setattr(graphs_module, "get_forward_context", lambda: context)
    graphs.before_forward()
    assert context.cudagraph_runtime_mode == CUDAGraphMode.NONE
    graphs.replayed_rows = 512
    graphs.before_forward()
    assert context.cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE
    assert context.batch_descriptor == PartitionedBatchDescriptor(num_tokens=512)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, True),
        ({"cudagraph_mode": CUDAGraphMode.FULL_DECODE_ONLY}, False),
        ({"use_breakable_cg": True}, False),
        *(({"splitting_ops": EAGER_OPS - {op}}, False) for op in sorted(EAGER_OPS)),
        ({"splitting_ops": None}, False),
        ({"use_inductor_graph_partition": True}, False),
    ],
)
def test_what_gathers_is_never_captured(change: dict[str, Any], wanted: bool) -> None:
    settings: dict[str, Any] = {
        "cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE,
        "use_breakable_cg": False,
        "splitting_ops": [*EAGER_OPS, "vllm::mamba_mixer"],
        "use_inductor_graph_partition": False,
    } | change
    manager: Any = SimpleNamespace(
        **settings, needs_capture=lambda: True, compilation_config=SimpleNamespace(**settings)
    )
    assert PartitionGraphs.are_wanted(manager) == wanted


def test_vllm_splits_at_what_gathers() -> None:
    """Under other names there would be no graphs, and nobody would notice."""
    config = CompilationConfig(mode=CompilationMode.VLLM_COMPILE)
    config.set_splitting_ops_for_v1(all2all_backend="allgather_reducescatter")
    assert set(config.splitting_ops or ()) >= EAGER_OPS

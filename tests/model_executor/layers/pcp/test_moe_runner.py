# SPDX-License-Identifier: Apache-2.0
"""Ranks that share experts give what one process gives that has all of them, in every kind of step.

The ranks are processes with vLLM's own groups, weights and CPU kernels; the oracle is a loop.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.processes import run_module
from tests.model_executor.layers.pcp.oracle import (
    HIDDEN_SIZE,
    LAYERS,
    NUM_EXPERTS,
    NUM_ROWS,
    Layer,
    expected,
    make_rows,
)
from tests.model_executor.layers.pcp.ranks import CHOOSING_LAYERS
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.pcp import register_layers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("cpu" not in version("vllm"), reason="the ranks are CPU processes"),
]

# P x TP. Four ranks have 1 or 2 of the experts each.
WORLDS = ("2x1", "3x1", "4x1", "2x2")
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1.5e-2}

Rank = dict[tuple[str, bool], dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of what each rank of each world got."""
    folder = tmp_path_factory.mktemp("experts")
    run_module("tests.model_executor.layers.pcp.ranks", folder, *WORLDS, log=folder / "ranks.log")
    return folder


@pytest.fixture(params=WORLDS)
def ranks(request: pytest.FixtureRequest, folder: Path) -> list[list[Rank]]:
    """Return results of ranks: a list for each PCP rank, of its TP ranks."""
    pcp, tp = (int(size) for size in request.param.split("x"))
    files = [[f"{request.param}-{r * tp + t}.pt" for t in range(tp)] for r in range(pcp)]
    return [[torch.load(folder / name, weights_only=False) for name in row] for row in files]


@pytest.fixture(params=[False, True], ids=["width", "ep"])
def is_ep(request: pytest.FixtureRequest) -> bool:
    """Return whether ranks have whole experts, or a part of the width of each."""
    return bool(request.param)


each_layer = pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)


@each_layer
def test_partitioned_step_gives_each_rank_its_own_rows(
    ranks: list[list[Rank]], layer: Layer, is_ep: bool
) -> None:
    whole = expected(layer, make_rows(layer, len(ranks) * NUM_ROWS))
    for pcp_rank, tp_ranks in enumerate(ranks):
        own = whole[pcp_rank * NUM_ROWS : (pcp_rank + 1) * NUM_ROWS]
        for rank in tp_ranks:
            require_close(rank[layer.name, is_ep]["partitioned"], own, layer)
            require_close(rank[layer.name, is_ep]["overlapped"], own, layer)


@each_layer
def test_shared_experts_are_cut_in_two_for_collectives_to_run_beside(
    ranks: list[list[Rank]], layer: Layer, is_ep: bool
) -> None:
    first = NUM_ROWS // 2
    halves = [first, NUM_ROWS - first] if layer.shared_width else []
    for tp_ranks in ranks:
        for rank in tp_ranks:
            results = rank[layer.name, is_ep]
            assert results["overlapped shared rows"] == halves
            # Rows and logits on their way to the experts, and the output on its way back.
            assert results["tensors beside"] == (3 if halves else 0)
            assert len(results["partitioned shared rows"]) == len(halves) // 2
            collectives = results["overlapped collectives"]
            assert collectives == results["partitioned collectives"]


@each_layer
def test_step_of_shared_rows_gives_every_rank_the_same_bits(
    ranks: list[list[Rank]], layer: Layer, is_ep: bool
) -> None:
    outputs = [rank[layer.name, is_ep]["replicated"] for row in ranks for rank in row]
    require_close(outputs[0], expected(layer, make_rows(layer, NUM_ROWS)), layer)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@each_layer
def test_collectives_are_the_documented_ones_on_every_rank(
    ranks: list[list[Rank]], layer: Layer, is_ep: bool
) -> None:
    rows, gathered = (NUM_ROWS, HIDDEN_SIZE), (len(ranks) * NUM_ROWS, HIDDEN_SIZE)
    logits, all_logits = (NUM_ROWS, NUM_EXPERTS), (len(ranks) * NUM_ROWS, NUM_EXPERTS)
    wanted = {
        "partitioned": [
            collective("all_gather_into_tensor", layer.dtype, gathered, rows),
            collective("all_gather_into_tensor", torch.float32, all_logits, logits),
            collective("reduce_scatter_tensor", layer.dtype, rows, gathered),
        ],
        "replicated": [collective("all_reduce", layer.dtype, rows)],
    }
    for tp_ranks in ranks:
        for rank in tp_ranks:
            for kind, collectives in wanted.items():
                assert rank[layer.name, is_ep][f"{kind} collectives"] == collectives


@pytest.mark.parametrize(
    "layer",
    [layer for layer in LAYERS if layer.name in CHOOSING_LAYERS],
    ids=lambda layer: layer.name,
)
def test_ranks_choose_for_their_own_rows_where_kernels_are_told_the_experts(
    ranks: list[list[Rank]], layer: Layer, is_ep: bool
) -> None:
    size = len(ranks)
    whole = expected(layer, make_rows(layer, size * NUM_ROWS))
    same = expected(layer, make_rows(layer, NUM_ROWS))
    for pcp_rank, tp_ranks in enumerate(ranks):
        for rank in tp_ranks:
            results = rank[layer.name, is_ep]
            own = whole[pcp_rank * NUM_ROWS : (pcp_rank + 1) * NUM_ROWS]
            require_close(results["chosen partitioned"], own, layer)
            require_close(results["chosen replicated"], same, layer)
            assert results["rows chosen for"] == [NUM_ROWS, NUM_ROWS]
            shapes = [
                ((size * NUM_ROWS, width), (NUM_ROWS, width), dtype)
                for width, dtype in (
                    (HIDDEN_SIZE, layer.dtype),
                    (layer.top_k, torch.float32),
                    (layer.top_k, torch.int32),
                )
            ]
            rows = [
                collective("all_gather_into_tensor", dtype, gathered, own_rows)
                for gathered, own_rows, dtype in shapes
            ]
            gathered, own_rows, dtype = shapes[0]
            rows.append(collective("reduce_scatter_tensor", dtype, own_rows, gathered))
            assert results["chosen partitioned collectives"] == rows


def test_the_kind_of_a_step_is_not_compiled_in(ranks: list[list[Rank]], is_ep: bool) -> None:
    for tp_ranks in ranks:
        for rank in tp_ranks:
            results = rank["shared", is_ep]
            for kind in ("replicated", "partitioned"):
                torch.testing.assert_close(results[f"compiled {kind}"], results[kind])
                collectives = results[f"{kind} collectives"]
                assert results[f"compiled {kind} collectives"] == collectives


def test_models_get_our_runner(ranks: list[list[Rank]]) -> None:
    classes = {result["class"] for row in ranks for rank in row for result in rank.values()}
    assert classes == {"PCPMoERunner"}


def test_every_rank_refuses_what_reads_more_than_rows(folder: Path) -> None:
    refusals = [torch.load(path) for path in folder.glob("*-refusals.pt")]
    assert len(refusals) == sum(int(world[0]) * int(world[2]) for world in WORLDS)
    for refusal in refusals:
        assert len(refusal) == 5
        for feature, message in refusal.items():
            assert message.startswith(
                f"Prefill context parallelism does not support {feature} (got experts: "
            )


@pytest.mark.parametrize("name", ["MoERunner", "SparseAttnIndexer"])
def test_refuses_another_plugins_layer(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(op_registry_oot, name, torch.nn.Module)
    with pytest.raises(RuntimeError, match=rf"{name}, which another .* replaced \(got Module\)"):
        register_layers(shares_experts=True)


def collective(name: str, dtype: torch.dtype, *shapes: tuple[int, ...]) -> str:
    """Return a collective as ranks write it down."""
    return " ".join([name, *(f"{list(shape)} {dtype}" for shape in shapes)])


def require_close(actual: torch.Tensor, wanted: torch.Tensor, layer: Layer) -> None:
    """Assert that rows are right, up to what the layer's type can hold."""
    assert actual.dtype == layer.dtype
    assert actual.shape == wanted.shape
    error = (actual.double() - wanted).abs().max() / wanted.abs().max()
    assert error < TOLERANCE[layer.dtype], f"off by {error:.1e} of the largest element"

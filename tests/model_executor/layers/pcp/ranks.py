# SPDX-License-Identifier: Apache-2.0
"""Ranks that run layers of experts through vLLM, and save what each gets.

    python -m tests.model_executor.layers.pcp.ranks FOLDER 2x1 3x1 2x2

Each PxTP is a set of processes, which runs every layer with and without expert parallelism.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from tests.e2e.collectives import OPERATIONS
from tests.model_executor.layers.pcp.oracle import (
    HIDDEN_SIZE,
    LAYERS,
    NUM_EXPERTS,
    NUM_ROWS,
    WIDTH,
    Layer,
    Weights,
    logits_of,
    make_rows,
    make_weights,
)
from vllm.config import DeviceConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.pcp.collectives import gather_together, reduce_scatter_rows
from vllm.distributed.pcp.step import REPLICATED, StepState, set_step_state
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe import FusedMoE, MoERunner, RoutedExperts
from vllm.model_executor.layers.pcp import moe_runner, register_layers
from vllm.plugins import load_general_plugins

PARTITIONED = StepState(is_partitioned=True)


class OwnExperts(RoutedExperts):
    """Experts of a model that loads them in a way of its own."""


# Layers that no rank may get, by what is wrong with them.
REFUSED: dict[str, dict[str, Any]] = {
    "zero experts": {
        "zero_expert_type": "identity",
        "e_score_correction_bias": torch.zeros(NUM_EXPERTS),
    },
    "experts chosen by token id": {"hash_indices_table": torch.zeros(10, 2, dtype=torch.int32)},
    "experts that are loaded as if TP ranks alone shared them": {"routed_experts_cls": OwnExperts},
    "data parallelism": {"dp_size": 2},
}

# Layers that are also run with kernels of GPUs' kind.
CHOOSING_LAYERS = ("plain", "bf16")


def record_collectives() -> list[str]:
    """Return a list that this rank's collectives over PCP are appended to: name, shapes, types."""
    recorded: list[str] = []
    group = parallel_state.get_pcp_group()
    of_pcp = (group.device_group, group.cpu_group)

    def watch(operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def call(*args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            if any(value in of_pcp for value in values if not isinstance(value, torch.Tensor)):
                tensors = [value for value in values if isinstance(value, torch.Tensor)]
                shapes = [f"{list(tensor.shape)} {tensor.dtype}" for tensor in tensors]
                recorded.append(" ".join([operation.__name__, *shapes]))
            return operation(*args, **kwargs)

        return call

    for name in OPERATIONS:
        setattr(dist, name, watch(getattr(dist, name)))
    return recorded


class Shared(torch.nn.Module):
    """This rank's part of a shared expert: TP ranks sum up to the whole.

    Attributes:
        num_rows: Of each call of any instance.
    """

    num_rows: ClassVar[list[int]] = []

    def __init__(self, weights: Weights, width: int) -> None:
        super().__init__()
        group = parallel_state.get_tp_group()
        part = slice(*(width * (group.rank_in_group + i) // group.world_size for i in (0, 1)))
        self.w1, self.w3 = weights["shared_w1"][0, part], weights["shared_w3"][0, part]
        self.w2 = weights["shared_w2"][0][:, part]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.num_rows.append(len(rows))
        return (torch.nn.functional.silu(rows @ self.w1.T) * (rows @ self.w3.T)) @ self.w2.T


class Gate(torch.nn.Module):
    """The router's matrix, for runners that apply it themselves."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        return logits_of(self.weights, rows), None


class Chooser:
    """A router for layers without groups and bias.

    Attributes:
        num_rows: Of each call.
    """

    def __init__(self, layer: Layer) -> None:
        self.top_k = layer.top_k
        self.num_rows: list[int] = []

    def select_experts(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_rows.append(len(hidden_states))
        weights, ids = router_logits.softmax(dim=-1).topk(self.top_k)
        return weights / weights.sum(dim=-1, keepdim=True), ids.to(torch.int32)


class ChosenExperts(torch.nn.Module):
    """Kernels that are told which experts to run, as those of GPUs are: every so manieth here."""

    is_monolithic = has_unpadded_output = False
    skip_forward_padding = True
    topk_indices_dtype = moe_kernel = None
    moe_quant_config = "none"

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.weights = weights
        self.own = range(dist.get_rank(), NUM_EXPERTS, dist.get_world_size())

    def apply(  # type: ignore[override]
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        output = torch.zeros_like(x)
        for expert in self.own:
            w1, w2, w3 = (self.weights[name][expert] for name in ("w1", "w2", "w3"))
            share = (topk_weights * (topk_ids == expert)).sum(dim=-1, keepdim=True)
            gated = torch.nn.functional.silu(x @ w1.T) * (x @ w3.T)
            output += (share * (gated @ w2.T)).to(x.dtype)
        return output


class LateSide:
    """A stream beside the current one, on which nothing has been written until it is joined.

    Attributes:
        num_tensors: Results of collectives that ran there.
    """

    def __init__(self) -> None:
        self.num_tensors = 0
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []

    def gather_together(
        self, *tensors: torch.Tensor, side: LateSide | None = None
    ) -> tuple[torch.Tensor, ...]:
        gathered = gather_together(*tensors)
        return gathered if side is None else tuple(map(self._hide, gathered))

    def reduce_scatter_rows(self, rows: torch.Tensor, side: LateSide | None = None) -> torch.Tensor:
        own = reduce_scatter_rows(rows)
        return own if side is None else self._hide(own)

    def join(self) -> None:
        for tensor, values in self._written:
            tensor.copy_(values)
        self._written.clear()

    def _hide(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_tensors += 1
        self._written.append((tensor, tensor.clone()))
        return tensor.zero_()


def make_runner(layer: Layer, weights: Weights) -> MoERunner:
    """Build a layer as models do, and load its weights as checkpoints are loaded."""
    runner = FusedMoE(
        num_experts=NUM_EXPERTS,
        top_k=layer.top_k,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=WIDTH,
        params_dtype=layer.dtype,
        use_grouped_topk=layer.num_groups is not None,
        num_expert_group=layer.num_groups,
        topk_group=layer.num_top_groups,
        scoring_func=layer.scoring,
        e_score_correction_bias=weights["bias"] if layer.has_bias else None,
        routed_scaling_factor=layer.scale,
        apply_routed_scale_to_output=True,
        gate=Gate(weights) if layer.has_gate else None,
        shared_experts=Shared(weights, layer.shared_width) if layer.shared_width else None,
        prefix="experts",
    )
    experts = runner.routed_experts
    for shard, name in (("w1", "w13_weight"), ("w2", "w2_weight"), ("w3", "w13_weight")):
        for expert in range(NUM_EXPERTS):
            parameter = getattr(experts, name)
            parameter.weight_loader(parameter, weights[shard][expert], name, shard, expert)
    experts.quant_method.process_weights_after_loading(experts)
    return runner


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values, not contiguous."""
    wide = torch.cat([tensor, tensor], dim=1)
    return wide[:, : tensor.shape[1]]


def run_layer(layer: Layer, config: VllmConfig, collectives: list[str]) -> dict[str, Any]:
    """Return what this rank gets in steps of both kinds, and the collectives of each step."""
    group = parallel_state.get_pcp_group()
    weights = make_weights(layer)
    runner: Any = make_runner(layer, weights)
    shared_rows = make_rows(layer, NUM_ROWS)
    first = group.rank_in_group * NUM_ROWS
    own_rows = make_rows(layer, group.world_size * NUM_ROWS)[first : first + NUM_ROWS]
    results: dict[str, Any] = {"class": type(runner).__qualname__}

    def run(
        name: str, state: StepState, rows: torch.Tensor, forward: Callable[..., Any] = runner
    ) -> None:
        set_step_state(state)
        logits = strided(logits_of(weights, rows))
        collectives.clear()
        Shared.num_rows.clear()
        with set_forward_context(None, config, num_tokens=len(rows)), torch.inference_mode():
            results[name] = forward(strided(rows) if state.is_partitioned else rows, logits)
        results[f"{name} collectives"] = list(collectives)
        results[f"{name} shared rows"] = list(Shared.num_rows)
        set_step_state(REPLICATED)

    run("replicated", REPLICATED, shared_rows.clone())
    run("partitioned", PARTITIONED, own_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_runner, "MIN_OVERLAPPED_ROWS", NUM_ROWS)
        late = runner._side = LateSide()
        for name in ("gather_together", "reduce_scatter_rows"):
            patch.setattr(moe_runner, name, getattr(late, name))
        run("overlapped", PARTITIONED, own_rows)
        results["tensors beside"] = late.num_tensors
    if layer.name in CHOOSING_LAYERS:
        runner.router = router = Chooser(layer)
        runner.routed_experts.quant_method = ChosenExperts(weights)
        for kind, state, rows in (
            ("replicated", REPLICATED, shared_rows.clone()),
            ("partitioned", PARTITIONED, own_rows.clone()),
        ):
            run(f"chosen {kind}", state, rows)
        results["rows chosen for"] = router.num_rows
        assert runner.router is router
        return results
    if layer.name == "shared":
        # One compilation, for the shapes of both kinds of step are the same here.
        compiled = torch.compile(runner, backend="eager", fullgraph=True)
        run("compiled replicated", REPLICATED, shared_rows.clone(), compiled)
        run("compiled partitioned", PARTITIONED, own_rows.clone(), compiled)
    return results


def make_config(*, is_ep: bool = False) -> VllmConfig:
    """Return a configuration for one layer: it takes the name of another one for a mistake."""
    parallel = ParallelConfig(enable_expert_parallel=is_ep)
    return VllmConfig(device_config=DeviceConfig("cpu"), parallel_config=parallel)


def refusal(options: dict[str, Any]) -> str:
    """Return what a layer is refused with, or nothing."""
    sizes: dict[str, Any] = {
        "num_experts": NUM_EXPERTS,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": WIDTH,
    }
    with set_current_vllm_config(make_config()):
        try:
            FusedMoE(top_k=2, prefix="experts", **sizes, **options)
        except NotImplementedError as error:
            return str(error)
    return ""


def run_rank(rank: int, pcp: int, tp: int, folder: Path) -> None:
    """Run every layer on one rank of P x TP."""
    load_general_plugins()
    torch.set_num_threads(1)
    os.environ["VLLM_DIST_IDENT"] = f"experts-{os.getppid()}-{pcp}x{tp}"
    with set_current_vllm_config(make_config()):
        parallel_state.init_distributed_environment(
            pcp * tp, rank, f"file://{folder}/store-{pcp}x{tp}", rank, "gloo"
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp, prefill_context_model_parallel_size=pcp
        )
    for _ in range(2):
        register_layers(shares_experts=True)
    collectives = record_collectives()
    refusals = {feature: refusal(options) for feature, options in REFUSED.items()}
    os.environ["VLLM_MOE_SKIP_PADDING"] = "1"
    refusals["leaving padding out of experts"] = refusal({})
    del os.environ["VLLM_MOE_SKIP_PADDING"]
    torch.save(refusals, folder / f"{pcp}x{tp}-{rank}-refusals.pt")
    results = {}
    for is_ep in (False, True):
        for layer in LAYERS:
            config = make_config(is_ep=is_ep)
            with set_current_vllm_config(config):
                results[layer.name, is_ep] = run_layer(layer, config, collectives)
    torch.save(results, folder / f"{pcp}x{tp}-{rank}.pt")
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def main(folder: Path, worlds: list[str]) -> None:
    """Run each set of ranks to its end, one after the other."""
    context = multiprocessing.get_context("fork")
    for world in worlds:
        pcp, tp = (int(size) for size in world.split("x"))
        ranks = [
            context.Process(target=run_rank, args=(rank, pcp, tp, folder))
            for rank in range(pcp * tp)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(f"{world}: ranks ended with {[process.exitcode for process in ranks]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

# SPDX-License-Identifier: Apache-2.0
"""Experts that P x TP ranks share, by whole experts or by a part of the width of each.

In a partitioned step each rank has rows of its own, and chooses their experts. The rows of all
ranks are gathered, each rank computes what its experts add to them, and the sums go back to the
rows' owners. In any other step all ranks have the same rows, so nothing is gathered: one all-reduce
adds up the shares.

Shared experts, and the reduction over TP that follows, stay where the stock runner has them, but
for long partitioned steps. There both collectives run beside shared experts, which need nothing
from other ranks::

    current stream   | shared, first half of rows | routed experts | shared, second half |
    side stream      | gather                     |                | reduce-scatter      |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

import vllm.envs as envs
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_pcp_group
from vllm.distributed.pcp.all_reduce import all_reduce_rows
from vllm.distributed.pcp.collectives import gather_together, reduce_scatter_rows
from vllm.distributed.pcp.side_stream import side_stream
from vllm.distributed.pcp.step import get_step_state
from vllm.model_executor.layers.fused_moe import MoERunner, RoutedExperts
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.model_executor.layers.quantization.bitsandbytes import BitsAndBytesMoEMethod
from vllm.model_executor.layers.quantization.moe_wna16 import MoeWNA16Method
from vllm.v1.worker.gpu.pcp.layout import max_local_tokens

# Half of so many rows still fill a GPU.
MIN_OVERLAPPED_ROWS = 1024


class ChosenExperts:
    """Stands in for a router where its choice has been made.

    Attributes:
        weights: ``[num_rows, top_k]``.
        ids: ``[num_rows, top_k]``.
    """

    def __init__(self, weights: torch.Tensor, ids: torch.Tensor) -> None:
        self.weights = weights
        self.ids = ids

    def select_experts(self, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and ids, whatever the rows."""
        return self.weights, self.ids


class PCPMoERunner(MoERunner):
    """Over the stock runner: what goes to the experts, and how their output is combined.

    Raises:
        NotImplementedError: The layer reads per-row inputs beside the rows, or its weights are not
            sharded over P. Configurations that say so are refused earlier, by
            ``vllm.plugins.pcp.admission``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.moe_config
        assert config.pcp_size == get_pcp_group().world_size
        for feature, is_used in self._refused().items():
            if is_used:
                from vllm.plugins.pcp.admission import refusal

                parts = (self.router, self.routed_experts, self._quant_method)
                kinds = ", ".join(type(part).__name__ for part in parts)
                raise NotImplementedError(refusal(feature, f"{self.layer_name}: {kinds}"))
        self._side = side_stream(get_pcp_group().device)
        self._chosen: ChosenExperts | None = None
        # Where collectives run beside shared experts, the rows of the second half.
        self._later_rows: torch.Tensor | None = None
        scheduler = get_current_vllm_config().scheduler_config
        # Kernels size their memory by it. P ranks may have more rows than a batch has tokens:
        # some tokens are computed on all of them, and those with fewer rows are padded.
        config.max_num_tokens = config.pcp_size * max_local_tokens(
            scheduler.max_num_batched_tokens, scheduler.max_num_seqs, config.pcp_size
        )

    def _refused(self) -> dict[str, bool]:
        parallel = self.moe_config.moe_parallel_config
        router, method = self.router, self._quant_method
        takes_token_ids = (
            isinstance(router, FusedTopKBiasRouter) and router._hash_indices_table is not None
        )
        return {
            "data parallelism": parallel.dp_size * parallel.sp_size > 1,
            "expert parallelism load balancing": parallel.enable_eplb,
            "zero experts": isinstance(router, ZeroExpertRouter),
            "experts chosen by token id": takes_token_ids,
            "leaving padding out of experts": envs.VLLM_MOE_SKIP_PADDING,
            "experts that are loaded as if TP ranks alone shared them": (
                type(self.routed_experts) is not RoutedExperts
                or isinstance(method, BitsAndBytesMoEMethod | MoeWNA16Method)
            ),
        }

    def _select_forward(self) -> Callable[..., Any]:
        # On CPUs too, where the stock runner lets torch.compile see through the layer: the kind of
        # the step must not be compiled in.
        if self.shared_experts is None:
            return torch.ops.vllm.moe_forward
        return torch.ops.vllm.moe_forward_shared

    def _overlaps(self, rows: torch.Tensor) -> bool:
        """Say whether collectives of a step with so many rows run beside shared experts."""
        shared = self.shared_experts
        if shared is None or rows.shape[0] < MIN_OVERLAPPED_ROWS:
            return False
        half = rows[: rows.shape[0] // 2]
        order = shared._determine_shared_experts_order(half)
        return get_step_state().is_partitioned and order is SharedExpertsOrder.NO_OVERLAP

    def _maybe_dispatch(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows that the experts get, and logits.

        Args:
            hidden_states: ``[num_rows, hidden_dim]``, of any strides.
            router_logits: ``[num_rows, num_experts]``, of any type and strides.

        Collectives: in a partitioned step, those of ``gather_together``; it may be that shared
        experts have to be applied before the result is there.
        """
        if not get_step_state().is_partitioned:
            return hidden_states, router_logits
        side = self._side if self._overlaps(hidden_states) else None
        if self.routed_experts.quant_method.is_monolithic:
            # Its kernels choose.
            hidden_states, router_logits = gather_together(hidden_states, router_logits, side=side)
            return hidden_states, router_logits
        weights, ids = self.router.select_experts(
            hidden_states=hidden_states,
            router_logits=router_logits,
            topk_indices_dtype=self._quant_method.topk_indices_dtype,
        )
        hidden_states, *chosen = gather_together(hidden_states, weights, ids, side=side)
        self._chosen = ChosenExperts(*chosen)
        return hidden_states, router_logits

    def _apply_quant_method(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Run experts on the dispatched rows, with those chosen at dispatch."""
        if self._chosen is None:
            return super()._apply_quant_method(hidden_states, router_logits, *args, **kwargs)
        router: Any = self.router
        self.router, self._chosen = cast(Any, self._chosen), None
        try:
            return super()._apply_quant_method(hidden_states, router_logits, *args, **kwargs)
        finally:
            self.router = router

    def _maybe_apply_shared_experts(
        self, shared_experts_input: torch.Tensor | None, order: SharedExpertsOrder
    ) -> None:
        """Apply shared experts, to the first half of the rows if collectives run beside them.

        Args:
            shared_experts_input: ``[num_rows, hidden_dim]`` of this rank's rows, or None.
            order: The place where the stock runner calls this; they are applied at one of them.
        """
        rows = shared_experts_input
        if order is not SharedExpertsOrder.NO_OVERLAP or rows is None or not self._overlaps(rows):
            super()._maybe_apply_shared_experts(rows, order)
            return
        num_rows = rows.shape[0] // 2
        self._later_rows = rows[num_rows:]
        super()._maybe_apply_shared_experts(rows[:num_rows], order)
        self._side.join()

    def _maybe_combine(
        self, shared_output: torch.Tensor | None, hidden_states: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's rows of the routed output, behind that of shared experts if any.

        Args:
            shared_output: ``[num_rows, hidden_dim]`` of this rank's rows, or of their first half,
                or None.
            hidden_states: What this rank's experts add to each of the dispatched rows.

        Collectives: one reduce_scatter in a partitioned step, else one all_reduce.
        """
        assert not self._fused_output_is_reduced
        if self._later_rows is not None:
            rows, self._later_rows = self._later_rows, None
            assert self.shared_experts is not None
            assert shared_output is not None
            routed = reduce_scatter_rows(hidden_states, self._side)
            super()._maybe_apply_shared_experts(rows, SharedExpertsOrder.NO_OVERLAP)
            shared_output = torch.cat((shared_output, self.shared_experts.output))
            self._side.join()
            return shared_output, routed
        combine = reduce_scatter_rows if get_step_state().is_partitioned else all_reduce_rows
        routed = combine(hidden_states)
        return routed if shared_output is None else (shared_output, routed)

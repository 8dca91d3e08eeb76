# SPDX-License-Identifier: Apache-2.0
"""Experts that P x TP ranks share, by whole experts or by a part of the width of each.

In a partitioned step each rank has rows of its own: those of all ranks are gathered, each rank
computes what its experts add to all of them, and the sums go back to the rows' owners. In any other
step all ranks have the same rows, so nothing is gathered: one all-reduce adds up the shares.

Shared experts, and the reduction over TP that follows, stay where the stock runner has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import vllm.envs as envs
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_pcp_group
from vllm.distributed.pcp.collectives import (
    all_reduce_rows,
    gather_together,
    reduce_scatter_rows,
)
from vllm.distributed.pcp.step import get_step_state
from vllm.model_executor.layers.fused_moe import MoERunner, RoutedExperts
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
from vllm.model_executor.layers.quantization.bitsandbytes import BitsAndBytesMoEMethod
from vllm.model_executor.layers.quantization.moe_wna16 import MoeWNA16Method
from vllm.v1.worker.gpu.pcp.layout import max_local_tokens


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
                raise NotImplementedError(
                    f"Prefill context parallelism does not support {feature} (got "
                    f"{self.layer_name}: {type(self.router).__name__}, "
                    f"{type(self.routed_experts).__name__}, {type(self._quant_method).__name__}). "
                    "Do without, or set --prefill-context-parallel-size 1."
                )
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
            "data or sequence parallelism of experts": parallel.dp_size * parallel.sp_size > 1,
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

    def _maybe_dispatch(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows that the experts get, and their logits.

        Args:
            hidden_states: ``[num_rows, hidden_dim]``, of any strides.
            router_logits: ``[num_rows, num_experts]``, of any type and strides.

        Collectives: in a partitioned step, those of ``gather_together``.
        """
        if get_step_state().is_partitioned:
            hidden_states, router_logits = gather_together(hidden_states, router_logits)
        return hidden_states, router_logits

    def _maybe_combine(
        self, shared_output: torch.Tensor | None, hidden_states: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's rows of the routed output, behind that of shared experts if any.

        Args:
            shared_output: ``[num_rows, hidden_dim]`` of this rank's rows, or None.
            hidden_states: What this rank's experts add to each of the dispatched rows.

        Collectives: one reduce_scatter in a partitioned step, else one all_reduce.
        """
        assert not self._fused_output_is_reduced
        combine = reduce_scatter_rows if get_step_state().is_partitioned else all_reduce_rows
        routed = combine(hidden_states)
        return routed if shared_output is None else (shared_output, routed)

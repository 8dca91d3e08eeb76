# SPDX-License-Identifier: Apache-2.0
"""Layers for prefill context parallelism.

moe_runner           experts that P x TP ranks share
replicated_experts   experts that TP ranks alone share
sparse_attn_indexer  the indexer of sparse MLA
shared_selection     how it selects from a cache that ranks share
"""

from typing import Any

from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer


def register_layers(*, shares_experts: bool) -> None:
    """Put our layers in place of vLLM's, in this process; ahead of building the model.

    Does nothing the second time; experts that are shared once are shared for good.

    Args:
        shares_experts: Whether P x TP ranks share the experts of a layer. If TP ranks alone do,
            vLLM's own layer is the one.

    Raises:
        RuntimeError: Something else has taken a place.
    """
    from vllm.model_executor.layers.pcp.moe_runner import PCPMoERunner
    from vllm.model_executor.layers.pcp.sparse_attn_indexer import PCPSparseAttnIndexer

    layers: list[tuple[Any, Any]] = [(SparseAttnIndexer, PCPSparseAttnIndexer)]
    if shares_experts:
        layers.append((MoERunner, PCPMoERunner))
    for stock, ours in layers:
        name = stock.__name__
        if name not in op_registry_oot:
            stock.register_oot(ours)
        elif op_registry_oot[name] is not ours:
            raise RuntimeError(
                f"Prefill context parallelism replaces {name}, which another plugin has replaced "
                f"(got {op_registry_oot[name].__qualname__}). Uninstall that plugin, or set "
                "--prefill-context-parallel-size 1."
            )

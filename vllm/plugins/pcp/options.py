# SPDX-License-Identifier: Apache-2.0
"""What ``--additional-config`` says to prefill context parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Values of each option; the first one is the default.
# "pcp_kv_exchange": how a partitioned step brings new KV to all ranks.
KV_EXCHANGES = ("gather", "peer")
# "pcp_experts": whether P x TP ranks share the experts of a layer, or TP ranks alone do.
EXPERT_PLACEMENTS = ("sharded", "replicated")
# "pcp_last_layer": which rows of a partitioned step it computes, apart from their KV.
LAST_LAYERS = ("all", "sampled")


def kv_exchange(vllm_config: VllmConfig) -> str:
    """Return one of ``KV_EXCHANGES``, or what else was asked for."""
    return _chosen(vllm_config, "pcp_kv_exchange", KV_EXCHANGES)


def expert_placement(vllm_config: VllmConfig) -> str:
    """Return one of ``EXPERT_PLACEMENTS``, or what else was asked for."""
    return _chosen(vllm_config, "pcp_experts", EXPERT_PLACEMENTS)


def replicates_experts(vllm_config: VllmConfig) -> bool:
    """Say whether each PCP rank has all experts, or its TP rank's share of them."""
    return expert_placement(vllm_config) == "replicated"


def last_layer(vllm_config: VllmConfig) -> str:
    """Return one of ``LAST_LAYERS``, or what else was asked for."""
    return _chosen(vllm_config, "pcp_last_layer", LAST_LAYERS)


def _chosen(vllm_config: VllmConfig, name: str, values: Sequence[str]) -> str:
    options = vllm_config.additional_config
    chosen = options.get(name) if isinstance(options, dict) else None
    return values[0] if chosen is None else str(chosen)

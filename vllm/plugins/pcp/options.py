# SPDX-License-Identifier: Apache-2.0
"""What ``--additional-config`` says to prefill context parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KV_EXCHANGE, EXPERTS, LAST_LAYER = "pcp_kv_exchange", "pcp_experts", "pcp_last_layer"
# Values of each option, the default first: how a partitioned step brings new KV to all ranks, by
# copies between their caches ("auto": where they can be reached) or a gather; whether P x TP ranks
# share the experts of a layer or TP ranks alone do; and which rows of a partitioned step the last
# layer computes, apart from their KV ("auto": those that are sampled from, where it can).
OPTIONS = {
    KV_EXCHANGE: ("auto", "peer", "gather"),
    EXPERTS: ("sharded", "replicated"),
    LAST_LAYER: ("auto", "all"),
}
# What begins so, whatever it goes on with and in capitals too, is meant for these.
_PREFIX = "pcp"


def kv_exchange(vllm_config: VllmConfig) -> str:
    """Return how new KV comes to all ranks."""
    return _value(vllm_config, KV_EXCHANGE)


def replicates_experts(vllm_config: VllmConfig) -> bool:
    """Say whether each PCP rank has all experts, or its TP rank's share of them."""
    return _value(vllm_config, EXPERTS) == "replicated"


def samples_last_layer(vllm_config: VllmConfig) -> bool:
    """Say whether the last layer may leave out the rows that are not sampled from."""
    return _value(vllm_config, LAST_LAYER) != "all"


def unknown_options(vllm_config: VllmConfig) -> dict[str, object]:
    """Return the options that there are not, or that have another value."""
    return {
        name: value
        for name, value in _chosen(vllm_config).items()
        if value not in OPTIONS.get(name, ())
    }


def _value(vllm_config: VllmConfig, option: str) -> str:
    return str(_chosen(vllm_config).get(option, OPTIONS[option][0]))


def _chosen(vllm_config: VllmConfig) -> dict[str, object]:
    config = vllm_config.additional_config
    options = config if isinstance(config, dict) else {}
    return {name: value for name, value in options.items() if str(name).lower().startswith(_PREFIX)}

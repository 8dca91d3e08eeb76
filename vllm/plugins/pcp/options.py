# SPDX-License-Identifier: Apache-2.0
"""What ``--additional-config`` says to prefill context parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Values of "pcp_kv_exchange": how a partitioned step brings new KV to all ranks. The first one is
# the default.
KV_EXCHANGES = ("gather", "peer")


def kv_exchange(vllm_config: VllmConfig) -> str:
    """Return one of ``KV_EXCHANGES``, or what else was asked for."""
    options = vllm_config.additional_config
    chosen = options.get("pcp_kv_exchange") if isinstance(options, dict) else None
    return KV_EXCHANGES[0] if chosen is None else str(chosen)

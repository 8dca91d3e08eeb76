# SPDX-License-Identifier: Apache-2.0
"""The executor that shows the engine core a configuration without prefill context parallelism."""

from __future__ import annotations

import copy

from vllm.config import ParallelConfig
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig


def scheduler_view(parallel_config: ParallelConfig) -> ParallelConfig:
    """Return a shallow copy in which the KV cache is sharded by DCP alone.

    vLLM 0.25.1 multiplies block sizes, hashes and capacity by PCP x DCP. PCP replicates the KV
    cache, so the scheduler and everything around it must see a PCP size of 1.
    """
    view = copy.copy(parallel_config)
    view.prefill_context_parallel_size = 1
    return view


class PCPMultiprocExecutor(MultiprocExecutor):
    """Multiprocessing executor for P > 1.

    The workers are started with the real configuration. The engine core, which shares
    ``vllm_config`` with its executor, goes on with the scheduler's view; the executor keeps the
    real ``parallel_config`` for its ranks.
    """

    def _post_init_executor(self) -> None:
        super()._post_init_executor()
        self.vllm_config.parallel_config = scheduler_view(self.parallel_config)

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Hand the KV cache layout to the workers, once sure that it was sized with DCP alone."""
        pcp_size = self.vllm_config.parallel_config.prefill_context_parallel_size
        # With any other value block sizes are multiplied by P, and prompts longer than a block go
        # wrong silently.
        assert pcp_size == 1, f"the engine core sees prefill_context_parallel_size={pcp_size}"
        super().initialize_from_config(kv_cache_configs)

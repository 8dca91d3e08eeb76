# SPDX-License-Identifier: Apache-2.0
"""The executor that shows the engine core a configuration without prefill context parallelism."""

from __future__ import annotations

import copy
import dataclasses
from array import array
from typing import TYPE_CHECKING, Any, cast

from vllm.config import ParallelConfig
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput


def scheduler_view(parallel_config: ParallelConfig) -> ParallelConfig:
    """Return a shallow copy in which the KV cache is sharded by DCP alone.

    vLLM 0.25.1 multiplies block sizes, hashes and capacity by PCP x DCP. PCP replicates the KV
    cache, so the scheduler and everything around it must see a PCP size of 1.
    """
    view = copy.copy(parallel_config)
    view.prefill_context_parallel_size = 1
    return view


def with_packed_tokens(scheduler_output: SchedulerOutput) -> SchedulerOutput:
    """Return a shallow copy in which new requests' tokens are arrays of 32-bit integers.

    A list is pickled, and unpickled by every rank, token by token, while GPUs wait; and a fresh
    prompt stands there twice.
    """
    packed = copy.copy(scheduler_output)
    packed.scheduled_new_reqs = [_pack(request) for request in packed.scheduled_new_reqs]
    return packed


def _pack(request: NewRequestData) -> NewRequestData:
    prompt, prefill = request.prompt_token_ids, request.prefill_token_ids
    packed_prompt = _to_array(prompt)
    packed_prefill = packed_prompt if prefill == prompt else _to_array(prefill)
    return dataclasses.replace(
        request, prompt_token_ids=packed_prompt, prefill_token_ids=packed_prefill
    )


def _to_array(tokens: list[int] | None) -> list[int] | None:
    # Not numpy's: what travels beside the pickle is a view of a buffer that the next message
    # overwrites.
    if tokens is None:
        return None
    try:
        # CPython converts to unsigned integers in fewer steps than to signed ones.
        packed = array("I", tokens)
    except OverflowError:
        packed = array("i", tokens)
    return cast("list[int]", packed)


class PCPMultiprocExecutor(MultiprocExecutor):
    """Multiprocessing executor for P > 1.

    The workers are started with the real configuration. The engine core, which shares
    ``vllm_config`` with its executor, goes on with the scheduler's view; the executor keeps the
    real ``parallel_config`` for its ranks.
    """

    def _post_init_executor(self) -> None:
        super()._post_init_executor()
        self.vllm_config.parallel_config = scheduler_view(self.parallel_config)

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Have the workers run a step."""
        return super().execute_model(with_packed_tokens(scheduler_output), non_block)

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Hand the KV cache layout to the workers, once sure that it was sized with DCP alone."""
        pcp_size = self.vllm_config.parallel_config.prefill_context_parallel_size
        # With any other value block sizes are multiplied by P, and prompts longer than a block go
        # wrong silently.
        assert pcp_size == 1, f"the engine core sees prefill_context_parallel_size={pcp_size}"
        super().initialize_from_config(kv_cache_configs)

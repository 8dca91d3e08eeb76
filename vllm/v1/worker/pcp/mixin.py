# SPDX-License-Identifier: Apache-2.0
"""What makes a stock worker one rank of prefill context parallelism."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import ensure_kv_transfer_initialized
from vllm.distributed.pcp.all_reduce import init_direct_all_reduce
from vllm.distributed.pcp.groups import init_dcp_group
from vllm.model_executor.layers.pcp import register_layers
from vllm.plugins.pcp.options import replicates_experts
from vllm.plugins.pcp.seams import EXPERT_SEAMS, install
from vllm.v1.attention.backends.pcp import register_backends
from vllm.v1.executor.pcp import scheduler_view
from vllm.v1.worker.gpu.pcp.model_runner import make_pcp_runner

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.worker_base import CompilationTimes

    _WorkerBase = Worker
else:
    _WorkerBase = object


class PCPWorkerMixin(_WorkerBase):
    """Over a stock worker: our backends and layers in the registries, our runner in place."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        # Backends are looked up, and the answer cached, when the model is built.
        register_backends()
        replicates = replicates_experts(vllm_config)
        register_layers(shares_experts=not replicates)
        if replicates:
            install(EXPERT_SEAMS)
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        """Initialise groups and build the stock runner, then make it a PCP runner.

        Collectives: those of ``init_dcp_group`` and, if ranks share experts, those of
        ``init_direct_all_reduce``.
        """
        super().init_device()
        init_dcp_group()
        if self.model_config.is_moe and not replicates_experts(self.vllm_config):
            assert self.device is not None
            init_direct_all_reduce(self.device)
        self.pcp_runner = make_pcp_runner(self.model_runner)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache; ahead of it create the KV connector, if there is one.

        The connector counts blocks as its other half in the engine core does: by D alone. The stock
        worker then finds it, and makes no other.

        Collectives: with a connector, a broadcast on the TP group.
        """
        view = copy.copy(self.vllm_config)
        view.parallel_config = scheduler_view(view.parallel_config)
        ensure_kv_transfer_initialized(view, kv_cache_config)
        super().initialize_from_config(kv_cache_config)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Warm up as usual, then the collectives of a partitioned step.

        Collectives: those of ``PCPRunnerMixin.warm_up_gather``.
        """
        times: CompilationTimes = super().compile_or_warm_up_model()
        self.pcp_runner.warm_up_gather()
        return times

    def pcp_stats(self) -> dict[str, int]:
        """Return this rank's counters (``PCPStats``), for ``LLM.collective_rpc("pcp_stats")``."""
        return self.pcp_runner.pcp.snapshot()

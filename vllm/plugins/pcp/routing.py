# SPDX-License-Identifier: Apache-2.0
"""What a configuration with P > 1 is turned into."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Worker that the platform chose -> ours over it.
WORKERS = {
    "vllm.v1.worker.gpu_worker.Worker": "vllm.v1.worker.pcp.gpu_worker.PCPWorker",
    "vllm.v1.worker.cpu_worker.CPUWorker": "vllm.v1.worker.pcp.cpu_worker.PCPCPUWorker",
}
EXECUTOR = "vllm.v1.executor.pcp.PCPMultiprocExecutor"
OMP_BIND_ENV = "VLLM_CPU_OMP_THREADS_BIND"

_chosen_binding = "auto"


def wrap_vllm_config_post_init(
    original: Callable[[VllmConfig], None],
) -> Callable[[VllmConfig], None]:
    """Let a configuration with P > 1 pass vLLM's validation, ours, and be routed to our classes.

    vLLM validates it as if P were 1. The engine core validates its configuration a second time; it
    is at the scheduler's view by then, P = 1, and its classes stay routed.
    """

    @functools.wraps(original)
    def __post_init__(self: VllmConfig) -> None:
        pcp_world_size = self.parallel_config.prefill_context_parallel_size
        if pcp_world_size == 1:
            return original(self)
        from vllm.plugins.pcp.admission import validate_config

        # Ahead of vLLM, which would refuse or override some settings for reasons that do not
        # mention P, and behind it, when its defaults are known.
        validate_config(self)
        # For this process and the ones it starts: the engine core no longer sees P.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        self.parallel_config.prefill_context_parallel_size = 1
        try:
            original(self)
        finally:
            self.parallel_config.prefill_context_parallel_size = pcp_world_size
        validate_config(self)
        route(self)

    return __post_init__


def route(vllm_config: VllmConfig) -> None:
    """Name our worker and executor in an admitted configuration."""
    parallel_config = vllm_config.parallel_config
    parallel_config.worker_cls = pcp_worker(parallel_config.worker_cls)
    parallel_config.distributed_executor_backend = EXECUTOR
    # Fusions of rotary embedding and cache write pass by ``do_kv_cache_update`` and its gather.
    vllm_config.compilation_config.pass_config.fuse_rope_kvcache = False
    vllm_config.compilation_config.pass_config.fuse_rope_kvcache_cat_mla = False

    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        bind_cpu_ranks(parallel_config.world_size)


def pcp_worker(worker_cls: str) -> str:
    """Return our worker over a stock one, or a class that the user derived from ours.

    Raises:
        ValueError: it is neither.
    """
    if worker_cls in WORKERS:
        return WORKERS[worker_cls]
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.worker.pcp.mixin import PCPWorkerMixin

    if not issubclass(resolve_obj_by_qualname(worker_cls), PCPWorkerMixin):
        raise ValueError(
            "Prefill context parallelism does not support a worker class of its own kind (got "
            f"worker_cls={worker_cls}). Derive it from {' or '.join(WORKERS.values())}, leave "
            "--worker-cls out, or set --prefill-context-parallel-size 1."
        )
    return worker_cls


def bind_cpu_ranks(world_size: int) -> None:
    """Give each rank its share of the cores, where the user named none.

    vLLM's automatic binding wants a NUMA node for each rank.
    """
    global _chosen_binding
    # What an earlier engine of this process was given is not the user's word.
    if os.environ.get(OMP_BIND_ENV, "auto") not in ("auto", _chosen_binding):
        return
    from vllm.utils.cpu_resource_utils import get_visible_memory_node

    if len(get_visible_memory_node()) >= world_size:
        _chosen_binding = "auto"
    else:
        cores = sorted(os.sched_getaffinity(0))
        share = len(cores) // world_size
        ranks = (cores[rank * share : (rank + 1) * share] for rank in range(world_size))
        lists = "|".join(",".join(map(str, rank)) for rank in ranks)
        _chosen_binding = lists if share else "nobind"
    os.environ[OMP_BIND_ENV] = _chosen_binding

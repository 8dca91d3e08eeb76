# SPDX-License-Identifier: Apache-2.0
"""What a configuration with P > 1 is turned into."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

# Worker that the platform chose -> ours over it.
WORKERS = {
    "vllm.v1.worker.gpu_worker.Worker": "vllm.v1.worker.pcp.gpu_worker.PCPWorker",
    "vllm.v1.worker.cpu_worker.CPUWorker": "vllm.v1.worker.pcp.cpu_worker.PCPCPUWorker",
}
EXECUTOR = "vllm.v1.executor.pcp.PCPMultiprocExecutor"
INDEXER_OP = "vllm::pcp_sparse_attn_indexer"
OMP_BIND_ENV = "VLLM_CPU_OMP_THREADS_BIND"

# What vLLM is shown in place of D. It takes DCP for a part of TP, and compares D with TP alone and
# with the number of KV heads.
WITHOUT_DCP: Mapping[str, Any] = {"decode_context_parallel_size": 1, "dcp_comm_backend": "ag_rs"}
# What was asked for, while a configuration is created from arguments.
_asked_dcp: ContextVar[Mapping[str, Any] | None] = ContextVar("_asked_dcp", default=None)

# Name -> the value set for the last engine with P > 1, and the one before.
_environment: dict[str, tuple[str, str | None]] = {}


def wrap_create_engine_config(original: Callable[..., VllmConfig]) -> Callable[..., VllmConfig]:
    """Keep D from vLLM's validation of arguments; ``wrap_vllm_config_post_init`` puts it back."""

    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        if self.prefill_context_parallel_size == 1:
            return original(self, *args, **kwargs)
        asked = {name: getattr(self, name) for name in WITHOUT_DCP}
        token = _asked_dcp.set(asked)
        try:
            with showing(self, WITHOUT_DCP):
                return original(self, *args, **kwargs)
        finally:
            _asked_dcp.reset(token)

    return create_engine_config


def wrap_vllm_config_post_init(
    original: Callable[[VllmConfig], None],
) -> Callable[[VllmConfig], None]:
    """Let a configuration with P > 1 pass vLLM's validation, ours, and be routed to our classes.

    vLLM validates it as if P and D were 1. The engine core validates its configuration a second
    time; it is at the scheduler's view by then, P = 1, and its classes stay routed.
    """

    @functools.wraps(original)
    def __post_init__(self: VllmConfig) -> None:
        parallel_config = self.parallel_config
        if parallel_config.prefill_context_parallel_size == 1:
            if _environment and starts_another_engine(self):
                undo_environment()
            if parallel_config.distributed_executor_backend != EXECUTOR:
                return original(self)
            with showing(parallel_config, WITHOUT_DCP):
                return original(self)
        from vllm import envs
        from vllm.plugins.pcp.admission import validate_config

        undo_environment()
        for name, value in (_asked_dcp.get() or {}).items():
            setattr(parallel_config, name, value)
        # Ahead of vLLM, which would refuse or override some settings for reasons that do not
        # mention P, and behind it, when its defaults are known.
        validate_config(self)
        # An engine that ran in this process has left vLLM with a copy of the environment.
        envs.disable_envs_cache()
        # For this process and the ones it starts: the engine core no longer sees P.
        set_environment("VLLM_USE_V2_MODEL_RUNNER", "1")
        with showing(parallel_config, {**WITHOUT_DCP, "prefill_context_parallel_size": 1}):
            original(self)
        validate_config(self)
        route(self)

    return __post_init__


@contextlib.contextmanager
def showing(config: object, values: Mapping[str, Any]) -> Iterator[None]:
    """Give attributes other values for a while."""
    found = {name: getattr(config, name) for name in values}
    for name, value in values.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in found.items():
            setattr(config, name, value)


def route(vllm_config: VllmConfig) -> None:
    """Name our worker and executor in an admitted configuration."""
    parallel_config = vllm_config.parallel_config
    parallel_config.worker_cls = pcp_worker(parallel_config.worker_cls)
    parallel_config.distributed_executor_backend = EXECUTOR
    # Fusions of rotary embedding and cache write pass by ``do_kv_cache_update`` and its gather.
    compilation_config = vllm_config.compilation_config
    compilation_config.pass_config.fuse_rope_kvcache = False
    compilation_config.pass_config.fuse_rope_kvcache_cat_mla = False
    # Graphs are split at our indexer as at the one in whose place it is.
    splitting_ops = compilation_config.splitting_ops
    if splitting_ops and INDEXER_OP not in splitting_ops:
        splitting_ops.append(INDEXER_OP)

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

    vLLM's automatic binding wants a NUMA node for each rank. Like it, use one thread of a core,
    where there are cores enough.
    """
    if os.environ.get(OMP_BIND_ENV, "auto") != "auto":
        return
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_visible_memory_node

    if len(get_visible_memory_node()) >= world_size:
        return
    threads = sorted(get_allowed_cpu_list(), key=lambda cpu: (cpu.numa_node, cpu.physical_core))
    cores = list({(cpu.numa_node, cpu.physical_core): cpu for cpu in threads}.values())
    cpus = cores if len(cores) >= world_size else threads
    share = len(cpus) // world_size
    ranks = (cpus[rank * share : (rank + 1) * share] for rank in range(world_size))
    lists = "|".join(",".join(str(cpu.id) for cpu in rank) for rank in ranks)
    set_environment(OMP_BIND_ENV, lists if share else "nobind")


def starts_another_engine(vllm_config: VllmConfig) -> bool:
    """Tell a new engine with P = 1 from configurations that are made beside one with P > 1.

    Its engine core validates again with the scheduler's view, and vLLM makes some without a model.
    """
    if vllm_config.parallel_config.distributed_executor_backend == EXECUTOR:
        return False
    # Declared as always there; configurations for parts of vLLM have none.
    model_config: ModelConfig | None = vllm_config.model_config
    return model_config is not None


def set_environment(name: str, value: str) -> None:
    """Set a variable for the processes of an engine, to be undone for the next one."""
    found = _environment[name][1] if name in _environment else os.environ.get(name)
    _environment[name] = (value, found)
    os.environ[name] = value


def undo_environment() -> None:
    """Put back what ``set_environment`` found, unless somebody has set it anew since."""
    while _environment:
        name, (value, found) = _environment.popitem()
        if os.environ.get(name) != value:
            continue
        if found is None:
            del os.environ[name]
        else:
            os.environ[name] = found

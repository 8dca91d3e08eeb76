# SPDX-License-Identifier: Apache-2.0
"""What runs with ``--prefill-context-parallel-size`` above 1, and what is refused.

``RULES`` lists every refusal that a configuration shows; whatever no rule names is admitted. A
feature becomes supported by deleting its rule. The table in ``docs/support.md`` is
``refusal_table()``, and a test keeps the two equal.

Everything is decided from the configuration, in the process that parses it, so that a
refusal costs no model load and no GPU memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from vllm.plugins.pcp.options import (
    OPTIONS,
    kv_exchange,
    replicates_experts,
    unknown_options,
)
from vllm.plugins.pcp.routing import EXECUTOR, WORKERS
from vllm.v1.attention.backends.pcp import BACKENDS, DCP_BACKENDS

if TYPE_CHECKING:
    from vllm.config import CUDAGraphMode, ModelConfig, VllmConfig

# Returns the offending setting as "name=value", or None if all is well. A setting that
# vLLM has yet to resolve is well.
Received: TypeAlias = Callable[["VllmConfig"], str | None]

MAX_PCP_WORLD_SIZE = 64
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")

# Decoders whose prompt attends to itself in both directions; no setting says so.
_PREFIX_LM = ("HrmTextForCausalLM",)

# Model classes that write the KV cache in a kernel of their own, and the package of those
# that --model-class-overrides can put in place of a generic class.
_FUSED_CACHE_WRITE = (
    "DeepseekV4ForCausalLM",
    "MiniMaxM3SparseForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration",
)
_FUSED_CACHE_WRITE_PACKAGE = "vllm.models."

# Model classes and quantizations that load experts as if TP ranks alone shared them.
_EXPERTS_OF_TP = ("AriaForConditionalGeneration", "DbrxForCausalLM")
_QUANTIZED_EXPERTS_OF_TP = ("bitsandbytes", "moe_wna16")

# KV connectors of vLLM that offload to CPU memory, and the offloading that the first one does.
_OFFLOADING_CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector")
_OFFLOADING_SPEC = "CPUOffloadingSpec"

# Workers that take a GPU each. One from elsewhere may place its ranks as it likes.
_ONE_GPU_EACH = frozenset({"auto", *WORKERS, *WORKERS.values()})


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that does not run with prefill context parallelism.

    Attributes:
        feature: The name users know; completes "does not support ...".
        received: Finds the feature in a configuration.
        reason: Why it is refused.
        way_out: What to change, an imperative clause without a full stop.
        status: Whether support is planned.
        error: NotImplementedError for what could run one day, ValueError for what cannot.
    """

    feature: str
    received: Received
    reason: str
    way_out: str
    status: Literal["planned", "refused"] = "refused"
    error: type[NotImplementedError] | type[ValueError] = NotImplementedError

    def sentence(self, received: str) -> str:
        """Return what the user reads when ``received`` is refused."""
        return (
            f"Prefill context parallelism does not support {self.feature} (got {received}). "
            f"{self.way_out}, or set --prefill-context-parallel-size 1."
        )


def validate_config(vllm_config: VllmConfig) -> None:
    """Refuse a configuration that does not run with prefill context parallelism.

    Does nothing if ``prefill_context_parallel_size`` is 1. Changes nothing, so it can run
    twice: before vLLM fills in its defaults, to speak before vLLM refuses or overrides a
    setting for reasons that do not mention P, and after, when defaults such as the KV
    cache type of a quantized checkpoint are known.

    Args:
        vllm_config: The configuration, with the real ``prefill_context_parallel_size``.

    Raises:
        NotImplementedError: Features are set that do not run with P > 1.
        ValueError: At least one setting makes no sense with P > 1. Either error has one
            line for each thing refused.
    """
    if vllm_config.parallel_config.prefill_context_parallel_size == 1:
        return
    refused = [(rule, received) for rule in RULES if (received := rule.received(vllm_config))]
    if not refused:
        return
    is_senseless = any(rule.error is ValueError for rule, _ in refused)
    error = ValueError if is_senseless else NotImplementedError
    raise error("\n".join(rule.sentence(received) for rule, received in refused))


def refusal(feature: str, received: str) -> str:
    """Return what the user reads when ``received`` shows later than in the configuration."""
    (rule,) = (rule for rule in RULES if rule.feature == feature)
    return rule.sentence(received)


def refusal_table() -> str:
    """Return ``RULES`` as the Markdown table of ``docs/support.md``."""
    lines = ["| Not with P > 1 | Why | Way out | Status |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {rule.feature} | {rule.reason} | {rule.way_out} | {rule.status} |" for rule in RULES
    ]
    return "\n".join(lines)


def _setting(path: str, *, at_most: int = 0) -> Received:
    """Find a flag that is on, or a number above ``at_most``."""
    read = attrgetter(path)
    name = path.rpartition(".")[2]

    def received(config: VllmConfig) -> str | None:
        value = read(config)
        return f"{name}={value}" if value is not None and value > at_most else None

    return received


def _optional_config(name: str, field: str) -> Received:
    """Find a part of the configuration that is absent unless its feature is used."""
    part, value = attrgetter(name), attrgetter(f"{name}.{field}")

    def received(config: VllmConfig) -> str | None:
        return None if part(config) is None else f"{field}={value(config)}"

    return received


def _model(is_refused: Callable[[ModelConfig], bool]) -> Received:
    """Find a kind of model."""

    def received(config: VllmConfig) -> str | None:
        model = config.model_config
        return f"architecture={model.architecture}" if is_refused(model) else None

    return received


def _hf_value(config: VllmConfig, name: str) -> Any:
    """Return what a key of the model's own configuration holds, None if it is absent."""
    text_config = config.model_config.hf_text_config
    return getattr(text_config, name) if hasattr(text_config, name) else None


def _hf_setting(name: str) -> Received:
    """Find a key of the model's own configuration that holds anything but zero or null."""

    def received(config: VllmConfig) -> str | None:
        value = _hf_value(config, name)
        return f"{name}={value}" if value else None

    return received


def _v1_model_runner(_: VllmConfig) -> str | None:
    value = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "1")
    try:
        is_v2 = bool(int(value))
    except ValueError:
        is_v2 = False
    return None if is_v2 else f"VLLM_USE_V2_MODEL_RUNNER={value}"


def _platform(_: VllmConfig) -> str | None:
    from vllm.platforms import current_platform

    if current_platform.is_cuda() or current_platform.is_cpu():
        return None
    return f"platform={current_platform.device_name}"


def _missing_gpus(config: VllmConfig) -> str | None:
    from vllm.platforms import current_platform

    parallel = config.parallel_config
    takes_gpus = current_platform.is_cuda() and parallel.worker_cls in _ONE_GPU_EACH
    if not takes_gpus or parallel.nnodes > 1:
        return None
    num_gpus = current_platform.device_count()
    if parallel.world_size <= num_gpus:
        return None
    return f"world_size={parallel.world_size} with {num_gpus} visible"


def _executor(config: VllmConfig) -> str | None:
    backend = config.parallel_config.distributed_executor_backend
    if isinstance(backend, type):
        backend = f"{backend.__module__}.{backend.__qualname__}"
    is_fine = backend in (None, "mp", EXECUTOR)
    return None if is_fine else f"distributed_executor_backend={backend}"


def _with_dcp(received: Received) -> Received:
    """Find a setting beside D > 1 only."""

    def received_with_dcp(config: VllmConfig) -> str | None:
        shares_cache = config.parallel_config.decode_context_parallel_size > 1
        return received(config) if shares_cache else None

    return received_with_dcp


def _dcp_size(config: VllmConfig) -> str | None:
    parallel = config.parallel_config
    pcp, size = parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
    *smaller, largest = sorted({1, pcp, pcp * parallel.tensor_parallel_size})
    if size in (*smaller, largest):
        return None
    possible = f"{', '.join(map(str, smaller))} or {largest}"
    return f"decode_context_parallel_size={size}, not {possible}"


def _dcp_kv_heads(config: VllmConfig) -> str | None:
    """Find KV heads that not all ranks of a DCP group have."""
    model, parallel = config.model_config, config.parallel_config
    spans_tp = parallel.decode_context_parallel_size > parallel.prefill_context_parallel_size
    num_kv_heads = model.get_total_num_kv_heads()
    if model.use_mla or not spans_tp or num_kv_heads == 1:
        return None
    size = parallel.decode_context_parallel_size
    return f"decode_context_parallel_size={size} with {num_kv_heads} KV heads"


def _dcp_interleave(config: VllmConfig) -> str | None:
    """Find runs of tokens that do not lie in one block, as far as blocks are known yet."""
    interleave = config.parallel_config.cp_kv_cache_interleave_size
    cache = config.cache_config
    if interleave < 1:
        return f"cp_kv_cache_interleave_size={interleave}"
    if not cache.user_specified_block_size or cache.block_size % interleave == 0:
        return None
    return f"cp_kv_cache_interleave_size={interleave} with block_size={cache.block_size}"


def _dcp_attention_backend(config: VllmConfig) -> str | None:
    from vllm.platforms import current_platform

    backend = config.attention_config.backend
    if backend is None:
        # The one that there is on CPUs, apart from MLA.
        is_refused = current_platform.is_cpu() and not config.model_config.use_mla
        return "attention_backend=CPU_ATTN" if is_refused else None
    is_refused = backend.name in BACKENDS and backend.name not in DCP_BACKENDS
    return f"attention_backend={backend.name}" if is_refused else None


def _dcp_prefill_backend(config: VllmConfig) -> str | None:
    backend = config.attention_config.mla_prefill_backend
    if backend is None or backend.name == "FLASH_ATTN":
        return None
    return f"mla_prefill_backend={backend.name}"


def _full_graphs(config: VllmConfig) -> str | None:
    mode: CUDAGraphMode | None = config.compilation_config.cudagraph_mode
    return f"cudagraph_mode={mode.name}" if mode is not None and mode.name == "FULL" else None


def _dcp_communication(config: VllmConfig) -> str | None:
    backend = config.parallel_config.dcp_comm_backend
    return None if backend == "ag_rs" else f"dcp_comm_backend={backend}"


def _microbatches(config: VllmConfig) -> str | None:
    parallel = config.parallel_config
    if parallel.enable_dbo:
        return "enable_dbo=True"
    return f"ubatch_size={parallel.ubatch_size}" if parallel.use_ubatching else None


def _sequence_parallelism(config: VllmConfig) -> str | None:
    if config.parallel_config.tensor_parallel_size == 1:
        return None  # vLLM itself turns both passes off
    passes = config.compilation_config.pass_config
    if passes.fuse_gemm_comms:
        return "pass_config.fuse_gemm_comms=True"
    return "pass_config.enable_sp=True" if passes.enable_sp else None


def _experts_of_tp(config: VllmConfig) -> str | None:
    model = config.model_config
    if replicates_experts(config):
        return None
    if model.architecture in _EXPERTS_OF_TP:
        return f"architecture={model.architecture}"
    is_refused = model.is_moe and model.quantization in _QUANTIZED_EXPERTS_OF_TP
    return f"quantization={model.quantization}" if is_refused else None


def _uneven_experts(config: VllmConfig) -> str | None:
    """Find experts that ranks would have none of, or that cannot be cut into equal parts."""
    model, parallel = config.model_config, config.parallel_config
    num_experts = model.get_num_experts()
    if num_experts == 0:
        return None
    num_ranks = parallel.tensor_parallel_size
    if not replicates_experts(config):
        num_ranks *= parallel.prefill_context_parallel_size
    # Its loader cuts both ways evenly.
    is_even = _is_gpt_oss(config)
    if parallel.enable_expert_parallel:
        if num_experts < num_ranks or (is_even and num_experts % num_ranks):
            return f"num_experts={num_experts} on {num_ranks} ranks"
        if not is_even:
            return None
    name = "moe_intermediate_size"
    if not _hf_value(config, name):
        name = "intermediate_size"
    width = _hf_value(config, name)
    widths = width if isinstance(width, list) else [width or 0]
    return f"{name}={width} on {num_ranks} ranks" if any(w % num_ranks for w in widths) else None


def _is_gpt_oss(config: VllmConfig) -> bool:
    return bool(_hf_value(config, "model_type") == "gpt_oss")


def _cannot_replicate(config: VllmConfig) -> str | None:
    """Find what shards experts over P x TP ranks, if each is to have them all."""
    if not replicates_experts(config):
        return None
    if _is_gpt_oss(config):
        return "pcp_experts=replicated with model_type=gpt_oss"
    is_refused = config.parallel_config.enable_expert_parallel
    return "pcp_experts=replicated with enable_expert_parallel=True" if is_refused else None


def _skipped_padding(config: VllmConfig) -> str | None:
    import vllm.envs as envs

    is_refused = config.model_config.is_moe and envs.VLLM_MOE_SKIP_PADDING
    return "VLLM_MOE_SKIP_PADDING=1" if is_refused else None


def _pooling(config: VllmConfig) -> str | None:
    """Find pooling other than that of the last token of a causal language model."""
    model = config.model_config
    pooler = model.pooler_config
    if model.runner_type != "pooling" or pooler is None or _is_bidirectional(model):
        return None
    if model.convert_type != "embed":
        return f"convert_type={model.convert_type}"
    if pooler.seq_pooling_type not in (None, "LAST"):
        return f"seq_pooling_type={pooler.seq_pooling_type}"
    if pooler.use_activation is False:
        return "use_activation=False"
    return "is_matryoshka=True" if model.is_matryoshka else None


def _fused_cache_write(config: VllmConfig) -> str | None:
    model = config.model_config
    if model.architecture in _FUSED_CACHE_WRITE:
        return f"architecture={model.architecture}"
    for architecture, target in model.model_class_overrides.items():
        if target.startswith(_FUSED_CACHE_WRITE_PACKAGE):
            return f"model_class_overrides={architecture}:{target}"
    return None


def _is_bidirectional(model: ModelConfig) -> bool:
    return model.attn_type == "encoder_only" or model.architecture in _PREFIX_LM


def _takes_multimodal_inputs(model: ModelConfig) -> bool:
    multimodal = model.multimodal_config
    if multimodal is None:
        return False
    return multimodal.enable_mm_embeds or not multimodal.language_model_only


def _kv_connector(config: VllmConfig) -> str | None:
    transfer = config.kv_transfer_config
    if transfer is None:
        return None
    if transfer.kv_connector in (None, *_OFFLOADING_CONNECTORS):
        module = transfer.kv_connector_module_path
        return f"kv_connector_module_path={module}" if module else None
    return f"kv_connector={transfer.kv_connector}"


def _unknown_options(config: VllmConfig) -> str | None:
    unknown = unknown_options(config)
    return ", ".join(f"{name}={value}" for name, value in unknown.items()) or None


def peer_obstacles(config: VllmConfig) -> list[str]:
    """Return the settings with which ranks do not write to each other's KV cache."""
    from vllm.platforms import current_platform

    dcp_size = config.parallel_config.decode_context_parallel_size
    obstacles = {
        "a platform other than CUDA": not current_platform.is_cuda(),
        f"architecture={config.model_config.architecture}": bool(_hf_value(config, "index_topk")),
        f"decode_context_parallel_size={dcp_size}": dcp_size > 1,
        "kv_transfer_config": config.kv_transfer_config is not None,
        "kv_offloading_size": config.cache_config.kv_offloading_size is not None,
    }
    return [name for name, is_obstacle in obstacles.items() if is_obstacle] + memory_obstacles()


def memory_obstacles() -> list[str]:
    """Return the settings of the environment that keep ranks from each other's memory."""
    p2p_disable = os.environ.get("NCCL_P2P_DISABLE", "")
    obstacles = {
        # Memory that moves, and of which each piece would be a file descriptor.
        "expandable_segments:True": "expandable_segments:true" in _allocator_settings(),
        # Memory of a pool of the driver's, which is not shared.
        "backend:cudaMallocAsync": "backend:cudamallocasync" in _allocator_settings(),
        # Peers' memory is not to be reached.
        f"NCCL_P2P_DISABLE={p2p_disable}": p2p_disable not in ("", "0"),
    }
    return [name for name, is_obstacle in obstacles.items() if is_obstacle]


def _allocator_settings() -> str:
    """Return the settings of PyTorch's allocator, under its two names, in lower case."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return ",".join(os.environ.get(name, "") for name in names).replace(" ", "").lower()


def _peer_exchange(config: VllmConfig) -> str | None:
    found = peer_obstacles(config) if kv_exchange(config) == "peer" else []
    return f"pcp_kv_exchange=peer with {', '.join(found)}" if found else None


def _offloading_backend(config: VllmConfig) -> str | None:
    """Find offloading to anything but CPU memory, which is what vLLM does by default."""
    cache, transfer = config.cache_config, config.kv_transfer_config
    if cache.kv_offloading_size is not None and cache.kv_offloading_backend != "native":
        return f"kv_offloading_backend={cache.kv_offloading_backend}"
    if transfer is None:
        return None
    spec = transfer.get_from_extra_config("spec_name", _OFFLOADING_SPEC)
    return None if spec == _OFFLOADING_SPEC else f"spec_name={spec}"


def _attention_backend(config: VllmConfig) -> str | None:
    backend = config.attention_config.backend
    if backend is None or backend.name in BACKENDS:
        return None
    return f"attention_backend={backend.name}"


def _kv_cache_dtype(config: VllmConfig) -> str | None:
    dtype = config.cache_config.cache_dtype
    return None if dtype in KV_CACHE_DTYPES else f"kv_cache_dtype={dtype}"


RULES: tuple[Rule, ...] = (
    # Where it runs
    Rule(
        "model runner V1",
        _v1_model_runner,
        "Prompts are split inside model runner V2",
        "Unset VLLM_USE_V2_MODEL_RUNNER",
        error=ValueError,
    ),
    Rule(
        "platforms other than CUDA and CPU",
        _platform,
        "Never tried",
        "Run on NVIDIA GPUs or on CPUs",
    ),
    Rule(
        f"more than {MAX_PCP_WORLD_SIZE} ranks",
        _setting("parallel_config.prefill_context_parallel_size", at_most=MAX_PCP_WORLD_SIZE),
        "Never tried",
        f"Set --prefill-context-parallel-size to at most {MAX_PCP_WORLD_SIZE}",
        error=ValueError,
    ),
    Rule(
        "more ranks than GPUs",
        _missing_gpus,
        "Each of the P x TP ranks needs a GPU",
        "Lower --prefill-context-parallel-size or --tensor-parallel-size",
        error=ValueError,
    ),
    Rule(
        "several nodes",
        _setting("parallel_config.nnodes", at_most=1),
        "Never tried",
        "Drop --nnodes",
    ),
    Rule(
        "executors other than mp",
        _executor,
        "The executor keeps P out of the accounting of the KV cache",
        "Set --distributed-executor-backend mp",
    ),
    # Other kinds of parallelism
    Rule(
        "decode context parallelism of other sizes",
        _dcp_size,
        "Ranks share the KV cache along the PCP axis first, then along TP",
        "Set --decode-context-parallel-size to 1, P or P x TP",
        error=ValueError,
    ),
    Rule(
        "decode context parallelism over TP with several KV heads",
        _dcp_kv_heads,
        "TP ranks that share the KV cache must want the same KV heads",
        "Set --decode-context-parallel-size to 1 or P",
        error=ValueError,
    ),
    Rule(
        "decode context parallelism with sliding windows",
        _with_dcp(_hf_setting("sliding_window")),
        "Keys of a rank's part of the KV cache do not stand where they do in the request",
        "Set --decode-context-parallel-size 1",
    ),
    Rule(
        "decode context parallelism with some attention backends",
        _with_dcp(_dcp_attention_backend),
        "Partial results are merged by their log-sum-exp; not all tell it, or gather prefills",
        f"Set --attention-backend to auto or one of {', '.join(DCP_BACKENDS)}",
    ),
    Rule(
        "decode context parallelism with some MLA prefill backends",
        _with_dcp(_dcp_prefill_backend),
        "They take a row's context apart from its own tokens, each rank that of its own rows",
        "Drop mla_prefill_backend from --attention-config",
    ),
    Rule(
        "decode context parallelism with CUDA graphs of mixed batches",
        _with_dcp(_full_graphs),
        "How much of the KV cache a prefill gathers differs from step to step",
        "Set cudagraph_mode to FULL_AND_PIECEWISE in --compilation-config",
    ),
    Rule(
        "all-to-all exchange of partial results",
        _dcp_communication,
        "Each backend has one way to merge them, which leaves the same bits on all ranks",
        "Drop --dcp-comm-backend",
    ),
    Rule(
        "the former name of the interleave size",
        _with_dcp(_setting("parallel_config.dcp_kv_cache_interleave_size", at_most=1)),
        "vLLM renames it after workers have started, which go on without it",
        "Set --cp-kv-cache-interleave-size in place of --dcp-kv-cache-interleave-size",
        error=ValueError,
    ),
    Rule(
        "decode context parallelism with runs of tokens that blocks cut",
        _with_dcp(_dcp_interleave),
        "A rank keeps whole runs, each in one block",
        "Set --cp-kv-cache-interleave-size to a divisor of --block-size",
        error=ValueError,
    ),
    Rule(
        "pipeline parallelism",
        _setting("parallel_config.pipeline_parallel_size", at_most=1),
        "Stages would hand each other the activations of split batches",
        "Set --pipeline-parallel-size 1",
    ),
    Rule(
        "data parallelism",
        _setting("parallel_config.data_parallel_size", at_most=1),
        "Replicas of MoE models step together; never tried with dense models",
        "Drop --data-parallel-size and start one server for each replica",
    ),
    Rule(
        "dual batch overlap and micro-batches",
        _microbatches,
        "They cut a batch that is already cut",
        "Drop --enable-dbo and --ubatch-size",
    ),
    Rule(
        "sequence parallelism and async TP",
        _sequence_parallelism,
        "Model runner V2 has neither",
        "Set enable_sp and fuse_gemm_comms to false in the pass_config of --compilation-config",
    ),
    Rule(
        "expert parallelism load balancing",
        _setting("parallel_config.enable_eplb"),
        "Tokens per expert would be counted on one rank's share",
        "Drop --enable-eplb",
    ),
    Rule(
        "elastic expert parallelism",
        _setting("parallel_config.enable_elastic_ep"),
        "Ranks come and go, the split over them does not",
        "Drop --enable-elastic-ep",
    ),
    # Models
    Rule(
        "FP4 caches of indexers",
        _setting("attention_config.use_fp4_indexer_cache"),
        "Never tried",
        "Drop use_fp4_indexer_cache from --attention-config",
    ),
    Rule(
        "experts that the ranks cannot share evenly",
        _uneven_experts,
        "P x TP ranks share experts, by a part of the width of each or by whole experts; TP ranks "
        "share replicated ones, by a part of the width",
        "Let their number divide the width, or set --enable-expert-parallel and P x TP to at most "
        "the number of experts, or without it pcp_experts in --additional-config to replicated",
        error=ValueError,
    ),
    Rule(
        "replicated experts with expert parallelism, or of GPT-OSS",
        _cannot_replicate,
        "Expert parallelism shards what is to be replicated; the loader of GPT-OSS shards it, too",
        "Drop --enable-expert-parallel, or pcp_experts from --additional-config",
        error=ValueError,
    ),
    Rule(
        "experts that are loaded as if TP ranks alone shared them",
        _experts_of_tp,
        "Ranks of different P would load the same part of them",
        "Set pcp_experts in --additional-config to replicated, without --enable-expert-parallel",
    ),
    Rule(
        "mixture-of-experts models of the Transformers library",
        _model(lambda model: model.is_moe and model.using_transformers_backend()),
        "Experts are chosen outside of the layer that gathers rows",
        "Drop --model-impl, or serve a model that vLLM has a class for",
    ),
    Rule(
        "zero experts",
        _hf_setting("zero_expert_num"),
        "Their output is added outside of the layer that gathers rows",
        "Serve another model",
    ),
    Rule(
        "experts chosen by token id",
        _hf_setting("num_hash_layers"),
        "Token ids are not gathered with the rows",
        "Serve another model",
    ),
    Rule(
        "leaving padding out of experts",
        _skipped_padding,
        "Which rows are padding is known of the whole batch, and not gathered with the rows",
        "Unset VLLM_MOE_SKIP_PADDING",
    ),
    Rule(
        "returning routed experts",
        _setting("model_config.enable_return_routed_experts"),
        "They would be those of other rows; model runner V2 lacks it",
        "Drop --enable-return-routed-experts",
    ),
    Rule(
        "models that write the KV cache in fused kernels",
        _fused_cache_write,
        "The write passes by the gather",
        "Serve another model, or drop --model-class-overrides",
    ),
    Rule(
        "hybrid, linear-attention and state-space models",
        _model(lambda model: model.is_hybrid or model.is_attention_free),
        "A recurrent state runs through all tokens of a request in order",
        "Serve a model that has attention only",
    ),
    Rule(
        "encoder-decoder models",
        _model(lambda model: model.is_encoder_decoder),
        "Cross-attention keeps state for the requests of the whole batch",
        "Serve a decoder-only model",
    ),
    Rule(
        "encoder-only and prefix LM models",
        _model(_is_bidirectional),
        "Tokens are split so that each attends to earlier ones only",
        "Serve a causal model",
    ),
    Rule(
        "non-causal attention",
        _setting("attention_config.use_non_causal"),
        "Tokens are split so that each attends to earlier ones only",
        "Drop use_non_causal from --attention-config",
    ),
    Rule(
        "diffusion language models",
        _model(lambda model: model.is_diffusion),
        "A denoising step is neither prefill nor decode",
        "Serve an autoregressive model",
    ),
    Rule(
        "chunked local attention",
        _hf_setting("attention_chunk_size"),
        "Never tried; it cuts rows that are already cut",
        "Serve a model with full or sliding-window attention",
    ),
    Rule(
        "reference sliding-window attention",
        _setting("model_config.rswa_window"),
        "Its mask depends on where the prompt of each row ends",
        "Serve a model with full or sliding-window attention",
    ),
    Rule(
        "static sink tokens",
        _hf_setting("param_sink_number"),
        "Their block table has one row for each request, a split batch has two",
        "Serve another model",
    ),
    Rule(
        "multimodal inputs",
        _model(_takes_multimodal_inputs),
        "Embeddings are placed by position in the whole batch",
        "Set --language-model-only and drop --enable-mm-embeds",
    ),
    Rule(
        "M-RoPE and XD-RoPE models",
        _model(lambda model: model.uses_mrope or model.uses_xdrope_dim > 0),
        "Their positions are kept for the whole batch",
        "Serve a model with one position for each token",
    ),
    # Attention and KV cache
    Rule(
        "attention backends without a gather before the cache write",
        _attention_backend,
        "Ranks would lack each other's keys and values",
        f"Set --attention-backend to auto or one of {', '.join(BACKENDS)}",
    ),
    Rule(
        "quantized KV caches other than FP8",
        _kv_cache_dtype,
        "Never tried",
        f"Set --kv-cache-dtype to one of {', '.join(KV_CACHE_DTYPES)}",
    ),
    Rule(
        "KV scales calculated at run time",
        _setting("cache_config.calculate_kv_scales"),
        "Each rank would derive them from its own tokens",
        "Drop --calculate-kv-scales",
    ),
    Rule(
        "fast prefill with shared KV caches",
        _setting("cache_config.kv_sharing_fast_prefill"),
        "Model runner V2 lacks it",
        "Drop --kv-sharing-fast-prefill",
    ),
    Rule(
        "options of other names or values",
        _unknown_options,
        "There are none",
        "Drop them from --additional-config, or set "
        + ", ".join(f"{name} to {' or '.join(values)}" for name, values in OPTIONS.items()),
        error=ValueError,
    ),
    Rule(
        "copies between KV caches of sparse MLA, shared, offloaded, or out of reach",
        _peer_exchange,
        "Ranks must keep all keys and values, or dense latents, in GPU memory that others reach",
        "Drop pcp_kv_exchange=peer from --additional-config",
    ),
    Rule(
        "KV connectors that do more than offload",
        _kv_connector,
        "Connectors do not know that ranks hold copies of one cache",
        f"Set kv_connector in --kv-transfer-config to {' or '.join(_OFFLOADING_CONNECTORS)}",
    ),
    Rule(
        "KV cache offloading to other places than CPU memory",
        _offloading_backend,
        "Never tried",
        "Set --kv-offloading-backend native and drop spec_name from --kv-transfer-config",
    ),
    Rule(
        "encoder cache transfer",
        _optional_config("ec_transfer_config", "ec_connector"),
        "Model runner V2 lacks it",
        "Drop --ec-transfer-config",
    ),
    # Features
    Rule(
        "LoRA",
        _optional_config("lora_config", "max_loras"),
        "Adapters are mapped to the tokens of the whole batch",
        "Drop --enable-lora",
        status="planned",
    ),
    Rule(
        "speculative decoding",
        _optional_config("speculative_config", "method"),
        "Drafting reads hidden states and attention metadata of the whole batch",
        "Drop --speculative-config",
        status="planned",
    ),
    Rule(
        "pooling other than normalised embeddings of the last token",
        _pooling,
        "Model runner V2 computes these, whatever a model asks for",
        "Serve a causal embedding model with LAST pooling",
    ),
    Rule(
        "prompt embeddings",
        _setting("model_config.enable_prompt_embeds"),
        "Model runner V2 lacks them",
        "Drop --enable-prompt-embeds",
    ),
    Rule(
        "sleep mode",
        _setting("model_config.enable_sleep_mode"),
        "Never tried; buffers allocated with the KV cache lose their contents",
        "Drop --enable-sleep-mode",
    ),
)

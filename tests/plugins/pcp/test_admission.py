# SPDX-License-Identifier: Apache-2.0
"""Each refusal is reached by a configuration that does nothing else wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from vllm.config import (
    AttentionConfig,
    CompilationConfig,
    CUDAGraphMode,
    ECTransferConfig,
    KVTransferConfig,
    PassConfig,
    PoolerConfig,
    VllmConfig,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
from vllm.plugins.pcp.admission import RULES, Rule, refusal_table, validate_config
from vllm.plugins.pcp.routing import EXECUTOR
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

ROOT = Path(__file__).parents[3]
SUPPORT_PAGE = ROOT / "docs" / "support.md"

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "dtype": "float32",
}
DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 0,
}
DEEPSEEK_V32 = {
    **DEEPSEEK,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_topk": 8,
}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
UNEVEN_WIDTHS = {"num_experts": 4, "moe_intermediate_size": [128, 129]}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "intermediate_size": 127,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": 5,
}
DBRX = {
    "architectures": ["DbrxForCausalLM"],
    "model_type": "dbrx",
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 512,
    "attn_config": {"kv_n_heads": 2},
    "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 1},
}
EP = {"enable_expert_parallel": True}
REPLICATED = {"additional_config": {"pcp_experts": "replicated"}}


Change: TypeAlias = Callable[[VllmConfig, pytest.MonkeyPatch], None]


class Rocm:
    """The platform that vLLM detects on AMD GPUs, as far as admission looks at it."""

    device_name = "rocm"

    def is_cuda(self) -> bool:
        return False

    def is_cpu(self) -> bool:
        return False


class OneGpu:
    """The same for a machine with one NVIDIA GPU."""

    def is_cuda(self) -> bool:
        return True

    def is_cpu(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1


@dataclass(frozen=True)
class Case:
    """A configuration and what the refusal says it got.

    Attributes:
        got: The setting that the error repeats.
        model: Keys of the model's config.json that differ from LLAMA.
        args: Engine arguments.
        change: Applied to the finished configuration, for what cannot be built without a
            GPU or several nodes.
    """

    got: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    change: Change | None = None


def setting(path: str, value: Any) -> Change:
    part, _, name = path.partition(".")
    return lambda config, patch: setattr(getattr(config, part), name, value)


def dcp(size: int, path: str | None = None, value: Any = None) -> Change:
    """Set D, and one more thing; with P = 1 vLLM would want D to divide TP."""

    def change(config: VllmConfig, patch: pytest.MonkeyPatch) -> None:
        config.parallel_config.decode_context_parallel_size = size
        if path is not None:
            setting(path, value)(config, patch)

    return change


def one_gpu(worker_cls: str) -> Change:
    def change(config: VllmConfig, patch: pytest.MonkeyPatch) -> None:
        patch.setattr("vllm.platforms.current_platform", OneGpu())
        config.parallel_config.worker_cls = worker_cls

    return change


gpus = one_gpu("some.other.Worker")


def connector(name: str, **extra: Any) -> dict[str, Any]:
    """Return engine arguments that choose a KV connector."""
    config = KVTransferConfig(name, kv_role="kv_both", kv_connector_extra_config=extra)
    return {"kv_transfer_config": config}


def all_of(*changes: Change) -> Change:
    def change(config: VllmConfig, patch: pytest.MonkeyPatch) -> None:
        for one in changes:
            one(config, patch)

    return change


CASES = {
    "model runner V1": Case(
        "VLLM_USE_V2_MODEL_RUNNER=0",
        change=lambda config, patch: patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0"),
    ),
    "platforms other than CUDA and CPU": Case(
        "platform=rocm",
        change=lambda config, patch: patch.setattr("vllm.platforms.current_platform", Rocm()),
    ),
    "more than 64 ranks": Case(
        "prefill_context_parallel_size=65",
        change=setting("parallel_config.prefill_context_parallel_size", 65),
    ),
    "more ranks than GPUs": Case(
        "world_size=2 with 1 visible",
        change=one_gpu("vllm.v1.worker.gpu_worker.Worker"),
    ),
    "several nodes": Case("nnodes=2", args={"nnodes": 2, "tensor_parallel_size": 2}),
    "executors other than mp": Case(
        "distributed_executor_backend=ray",
        change=setting("parallel_config.distributed_executor_backend", "ray"),
    ),
    "decode context parallelism of other sizes": Case(
        "decode_context_parallel_size=3, not 1 or 2", model=DEEPSEEK, change=dcp(3)
    ),
    "decode context parallelism over TP with several KV heads": Case(
        "decode_context_parallel_size=4 with 2 KV heads",
        model={"num_key_value_heads": 2},
        args={"tensor_parallel_size": 2},
        change=all_of(gpus, dcp(4)),
    ),
    "decode context parallelism with sliding windows": Case(
        "sliding_window=64", {"sliding_window": 64}, change=all_of(gpus, dcp(2))
    ),
    "decode context parallelism with some attention backends": Case(
        "attention_backend=TRITON_ATTN",
        model=DEEPSEEK,
        args={"attention_backend": "TRITON_ATTN"},
        change=dcp(2),
    ),
    "decode context parallelism with some MLA prefill backends": Case(
        "mla_prefill_backend=FLASHINFER",
        model=DEEPSEEK,
        args={
            "attention_config": AttentionConfig(
                mla_prefill_backend=MLAPrefillBackendEnum.FLASHINFER
            )
        },
        change=dcp(2),
    ),
    "decode context parallelism with CUDA graphs of mixed batches": Case(
        "cudagraph_mode=FULL",
        model=DEEPSEEK,
        change=dcp(2, "compilation_config.cudagraph_mode", CUDAGraphMode.FULL),
    ),
    "all-to-all exchange of partial results": Case(
        "dcp_comm_backend=a2a",
        model=DEEPSEEK,
        change=dcp(2, "parallel_config.dcp_comm_backend", "a2a"),
    ),
    "the former name of the interleave size": Case(
        "dcp_kv_cache_interleave_size=16",
        model=DEEPSEEK,
        args={"dcp_kv_cache_interleave_size": 16},
        change=dcp(2),
    ),
    "decode context parallelism with runs of tokens that blocks cut": Case(
        "cp_kv_cache_interleave_size=48 with block_size=64",
        model=DEEPSEEK,
        args={"block_size": 64, "cp_kv_cache_interleave_size": 48},
        change=dcp(2),
    ),
    "pipeline parallelism": Case("pipeline_parallel_size=2", args={"pipeline_parallel_size": 2}),
    "data parallelism": Case("data_parallel_size=2", args={"data_parallel_size": 2}),
    "dual batch overlap and micro-batches": Case(
        "ubatch_size=2", change=setting("parallel_config.ubatch_size", 2)
    ),
    "sequence parallelism and async TP": Case(
        "pass_config.enable_sp=True",
        args={
            "tensor_parallel_size": 2,
            "compilation_config": CompilationConfig(
                pass_config=PassConfig(enable_sp=True, sp_min_token_num=1)
            ),
        },
    ),
    "expert parallelism load balancing": Case(
        "enable_eplb=True", change=setting("parallel_config.enable_eplb", True)
    ),
    "elastic expert parallelism": Case(
        "enable_elastic_ep=True", change=setting("parallel_config.enable_elastic_ep", True)
    ),
    "FP4 caches of indexers": Case(
        "use_fp4_indexer_cache=True",
        change=setting("attention_config.use_fp4_indexer_cache", True),
    ),
    "experts that the ranks cannot share evenly": Case(
        "moe_intermediate_size=129 on 2 ranks", model={**MOE, "moe_intermediate_size": 129}
    ),
    "replicated experts with expert parallelism, or of GPT-OSS": Case(
        "pcp_experts=replicated with enable_expert_parallel=True",
        model=MOE,
        args={**EP, **REPLICATED},
    ),
    "experts that are loaded as if TP ranks alone shared them": Case(
        "architecture=DbrxForCausalLM",
        model=DBRX,
    ),
    "mixture-of-experts models of the Transformers library": Case(
        "architecture=TransformersMoEForCausalLM", model=MOE, args={"model_impl": "transformers"}
    ),
    "zero experts": Case("zero_expert_num=2", model={"zero_expert_num": 2}),
    "experts chosen by token id": Case("num_hash_layers=1", model={"num_hash_layers": 1}),
    "leaving padding out of experts": Case(
        "VLLM_MOE_SKIP_PADDING=1",
        model=MOE,
        change=lambda config, patch: patch.setenv("VLLM_MOE_SKIP_PADDING", "1"),
    ),
    "returning routed experts": Case(
        "enable_return_routed_experts=True",
        model=MOE,
        args={"enable_return_routed_experts": True},
    ),
    "models that write the KV cache in fused kernels": Case(
        "model_class_overrides=LlamaForCausalLM:vllm.models.deepseek_v32.nvidia.model:Model",
        change=setting(
            "model_config.model_class_overrides",
            {"LlamaForCausalLM": "vllm.models.deepseek_v32.nvidia.model:Model"},
        ),
    ),
    "hybrid, linear-attention and state-space models": Case(
        "architecture=FalconH1ForCausalLM",
        model={
            "architectures": ["FalconH1ForCausalLM"],
            "model_type": "falcon_h1",
            "mamba_d_ssm": 128,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
        },
    ),
    "encoder-decoder models": Case(
        "architecture=WhisperForConditionalGeneration",
        model={
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": "whisper",
            "d_model": 64,
        },
        args={"language_model_only": True},
    ),
    "encoder-only and prefix LM models": Case(
        "architecture=BertModel", model={"architectures": ["BertModel"], "model_type": "bert"}
    ),
    "non-causal attention": Case(
        "use_non_causal=True", args={"attention_config": AttentionConfig(use_non_causal=True)}
    ),
    "diffusion language models": Case("architecture=LlamaForCausalLM", model={"canvas_length": 32}),
    "chunked local attention": Case("attention_chunk_size=64", model={"attention_chunk_size": 64}),
    "reference sliding-window attention": Case("rswa_window=64", model={"rswa_window": 64}),
    "static sink tokens": Case("param_sink_number=128", model={"param_sink_number": 128}),
    "multimodal inputs": Case(
        "architecture=PaliGemmaForConditionalGeneration",
        model={
            "architectures": ["PaliGemmaForConditionalGeneration"],
            "model_type": "paligemma",
            "text_config": {**LLAMA, "model_type": "gemma"},
        },
    ),
    "M-RoPE and XD-RoPE models": Case(
        "architecture=LlamaForCausalLM",
        model={
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 3, 3],
            }
        },
    ),
    "attention backends without a gather before the cache write": Case(
        "attention_backend=FLEX_ATTENTION", args={"attention_backend": "FLEX_ATTENTION"}
    ),
    "quantized KV caches other than FP8": Case(
        "kv_cache_dtype=int8_per_token_head", args={"kv_cache_dtype": "int8_per_token_head"}
    ),
    "KV scales calculated at run time": Case(
        "calculate_kv_scales=True", args={"calculate_kv_scales": True}
    ),
    "fast prefill with shared KV caches": Case(
        "kv_sharing_fast_prefill=True", args={"kv_sharing_fast_prefill": True}
    ),
    "options of other names or values": Case(
        "pcp_kv_exchange=push, pcp_expert=replicated",
        args={
            "additional_config": {
                "pcp_kv_exchange": "push",
                "pcp_expert": "replicated",
                "pcp_last_layer": "all",
                "of_another_plugin": 1,
            }
        },
    ),
    "copies between KV caches of sparse MLA, shared, offloaded, or out of reach": Case(
        "pcp_kv_exchange=peer with a platform other than CUDA, "
        "architecture=DeepseekV32ForCausalLM, decode_context_parallel_size=2",
        model=DEEPSEEK_V32,
        args={"additional_config": {"pcp_kv_exchange": "peer"}},
        change=dcp(2),
    ),
    "KV connectors that do more than offload": Case(
        "kv_connector=ExampleConnector", args=connector("ExampleConnector")
    ),
    "KV cache offloading to other places than CPU memory": Case(
        "spec_name=TieringOffloadingSpec",
        args=connector("OffloadingConnector", spec_name="TieringOffloadingSpec"),
    ),
    "encoder cache transfer": Case(
        "ec_connector=ECExampleConnector",
        args={
            "ec_transfer_config": ECTransferConfig(
                ec_connector="ECExampleConnector", ec_role="ec_producer"
            )
        },
    ),
    "LoRA": Case("max_loras=3", args={"enable_lora": True, "max_loras": 3}),
    "speculative decoding": Case(
        "method=ngram",
        args={
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 2,
                "prompt_lookup_max": 2,
            }
        },
    ),
    "pooling other than normalised embeddings of the last token": Case(
        "convert_type=classify", args={"runner": "pooling", "convert": "classify"}
    ),
    "prompt embeddings": Case("enable_prompt_embeds=True", args={"enable_prompt_embeds": True}),
    "sleep mode": Case(
        "enable_sleep_mode=True", change=setting("model_config.enable_sleep_mode", True)
    ),
}

# More ways to one refusal.
POOLING = {
    "mean": Case(
        "seq_pooling_type=MEAN",
        args={
            "runner": "pooling",
            "convert": "embed",
            "pooler_config": PoolerConfig(pooling_type="MEAN"),
        },
    ),
    "raw": Case(
        "use_activation=False",
        args={
            "runner": "pooling",
            "convert": "embed",
            "pooler_config": PoolerConfig(use_activation=False),
        },
    ),
    "matryoshka": Case(
        "is_matryoshka=True",
        model={"is_matryoshka": True},
        args={"runner": "pooling", "convert": "embed"},
    ),
}

EXPERTS = {
    "parts of uneven width": Case("moe_intermediate_size=[128, 129] on 2 ranks", UNEVEN_WIDTHS),
    "parts, TP included": Case(
        "moe_intermediate_size=130 on 4 ranks",
        {**MOE, "moe_intermediate_size": 130},
        {"tensor_parallel_size": 2},
    ),
    "width of a model without dense layers": Case("intermediate_size=127 on 2 ranks", MIXTRAL),
    "parts of uneven width that TP ranks alone share": Case(
        "moe_intermediate_size=129 on 2 ranks",
        {**MOE, "moe_intermediate_size": 129},
        {"tensor_parallel_size": 2, **REPLICATED},
    ),
    "ranks without experts": Case("num_experts=1 on 2 ranks", {**MOE, "num_experts": 1}, EP),
    "experts that GPT-OSS cannot share": Case("num_experts=5 on 2 ranks", GPT_OSS, EP),
    "width that GPT-OSS could not have without": Case(
        "intermediate_size=127 on 2 ranks",
        {**GPT_OSS, "num_local_experts": 6, "intermediate_size": 127},
        EP,
    ),
}

DCP = {
    "more ranks than there are": Case("decode_context_parallel_size=4, not 1 or 2", change=dcp(4)),
    "TP alone": Case(
        "decode_context_parallel_size=4, not 1, 2 or 8",
        args={"tensor_parallel_size": 4},
        change=dcp(4),
    ),
    "a backend of sparse MLA": Case(
        "attention_backend=FLASHINFER_MLA_SPARSE",
        model=DEEPSEEK_V32,
        args={"attention_backend": "FLASHINFER_MLA_SPARSE"},
        change=dcp(2),
    ),
    "GQA on CPUs": Case("attention_backend=CPU_ATTN", change=dcp(2)),
    "another backend": Case(
        "attention_backend=FLASHINFER",
        args={"attention_backend": "FLASHINFER"},
        change=all_of(gpus, dcp(2)),
    ),
}


def copies(got: str, variable: str, value: str) -> Case:
    """Return a case of copies between caches that a variable of the environment rules out."""
    return Case(
        f"pcp_kv_exchange=peer with {got}",
        args={"additional_config": {"pcp_kv_exchange": "peer"}},
        change=all_of(gpus, lambda config, patch: patch.setenv(variable, value)),
    )


COPIES = {
    "of memory that moves": copies(
        "expandable_segments:True",
        "PYTORCH_ALLOC_CONF",
        "max_split_size_mb:64, expandable_segments:True",
    ),
    "of memory that is not shared": copies(
        "backend:cudaMallocAsync", "PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync"
    ),
    "to memory that is not to be reached": copies("NCCL_P2P_DISABLE=1", "NCCL_P2P_DISABLE", "1"),
}

OFFLOADING = {
    "by LMCache": Case(
        "kv_offloading_backend=lmcache",
        args={"kv_offloading_size": 1.0},
        change=setting("cache_config.kv_offloading_backend", "lmcache"),
    ),
    "by a connector of that name from elsewhere": Case(
        "kv_connector_module_path=some.other.module",
        args=connector("OffloadingConnector"),
        change=setting("kv_transfer_config.kv_connector_module_path", "some.other.module"),
    ),
}

SUPPORTED = {
    "dense": Case(),
    "KV cache offloading on GPUs": Case(args=connector("SimpleCPUOffloadConnector"), change=gpus),
    "keys and values written to other ranks' caches": Case(
        model=DEEPSEEK, args={"additional_config": {"pcp_kv_exchange": "peer"}}, change=gpus
    ),
    "sparse MLA on GPUs, compiled": Case(
        model=DEEPSEEK_V32,
        args={"enforce_eager": False},
        change=one_gpu("vllm.v1.worker.pcp.gpu_worker.OneGpuPCPWorker"),
    ),
    "KV cache of sparse MLA shared on GPUs, compiled": Case(
        model=DEEPSEEK_V32,
        args={"enforce_eager": False},
        change=all_of(dcp(2), one_gpu("vllm.v1.worker.pcp.gpu_worker.OneGpuPCPWorker")),
    ),
    "KV cache of MLA shared on GPUs, compiled": Case(
        model=DEEPSEEK,
        args={"enforce_eager": False},
        change=all_of(dcp(2), one_gpu("vllm.v1.worker.pcp.gpu_worker.OneGpuPCPWorker")),
    ),
    "KV cache of MLA shared along the PCP axis": Case(model=DEEPSEEK, change=dcp(2)),
    "KV cache of MLA shared by all ranks": Case(
        model=DEEPSEEK, args={"tensor_parallel_size": 2}, change=dcp(4)
    ),
    "KV cache of sparse MLA shared along the PCP axis": Case(model=DEEPSEEK_V32, change=dcp(2)),
    "KV cache of GQA shared along the PCP axis": Case(change=all_of(gpus, dcp(2))),
    "KV cache of one KV head shared by all ranks": Case(
        model={"num_key_value_heads": 1},
        args={"tensor_parallel_size": 2, "attention_backend": "FLASH_ATTN"},
        change=all_of(gpus, dcp(4)),
    ),
    "runs of shared tokens": Case(
        model=DEEPSEEK,
        args={"cp_kv_cache_interleave_size": 16, "attention_backend": "TRITON_MLA"},
        change=dcp(2),
    ),
    "CUDA graphs of decodes over a shared cache": Case(
        model=DEEPSEEK,
        change=dcp(2, "compilation_config.cudagraph_mode", CUDAGraphMode.FULL_AND_PIECEWISE),
    ),
    "model runner V2, asked for": Case(
        change=lambda config, patch: patch.setenv("VLLM_USE_V2_MODEL_RUNNER", " 1")
    ),
    "an option of another plugin, under a number": Case(args={"additional_config": {1: 2}}),
    "experts": Case(model=MOE),
    "more experts on some ranks than on others": Case(
        model={**MOE, "num_experts": 5, "moe_intermediate_size": 129}, args=EP
    ),
    "experts of uneven width that every rank has": Case(
        model={**MOE, "moe_intermediate_size": 129}, args=REPLICATED
    ),
    "experts of TP ranks that every PCP rank has": Case(model=DBRX, args=REPLICATED),
    "replicated experts of a model that has none": Case(args=REPLICATED),
    "quantized experts of TP ranks that every PCP rank has": Case(
        model=MOE,
        args=REPLICATED,
        change=setting("model_config.quantization", "moe_wna16"),
    ),
    "hidden padding of a dense model": Case(
        change=lambda config, patch: patch.setenv("VLLM_MOE_SKIP_PADDING", "1")
    ),
    "tensor parallelism": Case(args={"tensor_parallel_size": 2}),
    "prefix caching off": Case(args={"enable_prefix_caching": False}),
    "chunked prefill off": Case(
        args={"enable_chunked_prefill": False, "max_num_batched_tokens": 512}
    ),
    "async scheduling": Case(args={"async_scheduling": True}),
    "fp8 cache": Case(args={"kv_cache_dtype": "fp8"}),
    "torch.compile": Case(args={"enforce_eager": False}),
    "chosen backend": Case(args={"attention_backend": "TRITON_ATTN"}),
    "KV cache offloaded": Case(args={"kv_offloading_size": 1.0}),
    "KV cache offloaded by a connector": Case(
        args=connector("OffloadingConnector", cpu_bytes_to_use=2**30)
    ),
    "KV cache offloaded by the simple connector": Case(args=connector("SimpleCPUOffloadConnector")),
    "sliding window": Case(
        model={
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": 32,
        },
    ),
    "shared KV caches": Case(
        model={
            "architectures": ["Gemma3nForCausalLM"],
            "model_type": "gemma3n_text",
            "num_kv_shared_layers": 1,
        },
    ),
    "embedding": Case(args={"runner": "pooling", "convert": "embed"}),
    "text of a multimodal model": Case(
        model=CASES["multimodal inputs"].model,
        args={"language_model_only": True},
    ),
    "DeepSeek with MLA off": Case(
        model=DEEPSEEK,
        change=lambda config, patch: patch.setenv("VLLM_MLA_DISABLE", "1"),
    ),
    "ranks that share a GPU": Case(
        change=one_gpu("vllm.v1.worker.pcp.gpu_worker.OneGpuPCPWorker"),
    ),
    "routed already": Case(
        change=setting("parallel_config.distributed_executor_backend", EXECUTOR),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def vllm_set_up() -> Iterator[None]:
    """Load plugins before a test patches what they wrap, and look at model classes right here.

    vLLM starts a process for each class, to keep CUDA out of this one.
    """
    load_general_plugins()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda look: look())
        yield


@pytest.fixture
def engine_args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], EngineArgs]:
    """Write the model's config.json and return engine arguments, P not among them."""
    # vLLM then falls back to model runner V1 for what V2 lacks.
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)

    def make(case: Case) -> EngineArgs:
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **case.model}))
        args: dict[str, Any] = {
            "enforce_eager": True,
            "distributed_executor_backend": "mp",
            **case.args,
        }
        return EngineArgs(
            model=str(tmp_path), skip_tokenizer_init=True, load_format="dummy", **args
        )

    return make


@pytest.fixture
def build(
    engine_args: Callable[[Case], EngineArgs], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Case], VllmConfig]:
    """Build a configuration with P = 1, then turn it into one that vLLM has let pass with P = 2."""

    def build_case(case: Case) -> VllmConfig:
        config = engine_args(case).create_engine_config()
        config.parallel_config.prefill_context_parallel_size = 2
        config.parallel_config.world_size *= 2
        if case.change is not None:
            case.change(config, monkeypatch)
        return config

    return build_case


def sentence(rule: Rule, got: str) -> str:
    return (
        f"Prefill context parallelism does not support {rule.feature} (got {got}). "
        f"{rule.way_out}, or set --prefill-context-parallel-size 1."
    )


def test_every_rule_has_a_case() -> None:
    assert list(CASES) == [rule.feature for rule in RULES]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.feature)
def test_refuses_by_name_with_value_and_way_out(
    rule: Rule, build: Callable[[Case], VllmConfig]
) -> None:
    case = CASES[rule.feature]
    with pytest.raises(rule.error) as refusal:
        validate_config(build(case))
    assert str(refusal.value) == sentence(rule, case.got)


@pytest.mark.parametrize(
    "rule",
    [rule for rule in RULES if CASES[rule.feature].change is None],
    ids=lambda rule: rule.feature,
)
def test_refuses_before_vllm_fills_in_its_defaults(
    rule: Rule, engine_args: Callable[[Case], EngineArgs], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[rule.feature]
    args = engine_args(case)
    args.prefill_context_parallel_size = 2
    monkeypatch.setattr(VllmConfig, "__post_init__", validate_config)
    with pytest.raises(rule.error) as refusal:
        args.create_engine_config()
    # Pydantic puts the words around a ValueError that say where it comes from.
    assert sentence(rule, case.got) in str(refusal.value)


@pytest.mark.parametrize("case", POOLING.values(), ids=POOLING)
def test_refuses_what_the_v2_pooler_gets_wrong(
    case: Case, build: Callable[[Case], VllmConfig]
) -> None:
    with pytest.raises(NotImplementedError, match=f"other than normalised.*{case.got}"):
        validate_config(build(case))


@pytest.mark.parametrize("case", EXPERTS.values(), ids=EXPERTS)
def test_refuses_experts_that_ranks_cannot_share(
    case: Case, build: Callable[[Case], VllmConfig]
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"cannot share evenly (got {case.got})")):
        validate_config(build(case))


def test_refuses_replicated_experts_of_gpt_oss(build: Callable[[Case], VllmConfig]) -> None:
    case = Case(model={**GPT_OSS, "intermediate_size": 128}, args=REPLICATED)
    with pytest.raises(ValueError, match=r"of GPT-OSS \(got pcp_experts=replicated with model_ty"):
        validate_config(build(case))


@pytest.mark.parametrize("case", DCP.values(), ids=DCP)
def test_refuses_more_of_decode_context_parallelism(
    case: Case, build: Callable[[Case], VllmConfig]
) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(f"(got {case.got})")):
        validate_config(build(case))


@pytest.mark.parametrize("interleave", [0, -1])
def test_refuses_runs_of_no_tokens(interleave: int, build: Callable[[Case], VllmConfig]) -> None:
    case = Case(model=DEEPSEEK, args={"cp_kv_cache_interleave_size": interleave}, change=dcp(2))
    with pytest.raises(ValueError, match=rf"\(got cp_kv_cache_interleave_size={interleave}\)"):
        validate_config(build(case))


@pytest.mark.parametrize("value", ["0", " 0", "00", "", "false", "off", "v1"])
def test_refuses_whatever_does_not_choose_model_runner_v2(
    value: str, build: Callable[[Case], VllmConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = build(Case())
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", value)
    with pytest.raises(ValueError, match=rf"\(got VLLM_USE_V2_MODEL_RUNNER={value}\)"):
        validate_config(config)


@pytest.mark.parametrize("name", ["PCP_experts", "pcp-experts", "pcpexperts", "pcp"])
def test_refuses_options_that_are_nearly_ours(
    name: str, build: Callable[[Case], VllmConfig]
) -> None:
    case = Case(args={"additional_config": {name: "replicated", 1: 2}})
    with pytest.raises(ValueError, match=rf"\(got {name}=replicated\)"):
        validate_config(build(case))


@pytest.mark.parametrize("case", OFFLOADING.values(), ids=OFFLOADING)
def test_refuses_other_ways_to_offload(case: Case, build: Callable[[Case], VllmConfig]) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(f"(got {case.got})")):
        validate_config(build(case))


@pytest.mark.parametrize("case", COPIES.values(), ids=COPIES)
def test_refuses_copies_where_memory_is_not_in_reach(
    case: Case, build: Callable[[Case], VllmConfig]
) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(f"(got {case.got})")):
        validate_config(build(case))


@pytest.mark.parametrize("case", SUPPORTED.values(), ids=SUPPORTED)
def test_admits(case: Case, build: Callable[[Case], VllmConfig]) -> None:
    validate_config(build(case))


def test_one_rank_is_never_refused(build: Callable[[Case], VllmConfig]) -> None:
    config = build(CASES["LoRA"])
    config.parallel_config.prefill_context_parallel_size = 1
    validate_config(config)


def test_lists_all_that_is_wrong(build: Callable[[Case], VllmConfig]) -> None:
    both = {**CASES["LoRA"].args, **CASES["pipeline parallelism"].args}
    with pytest.raises(NotImplementedError) as refusal:
        validate_config(build(Case(args=both)))
    pipeline, lora = str(refusal.value).splitlines()
    assert "pipeline parallelism (got pipeline_parallel_size=2)" in pipeline
    assert "LoRA (got max_loras=3)" in lora


def test_a_senseless_setting_makes_it_a_value_error(build: Callable[[Case], VllmConfig]) -> None:
    too_many = CASES["more than 64 ranks"].change
    with pytest.raises(ValueError, match=r"more than 64 ranks(.|\n)*LoRA"):
        validate_config(build(Case(args=CASES["LoRA"].args, change=too_many)))


def test_way_out_names_flags_that_exist() -> None:
    flags = {flag for rule in RULES for flag in re.findall(r"--([a-z-]+)", rule.way_out)}
    assert flags
    assert {flag.replace("-", "_") for flag in flags} <= {arg.name for arg in fields(EngineArgs)}


def test_support_page_lists_every_refusal() -> None:
    assert refusal_table() in SUPPORT_PAGE.read_text(), "put refusal_table() into the page"


def test_support_page_names_tests_that_exist() -> None:
    paths = set(re.findall(r"`((?:tests|benchmarks)/[^`]*)`", SUPPORT_PAGE.read_text()))
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []

# SPDX-License-Identifier: Apache-2.0
"""Model shapes to time with dummy weights.

A folder with nothing but a ``config.json`` is enough for ``dummy_weights.LOAD_FORMAT``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    # More than the models' own, for the longest prompts; only a table of this length depends on it.
    "max_position_embeddings": 163840,
    "head_dim": 128,
    "vocab_size": 151936,
}

# DeepSeek-V2-Lite, published configuration.
_DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 6,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "tie_word_embeddings": False,
}

# DeepSeek-V3.2's layers, narrower, and fewer of them and of the experts.
_DEEPSEEK_V32 = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "vocab_size": 129280,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
}

# Qwen3-30B-A3B, published configuration but for the positions.
_QWEN3_30B_A3B = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b-8-layers": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "deepseek-v2-lite": _DEEPSEEK_V2_LITE,
    "deepseek-v32-8-layers": _DEEPSEEK_V32,
    # For what can be timed on one rank alone.
    "deepseek-v32-8-dense-layers": _DEEPSEEK_V32 | {"first_k_dense_replace": 8},
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    # To try a benchmark out.
    "tiny-mla": _DEEPSEEK_V2_LITE
    | {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 16,
        "moe_intermediate_size": 128,
    },
    "tiny-sparse": _DEEPSEEK_V32
    | {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "index_n_heads": 4,
        "index_topk": 64,
        "first_k_dense_replace": 2,
    },
    "tiny-moe": _QWEN3_30B_A3B
    | {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 16,
        "moe_intermediate_size": 128,
    },
    "tiny": _QWEN3
    | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "tie_word_embeddings": False,
    },
}

# Which of ``checkpoints.KINDS`` is built as a shape is.
_KINDS = {
    "Qwen3ForCausalLM": "gqa",
    "DeepseekV2ForCausalLM": "mla",
    "DeepseekV32ForCausalLM": "sparse",
    "Qwen3MoeForCausalLM": "moe",
}


def kind(shape: str) -> str:
    """Return the kind of model of a shape, one of ``checkpoints.KINDS``."""
    return _KINDS[SHAPES[shape]["architectures"][0]]


def model_folder(shape: str, **changes: Any) -> str:
    """Return a folder that holds the configuration of a shape, always the same one.

    Args:
        shape: One of ``SHAPES``.
        **changes: Entries of the configuration that are to be others.
    """
    # At a fixed place: vLLM's cache of compiled models depends on the path.
    name = "-".join([shape, *(f"{key}-{value}" for key, value in changes.items())])
    folder = Path(tempfile.gettempdir()) / "vllm_pcp_benchmarks" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape] | changes, indent=2))
    return str(folder)

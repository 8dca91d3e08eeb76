# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints, saved the way that people's checkpoints are.

Weights are drawn wide enough (standard deviation 0.1) that the most likely token stands out: with
the usual 0.02 every token is nearly as likely as every other, and greedy tokens say nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

EOS_TOKEN = "<eos>"
VOCAB_SIZE = 320  # 256 bytes, one special token, and unused rows as real checkpoints have them
SLIDING_WINDOW = 48

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "eos_token_id": 256,
    "bos_token_id": None,
    "pad_token_id": None,
}
# Divide by 2, 3, 4 and 6: ranks share the experts, or the width of each.
_NUM_EXPERTS = 12
_EXPERT_WIDTH = 384
_EXPERT_SIZES: dict[str, Any] = {"moe_intermediate_size": _EXPERT_WIDTH, "num_experts_per_tok": 2}
# vLLM's MLA kernels know latents of 256 + 64 and of 512 + 64 only.
_LATENT_SIZES: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_SPARSE_SIZES: dict[str, Any] = {
    **_LATENT_SIZES,
    # A quantised cache has rows for no other latents.
    "kv_lora_rank": 512,
    # Few heads give many tokens the same score, 0, and the best of them would be anybody's guess.
    "index_n_heads": 16,
    "index_head_dim": 128,
}


def _qwen3(num_kv_heads: int) -> PreTrainedModel:
    heads = {"num_key_value_heads": num_kv_heads}
    config = Qwen3Config(num_hidden_layers=3, tie_word_embeddings=False, **{**_SIZES, **heads})
    return Qwen3ForCausalLM(config)


def _mistral() -> PreTrainedModel:
    config = MistralConfig(num_hidden_layers=2, sliding_window=SLIDING_WINDOW, **_SIZES)
    return MistralForCausalLM(config)


def _gemma3() -> PreTrainedModel:
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        sliding_window=SLIDING_WINDOW,
        query_pre_attn_scalar=64,
        **_SIZES,
    )
    return Gemma3ForCausalLM(config)


def _deepseek_v2() -> PreTrainedModel:
    config = DeepseekV2Config(
        num_hidden_layers=3,
        first_k_dense_replace=1,
        q_lora_rank=None,
        n_routed_experts=_NUM_EXPERTS,
        n_shared_experts=2,
        topk_method="group_limited_greedy",
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.5,
        **{**_SIZES, **_LATENT_SIZES, **_EXPERT_SIZES},
    )
    return DeepseekV2ForCausalLM(config)


def _deepseek_v3() -> PreTrainedModel:
    choice = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # transformers knows no other
    config = DeepseekV3Config(
        num_hidden_layers=3,
        first_k_dense_replace=1,
        q_lora_rank=96,
        n_routed_experts=_NUM_EXPERTS,
        n_shared_experts=1,
        n_group=3,
        topk_group=2,
        num_mtp_layers=0,
        **{**_SIZES, **_LATENT_SIZES, **_EXPERT_SIZES, **choice},
    )
    return _with_random_biases(DeepseekV3ForCausalLM(config))


def _deepseek_v32(index_topk: int) -> PreTrainedModel:
    # Fewer take another way through a quantised cache.
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32}
    choice = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # transformers knows no other
    config = DeepseekV32Config(
        num_hidden_layers=3,
        first_k_dense_replace=1,
        q_lora_rank=96,
        index_topk=index_topk,
        n_routed_experts=_NUM_EXPERTS,
        n_shared_experts=1,
        n_group=3,
        topk_group=2,
        **{**_SIZES, **_SPARSE_SIZES, **_EXPERT_SIZES, **heads, **choice},
    )
    return _with_random_biases(DeepseekV32ForCausalLM(config))


def _glm_moe_dsa() -> PreTrainedModel:
    choice = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # transformers knows no other
    indexer = {
        "index_topk": 16,
        "index_topk_pattern": "FSFS",
        "indexer_rope_interleave": True,  # transformers knows no other
    }
    config = GlmMoeDsaConfig(
        num_hidden_layers=4,
        first_k_dense_replace=1,
        q_lora_rank=96,
        rms_norm_eps=1e-6,  # two of its norms know no other
        n_routed_experts=_NUM_EXPERTS,
        n_shared_experts=1,
        **{**_SIZES, **_SPARSE_SIZES, **_EXPERT_SIZES, **indexer, **choice},
    )
    return _with_random_biases(GlmMoeDsaForCausalLM(config))


def _qwen3_moe() -> PreTrainedModel:
    config = Qwen3MoeConfig(
        num_hidden_layers=3,
        num_experts=_NUM_EXPERTS,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        **{**_SIZES, **_EXPERT_SIZES},
    )
    return Qwen3MoeForCausalLM(config)


def _mixtral() -> PreTrainedModel:
    sizes = {**_SIZES, "intermediate_size": _EXPERT_WIDTH}
    config = MixtralConfig(num_hidden_layers=2, num_local_experts=_NUM_EXPERTS, **sizes)
    return MixtralForCausalLM(config)


def _glm4_moe() -> PreTrainedModel:
    config = Glm4MoeConfig(
        num_hidden_layers=3,
        first_k_dense_replace=1,
        n_routed_experts=_NUM_EXPERTS,
        use_qk_norm=True,
        num_mtp_layers=0,
        **{**_SIZES, **_EXPERT_SIZES},
    )
    return _with_random_biases(Glm4MoeForCausalLM(config))


def _gpt_oss() -> PreTrainedModel:
    config = GptOssConfig(
        num_hidden_layers=2,
        num_local_experts=_NUM_EXPERTS,
        num_experts_per_tok=2,
        sliding_window=SLIDING_WINDOW,
        **{**_SIZES, "intermediate_size": _EXPERT_WIDTH},
    )
    model = _with_random_biases(GptOssForCausalLM(config))
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            # As released ones are; the CPU build of vLLM has a kernel for no other.
            parameter.data = parameter.data.bfloat16().float()
    return model


def _with_random_biases(model: PreTrainedModel) -> PreTrainedModel:
    """Let biases matter, those that choose among experts too: transformers leaves them at zero."""
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("bias"):
                tensor.normal_(std=0.1)
    return model


RANDOM_CHECKPOINTS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": partial(_qwen3, 2),  # full attention
    "qwen3_mqa": partial(_qwen3, 1),  # the same with one KV head
    "mistral": _mistral,  # a sliding window in every layer
    "gemma3": _gemma3,  # a sliding window in some layers: two groups of KV cache
    "deepseek_v2": _deepseek_v2,  # MLA; experts chosen in groups, by softmax; shared experts
    "deepseek_v3": _deepseek_v3,  # MLA, queries compressed too; by sigmoid, with a bias
    "deepseek_v32": partial(_deepseek_v32, 16),  # sparse MLA: 16 tokens are attended to
    "deepseek_v32_2048": partial(_deepseek_v32, 2048),  # the same of more tokens than a prompt has
    "glm_moe_dsa": _glm_moe_dsa,  # sparse MLA, every other layer with the choice of the last one
    "qwen3_moe": _qwen3_moe,  # experts in every layer
    "mixtral": _mixtral,
    "glm4_moe": _glm4_moe,  # shared experts, by sigmoid, with a bias; rotates half of a head
    "gpt_oss": _gpt_oss,  # attention sinks, windows in some layers, biases everywhere
}


def save_random_checkpoint(name: str, folder: Path) -> Path:
    """Save one of ``RANDOM_CHECKPOINTS`` and a tokenizer of bytes to ``folder / name``."""
    target = folder / name
    torch.manual_seed(0)
    RANDOM_CHECKPOINTS[name]().float().save_pretrained(target)
    byte_tokenizer().save_pretrained(target)
    return target


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte and one that ends the text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: token for token, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, EOS_TOKEN: len(vocab)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS_TOKEN)

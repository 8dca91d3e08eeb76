# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints, saved the way that people's checkpoints are.

Weights are drawn wide enough (standard deviation 0.1) that the most likely token stands out: with
the usual 0.02 every token is nearly as likely as every other, and greedy tokens say nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
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


def _qwen3() -> PreTrainedModel:
    config = Qwen3Config(num_hidden_layers=3, tie_word_embeddings=False, **_SIZES)
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


RANDOM_CHECKPOINTS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": _qwen3,  # full attention
    "mistral": _mistral,  # a sliding window in every layer
    "gemma3": _gemma3,  # a sliding window in some layers: two groups of KV cache
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

# SPDX-License-Identifier: Apache-2.0
"""Model shapes to time with dummy weights, and a small checkpoint whose tokens mean something.

A folder with nothing but a ``config.json`` is enough for ``load_format="dummy"``.
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
    # To try a benchmark out.
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

# Wide initialisation separates the logits, so that greedy tokens depend on every layer.
_CHECKPOINT: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
CHECKPOINT_VOCAB_SIZE = 2048


def model_folder(shape: str) -> str:
    """Return a folder that holds the configuration of a shape, always the same one."""
    folder = _folder(shape)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape], indent=2))
    return str(folder)


def random_checkpoint() -> str:
    """Return a folder with a small random Qwen3 checkpoint, made on the first call."""
    folder = _folder("checkpoint")
    if not (folder / "model.safetensors").exists():
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**_CHECKPOINT)).bfloat16().save_pretrained(folder)
    return str(folder)


def _folder(name: str) -> Path:
    # At a fixed place: vLLM's cache of compiled models depends on the path.
    folder = Path(tempfile.gettempdir()) / "vllm_pcp_benchmarks" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder

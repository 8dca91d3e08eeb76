# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints whose tokens mean something, and what they should answer: transformers in fp32.

Wide initialisation separates the logits, so that greedy tokens depend on every layer. A router
turns rounding into jumps: where two experts tie, bf16 may take the other one. So experts speak
softly here, and routers mean what they say; the weights of some parameters are scaled. Measured
with transformers on 300 tokens, bf16 against fp32: a token is off by 0.01 to 0.03 at the median
and by 0.1 to 0.2 at most, where losing half of the experts, or a sixth of the context, changes it
5 and 14 times as much at the median, and by 0.5 and more at most.

Of models that choose which tokens to attend to, embeddings are loud: tokens of one prompt would
otherwise look alike to the indexer, and rounding would choose. Still, bf16 leaves out a tenth of
what fp32 chooses, and a token is off by 0.05 at the median and by 0.2 at most.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

VOCAB_SIZE = 2048
# The fewest tokens that vLLM's fast top-k kernels choose. Attention kernels take multiples of 128.
INDEX_TOPK = 512

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GQA: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
# The only sizes that all dense MLA kernels of Hopper take.
_MLA: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_NUM_EXPERTS = 8
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
_GROUPED: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": _NUM_EXPERTS,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
}


def _gqa(num_kv_heads: int) -> PreTrainedConfig:
    from transformers import Qwen3Config

    heads = _GQA | {"num_key_value_heads": num_kv_heads}
    return Qwen3Config(initializer_range=0.1, **_SIZES, **heads)


def _mla() -> PreTrainedConfig:
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        initializer_range=0.05,
        topk_method="group_limited_greedy",
        **_SIZES,
        **_MLA,
        **_EXPERTS,
        **_GROUPED,
    )


def _sparse(num_heads: int, **changes: Any) -> PreTrainedConfig:
    from transformers import DeepseekV32Config

    own: dict[str, Any] = {
        "num_hidden_layers": 8,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "q_lora_rank": 256,
        "index_topk": INDEX_TOPK,
        # vLLM reads them, transformers knows no other.
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        **changes,
    }
    return DeepseekV32Config(
        initializer_range=0.05, **{**_SIZES, **_MLA, **_EXPERTS, **_GROUPED, **own}
    )


def _moe() -> PreTrainedConfig:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        initializer_range=0.05,
        num_experts=_NUM_EXPERTS,
        norm_topk_prob=True,
        **_SIZES,
        **_GQA,
        **_EXPERTS,
    )


def _glm4_moe() -> PreTrainedConfig:
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(
        initializer_range=0.1,
        use_qk_norm=True,
        **_SIZES,
        **_GQA,
        **_EXPERTS,
        **_GROUPED,
    )


def _gpt_oss() -> PreTrainedConfig:
    from transformers import GptOssConfig

    return GptOssConfig(
        initializer_range=0.05,
        num_local_experts=_NUM_EXPERTS,
        num_experts_per_tok=2,
        sliding_window=128,
        **{**_SIZES, **_GQA, "intermediate_size": 256, "head_dim": 64},
    )


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        make_config: Returns its configuration.
        scales: Part of a parameter's name -> factor of what initialisation gave it.
        has_experts: It routes tokens.
        index_topk: Tokens that a query chooses and attends to; 0 if it attends to all.
    """

    make_config: Callable[[], PreTrainedConfig]
    scales: Mapping[str, float] = field(default_factory=dict)
    has_experts: bool = True
    index_topk: int = 0


_SPARSE_SCALES = {"embed_tokens": 20, "mlp.gate.weight": 0.6, "experts.down_proj": 0.5}
KINDS = {
    "gqa": Kind(partial(_gqa, 2), has_experts=False),
    # TP ranks can share a KV cache where they have the same heads.
    "mqa": Kind(partial(_gqa, 1), has_experts=False),
    "mla": Kind(_mla, {"mlp.gate.weight": 8, "experts.down_proj": 0.5}),
    "sparse": Kind(partial(_sparse, 64), _SPARSE_SCALES, index_topk=INDEX_TOPK),
    # With few heads vLLM reads an FP8 cache in another way.
    "sparse_few_heads": Kind(partial(_sparse, 16), _SPARSE_SCALES, index_topk=INDEX_TOPK),
    "sparse_long": Kind(
        partial(_sparse, 64, max_position_embeddings=40960),
        _SPARSE_SCALES,
        index_topk=INDEX_TOPK,
    ),
    "moe": Kind(_moe, {"mlp.gate.weight": 8, "experts.down_proj": 0.7, "o_proj": 2}),
    "glm4_moe": Kind(_glm4_moe, {"mlp.gate.weight": 0.3, "experts.down_proj": 0.2}),
    "gpt_oss": Kind(_gpt_oss, {"router.weight": 8, "experts.down_proj": 0.2, "q_proj.weight": 0.5}),
}


def save_checkpoint(kind: str, folder: Path) -> None:
    """Save a model of a kind, always the same one, in bf16."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(KINDS[kind].make_config(), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("bias"):
                # Transformers leaves them at zero.
                tensor.normal_(std=0.1)
        for name, tensor in model.named_parameters():
            for part, factor in KINDS[kind].scales.items():
                if part in name:
                    tensor.mul_(factor)
            # Routers are saved in fp32, whatever the model's type, and vLLM rounds them.
            tensor.copy_(tensor.bfloat16())
    model.to(torch.bfloat16).save_pretrained(folder)


def checkpoint_folder(kind: str) -> str:
    """Return a folder with a checkpoint of a kind, made on the first call."""
    folder = Path(tempfile.gettempdir()) / "vllm_pcp_benchmarks" / f"checkpoint-{kind}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        own_folder = Path(tempfile.mkdtemp(dir=folder.parent))
        save_checkpoint(kind, own_folder)
        # Of engines that start together, the first one to have made it has made it for all.
        with contextlib.suppress(OSError):
            own_folder.rename(folder)
    return str(folder)


class Reference:
    """A checkpoint in fp32, on a GPU where there is one."""

    def __init__(self, folder: str | Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, experts_implementation="eager"
        )
        self.model = model.to(self.device).eval()
        self._known: dict[tuple[int, ...], list[float]] = {}

    def logprobs(self, prompt: list[int], tokens: list[int]) -> list[float]:
        """Return the log-probability of each token after the prompt and the tokens before it."""
        import torch

        key = (*prompt, -1, *tokens)
        if key not in self._known:
            with torch.inference_mode():
                ids = torch.tensor([prompt + tokens], device=self.device)
                logits = self.model(ids, logits_to_keep=len(tokens) + 1).logits[0, :-1]
                picked = logits.log_softmax(-1).gather(1, ids[0, -len(tokens) :, None])
            self._known[key] = picked[:, 0].tolist()
        return self._known[key]

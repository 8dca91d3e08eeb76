# SPDX-License-Identifier: Apache-2.0
"""What a planned prefill asks of a prefill backend, and which one can do it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from vllm.v1.attention.backends.mla.prefill.registry import (
    MLAPrefillBackendEnum,
    register_mla_prefill_backend,
)

FLASH_ATTN = "vllm.v1.attention.backends.pcp.mla.flash_attn_prefill.PCPFlashAttnPrefillBackend"


@runtime_checkable
class AttendingPrefillBackend(Protocol):
    """A prefill backend that can run a ``PrefillPlan``."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend within each of several sequences.

        Args:
            q: ``[T, num_heads, qk_head_dim]``.
            k: ``[N, num_heads, qk_head_dim]``.
            v: ``[N, num_heads, v_head_dim]``, may be strided.
            cu_seqlens_q: ``[num_sequences + 1]`` int32; a sequence may be without queries.
            cu_seqlens_k: ``[num_sequences + 1]`` int32.
            max_seqlen_q: Most queries of a sequence.
            max_seqlen_k: Most keys of a sequence that has queries.
            causal: Whether the last query of a sequence sees its last key, the one before one less,
                and so on; otherwise all queries see all keys.
            return_softmax_lse: Whether to return the log-sum-exp of the scores too.
            out: ``[T, num_heads, v_head_dim]``, contiguous, to be written and returned; or None.

        Returns:
            ``[T, num_heads, v_head_dim]``, and ``[num_heads, T]`` float32 if asked for.
        """
        ...


def register_prefill_backend() -> None:
    """Put our class into vLLM's registry, unless another one took the stock one's place."""
    if not MLAPrefillBackendEnum.FLASH_ATTN.is_overridden():
        register_mla_prefill_backend(MLAPrefillBackendEnum.FLASH_ATTN, FLASH_ATTN)

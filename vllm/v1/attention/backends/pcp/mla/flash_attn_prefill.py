# SPDX-License-Identifier: Apache-2.0
"""FlashAttention for MLA prefills whose queries are the last of their keys."""

from __future__ import annotations

import torch

from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey
from vllm.v1.attention.backends.mla.prefill.flash_attn import FlashAttnPrefillBackend


class PCPFlashAttnPrefillBackend(FlashAttnPrefillBackend):
    """The stock backend with a call for any plan; keeps its name."""

    def supports_quant_output(self, quant_key: QuantKey) -> bool:
        """Say no: a row's output may be merged from several calls."""
        return False

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
        """Attend within each sequence; see ``AttendingPrefillBackend``."""
        # Padded to the width of keys, an output is a view of a wider one.
        own_out = None if self.requires_v_padding else out
        result = self._flash_attn_varlen_diff_headdims(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            softmax_scale=self.scale,
            causal=causal,
            return_softmax_lse=return_softmax_lse,
            out=own_out,
        )
        if out is not None and own_out is None:
            out.copy_(result[0] if isinstance(result, tuple) else result)
        return result

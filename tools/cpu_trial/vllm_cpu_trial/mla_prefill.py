# SPDX-License-Identifier: Apache-2.0
"""Attention of MLA prefills, in torch.

Symptom: "FlashAttnPrefillBackend requires flash_attn_varlen_func".
Cause: vLLM 0.25.1 takes the FlashAttention backend where a device has no compute capability.
It can go when vLLM has a prefill backend for CPUs.
"""

import torch

from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

# Bounds the memory of the scores, and leaves out most of what a causal mask would hide.
_QUERIES_AT_A_TIME = 256


class TorchPrefillBackend(MLAPrefillBackend):
    """Scaled matrix products and a softmax in float32."""

    @staticmethod
    def get_name() -> str:
        """Return the name of the backend that this one stands in for."""
        return "FLASH_ATTN"

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend to each sequence's keys from its queries.

        Args:
            q: ``[num_queries, num_heads, qk_head_dim]``.
            k: ``[num_keys, num_heads, qk_head_dim]``.
            v: ``[num_keys, num_heads, v_head_dim]``.
            cu_seqlens_q: ``[num_seqs + 1]``, where each sequence's queries begin.
            cu_seqlens_k: ``[num_seqs + 1]``, where its keys begin.
            max_seqlen_q: The most queries of a sequence; not needed here.
            max_seqlen_k: The most keys of a sequence; not needed here.
            causal: A sequence's last query sees all of its keys, each one before sees one less.
            return_softmax_lse: Whether to return the second tensor.
            out: Where to write the output, or None.

        Returns:
            The output, ``[num_queries, num_heads, v_head_dim]`` in the dtype of ``q``, and the
            natural logarithm of each softmax's denominator, ``[num_heads, num_queries]`` float32.
            A query that sees no key has output 0 and lse -inf.
        """
        out = q.new_zeros(*q.shape[:-1], v.shape[-1]) if out is None else out.zero_()
        lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=torch.float32)
        starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        for first, stop_q, start_k, stop_k in zip(
            starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False
        ):
            for start in range(first, stop_q, _QUERIES_AT_A_TIME):
                stop = min(start + _QUERIES_AT_A_TIME, stop_q)
                # The last of these queries sees what comes before this key.
                stop_visible = stop_k - (stop_q - stop) if causal else stop_k
                if stop_visible <= start_k:
                    continue
                keys = slice(start_k, stop_visible)
                out[start:stop], lse[:, start:stop] = _attend(
                    q[start:stop], k[keys], v[keys], self.scale, causal
                )
        return (out, lse) if return_softmax_lse else out

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend to the tokens of this step; ``attend`` has the shapes."""
        assert out is None, "only a quantised output is written in place"
        assert output_scale is None, "the output is not quantised on CPUs"
        metadata = self._prefill_metadata
        starts, length = metadata.query_start_loc, metadata.max_query_len
        return self.attend(q, k, v, starts, starts, length, length, True, return_softmax_lse)

    def run_prefill_context_chunk(
        self, chunk_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to a run of tokens of earlier steps; ``attend`` has the shapes."""
        metadata = self._prefill_metadata
        context = metadata.chunked_context
        assert context is not None, "a chunk of context in a step without any"
        output = self.attend(
            q,
            k,
            v,
            metadata.query_start_loc,
            context.cu_seq_lens[chunk_idx],
            metadata.max_query_len,
            context.max_seq_lens[chunk_idx],
            False,
            True,
        )
        assert isinstance(output, tuple)
        return output


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend within one sequence that has a key; the last query sees all of them."""
    scores = torch.matmul(q.transpose(0, 1).float(), k.permute(1, 2, 0).float()) * scale
    if causal:
        num_hidden = torch.arange(len(q) - 1, -1, -1)
        hidden = torch.arange(len(k)) >= len(k) - num_hidden[:, None]
        scores.masked_fill_(hidden, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    # Where no key is seen, both are -inf, and their difference would not be a number.
    weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return torch.matmul(weights, v.transpose(0, 1).float()).transpose(0, 1).to(q.dtype), lse

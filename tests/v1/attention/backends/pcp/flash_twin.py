# SPDX-License-Identifier: Apache-2.0
"""FlashAttention and what merges its results, in plain torch, for machines without a GPU.

The twins insist on the contract: lengths that fit, tables that lead to blocks, causal masks aligned
to the bottom right. What no sequence holds comes back as NaN, as does a log-sum-exp of padding.
"""

from __future__ import annotations

from itertools import pairwise

import torch

# What vLLM has FlashAttention 3 split the keys into at most, in steps that may be in a CUDA graph.
GRAPH_SPLITS = 32


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[q, H, d]`` and the log-sum-exp ``[H, q]``, in float64.

    Args:
        query: ``[q, H, d]``.
        key: ``[k, num_kv_heads, d]``.
        value: The same.
        scale: Of the scores.
        causal: The last query sees the last key, the one before one less, and so on.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (rows.double().repeat_interleave(group, dim=1) for rows in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    if causal:
        is_seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=query.device)
        scores = scores.masked_fill(~is_seen.tril(key.shape[0] - query.shape[0]), -torch.inf)
    lse = scores.logsumexp(dim=2)
    return torch.einsum("hqk,khd->qhd", (scores - lse[..., None]).exp(), value), lse


def require_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    assert q.stride(2) == k.stride(-1) == v.stride(-1) == out.stride(2) == 1
    assert q.shape == out.shape
    assert k.shape == v.shape
    assert q.dtype == k.dtype == v.dtype
    assert q.shape[1] % k.shape[-2] == 0


def require_sequences(
    q: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> None:
    assert (cu_seqlens_k is None) != (seqused_k is None)
    assert (block_table is None) == (seqused_k is None)
    for lengths in (cu_seqlens_q, cu_seqlens_k, seqused_k):
        if lengths is not None:
            assert lengths.dtype == torch.int32
            assert lengths.is_contiguous()
    num_sequences = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k is not None:
        assert cu_seqlens_k.shape == cu_seqlens_q.shape
    if seqused_k is not None and block_table is not None:
        assert seqused_k.shape == (num_sequences,)
        assert block_table.shape[0] == num_sequences
        assert block_table.dtype == torch.int32
        assert block_table.stride(1) == 1
    assert cu_seqlens_q[0] == 0
    assert cu_seqlens_q[-1] <= q.shape[0]


def flash_attn_varlen_func(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    fa_version: int,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softcap: float = 0.0,
    return_softmax_lse: bool = False,
    num_splits: int = 0,
    scheduler_metadata: torch.Tensor | None = None,
    **descales: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend within each sequence, into ``out``; see vLLM's function of that name."""
    require_heads(q, k, v, out)
    scales_shape = (cu_seqlens_q.shape[0] - 1, k.shape[-2])
    assert set(descales) == {"q_descale", "k_descale", "v_descale"}
    assert all(scale.shape == scales_shape for scale in descales.values())
    require_sequences(q, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    # Version 2 then reads queries of one KV head as if they were one sequence.
    assert max_seqlen_q > 1 or q.shape[0] == scales_shape[0]
    assert softcap == 0.0
    assert num_splits in (0, GRAPH_SPLITS)
    assert scheduler_metadata is None
    lengths = cu_seqlens_k if seqused_k is None else seqused_k
    assert lengths is not None
    out.fill_(torch.nan)
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan)
    for sequence, (start, stop) in enumerate(pairwise(cu_seqlens_q.tolist())):
        assert 0 <= stop - start <= max_seqlen_q
        if block_table is None:
            first, last = lengths[sequence : sequence + 2].tolist()
            keys, values = k[first:last], v[first:last]
        else:
            length = int(lengths[sequence])
            blocks = block_table[sequence, : -(-length // k.shape[1])].long()
            keys, values = (rows[blocks].flatten(0, 1)[:length] for rows in (k, v))
        assert keys.shape[0] <= max_seqlen_k
        if start == stop:
            continue
        if keys.shape[0] == 0:
            out[start:stop] = 0
            lse[:, start:stop] = torch.inf if fa_version == 2 else -torch.inf
            continue
        assert not causal or keys.shape[0] >= stop - start
        results, lse[:, start:stop] = attention(
            q[start:stop], keys, values, softmax_scale, causal=causal
        )
        out[start:stop] = results
    return out, lse


def merge_partials(
    output: torch.Tensor,
    output_lse: torch.Tensor | None,
    partials: torch.Tensor,
    partial_lses: torch.Tensor,
) -> None:
    """Merge into ``output``; see our function of that name."""
    num_tokens = output.shape[0]
    parts, lses = partials[:, :num_tokens].double(), partial_lses[..., :num_tokens].double()
    if output_lse is not None:
        parts = torch.cat([output.double()[None], parts])
        lses = torch.cat([output_lse.double()[None], lses])
    lses = lses.masked_fill(lses == torch.inf, -torch.inf).transpose(1, 2)[..., None]
    weights = lses.softmax(dim=0)
    output.copy_(torch.where(weights > 0, weights * parts, 0.0).sum(dim=0))


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Write rows to their slots; see vLLM's operator of that name."""
    assert slot_mapping.dtype == torch.int64
    assert k_scale == v_scale == 1
    if kv_cache_dtype == "fp8":
        key, value = (rows.to(torch.float8_e4m3fn).view(torch.uint8) for rows in (key, value))
    assert key.dtype == value.dtype == key_cache.dtype == value_cache.dtype
    is_written = slot_mapping >= 0
    slots = slot_mapping[is_written]
    for cache, rows in ((key_cache, key), (value_cache, value)):
        block_size = cache.shape[1]
        cache[slots // block_size, slots % block_size] = rows[: len(slot_mapping)][is_written]

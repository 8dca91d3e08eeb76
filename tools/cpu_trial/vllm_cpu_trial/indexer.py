# SPDX-License-Identifier: Apache-2.0
"""The indexer of sparse attention, in torch.

It scores the tokens that a query may attend to, and leaves the best of them. Queries and keys are
scored as float8_e4m3fn values, each vector with a scale that is a power of two.

Symptoms: "SparseAttnIndexer native forward is only implemented for", "DeepGEMM backend is
unavailable", and operators that are missing. Cause: vLLM 0.25.1 has all of it for GPUs only. The
operator around it and its metadata run as they are. It can go when vLLM has an indexer for CPUs.

Rounding. Symptom: other tokens are chosen than with exact arithmetic. Cause: the interpreter of
Triton rounds 2 % of the values wrongly on their way to float8. It can go when that is repaired;
the interpreted kernel takes a second for what torch does at once, too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm.model_executor.layers import sparse_attn_indexer
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.model_executor.models import deepseek_v2
from vllm.utils import deep_gemm
from vllm_cpu_trial.mla_cache import rows_of

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
_SCALE_BYTES = 4

_group_quant: Callable[..., tuple[torch.Tensor, torch.Tensor]] = fp8_utils.per_token_group_quant_fp8


def per_token_group_quant_fp8(
    x: torch.Tensor,
    group_size: int,
    *args: Any,
    column_major_scales: bool = False,
    use_ue8m0: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise as the original; where an indexer asks, in torch.

    Args:
        x: ``[..., n * group_size]``.
        group_size: Elements with a common scale.
        args: As of the original; an indexer has none.
        column_major_scales: As of the original; an indexer has row-major ones.
        use_ue8m0: Whether scales are powers of two; those of an indexer are.
        kwargs: As of the original; an indexer has none.

    Returns:
        The values, float8_e4m3fn of the shape of ``x``, and the scales, ``[..., n]`` float32.
    """
    if args or kwargs or column_major_scales or not use_ue8m0:
        kwargs |= {"column_major_scales": column_major_scales, "use_ue8m0": use_ue8m0}
        return _group_quant(x, group_size, *args, **kwargs)
    values, scales = _quantize(x.unflatten(-1, (-1, group_size)), 1e-10)
    return values.flatten(-2), scales


def indexer_k_quant_and_cache(
    k: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    quant_block_size: int,
    scale_fmt: str,
) -> None:
    """Write a quantised key to each token's slot.

    Args:
        k: ``[num_tokens, head_dim]``. There may be more rows than slots.
        kv_cache: ``[num_blocks, block_size, head_dim + 4 * head_dim / quant_block_size]``, bytes,
            written in place. A block begins with the values of all its tokens; the scales follow.
        slot_mapping: ``[num_slots]``; tokens of negative slots are left out.
        quant_block_size: Elements with a common scale; here a whole key.
        scale_fmt: "ue8m0": scales are powers of two.
    """
    assert scale_fmt == "ue8m0", scale_fmt
    assert quant_block_size == k.shape[1], (quant_block_size, k.shape)
    (tokens,) = torch.where(slot_mapping >= 0)
    slots = slot_mapping[tokens]
    values, scales = _quantize(k[tokens].float(), 1e-4)
    blocks, places = slots // kv_cache.shape[1], slots % kv_cache.shape[1]
    cached_values, cached_scales = _parts_of(kv_cache)
    cached_values[blocks, places] = values.view(torch.uint8)
    cached_scales[blocks, places] = scales[:, None].view(torch.uint8)


def cp_gather_indexer_k_quant_cache(
    kv_cache: torch.Tensor,
    dst_k: torch.Tensor,
    dst_scale: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
) -> None:
    """Copy the keys of sequences out of the cache, one behind the other.

    Args:
        kv_cache: As written by ``indexer_k_quant_and_cache``.
        dst_k: ``[>= num_tokens, head_dim]`` float8_e4m3fn, written in place.
        dst_scale: ``[>= num_tokens, 4]``, the bytes of each scale, written in place.
        block_table: ``[num_seqs, max_num_blocks]``.
        cu_seq_lens: ``[num_seqs + 1]``, where each sequence begins in ``dst_k``.
    """
    lengths = cu_seq_lens.diff()
    seqs = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    for part, dst in zip(_parts_of(kv_cache), (dst_k.view(torch.uint8), dst_scale), strict=True):
        dst[: len(seqs)] = rows_of(part, block_table, cu_seq_lens, seqs)


def mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    clean_logits: bool,
) -> torch.Tensor:
    """Score the keys of each query's sequence.

    Args:
        q: The queries' values, ``[num_queries, num_heads, head_dim]`` float8_e4m3fn, and None.
        kv: The keys' values, ``[num_keys, head_dim]`` float8_e4m3fn, and scales, ``[num_keys]``.
        weights: Of the heads, ``[num_queries, num_heads]``.
        cu_seqlen_ks: ``[num_queries]``, each query's first key.
        cu_seqlen_ke: ``[num_queries]``, the key behind its last.
        clean_logits: Whether to mark what a query does not see. No.

    Returns:
        ``[num_queries, num_keys]`` float32. What a query does not see may be anything, or NaN.
    """
    assert not clean_logits, "nobody asks for it"
    (values, _), (keys, scales) = q, kv
    logits = weights.new_full((len(values), len(keys)), float("nan"), dtype=torch.float32)
    _, num_queries = cu_seqlen_ks.unique_consecutive(return_counts=True)
    row = 0
    for count in num_queries.tolist():
        rows = slice(row, row := row + count)
        seq = slice(int(cu_seqlen_ks[rows.start]), int(cu_seqlen_ke[rows].max()))
        logits[rows, seq] = _scores(values[rows], weights[rows], keys[seq], scales[seq])
    return logits


def paged_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule_metadata: torch.Tensor,
    max_model_len: int,
    clean_logits: bool,
) -> torch.Tensor:
    """Score the keys of each query's sequence, in the cache.

    Args:
        q: The queries' values, ``[num_seqs, num_queries, num_heads, head_dim]``, and None.
        kv_cache: ``[num_blocks, block_size, 1, head_dim + 4]``, as written by
            ``indexer_k_quant_and_cache``.
        weights: Of the heads, ``[num_seqs * num_queries, num_heads]``.
        context_lens: ``[num_seqs, num_queries]``, the keys that each query sees.
        block_tables: ``[num_seqs, max_num_blocks]``.
        schedule_metadata: How a GPU splits the work; not needed here.
        max_model_len: Keys of the longest sequence.
        clean_logits: Whether to mark what a query does not see. No.

    Returns:
        ``[num_seqs * num_queries, max_model_len]`` float32. What a query does not see may be
        anything, or NaN.
    """
    assert not clean_logits, "nobody asks for it"
    values, _ = q
    num_seqs, num_queries, *_ = values.shape
    lengths = context_lens.expand(num_seqs, num_queries)
    logits = weights.new_full((num_seqs, num_queries, max_model_len), float("nan"))
    cached_values, cached_scales = _parts_of(kv_cache.squeeze(2))
    for seq, num_keys in enumerate(lengths.amax(1).tolist()):
        blocks = block_tables[seq, : -(-num_keys // kv_cache.shape[1])]
        keys, scales = (x[blocks].flatten(0, 1)[:num_keys] for x in (cached_values, cached_scales))
        logits[seq, :, :num_keys] = _scores(
            values[seq],
            weights.unflatten(0, (num_seqs, num_queries))[seq],
            keys.view(_FP8),
            scales.view(torch.float32).flatten(),
        )
    return logits.flatten(0, 1)


def top_k_per_row_prefill(
    logits: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    raw_topk_indices: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk_tokens: int,
) -> None:
    """Leave each query's best keys.

    Args:
        logits: ``[num_rows, num_keys]``.
        cu_seqlen_ks: ``[num_rows]``, each query's first key.
        cu_seqlen_ke: ``[num_rows]``, the key behind its last.
        raw_topk_indices: ``[num_rows, topk_tokens]`` int32, written: positions behind the first
            key, in ascending order, then -1. Of keys with one score the first are better.
        num_rows: Queries.
        stride0: Of ``logits``; not needed here.
        stride1: The same.
        topk_tokens: How many keys are left.
    """
    first = cu_seqlen_ks[:, None]
    scores = logits.masked_fill(~_within(logits, cu_seqlen_ks, cu_seqlen_ke), float("-inf"))
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :topk_tokens]
    num_best = (cu_seqlen_ke - cu_seqlen_ks).clamp_max(topk_tokens)[:, None]
    is_best = torch.arange(best.shape[1]) < num_best
    none = torch.iinfo(best.dtype).max
    positions = (best - first).masked_fill(~is_best, none).sort(dim=1).values
    raw_topk_indices[:, : best.shape[1]] = positions.masked_fill(positions == none, -1)
    raw_topk_indices[:, best.shape[1] :] = -1


def top_k_per_row_decode(
    logits: torch.Tensor,
    next_n: int,
    seq_lens: torch.Tensor,
    raw_topk_indices: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk_tokens: int,
) -> None:
    """Leave each query's best keys, as ``top_k_per_row_prefill``.

    Args:
        logits: ``[num_rows, num_keys]``, a sequence's first key in the first column.
        next_n: Queries of a sequence.
        seq_lens: The keys that each query sees, ``[num_rows / next_n, next_n]``; or that the last
            query of each sequence sees, ``[num_rows / next_n]``, each one before one less.
        raw_topk_indices: ``[num_rows, topk_tokens]`` int32, written.
        num_rows: Queries.
        stride0: Of ``logits``; not needed here.
        stride1: The same.
        topk_tokens: How many keys are left.
    """
    if seq_lens.dim() == 1:
        seq_lens = seq_lens[:, None] - torch.arange(next_n - 1, -1, -1)
    stop = seq_lens.flatten()
    top_k_per_row_prefill(
        logits,
        torch.zeros_like(stop),
        stop,
        raw_topk_indices,
        num_rows,
        stride0,
        stride1,
        topk_tokens,
    )


def forward_native(
    self: sparse_attn_indexer.SparseAttnIndexer, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Run what a GPU runs, of a subclass too."""
    topk_indices: torch.Tensor = self.forward_cuda(*args, **kwargs)
    return topk_indices


def _quantize(rows: torch.Tensor, smallest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values of the shape of ``rows``, and the scale of each row, a power of two."""
    at_least = rows.abs().amax(dim=-1).clamp_min(smallest) / _LARGEST
    mantissa, exponent = torch.frexp(at_least)
    # Mantissas are from 0.5 on, which stands for a power of two itself.
    scales = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    values = (rows / scales[..., None]).clamp(-_LARGEST, _LARGEST).to(_FP8)
    return values, scales


def _parts_of(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a cache: values ``[.., block_size, head_dim]``, scales ``[.., .., 4]``."""
    num_blocks, block_size, width = cache.shape
    head_dim = width - _SCALE_BYTES
    blocks = cache.view(num_blocks, -1)
    values, scales = blocks.split([block_size * head_dim, block_size * _SCALE_BYTES], dim=1)
    return values.unflatten(1, (block_size, head_dim)), scales.unflatten(1, (block_size, -1))


def _scores(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Score ``[num_keys, head_dim]`` for ``[num_queries, num_heads, head_dim]``.

    A product of float8 vectors is exact in float64, whatever the order of its terms: scores do not
    depend on what else is in a batch.
    """
    transposed = keys.double().T
    total = transposed.new_zeros(len(q), len(keys))
    for head, head_weights in zip(q.unbind(1), weights.double().unbind(1), strict=True):
        total += (head.double() @ transposed).relu_() * head_weights[:, None]
    return (total * scales).float()


def _within(logits: torch.Tensor, first: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
    keys = torch.arange(logits.shape[1])
    return (keys >= first[:, None]) & (keys < stop[:, None])


REPLACEMENTS: Sequence[tuple[object, str, object]] = (
    (fp8_utils, "per_token_group_quant_fp8", per_token_group_quant_fp8),
    # It has copied the binding, and workers import it before they load plugins.
    (deepseek_v2, "per_token_group_quant_fp8", per_token_group_quant_fp8),
    (deep_gemm, "_fp8_fp4_mqa_logits_impl", mqa_logits),
    (deep_gemm, "_fp8_fp4_paged_mqa_logits_impl", paged_mqa_logits),
    (sparse_attn_indexer.SparseAttnIndexer, "forward_native", forward_native),
)
# In which namespace, and what is written.
OPERATORS: Sequence[tuple[str, Callable[..., None], *tuple[str, ...]]] = (
    ("_C_cache_ops", indexer_k_quant_and_cache, "kv_cache"),
    ("_C_cache_ops", cp_gather_indexer_k_quant_cache, "dst_k", "dst_scale"),
    ("_C", top_k_per_row_prefill, "raw_topk_indices"),
    ("_C", top_k_per_row_decode, "raw_topk_indices"),
)

# SPDX-License-Identifier: Apache-2.0
"""The operators that write and read an MLA cache, in torch.

Symptom: "'_OpNamespace' '_C_cache_ops' object has no attribute 'concat_and_cache_mla'".
Cause: no CPU build of vLLM 0.25.1 has them. They can go when one does.

In all of them ``kv_cache`` and ``src_cache`` are ``[num_blocks, block_size, head_size]``; rows need
not be neighbours. A quantised cache stands for its values, float8_e4m3fn, times ``scale``. A row of
an ``fp8_ds_mla`` cache is 656 bytes: a latent of 512 float8_e4m3fn values, four scales in float32
for 128 of them each, and a rope key of 64 values in bfloat16.
"""

from collections.abc import Callable, Sequence

import torch

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
_TILE = 128
_DS_MLA_BYTES = (512, 16, 128)


def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> None:
    """Write a latent and a rope key to each token's slot.

    Args:
        kv_c: ``[num_tokens, kv_lora_rank]``, any strides. There may be more rows than slots.
        k_pe: ``[num_tokens, qk_rope_head_dim]``, the same.
        kv_cache: Written in place; if quantised, float8_e4m3fn or bytes.
        slot_mapping: ``[num_slots]``; tokens of negative slots are left out.
        kv_cache_dtype: As on vLLM's command line.
        scale: One value, of a quantised cache.
    """
    (tokens,) = torch.where(slot_mapping >= 0)
    slots = slot_mapping[tokens]
    rows = torch.cat((kv_c[tokens], k_pe[tokens]), dim=-1)
    if kv_cache_dtype == "fp8_ds_mla":
        rows = _packed(kv_c[tokens], k_pe[tokens])
    elif kv_cache_dtype.startswith("fp8"):
        rows = (rows.float() / scale).clamp(-_LARGEST, _LARGEST).to(_FP8).view(torch.uint8)
        kv_cache = kv_cache.view(torch.uint8)
    block_size = kv_cache.shape[1]
    kv_cache[slots // block_size, slots % block_size] = rows.to(kv_cache.dtype)


def gather_and_maybe_dequant_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    seq_starts: torch.Tensor | None = None,
) -> None:
    """Copy runs of tokens out of the cache, one behind the other.

    Args:
        src_cache: The cache; if quantised, float8_e4m3fn.
        dst: ``[>= num_tokens, head_size]``, written in place.
        block_table: ``[num_seqs, max_num_blocks]``.
        cu_seq_lens: ``[num_seqs + 1]``, where each sequence's run begins in ``dst``.
        token_to_seq: ``[>= num_tokens]``, the sequence of each row of ``dst``.
        num_tokens: Rows of ``dst`` to be written.
        kv_cache_dtype: As on vLLM's command line.
        scale: One value, of a quantised cache.
        seq_starts: ``[num_seqs]``, the position of each run's first token, or None for 0.
    """
    seqs = token_to_seq[:num_tokens].long()
    rows = rows_of(src_cache, block_table, cu_seq_lens, seqs, seq_starts)
    dst[:num_tokens] = rows.float() * scale if kv_cache_dtype.startswith("fp8") else rows


def cp_gather_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    batch_size: int,
    seq_starts: torch.Tensor | None = None,
) -> None:
    """Copy runs of tokens out of the cache as they are, one behind the other.

    The arguments are those of ``gather_and_maybe_dequant_cache``; ``batch_size`` is the number of
    sequences.
    """
    lengths = cu_seq_lens[1 : batch_size + 1] - cu_seq_lens[:batch_size]
    seqs = torch.repeat_interleave(torch.arange(batch_size), lengths)
    dst[: len(seqs)] = rows_of(src_cache, block_table, cu_seq_lens, seqs, seq_starts)


def cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    workspace_starts: torch.Tensor,
    batch_size: int,
) -> None:
    """Copy whole sequences out of an ``fp8_ds_mla`` cache.

    Args:
        src_cache: The cache.
        dst: ``[..., 576]`` bfloat16, written in place.
        block_table: ``[batch_size, max_num_blocks]``.
        seq_lens: ``[batch_size]``, tokens of each sequence.
        workspace_starts: ``[batch_size]``, where each sequence begins in ``dst``.
        batch_size: Sequences.
    """
    block_size = src_cache.shape[1]
    for blocks, length, start in zip(
        block_table, seq_lens.tolist(), workspace_starts.tolist(), strict=True
    ):
        positions = torch.arange(length)
        rows = src_cache[blocks[positions // block_size], positions % block_size]
        dst[start : start + length] = unpacked(rows)


def unpacked(rows: torch.Tensor) -> torch.Tensor:
    """Return ``[..., 576]`` bfloat16 of the bytes ``[..., 656]`` of an ``fp8_ds_mla`` cache."""
    values, scales, k_pe = rows.split(_DS_MLA_BYTES, dim=-1)
    tiles = values.view(_FP8).float().unflatten(-1, (-1, _TILE))
    kv_c = (tiles * scales.view(torch.float32)[..., None]).flatten(-2)
    return torch.cat((kv_c.bfloat16(), k_pe.view(torch.bfloat16)), dim=-1)


def _packed(kv_c: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    tiles = kv_c.float().unflatten(-1, (-1, _TILE))
    scales = tiles.abs().amax(dim=-1).clamp_min(torch.finfo(torch.float32).tiny) / _LARGEST
    values = (tiles / scales[..., None]).clamp(-_LARGEST, _LARGEST).to(_FP8)
    parts = (values.flatten(-2), scales, k_pe.bfloat16())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def rows_of(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    seqs: torch.Tensor,
    seq_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the rows of tokens.

    Args:
        cache: ``[num_blocks, block_size, width]``.
        block_table: ``[num_seqs, max_num_blocks]``.
        cu_seq_lens: ``[num_seqs + 1]``, where each sequence's run begins among the tokens.
        seqs: ``[num_tokens]``, the sequence of each token.
        seq_starts: ``[num_seqs]``, the position of each run's first token, or None for 0.
    """
    positions = torch.arange(len(seqs)) - cu_seq_lens[seqs]
    if seq_starts is not None:
        positions += seq_starts[seqs]
    block_size = cache.shape[1]
    return cache[block_table[seqs, positions // block_size], positions % block_size]


# In which namespace, and what is written.
OPERATORS: Sequence[tuple[str, Callable[..., None], *tuple[str, ...]]] = (
    ("_C_cache_ops", concat_and_cache_mla, "kv_cache"),
    ("_C_cache_ops", gather_and_maybe_dequant_cache, "dst"),
    ("_C_cache_ops", cp_gather_cache, "dst"),
    ("_C_cache_ops", cp_gather_and_upconvert_fp8_kv_cache, "dst"),
)

# SPDX-License-Identifier: Apache-2.0
"""The operators that write and read an MLA cache, in torch.

Symptom: "'_OpNamespace' '_C_cache_ops' object has no attribute 'concat_and_cache_mla'".
Cause: no CPU build of vLLM 0.25.1 has them. They can go when one does.

In all of them ``kv_cache`` and ``src_cache`` are ``[num_blocks, block_size, head_size]``; rows need
not be neighbours. A quantised cache stands for its values, float8_e4m3fn, times ``scale``.
"""

from functools import cache

import torch

from vllm.utils.torch_utils import direct_register_custom_op

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
# Operators live as long as their library.
_LIBRARY = torch.library.Library("_C_cache_ops", "FRAGMENT")


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
    if kv_cache_dtype.startswith("fp8"):
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
    rows = _rows_of(src_cache, block_table, cu_seq_lens, seqs, seq_starts)
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
    dst[: len(seqs)] = _rows_of(src_cache, block_table, cu_seq_lens, seqs, seq_starts)


def _rows_of(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    seqs: torch.Tensor,
    seq_starts: torch.Tensor | None,
) -> torch.Tensor:
    positions = torch.arange(len(seqs)) - cu_seq_lens[seqs]
    if seq_starts is not None:
        positions += seq_starts[seqs]
    block_size = cache.shape[1]
    return cache[block_table[seqs, positions // block_size], positions % block_size]


@cache
def define() -> None:
    """Let vLLM find the operators where it looks for those of a GPU build."""
    for operator, written in (
        (concat_and_cache_mla, "kv_cache"),
        (gather_and_maybe_dequant_cache, "dst"),
        (cp_gather_cache, "dst"),
    ):
        direct_register_custom_op(
            operator.__name__,
            operator,
            mutates_args=[written],
            target_lib=_LIBRARY,
            dispatch_key="CPU",
        )

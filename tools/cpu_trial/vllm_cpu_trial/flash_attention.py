# SPDX-License-Identifier: Apache-2.0
"""FLASH_ATTN in torch, for those who ask for it: CPU_ATTN tells no log-sum-exp.

Kernels. Symptom: "Cannot use FLASH_ATTN backend on CPU", or a name of FlashAttention is not
defined. Cause: vLLM 0.25.1 has it for GPUs. Versions 2 and 3 differ in what they take, and in the
log-sum-exp of no keys; ``flash_attn_version`` of the attention configuration chooses, version 2 if
it says nothing. It can go when a CPU backend tells the log-sum-exp.

Workspace. Symptom: "WorkspaceManager not initialized". Cause: workers of GPUs alone have one. It
can go when CPU workers do.

What kernels would take for granted, or read as something else, is asserted here. What no sequence
holds comes back as NaN, as does its log-sum-exp.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from vllm import _custom_ops
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backends import flash_attn
from vllm.v1.worker import workspace

_FULL = (-1, -1)


def flash_attn_version(*args: Any, **kwargs: Any) -> int:
    """Return the version that the configuration asks for, or else 2.

    Raises:
        NotImplementedError: It asks for another one than 2 or 3.
    """
    config = get_current_vllm_config_or_none()
    version = None if config is None else config.attention_config.flash_attn_version
    if version not in (None, 2, 3):
        raise NotImplementedError(
            f"The CPU trial has FlashAttention 2 and 3 (got flash_attn_version={version}). Drop "
            "flash_attn_version from --attention-config."
        )
    return version or 2


def supports_sinks() -> bool:
    """Return False."""
    return False


def get_scheduler_metadata(
    *,
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype,
    cu_seqlens_q: torch.Tensor,
    page_size: int,
    causal: bool,
    window_size: Sequence[int] | None = None,
    num_splits: int = 0,
) -> torch.Tensor:
    """Return ``[n]`` int32 of the size of version 3's, which says what launch it is for."""
    assert cache_seqlens.shape == (batch_size,)
    assert cu_seqlens_q.shape == (batch_size + 1,)
    planned = torch.zeros(1 + 4 * (batch_size + -batch_size % 4), dtype=torch.int32)
    launch = _launch(
        batch_size=batch_size,
        max_seqlens=(max_seqlen_q, max_seqlen_k),
        num_heads=(num_heads_q, num_heads_kv),
        head_size=headdim,
        page_size=page_size,
        causal=causal,
        window=tuple(window_size or _FULL),
        num_splits=num_splits,
    )
    planned[: len(launch)] = torch.tensor(launch)
    return planned


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
    window_size: Sequence[int] | None = None,
    return_softmax_lse: bool = False,
    num_splits: int = 0,
    scheduler_metadata: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend to each sequence's keys from its queries, in float64.

    Args:
        q: ``[num_tokens, num_heads, head_size]``.
        k: ``[num_keys, num_kv_heads, head_size]``, or with a block table the cache,
            ``[num_blocks, block_size, num_kv_heads, head_size]``.
        v: The same.
        out: As ``q``, written.
        cu_seqlens_q: ``[num_seqs + 1]`` int32, where each sequence's queries begin.
        max_seqlen_q: At least the most queries of a sequence; 1 only if each has one.
        max_seqlen_k: At least the most keys of a sequence.
        softmax_scale: Of the scores.
        causal: A sequence's last query sees all of its keys, each one before sees one less.
        fa_version: 2 or 3.
        cu_seqlens_k: ``[num_seqs + 1]`` int32, where each sequence's keys begin, without a table.
        seqused_k: ``[num_seqs]`` int32, keys of each sequence, with a table.
        block_table: ``[num_seqs, max_num_blocks]`` int32, or None.
        window_size: Keys that a query sees ahead of and behind its own; -1 or None: all.
        return_softmax_lse: Whether to return the second tensor.
        num_splits: Of the keys, version 3's; nothing depends on it here.
        scheduler_metadata: ``get_scheduler_metadata`` of this very launch, version 3's, or None.
        q_descale: ``[num_seqs, num_kv_heads]``; 1.
        k_descale: The same.
        v_descale: The same.
        **others: What is not supported unless it is off.

    Returns:
        ``out``, and the natural logarithm of each softmax's denominator, ``[num_heads,
        num_tokens]`` float32. A query that sees no key has output 0, and an infinite logarithm:
        with version 2 plus, with version 3 minus infinity.

    Raises:
        NotImplementedError: One of ``others`` is on.
    """
    _require_support(others)
    _require_heads(q, k, v, out)
    _require_sequences(q, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    num_seqs, window = cu_seqlens_q.shape[0] - 1, tuple(window_size or _FULL)
    for scale in (q_descale, k_descale, v_descale):
        assert scale is None or (
            scale.shape == (num_seqs, k.shape[-2]) and bool((scale == 1).all())
        )
    # With 1, version 2 reads the queries of one KV head as if they were one sequence.
    assert max_seqlen_q > 1 or q.shape[0] == num_seqs
    assert fa_version in (2, 3)
    assert fa_version == 3 or num_splits <= 1, f"version 2 with {num_splits=}"
    if scheduler_metadata is not None:
        assert fa_version == 3, "version 2 with scheduler_metadata"
        launch = _launch(
            batch_size=num_seqs,
            max_seqlens=(max_seqlen_q, max_seqlen_k),
            num_heads=(q.shape[1], k.shape[-2]),
            head_size=q.shape[2],
            page_size=k.shape[1],
            causal=causal,
            window=window,
            num_splits=num_splits,
        )
        assert scheduler_metadata[: len(launch)].tolist() == launch, "planned for another launch"

    left, right = window
    right = 0 if causal else right
    out.fill_(torch.nan)
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan)
    for seq, (start, stop) in enumerate(pairwise(cu_seqlens_q.tolist())):
        keys, values = (_rows_of(x, seq, cu_seqlens_k, seqused_k, block_table) for x in (k, v))
        assert 0 <= stop - start <= max_seqlen_q
        assert len(keys) <= max_seqlen_k
        out[start:stop], lse[:, start:stop] = _attend(
            q[start:stop], keys, values, softmax_scale, left, right
        )
    if fa_version == 2:
        lse.masked_fill_(lse == -torch.inf, torch.inf)
    return (out, lse) if return_softmax_lse else out


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
    """Write each token's key and value to its slot.

    Args:
        key: ``[num_tokens, num_kv_heads, head_size]``. There may be more rows than slots.
        value: The same.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_size]``, written in place.
        value_cache: The same.
        slot_mapping: ``[num_slots]`` int64; tokens of negative slots are left out.
        kv_cache_dtype: "auto", or "fp8": bytes, each a float8_e4m3fn.
        k_scale: 1.
        v_scale: 1.
    """
    assert slot_mapping.dtype == torch.int64
    assert k_scale == v_scale == 1
    if kv_cache_dtype == "fp8":
        key, value = (rows.to(torch.float8_e4m3fn).view(torch.uint8) for rows in (key, value))
    assert key.dtype == value.dtype == key_cache.dtype == value_cache.dtype
    is_written = slot_mapping >= 0
    slots = slot_mapping[is_written]
    block_size = key_cache.shape[1]
    for cache, rows in ((key_cache, key), (value_cache, value)):
        cache[slots // block_size, slots % block_size] = rows[: len(slot_mapping)][is_written]


def init_workspace() -> None:
    """Give this process the workspace that a GPU's worker has."""
    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(torch.device("cpu"))


def _launch(
    *,
    batch_size: int,
    max_seqlens: tuple[int, int],
    num_heads: tuple[int, int],
    head_size: int,
    page_size: int,
    causal: bool,
    window: tuple[int, ...],
    num_splits: int,
) -> list[int]:
    numbers = (batch_size, *max_seqlens, *num_heads, head_size, page_size, int(causal))
    return [*numbers, *window, num_splits]


def _require_support(others: dict[str, Any]) -> None:
    refused = [name for name, value in others.items() if value is not None and value != 0.0]
    if refused:
        raise NotImplementedError(
            f"The FlashAttention of the CPU trial does not support {', '.join(refused)}."
        )


def _require_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    assert q.stride(2) == k.stride(-1) == v.stride(-1) == out.stride(2) == 1
    assert q.shape == out.shape
    assert k.shape == v.shape
    assert q.dtype == k.dtype == v.dtype
    assert q.shape[1] % k.shape[-2] == 0


def _require_sequences(
    q: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> None:
    assert (cu_seqlens_k is None) == (block_table is not None) == (seqused_k is not None)
    for lengths in (cu_seqlens_q, cu_seqlens_k, seqused_k):
        assert lengths is None or (lengths.dtype == torch.int32 and lengths.is_contiguous())
    num_seqs = cu_seqlens_q.shape[0] - 1
    assert cu_seqlens_k is None or cu_seqlens_k.shape == cu_seqlens_q.shape
    assert seqused_k is None or seqused_k.shape == (num_seqs,)
    if block_table is not None:
        assert block_table.shape[0] == num_seqs
        assert block_table.dtype == torch.int32
        assert block_table.stride(1) == 1
    assert cu_seqlens_q[0] == 0
    assert cu_seqlens_q[-1] <= q.shape[0]


def _rows_of(
    rows: torch.Tensor,
    seq: int,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> torch.Tensor:
    """Return ``[num_keys, num_kv_heads, head_size]``, the keys or values of a sequence."""
    if cu_seqlens_k is not None:
        start, stop = cu_seqlens_k[seq : seq + 2].tolist()
        return rows[start:stop]
    assert seqused_k is not None
    assert block_table is not None
    length = int(seqused_k[seq])
    num_blocks = -(-length // rows.shape[1])
    assert num_blocks <= block_table.shape[1]
    return rows[block_table[seq, :num_blocks].long()].flatten(0, 1)[:length]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, left: int, right: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp, ``[q, H, d]`` and ``[H, q]``; 0 and -inf without keys."""
    group = q.shape[1] // k.shape[1]
    k, v = (rows.double().repeat_interleave(group, dim=1) for rows in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    # The last query stands where the last key does.
    ahead = torch.arange(len(k)) - torch.arange(len(k) - len(q), len(k))[:, None]
    if right >= 0:
        scores.masked_fill_(ahead > right, -torch.inf)
    if left >= 0:
        scores.masked_fill_(ahead < -left, -torch.inf)
    lse = scores.logsumexp(dim=2)
    # Where no key is seen, both are -inf, and their difference would not be a number.
    weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return torch.einsum("hqk,khd->qhd", weights, v), lse


REPLACEMENTS: Sequence[tuple[object, str, object]] = (
    (flash_attn, "get_flash_attn_version", flash_attn_version),
)
# Names that only a GPU build defines there.
ADDITIONS: Sequence[tuple[object, str, object]] = (
    (flash_attn, "flash_attn_varlen_func", flash_attn_varlen_func),
    (flash_attn, "flash_attn_supports_sinks", supports_sinks),
    (flash_attn, "get_scheduler_metadata", get_scheduler_metadata),
    (flash_attn, "reshape_and_cache_flash", _custom_ops.reshape_and_cache_flash),
)
OPERATORS = (("_C_cache_ops", reshape_and_cache_flash, "key_cache", "value_cache"),)

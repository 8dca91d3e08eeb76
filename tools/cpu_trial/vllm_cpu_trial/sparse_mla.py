# SPDX-License-Identifier: Apache-2.0
"""What keeps the FlashMLA backend for sparse attention from CPUs.

Kernel. Symptom: "vllm._flashmla_C is not available". Cause: it is for GPUs alone. The one here
takes any number of heads, any size of latents, and float32.

Slots. Symptom: "NUM_TOPK_TOKENS (16) must be divisible by BLOCK_N (128)". Cause: a Triton kernel
that looks up slots 128 at a time. It can go when that takes fewer.

Workspace. Symptom: "WorkspaceManager not initialized". Cause: the worker of vLLM's CPU build has
none. It can go when that changes.

Layout. Symptom: "shape '[64, 64, 576]' is invalid for input of size", with a quantised cache.
Cause, on every device: what a layer says of its cache in vLLM 0.25.1 leaves out that it is
quantised, and the runner lays it out as if it were not. It can go when the layer says so.

Pinned memory and weights: as in ``mla``.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import LinearBase
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import flashmla_sparse
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, get_kv_quant_mode
from vllm.v1.worker import workspace
from vllm_cpu_trial.mla import keep_weight
from vllm_cpu_trial.mla_cache import unpacked
from vllm_cpu_trial.structured_outputs import PageableMemory

_get_kv_cache_spec = MLAAttention.get_kv_cache_spec
_build = flashmla_sparse.FlashMLASparseMetadataBuilder.build
_init_impl = flashmla_sparse.FlashMLASparseImpl.__init__


def get_kv_cache_spec(self: MLAAttention, vllm_config: VllmConfig) -> KVCacheSpec:
    """Describe what the original describes, and say how it is quantised."""
    spec = _get_kv_cache_spec(self, vllm_config)
    assert isinstance(spec, MLAAttentionSpec)
    if spec.cache_dtype_str != "fp8_ds_mla":
        return spec
    return dataclasses.replace(spec, kv_quant_mode=get_kv_quant_mode(spec.cache_dtype_str))


def build(
    self: flashmla_sparse.FlashMLASparseMetadataBuilder,
    common_prefix_len: int,
    common_attn_metadata: CommonAttentionMetadata,
    fast_build: bool = False,
) -> flashmla_sparse.FlashMLASparseMetadata:
    """Build what the original builds, in pageable memory."""
    with PageableMemory():
        return _build(self, common_prefix_len, common_attn_metadata, fast_build)


@functools.wraps(_init_impl)
def init_impl(
    self: flashmla_sparse.FlashMLASparseImpl, *args: Any, kv_b_proj: LinearBase, **kwargs: Any
) -> None:
    """Do what the original does, keep a weight, and take queries in the dtype of the model."""
    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(torch.device("cpu"))
    keep_weight(kv_b_proj)
    _init_impl(self, *args, kv_b_proj=kv_b_proj, **kwargs)
    self.q_concat_buffer = torch.empty(self.q_concat_buffer.shape)


def concat_mla_q(ql_nope: torch.Tensor, q_pe: torch.Tensor, q_out: torch.Tensor) -> None:
    """Put the two parts of queries one behind the other.

    Args:
        ql_nope: ``[num_tokens, num_heads, kv_lora_rank]``.
        q_pe: ``[num_tokens, num_heads, qk_rope_head_dim]``.
        q_out: ``[num_tokens, num_heads, kv_lora_rank + qk_rope_head_dim]``, written.
    """
    torch.cat((ql_nope, q_pe), dim=-1, out=q_out)


def convert_to_slots(
    req_id: torch.Tensor,
    block_table: torch.Tensor,
    token_indices: torch.Tensor,
    BLOCK_SIZE: int = 64,
    NUM_TOPK_TOKENS: int = 2048,
    BLOCK_N: int = 128,
    HAS_PREFILL_WORKSPACE: bool = False,
    prefill_workspace_request_ids: torch.Tensor | None = None,
    prefill_workspace_starts: torch.Tensor | None = None,
    return_valid_counts: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Look up where tokens are.

    Where the block table ends does not matter to tokens in the workspace; to the kernel in whose
    place this is it does.

    Args:
        req_id: ``[num_queries]``, the row of each in ``block_table``.
        block_table: ``[num_reqs, max_num_blocks]``.
        token_indices: ``[num_queries, topk]``, positions in the query's sequence; -1 for none.
        BLOCK_SIZE: Tokens in a block.
        NUM_TOPK_TOKENS: Columns of ``token_indices``.
        BLOCK_N: Columns that a GPU takes at a time; not needed here.
        HAS_PREFILL_WORKSPACE: Whether some tokens are in the workspace, not in the cache: the next
            two arguments say which.
        prefill_workspace_request_ids: ``[num_queries]``, the index of a query's sequence in
            ``prefill_workspace_starts``; -1 for the cache.
        prefill_workspace_starts: Where each sequence begins in the workspace.
        return_valid_counts: Whether to return the second tensor.

    Returns:
        Slots, ``[num_queries, topk]`` int32, -1 for none; and how many each query has.
    """
    slots = torch.full_like(token_indices, -1)
    is_cached = token_indices >= 0
    if prefill_workspace_request_ids is not None and prefill_workspace_starts is not None:
        in_workspace = is_cached & (prefill_workspace_request_ids >= 0)[:, None]
        is_cached = is_cached & ~in_workspace
        queries, _ = torch.where(in_workspace)
        starts = prefill_workspace_starts[prefill_workspace_request_ids[queries]]
        slots[in_workspace] = starts + token_indices[in_workspace]
    queries, _ = torch.where(is_cached)
    positions = token_indices[is_cached]
    blocks = block_table[req_id[queries], positions // BLOCK_SIZE]
    slots[is_cached] = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
    return (slots, (slots >= 0).sum(1)) if return_valid_counts else slots


def attend(
    self: flashmla_sparse.FlashMLASparseImpl,
    q: torch.Tensor,
    kv_c_and_k_pe_cache: torch.Tensor,
    topk_indices: torch.Tensor,
    topk_length: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to the chosen slots, as the kernel in its place.

    Args:
        self: The implementation.
        q: ``[num_queries, num_heads, head_size]``.
        kv_c_and_k_pe_cache: ``[..., head_size]``, a row for each slot; or the bytes of an
            ``fp8_ds_mla`` cache, ``[..., 656]``.
        topk_indices: ``[num_queries, topk]``, slots; -1 for none.
        topk_length: ``[num_queries]``, how many of the slots count: the first ones.

    Returns:
        ``[num_queries, num_heads, kv_lora_rank]``; 0 where there is no slot.
    """
    out, _ = attend_to_slots(
        q,
        kv_c_and_k_pe_cache.flatten(0, -2),
        topk_indices,
        topk_length,
        self.softmax_scale,
        self.kv_lora_rank,
    )
    return out


def attend_to_slots(
    q: torch.Tensor,
    cache: torch.Tensor,
    topk_indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    scale: float,
    kv_lora_rank: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the chosen slots.

    Args:
        q: ``[num_queries, num_heads, head_size]``.
        cache: ``[num_slots, head_size]``, or ``[num_slots, 656]`` bytes.
        topk_indices: As of ``attend``.
        topk_length: As of ``attend``.
        scale: Of the scores.
        kv_lora_rank: Elements of a latent.

    Returns:
        As ``attend``; and the natural log-sum-exp, ``[num_queries, num_heads]`` float32, plus
        infinity where there is no slot.
    """
    is_slot = topk_indices >= 0
    if topk_length is not None:
        is_slot &= torch.arange(topk_indices.shape[1]) < topk_length[:, None]
    out = q.new_empty(*q.shape[:2], kv_lora_rank)
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    for query, slots in enumerate(topk_indices):
        rows = cache[slots[is_slot[query]]]
        keys = (unpacked(rows) if rows.dtype == torch.uint8 else rows).float()
        scores = q[query].float() @ keys.T * scale
        out[query] = scores.softmax(dim=-1) @ keys[:, :kv_lora_rank]
        lse[query] = scores.logsumexp(dim=-1)
    return out, lse.masked_fill_(lse.isneginf(), float("inf"))


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Attend to the chosen slots, as the kernel in its place.

    Args:
        q: ``[num_queries, num_heads, head_size]``.
        kv: ``[num_slots, 1, head_size]``.
        indices: ``[num_queries, 1, topk]``, slots; -1 for none.
        sm_scale: Of the scores.
        d_v: Elements of a latent.
        topk_length: ``[num_queries]``, how many of the slots count: the first ones.

    Returns:
        As ``attend_to_slots``; None for the largest scores, which nobody reads.
    """
    out, lse = attend_to_slots(q, kv[:, 0], indices[:, 0], topk_length, sm_scale, d_v)
    return out, None, lse


def flash_mla_with_kvcache(
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    head_dim_v: int,
    softmax_scale: float,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the chosen slots of an ``fp8_ds_mla`` cache, as the kernel in its place.

    Args:
        q: ``[num_seqs, num_queries, num_heads, head_size]``.
        k_cache: ``[num_blocks, block_size, 1, 656]``, bytes.
        indices: ``[num_seqs, num_queries, topk]``, slots; -1 for none.
        head_dim_v: Elements of a latent.
        softmax_scale: Of the scores.
        kwargs: How a GPU splits the work, and what is so; not needed here.

    Returns:
        As ``attend_to_slots``: ``[num_seqs, num_queries, num_heads, head_dim_v]`` and
        ``[num_seqs, num_heads, num_queries]``.
    """
    out, lse = attend_to_slots(
        q.flatten(0, 1),
        k_cache.flatten(0, 2),
        indices.flatten(0, 1),
        None,
        softmax_scale,
        head_dim_v,
    )
    shape = q.shape[:2]
    return out.unflatten(0, shape), lse.unflatten(0, shape).transpose(1, 2)


def attend_to_quantised(
    self: flashmla_sparse.FlashMLASparseImpl,
    q: torch.Tensor,
    kv_c_and_k_pe_cache: torch.Tensor,
    topk_indices: torch.Tensor,
    kernel_metadata: object,
) -> tuple[torch.Tensor, None]:
    """Attend to the chosen slots of an ``fp8_ds_mla`` cache, as the kernel in its place.

    Args:
        self: The implementation.
        q: ``[num_seqs, num_queries, num_heads, head_size]``.
        kv_c_and_k_pe_cache: The cache.
        topk_indices: ``[num_seqs, num_queries, topk]``, slots; -1 for none.
        kernel_metadata: How a GPU splits the work; not needed here.

    Returns:
        ``[num_seqs, num_queries, num_heads, kv_lora_rank]``; and None for the lse, which nobody
        reads.
    """
    out = attend(self, q.flatten(0, 1), kv_c_and_k_pe_cache, topk_indices.flatten(0, 1))
    return out.unflatten(0, q.shape[:2]), None


def no_metadata(**kwargs: Any) -> tuple[None, None]:
    """Return what a kernel would read."""
    return None, None


REPLACEMENTS: Sequence[tuple[object, str, object]] = (
    (MLAAttention, "get_kv_cache_spec", get_kv_cache_spec),
    (flashmla_sparse.FlashMLASparseMetadataBuilder, "build", build),
    (flashmla_sparse.FlashMLASparseImpl, "__init__", init_impl),
    (flashmla_sparse.FlashMLASparseImpl, "_bf16_flash_mla_kernel", attend),
    (flashmla_sparse.FlashMLASparseImpl, "_fp8_flash_mla_kernel", attend_to_quantised),
    (flashmla_sparse, "flash_mla_sparse_fwd", flash_mla_sparse_fwd),
    (flashmla_sparse, "flash_mla_with_kvcache", flash_mla_with_kvcache),
    (flashmla_sparse, "get_mla_metadata", no_metadata),
    (flashmla_sparse, "triton_convert_req_index_to_global_index", convert_to_slots),
)
OPERATORS: Sequence[tuple[str, Callable[..., None], *tuple[str, ...]]] = (
    ("_C_cache_ops", concat_mla_q, "q_out"),
)

# SPDX-License-Identifier: Apache-2.0
"""What keeps the Triton MLA backend from CPUs, or makes it slow there.

Pinned memory. Symptom: "Found no NVIDIA driver" in the first step with context. Cause: the metadata
builder of vLLM 0.25.1 asks for it without asking the platform. It can go when the builder does.

Row order. Symptom: a short first chunk of a prompt in the same step as a continued prompt gets
wrong logprobs. Cause, on every device: the builder counts the tokens that have context as if such
rows came first, and the runner sorts rows by length alone. Without that count the merge goes by
the lse, which is -inf for a row without context. It can go when vLLM does the same.

Weights. Symptom: an assertion on the shape of ``kv_b_proj`` while weights are processed. Cause: CPU
linear layers drop a weight that they have packed, and MLA splits this one later. It can go when
MLA is served first.

Time. Symptom: a decoded token costs 0.2 s at 20 tokens of context, and a prompt continued by 450
tokens 5 s. Cause: two interpreted kernels. They can go with the interpreter.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton

from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import triton_mla
from vllm.v1.attention.ops import merge_attn_states as merge_module
from vllm_cpu_trial.structured_outputs import PageableMemory

_build = triton_mla.TritonMLAMetadataBuilder.build
_init_impl = triton_mla.TritonMLAImpl.__init__


def build(
    self: triton_mla.TritonMLAMetadataBuilder,
    common_prefix_len: int,
    common_attn_metadata: CommonAttentionMetadata,
    fast_build: bool = False,
) -> mla_attention.MLACommonMetadata[mla_attention.MLACommonDecodeMetadata]:
    """Build what the original builds, in pageable memory and for rows in any order."""
    with PageableMemory():
        metadata = _build(self, common_prefix_len, common_attn_metadata, fast_build)
    if metadata.prefill is not None and metadata.prefill.chunked_context is not None:
        metadata.prefill.chunked_context.prefill_tokens_with_context = None
    return metadata


class KeepsWeight(UnquantizedLinearMethod):
    """The linear method of a layer whose weight is read elsewhere too."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the weight and keep it."""
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


def keep_weight(layer: LinearBase) -> None:
    """Keep the weight of a layer that is not quantised."""
    if type(layer.quant_method) is UnquantizedLinearMethod:
        layer.quant_method = KeepsWeight()


@functools.wraps(_init_impl)
def init_impl(
    self: triton_mla.TritonMLAImpl, *args: Any, kv_b_proj: LinearBase, **kwargs: Any
) -> None:
    """Do what the original does, and keep the weight of ``kv_b_proj``."""
    keep_weight(kv_b_proj)
    _init_impl(self, *args, kv_b_proj=kv_b_proj, **kwargs)


def decode_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    req_to_token: torch.Tensor,
    b_seq_len: torch.Tensor,
    attn_logits: torch.Tensor,
    num_kv_splits: int,
    sm_scale: float,
    page_size: int = 1,
    *,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    is_mla: bool,
) -> None:
    """Attend to each request's cache from one query, as the kernel in its place.

    Args:
        q: ``[num_reqs, num_heads, qk_head_dim]``.
        k_buffer: ``[num_blocks, page_size, 1, qk_head_dim]``.
        v_buffer: ``[num_blocks, page_size, 1, v_head_dim]``.
        o: ``[num_reqs, num_heads, v_head_dim]``, written; 0 for a request without tokens.
        lse: ``[num_reqs, num_heads]``, written: natural logarithm; -inf for such a request.
        req_to_token: ``[num_reqs, max_num_blocks]``, the block table.
        b_seq_len: ``[num_reqs]``.
        attn_logits: Room for partial results; not needed here.
        num_kv_splits: Into how many parts to split the work; not needed here.
        sm_scale: Of the scores.
        page_size: Tokens in a block.
        k_scale: One value, of a quantised cache.
        v_scale: The same.
        is_mla: Whether values are the head of the keys; not needed here.
    """
    is_quantized = k_buffer.dtype.itemsize == 1
    for req, num_tokens in enumerate(b_seq_len.tolist()):
        blocks = req_to_token[req, : triton.cdiv(num_tokens, page_size)]
        k, v = (x[blocks].flatten(0, 2)[:num_tokens].float() for x in (k_buffer, v_buffer))
        if is_quantized:
            k, v = k * k_scale, v * v_scale
        scores = torch.matmul(q[req].float(), k.T) * sm_scale
        lse[req] = scores.logsumexp(dim=-1)
        o[req] = torch.matmul(scores.softmax(dim=-1), v)


def merge_attn_states(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
) -> None:
    """Merge what the same queries get from two disjoint sets of keys, as the kernel in its place.

    Args:
        output: ``[num_tokens, num_heads, head_size]``, written; may be one of the two below.
        prefix_output: The same shape.
        prefix_lse: ``[num_heads, num_tokens]``, natural logarithm; +-inf where no key was seen.
        suffix_output: As for the prefix.
        suffix_lse: As for the prefix.
        output_lse: ``[num_heads, num_tokens]``, written, or None. Where neither saw a key it is
            -inf, and ``output`` is 0.
        prefill_tokens_with_context: Tokens from this one on take the suffix; None for no such.
    """
    lse = torch.stack((prefix_lse, suffix_lse))
    lse[lse == float("inf")] = float("-inf")
    if prefill_tokens_with_context is not None:
        lse[0, :, prefill_tokens_with_context:] = float("-inf")
    merged_lse = lse.logsumexp(dim=0)
    weights = (lse - merged_lse.nan_to_num(neginf=0.0)).exp().transpose(1, 2)[..., None]
    # What no key went into may be anything.
    prefix, suffix = (
        torch.where(weight > 0, weight * part, 0.0)
        for weight, part in zip(weights, (prefix_output, suffix_output), strict=True)
    )
    output.copy_(prefix + suffix)
    if output_lse is not None:
        output_lse.copy_(merged_lse)


REPLACEMENTS: Sequence[tuple[object, str, object]] = (
    (triton_mla.TritonMLAMetadataBuilder, "build", build),
    (triton_mla.TritonMLAImpl, "__init__", init_impl),
    (triton_mla, "decode_attention_fwd", decode_attention),
    # Where MLA has copied it, and where others find it.
    (mla_attention, "merge_attn_states", merge_attn_states),
    (merge_module, "merge_attn_states", merge_attn_states),
)

# SPDX-License-Identifier: Apache-2.0
"""Attention backends that bring the KV of all PCP ranks to each rank's cache before they attend.

kv_gather  what they share: the mixins over a stock implementation and metadata builder
flash_attn, flash_attn_diffkv, flashinfer, triton_attn, cpu_attn  one stock backend each
reshape_and_cache  the cache writer of FLASH_ATTN and FLASHINFER
mla        the same for backends that cache latents
flash_attn_metadata  what FLASH_ATTN's rows attend to, with D > 1
context_plan     what rows attend to where, with D > 1 and keys that are not gathered
partial_results, merge_partials  merge what ranks get from their parts of the keys
"""

from __future__ import annotations

# Name in vLLM's backend registry -> class that takes its place for P > 1. Backends that are not
# listed keep ``supports_pcp = False`` and are refused.
BACKENDS = {
    "FLASH_ATTN": f"{__name__}.flash_attn.PCPFlashAttentionBackend",
    "FLASH_ATTN_DIFFKV": f"{__name__}.flash_attn_diffkv.PCPFlashAttentionDiffKVBackend",
    "FLASHINFER": f"{__name__}.flashinfer.PCPFlashInferBackend",
    "TRITON_ATTN": f"{__name__}.triton_attn.PCPTritonAttentionBackend",
    "CPU_ATTN": f"{__name__}.cpu_attn.PCPCPUAttentionBackend",
    "FLASH_ATTN_MLA": f"{__name__}.mla.flashattn_mla.PCPFlashAttnMLABackend",
    "FLASHMLA": f"{__name__}.mla.flashmla.PCPFlashMLABackend",
    "CUTLASS_MLA": f"{__name__}.mla.cutlass_mla.PCPCutlassMLABackend",
    "FLASHINFER_MLA": f"{__name__}.mla.flashinfer_mla.PCPFlashInferMLABackend",
    "TRITON_MLA": f"{__name__}.mla.triton_mla.PCPTritonMLABackend",
    "FLASH_ATTN_MLA_SPARSE": f"{__name__}.mla.flashattn_mla_sparse.PCPFlashAttnMLASparseBackend",
    "FLASHMLA_SPARSE": f"{__name__}.mla.flashmla_sparse.PCPFlashMLASparseBackend",
    "FLASHINFER_MLA_SPARSE": f"{__name__}.mla.flashinfer_mla_sparse.PCPFlashInferMLASparseBackend",
}

# Those that attend to a KV cache of which each rank has a part, D > 1: results have a
# log-sum-exp, and prefills gather what others have, or have others attend to it.
DCP_BACKENDS = (
    "FLASH_ATTN",
    "FLASH_ATTN_MLA",
    "FLASHMLA",
    "CUTLASS_MLA",
    "FLASHINFER_MLA",
    "TRITON_MLA",
    "FLASH_ATTN_MLA_SPARSE",
    "FLASHMLA_SPARSE",
)


def register_backends() -> None:
    """Put our classes into vLLM's registry, in a worker process and before it loads a model."""
    from vllm.v1.attention.backends.pcp.mla.prefill_backend import register_prefill_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, class_path in BACKENDS.items():
        register_backend(AttentionBackendEnum[name], class_path)
    register_prefill_backend()

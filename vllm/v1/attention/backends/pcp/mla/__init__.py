# SPDX-License-Identifier: Apache-2.0
"""MLA backends for prefill context parallelism.

prefill_plan     which keys each row of a step attends to, up-projected once a request (numpy only)
device_plan      the same, as kernels take it
concat_keys      the rotary key behind each head's own part, in one pass
shared_decode    decodes over a KV cache that ranks share
prefill_backend  what a plan asks of a prefill backend; flash_attn_prefill is the one that can
latent           what the backends share: the gather, the builder, the prefill path
flashattn_mla, flashmla, cutlass_mla, flashinfer_mla, triton_mla  one stock backend each
flashattn_mla_sparse, flashmla_sparse, flashinfer_mla_sparse      the same of sparse MLA

Sparse MLA over a KV cache that ranks share:

request_chunks    which requests are gathered together (numpy only)
shared_rows       decodes apart from prefills, and chunks as kernels take them
selected_slots    where selected tokens stand
merged_selection  the best of what ranks selected
shared_sparse     builder and implementation of attention; indexer has those of the indexer's cache
"""

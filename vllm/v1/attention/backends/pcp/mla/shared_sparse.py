# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA over a KV cache that ranks share: attention to tokens that a row selected.

Decodes are the same on all ranks: each attends to those of the selected tokens that it keeps, and
``shared_decode`` adds up. For prefill rows the latents of whole requests are gathered, as they are
in the cache, and rows attend to the gathered ones that they selected. These are looked up one by
one in any case, so that nobody has to put them in order.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm.config import get_current_vllm_config
from vllm.distributed.pcp.shard_collectives import gather_shards, kv_shards
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.attention.backends.pcp.kv_gather import RowsPerRequestMixin
from vllm.v1.attention.backends.pcp.mla.device_plan import slots_to_read
from vllm.v1.attention.backends.pcp.mla.latent import GatherLatentMixin
from vllm.v1.attention.backends.pcp.mla.selected_slots import gathered_slots, kept_slots
from vllm.v1.attention.backends.pcp.mla.shared_decode import SharedDecodeMixin
from vllm.v1.attention.backends.pcp.mla.shared_rows import (
    GATHERED_BLOCK_SIZE,
    DeviceChunk,
    SharedPrefill,
    count_decodes,
    decode_view,
    max_gathered_rows,
    parts_of,
    plan_rows,
)
from vllm.v1.worker.workspace import current_workspace_manager

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.pcp.kv_shards import KVShards
    from vllm.v1.attention.backend import CommonAttentionMetadata, SparseMLAAttentionImpl
    from vllm.v1.kv_cache_interface import AttentionSpec

    class _ImplBase(SparseMLAAttentionImpl[Any]):
        topk_indices_buffer: torch.Tensor | None
        kv_lora_rank: int
        kv_cache_dtype: str
        num_shards: int
        shards: KVShards

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def forward_mqa(
            self,
            q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
            kv_c_and_k_pe_cache: torch.Tensor,
            attn_metadata: Any,
            layer: Any,
        ) -> tuple[torch.Tensor, torch.Tensor | None]: ...

else:
    _ImplBase = object


# Queries, or their latent and their rotary part.
Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

# Bytes of a row of the layout "fp8_ds_mla", with its scales.
_DS_MLA_BYTES = 656


@dataclass
class SparseChunk:
    """A chunk of prefill rows, as attention takes it.

    Attributes:
        chunk: What is gathered.
        slots: ``[num_read]`` int32, in this rank's cache, of what it reads.
        parts: Of the chunk's runs as many queries as a kernel takes at a time, counted from the
            first prefill token, and how it splits them, if it wants to be told.
    """

    chunk: DeviceChunk
    slots: torch.Tensor
    parts: list[tuple[slice, Any]]


@dataclass
class SharedSparseMetadata(AttentionMetadata):
    """A step over a cache that ranks share.

    Attributes:
        num_actual_tokens: All tokens.
        slot_mapping: As of the stock metadata.
        num_decodes: Tokens of decodes, ahead of all others.
        block_table: ``[num_decodes, max_num_blocks]`` int32.
        schedule: How a kernel splits the decodes, if it wants to be told.
        prefill: The other rows, if there are any.
        chunks: Of these.
    """

    num_actual_tokens: int
    slot_mapping: torch.Tensor
    num_decodes: int
    block_table: torch.Tensor
    schedule: Any
    prefill: SharedPrefill | None
    chunks: list[SparseChunk]


class SharedSparseBuilderMixin(RowsPerRequestMixin):
    """Over a stock metadata builder of sparse MLA: two rows a request; plans where ranks share."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.shards = kv_shards(vllm_config.parallel_config.cp_kv_cache_interleave_size)
        self.max_rows = max_gathered_rows(vllm_config, self.shards)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Build as usual; where ranks share the cache, ``SharedSparseMetadata``."""
        common = common_attn_metadata
        if self.shards.world_size == 1:
            stock: Any = super()
            return stock.build(common_prefix_len, common, fast_build)
        num_decodes = count_decodes(common)
        decodes = decode_view(common, num_decodes, self.shards)
        prefill = plan_rows(common, num_decodes, self.shards, self.max_rows)
        return SharedSparseMetadata(
            num_actual_tokens=common.num_actual_tokens,
            slot_mapping=common.slot_mapping,
            num_decodes=num_decodes,
            block_table=decodes.block_table_tensor,
            schedule=self.schedule(decodes),
            prefill=prefill,
            chunks=[
                self._sparse_chunk(chunk, decodes)
                for chunk in (prefill.chunks if prefill is not None else [])
            ],
        )

    def _sparse_chunk(self, chunk: DeviceChunk, decodes: CommonAttentionMetadata) -> SparseChunk:
        block_size = self.kv_cache_spec.block_size
        parts = []
        for part in parts_of(chunk.runs, self.max_queries()):
            queries = dataclasses.replace(decodes, num_actual_tokens=part.stop - part.start)
            # A schedule is of so many queries.
            parts.append((part, self.schedule(queries)))
        slots = slots_to_read(chunk.block_table, chunk.cu_kept, chunk.num_read, block_size)
        return SparseChunk(chunk, slots, parts)

    def max_queries(self) -> int | None:
        """Return how many queries of prefill rows a kernel takes at a time, if not any number."""
        return None

    def schedule(self, common: CommonAttentionMetadata) -> Any:
        """Return how a kernel splits queries, if it wants to be told.

        Args:
            common: Its ``num_actual_tokens`` is the number of queries.
        """
        return None


class KeptTokensMixin(_ImplBase):
    """Over a stock implementation of sparse MLA: attention to what this rank keeps, with D > 1."""

    def beside_gathered(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shapes and types of what else stands in vLLM's workspace meanwhile, in front."""
        return []

    def take_workspace(self, beside: list[torch.Tensor]) -> None:
        """Take ``beside_gathered`` in place of views of a workspace that has grown since."""

    def forward_mqa(
        self,
        q: Query,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend for the decode rows to those of their selected tokens that this rank keeps.

        Args:
            q: ``[n, num_heads, head_size]``, or its latent and its rotary part.
            kv_c_and_k_pe_cache: ``[num_blocks, block_size, width]``.
            attn_metadata: The step's.
            layer: The attention layer.

        Returns:
            ``[n, num_heads, kv_lora_rank]``, and with D > 1 the log-sum-exp, ``[n, num_heads]``;
            infinite for rows without such tokens.
        """
        if not isinstance(attn_metadata, SharedSparseMetadata):
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        assert self.topk_indices_buffer is not None
        slots, num_slots = kept_slots(
            self.topk_indices_buffer[: attn_metadata.num_decodes],
            attn_metadata.block_table,
            self.shards,
            kv_c_and_k_pe_cache.shape[1],
        )
        return self.attend(q, kv_c_and_k_pe_cache, slots, num_slots, attn_metadata.schedule)

    def attend(
        self,
        q: Query,
        cache: torch.Tensor,
        slots: torch.Tensor,
        num_slots: torch.Tensor,
        schedule: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to some slots each.

        Args:
            q: ``[n, num_heads, head_size]``, or its latent and its rotary part.
            cache: ``[num_blocks, block_size, width]``, or gathered rows in this shape.
            slots: ``[n, k]`` int32, then -1.
            num_slots: ``[n]`` int32.
            schedule: The builder's.

        Returns:
            ``[n, num_heads, kv_lora_rank]``, and the log-sum-exp ``[n, num_heads]`` float32,
            infinite where there are no slots.
        """
        raise NotImplementedError


if TYPE_CHECKING:

    class _SharedBase(GatherLatentMixin, KeptTokensMixin): ...
else:

    class _SharedBase(GatherLatentMixin, SharedDecodeMixin):
        pass


class SharedSparseMixin(_SharedBase):
    """Over a stock implementation of sparse MLA: gather before write; shared caches.

    Attributes:
        shards: How ranks share the KV cache.
        max_rows: Rows that a gather of latents may have.
    """

    can_return_lse_for_decode = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.num_shards == 1:
            return
        vllm_config = get_current_vllm_config()
        parallel_config = vllm_config.parallel_config
        self.shards = kv_shards(parallel_config.cp_kv_cache_interleave_size)
        self.max_rows = max_gathered_rows(vllm_config, self.shards)
        dtype = vllm_config.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        self._row = cached_row(self.kv_cache_dtype, dtype, self.head_size)
        # Reserved now, while it may still grow.
        *beside, _ = self._workspace()
        self.take_workspace(beside)

    def _workspace(self) -> list[torch.Tensor]:
        """Return ``beside_gathered`` and ``[max_rows, width]``, views of vLLM's workspace."""
        width, dtype = self._row
        views: list[torch.Tensor] = current_workspace_manager().get_simultaneous(
            *self.beside_gathered(), ((self.max_rows, width), dtype)
        )
        return views

    def forward_mqa(
        self,
        q: Query,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to the tokens that each row selected.

        Args:
            q: ``[T, num_heads, head_size]``, or its latent and its rotary part.
            kv_c_and_k_pe_cache: ``[num_blocks, block_size, width]``.
            attn_metadata: The step's.
            layer: The attention layer.

        Returns:
            ``[T, num_heads, kv_lora_rank]``; with D > 1, of decodes the same bits on all ranks that
            have these heads.

        Collectives: with D > 1 an all_gather on the DCP group for each chunk of prefill rows, and
        of decodes those of ``SharedDecodeMixin``.
        """
        cache = kv_c_and_k_pe_cache
        metadata = attn_metadata
        if not isinstance(metadata, SharedSparseMetadata) or metadata.prefill is None:
            return super().forward_mqa(q, cache, metadata, layer)
        part = q[0] if isinstance(q, tuple) else q
        out = part.new_empty(*part.shape[:2], self.kv_lora_rank)
        decodes = slice(0, metadata.num_decodes)
        if metadata.num_decodes > 0:
            out[decodes], _ = super().forward_mqa(rows_of(q, decodes), cache, metadata, layer)
        self._attend_prefill(q, cache, metadata, metadata.prefill, out)
        return out, None

    def _attend_prefill(
        self,
        q: Query,
        cache: torch.Tensor,
        metadata: SharedSparseMetadata,
        prefill: SharedPrefill,
        out: torch.Tensor,
    ) -> None:
        assert self.topk_indices_buffer is not None
        *_, buffer = self._workspace()
        blocks = buffer.view(-1, GATHERED_BLOCK_SIZE, buffer.shape[1])
        cached = words_of(cache.view(-1, cache.shape[-1]))
        for sparse_chunk in metadata.chunks:
            chunk = sparse_chunk.chunk
            gathered = buffer[: self.shards.world_size * chunk.num_read]
            own_rows = self.shards.own_rows(gathered)
            torch.index_select(cached, 0, sparse_chunk.slots, out=words_of(own_rows))
            gather_shards(gathered, own_rows)
            for part, schedule in sparse_chunk.parts:
                tokens = slice(metadata.num_decodes + part.start, metadata.num_decodes + part.stop)
                slots, num_slots = gathered_slots(
                    self.topk_indices_buffer[tokens], prefill.first_key[part], chunk.gathered_rows
                )
                out[tokens], _ = self.attend(rows_of(q, tokens), blocks, slots, num_slots, schedule)


def cached_row(
    kv_cache_dtype: str, model_dtype: torch.dtype, head_size: int
) -> tuple[int, torch.dtype]:
    """Return the width and the type of a row of the cache.

    Raises:
        ValueError: Kernels would be given queries of another type.
    """
    if kv_cache_dtype == "fp8_ds_mla":
        return _DS_MLA_BYTES, torch.uint8
    if kv_cache_dtype != "auto" and STR_DTYPE_TO_TORCH_DTYPE[kv_cache_dtype] != model_dtype:
        raise ValueError(
            "Prefill context parallelism does not support decode context parallelism with sparse "
            "MLA and a KV cache in 16 bits of another kind than the model's (got "
            f"kv_cache_dtype={kv_cache_dtype}, dtype={model_dtype}). Set --kv-cache-dtype auto, or "
            "--decode-context-parallel-size 1."
        )
    return head_size, model_dtype


def words_of(rows: torch.Tensor) -> torch.Tensor:
    """Return the bytes of rows, eight at a time, a view: copied as they are, and faster."""
    return rows.view(torch.int64)


def rows_of(q: Query, rows: slice) -> Query:
    """Return some rows of queries, views."""
    if isinstance(q, tuple):
        latent, rotary = q
        return latent[rows], rotary[rows]
    return q[rows]

# SPDX-License-Identifier: Apache-2.0
"""Gather before write: all a paged backend needs for prefill context parallelism while D = 1.

A row of a rank is an ordinary query over its request's block table, so that every backend that
reads K and V from the cache attends correctly, once the cache holds the new K and V of *all* ranks.
``do_kv_cache_update`` runs ahead of attention in each layer; here it gathers first. In a
partitioned step the slot mapping covers the rows of all ranks, in other steps only the layer's own:
its length says which it is, on every rank alike.

Where ranks reach each other's caches, each writes its own rows to its own cache instead, and copies
them to the others (``PeerCaches``).

In the gathered buffer a token is one row of bytes, its K (all heads) and behind it its V.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from vllm.distributed.pcp.kv_gather import get_kv_gather
from vllm.distributed.pcp.peer_caches import get_peer_caches
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionImpl, AttentionLayer, AttentionMetadataBuilder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

    class _ImplBase(AttentionImpl[Any]):
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def do_kv_cache_update(
            self,
            layer: Any,
            key: torch.Tensor,
            value: torch.Tensor,
            kv_cache: torch.Tensor,
            slot_mapping: torch.Tensor,
        ) -> None: ...

    _BuilderBase = AttentionMetadataBuilder[Any]
else:
    _ImplBase = _BuilderBase = object


def kv_views(
    rows: torch.Tensor, num_kv_heads: int, head_size: int, head_size_v: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of packed rows, ``[n, num_kv_heads, head_size]`` and ``[..., head_size_v]``.

    Args:
        rows: ``[n, num_kv_heads * (head_size + head_size_v)]`` of the element type that was packed.
        num_kv_heads: KV heads of this rank.
        head_size: Elements of a key head.
        head_size_v: Elements of a value head.
    """
    split = num_kv_heads * head_size
    keys, values = rows[:, :split], rows[:, split:]
    return (
        keys.view(-1, num_kv_heads, head_size),
        values.view(-1, num_kv_heads, head_size_v),
    )


class GatherKVMixin(_ImplBase):
    """Over a stock attention implementation; gathers K and V in the model's dtype.

    Attributes:
        shares_cache: Whether it attends to a KV cache of which each rank has a part, D > 1.

    Raises:
        NotImplementedError: it would have to, and does not.
    """

    supports_pcp = True
    shares_cache = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.dcp_world_size > 1 and not self.shares_cache:
            raise NotImplementedError(
                "Prefill context parallelism does not support decode context parallelism with the "
                f"attention implementation that vLLM chose (got {type(self).__name__}). Set "
                "--attention-backend FLASH_ATTN, or --decode-context-parallel-size 1."
            )

    def fused_rope_kvcache_supported(self) -> bool:
        """Refuse the fusion that writes the cache without ``do_kv_cache_update``."""
        return False

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the new K and V of all ranks to this rank's cache.

        Args:
            layer: The attention layer, for its cache scales.
            key: ``[L, num_kv_heads, head_size]``, this rank's rows.
            value: ``[L, num_kv_heads, head_size_v]``.
            kv_cache: The layer's cache.
            slot_mapping: ``[P * L]`` int64 in a partitioned step, ``[L]`` in others; -1 is not
                written.

        Collectives: one gather on the PCP group in a partitioned step, or one meeting.
        """
        num_tokens, peers = key.shape[0], get_peer_caches()
        if slot_mapping.shape[0] != self.pcp_world_size * num_tokens:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        elif peers is None:
            self._gather_and_write(layer, key, value, kv_cache, slot_mapping)
        else:
            own_slots = peers.own_slots(slot_mapping)
            super().do_kv_cache_update(layer, key, value, kv_cache, own_slots)
            peers.copy(kv_cache, own_slots)

    def _gather_and_write(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        num_tokens, num_kv_heads, head_size = key.shape
        shape = (num_kv_heads, head_size, value.shape[2])
        gather = get_kv_gather()
        own_rows = gather.begin(
            num_tokens, num_kv_heads * (shape[1] + shape[2]) * key.element_size()
        )
        own_keys, own_values = kv_views(own_rows.view(key.dtype), *shape)
        own_keys.copy_(key)
        own_values.copy_(value)
        keys, values = kv_views(gather.finish().view(key.dtype), *shape)
        super().do_kv_cache_update(layer, keys, values, kv_cache, slot_mapping)


class GatherQuantizedKVMixin(GatherKVMixin):
    """Gathers K and V in the dtype of the cache, quantised with the backend's own writer.

    The writer packs K and V into the buffer in one launch: to it, a cache of one block.
    """

    def _gather_and_write(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        _, num_kv_heads, head_size = key.shape
        self._pack(layer, key, value, kv_cache.dtype)
        rows = get_kv_gather().finish()
        if is_quantized_kv_cache(self.kv_cache_dtype):
            self._write_quantized(layer, rows, num_kv_heads, head_size, kv_cache, slot_mapping)
        else:
            keys, values = kv_views(rows.view(kv_cache.dtype), num_kv_heads, head_size, head_size)
            self._write(layer, keys, values, kv_cache[:, 0], kv_cache[:, 1], slot_mapping)

    def _pack(
        self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``key`` and ``value`` as the cache has them, views of this rank's rows.

        Args:
            layer: The attention layer, for its cache scales.
            key: ``[n, num_kv_heads, head_size]``.
            value: The same.
            dtype: The cache's.
        """
        num_tokens, num_kv_heads, head_size = key.shape
        gather = get_kv_gather()
        assert num_tokens <= gather.identity.shape[0], f"{num_tokens} tokens"
        own_rows = gather.begin(num_tokens, 2 * num_kv_heads * head_size * dtype.itemsize)
        own_keys, own_values = kv_views(own_rows.view(dtype), num_kv_heads, head_size, head_size)
        self._write(
            layer,
            key,
            value,
            own_keys.unsqueeze(0),
            own_values.unsqueeze(0),
            gather.identity[:num_tokens],
        )
        return own_keys, own_values

    def _write(
        self,
        layer: AttentionLayer,
        keys: torch.Tensor,
        values: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Scatter ``[n, heads, head_size]`` into ``[num_blocks, block_size, heads, head_size]``."""
        raise NotImplementedError

    def _write_quantized(
        self,
        layer: AttentionLayer,
        rows: torch.Tensor,
        num_kv_heads: int,
        head_size: int,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Scatter gathered rows that hold the cache's own bytes."""
        raise NotImplementedError


class RowsPerRequestMixin(_BuilderBase):
    """Over a stock metadata builder: buffers for twice ``max_num_seqs``, two rows a request."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, two_rows_per_request(vllm_config), device)


def two_rows_per_request(vllm_config: VllmConfig) -> VllmConfig:
    """Return a shallow copy of the configuration with ``max_num_seqs`` doubled."""
    view = copy.copy(vllm_config)
    view.scheduler_config = copy.copy(vllm_config.scheduler_config)
    view.scheduler_config.max_num_seqs *= 2
    return view

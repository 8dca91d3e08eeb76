# SPDX-License-Identifier: Apache-2.0
"""Bytes that a rank receives where ranks share the KV cache, by docs/design/collectives.md.

Of one kind each: new KV that P ranks gather, and what D = P ranks exchange. TP is 1, and the cache
has the type of the model.
"""

from __future__ import annotations

from typing import Any

Bytes = dict[str, int]


def prefill_bytes(
    shape: dict[str, Any], itemsize: int, size: int, num_shards: int, steps: list[tuple[int, int]]
) -> Bytes:
    """Return the bytes of a request that is prefilled alone.

    Args:
        shape: Configuration of the model.
        itemsize: Bytes of an element.
        size: P.
        num_shards: D.
        steps: Of each, the tokens that the request has before and after it; all are partitioned.
    """
    kv = dcp = 0
    for first, end in steps:
        num_rows = -(-(end - first) // size)
        kv += (size - 1) * num_rows * _cached_elements(shape) * itemsize
        if "kv_lora_rank" in shape:
            num_kept = -(-end // num_shards)
            dcp += (num_shards - 1) * num_kept * _cached_elements(shape) * itemsize
        elif first > 0:
            row = _query_bytes(shape, itemsize) + _result_bytes(shape, itemsize)
            dcp += (num_shards - 1) * num_rows * row
    num_layers = shape["num_hidden_layers"]
    return {"kv": kv * num_layers, "dcp": dcp * num_layers}


def decode_bytes(shape: dict[str, Any], itemsize: int, num_shards: int, num_requests: int) -> Bytes:
    """Return the bytes of a step of decodes, all of which have cached tokens."""
    if num_shards == 1:
        return {"kv": 0, "dcp": 0}
    if "kv_lora_rank" in shape:
        num_heads = shape["num_attention_heads"]
        row = (num_shards - 1) * 4 * num_heads + num_heads * shape["kv_lora_rank"] * itemsize
    else:
        row = (num_shards - 1) * _result_bytes(shape, itemsize)
    return {"kv": 0, "dcp": num_requests * row * shape["num_hidden_layers"]}


def _cached_elements(shape: dict[str, Any]) -> int:
    """Return what a token has in the cache of a layer."""
    if "kv_lora_rank" in shape:
        latent: int = shape["kv_lora_rank"] + shape["qk_rope_head_dim"]
        return latent
    elements: int = 2 * shape["num_key_value_heads"] * shape["head_dim"]
    return elements


def _query_bytes(shape: dict[str, Any], itemsize: int) -> int:
    num_bytes: int = shape["num_attention_heads"] * shape["head_dim"] * itemsize
    return num_bytes


def _result_bytes(shape: dict[str, Any], itemsize: int) -> int:
    """Return the bytes of a token's result and its log-sum-exps."""
    num_lse_bytes: int = 4 * shape["num_attention_heads"]
    return _query_bytes(shape, itemsize) + num_lse_bytes

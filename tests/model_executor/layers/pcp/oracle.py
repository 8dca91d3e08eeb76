# SPDX-License-Identifier: Apache-2.0
"""Layers of experts, and what they give by the book: a loop over rows and experts in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

HIDDEN_SIZE = 64
# Divides into parts of 2, 3 and 4 ranks that the CPU kernel takes: multiples of 32.
WIDTH = 384
NUM_EXPERTS = 6
# Of each rank in a partitioned step, of all ranks in another one.
NUM_ROWS = 5

Weights: TypeAlias = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        name: Unique.
        top_k: Experts of a row.
        num_groups: Groups of experts, of which the best ``num_top_groups`` are chosen from; None
            to choose from all.
        num_top_groups: See ``num_groups``.
        scoring: "softmax" or "sigmoid".
        has_bias: Whether a bias takes part in the choice, not in the weights.
        has_gate: Whether the runner computes the logits itself.
        shared_width: Of the shared expert; 0 for none.
        scale: Factor of the routed output.
        dtype: Of rows and experts. Logits are float32.
    """

    name: str
    top_k: int = 2
    num_groups: int | None = None
    num_top_groups: int | None = None
    scoring: str = "softmax"
    has_bias: bool = False
    has_gate: bool = False
    shared_width: int = 0
    scale: float = 1.0
    dtype: torch.dtype = torch.float32


LAYERS = (
    Layer("plain"),
    Layer("bf16", top_k=3, dtype=torch.bfloat16),
    Layer("shared", has_gate=True, shared_width=96),
    Layer("grouped", num_groups=3, num_top_groups=2, has_gate=True, shared_width=96, scale=1.5),
    Layer(
        "sigmoid",
        num_groups=3,
        num_top_groups=2,
        scoring="sigmoid",
        has_bias=True,
        shared_width=96,
        scale=2.5,
    ),
)


def make_weights(layer: Layer) -> Weights:
    """Return the weights of a layer, the same in every process."""
    generator = torch.Generator().manual_seed(LAYERS.index(layer))

    def random(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
        return values.to(layer.dtype)

    return {
        "gate": random(NUM_EXPERTS, HIDDEN_SIZE).float(),
        "bias": random(NUM_EXPERTS).float() * layer.has_bias,
        **expert_weights("", random, NUM_EXPERTS, WIDTH),
        **expert_weights("shared_", random, 1, layer.shared_width),
    }


def expert_weights(prefix: str, random: Any, num_experts: int, width: int) -> Weights:
    """Return the three matrices of gated experts."""
    if not width:
        return {}
    return {
        f"{prefix}w1": random(num_experts, width, HIDDEN_SIZE),
        f"{prefix}w3": random(num_experts, width, HIDDEN_SIZE),
        f"{prefix}w2": random(num_experts, HIDDEN_SIZE, width),
    }


def make_rows(layer: Layer, num_rows: int) -> torch.Tensor:
    """Return hidden states, the same in every process."""
    generator = torch.Generator().manual_seed(100 + num_rows)
    return torch.randn(num_rows, HIDDEN_SIZE, generator=generator).to(layer.dtype)


def logits_of(weights: Weights, rows: torch.Tensor) -> torch.Tensor:
    """Return the router's float32 logits."""
    return torch.nn.functional.linear(rows.float(), weights["gate"])


def expected(layer: Layer, rows: torch.Tensor) -> torch.Tensor:
    """Return what the layer gives for rows, float64."""
    weights = {name: tensor.double() for name, tensor in make_weights(layer).items()}
    return torch.stack([_expected_row(layer, weights, row) for row in rows.double()])


def _expected_row(layer: Layer, weights: Weights, row: torch.Tensor) -> torch.Tensor:
    routed = torch.zeros_like(row)
    for expert, share in _choice(layer, weights, row).items():
        routed += share * _gated(weights, "", expert, row)
    if layer.shared_width:
        return layer.scale * routed + _gated(weights, "shared_", 0, row)
    return layer.scale * routed


def _gated(weights: Weights, prefix: str, expert: int, row: torch.Tensor) -> torch.Tensor:
    w1, w2, w3 = (weights[f"{prefix}{name}"][expert] for name in ("w1", "w2", "w3"))
    return w2 @ (torch.nn.functional.silu(w1 @ row) * (w3 @ row))


def _choice(layer: Layer, weights: Weights, row: torch.Tensor) -> dict[int, float]:
    """Return the experts of a row and their shares, which sum up to one."""
    logits = weights["gate"] @ row
    scores = torch.sigmoid(logits) if layer.scoring == "sigmoid" else torch.softmax(logits, 0)
    votes = (scores + weights["bias"]).tolist()
    candidates = set(range(NUM_EXPERTS))
    if layer.num_groups is not None:
        size = NUM_EXPERTS // layer.num_groups
        groups = [list(range(i * size, (i + 1) * size)) for i in range(layer.num_groups)]
        # With a bias a group counts for its two best experts, else for its best one.
        num_best = 2 if layer.has_bias else 1
        groups.sort(key=lambda group: -sum(sorted(votes[e] for e in group)[-num_best:]))
        candidates = {expert for group in groups[: layer.num_top_groups] for expert in group}
    chosen = sorted(candidates, key=lambda expert: -votes[expert])[: layer.top_k]
    total = sum(float(scores[expert]) for expert in chosen)
    return {expert: float(scores[expert]) / total for expert in chosen}

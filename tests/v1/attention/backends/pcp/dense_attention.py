# SPDX-License-Identifier: Apache-2.0
"""What attention is, in float64, to hold results of kernels and of their twins against."""

from __future__ import annotations

import torch


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[q, H, d]`` and the log-sum-exp ``[H, q]``, in float64.

    Args:
        query: ``[q, H, d]``.
        key: ``[k, num_kv_heads, d]``.
        value: The same.
        scale: Of the scores.
        causal: The last query sees the last key, the one before one less, and so on.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (rows.double().repeat_interleave(group, dim=1) for rows in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    if causal:
        is_seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=query.device)
        scores = scores.masked_fill(~is_seen.tril(key.shape[0] - query.shape[0]), -torch.inf)
    lse = scores.logsumexp(dim=2)
    return torch.einsum("hqk,khd->qhd", (scores - lse[..., None]).exp(), value), lse


def merge(
    output: torch.Tensor,
    output_lse: torch.Tensor | None,
    partials: torch.Tensor,
    partial_lses: torch.Tensor,
) -> None:
    """Merge into ``output``; see ``merge_partials``."""
    num_tokens = output.shape[0]
    parts, lses = partials[:, :num_tokens].double(), partial_lses[..., :num_tokens].double()
    if output_lse is not None:
        parts = torch.cat([output.double()[None], parts])
        lses = torch.cat([output_lse.double()[None], lses])
    lses = lses.masked_fill(lses == torch.inf, -torch.inf).transpose(1, 2)[..., None]
    weights = lses.softmax(dim=0)
    output.copy_(torch.where(weights > 0, weights * parts, 0.0).sum(dim=0))

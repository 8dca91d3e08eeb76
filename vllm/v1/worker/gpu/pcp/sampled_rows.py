# SPDX-License-Identifier: Apache-2.0
"""The rows of a partitioned step that logits are computed from."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch

from vllm.v1.worker.gpu.pcp.copies import copy_to_device
from vllm.v1.worker.gpu.pcp.layout import Int32Array, PartitionPlan, RestorePlan


class SampledRows:
    """One rank's share of them; planned when first asked for, while the GPU is busy.

    ``K`` is the most that one rank owns; ranks with fewer repeat their first row.

    Args:
        plan: The partition.
        tokens: Returns ``[n]`` int32, the global tokens that have logits, n > 0.
        pcp_rank: Whose share.
        device: Where indices go.

    Attributes:
        is_partial: Whether the last attention layer has filled these rows of its output alone.
        is_applied: Whether the forward pass has returned these rows alone, ``[K, hidden_size]``.
    """

    def __init__(
        self,
        plan: PartitionPlan,
        tokens: Callable[[], Int32Array],
        pcp_rank: int,
        device: torch.device,
    ) -> None:
        self._plan, self._tokens, self._rank, self._device = plan, tokens, pcp_rank, device
        self.is_partial = self.is_applied = False

    @cached_property
    def _restore(self) -> RestorePlan:
        return self._plan.plan_restore(self._tokens())

    @cached_property
    def _indices(self) -> tuple[torch.Tensor, ...]:
        return copy_to_device(self.tokens, self._restore.recv_idx, device=self._device)

    @property
    def tokens(self) -> Int32Array:
        """``[K]`` int32, ``send_idx`` on the host."""
        tokens: Int32Array = self._restore.send_idx[self._rank]
        return tokens

    @property
    def send_idx(self) -> torch.Tensor:
        """``[K]`` int32, this rank's tokens."""
        return self._indices[0]

    @property
    def recv_idx(self) -> torch.Tensor:
        """``[n]`` int32, where each token with logits is among the ``[P * K]`` of all ranks."""
        return self._indices[1]

    def rows(self) -> tuple[torch.Tensor, ...]:
        """Return which row of the local batch each of ``send_idx`` is of, and how far from its end.

        Both are ``[K]`` int32; the last token of a row is 0 from its end.
        """
        send_idx = self.tokens
        query_start_loc = self._plan.query_start_loc(self._rank)
        row = np.searchsorted(query_start_loc, send_idx, side="right").astype(np.int32) - 1
        num_behind = query_start_loc[row + 1] - 1 - send_idx
        return copy_to_device(row, num_behind, device=self._device)

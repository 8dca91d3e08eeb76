# SPDX-License-Identifier: Apache-2.0
"""How ranks share one copy of the KV cache.

Of each request the ranks of a DCP group keep runs of ``interleave`` tokens in turn. What a rank
keeps stands without gaps in its own cache, under the same block table on all of them: a block
covers ``D`` times its tokens. With ``D = 2`` and runs of two tokens::

    tokens of a request    A B C D E F G
    kept by rank 0         A B     E F        as A B E F
    kept by rank 1             C D     G      as C D G

The ranks of PCP alone do not share: with ``D = 1`` each has all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Counts = TypeVar("Counts", npt.NDArray[np.int64], "torch.Tensor")


@dataclass(frozen=True, slots=True)
class KVShards:
    """Who keeps which tokens.

    Attributes:
        world_size: ``D``.
        rank: This rank's DCP rank.
        interleave: Tokens of a run.
        gather_order: ``[D]``, where each DCP rank's rows stand in a gathered tensor.
    """

    world_size: int = 1
    rank: int = 0
    interleave: int = 1
    gather_order: tuple[int, ...] = (0,)

    def num_kept(self, num_tokens: Counts, rank: int) -> Counts:
        """Return how many of a request's first tokens a rank keeps.

        Args:
            num_tokens: Of any shape, int32 or int64; returned itself if nobody else keeps any.
            rank: The DCP rank. Rank 0 keeps the most.
        """
        if self.world_size == 1:
            return num_tokens
        cycle = self.world_size * self.interleave
        rest = num_tokens % cycle - rank * self.interleave
        kept: Counts = num_tokens // cycle * self.interleave + rest.clip(0, self.interleave)
        return kept

    def num_gathered(self, num_tokens: Counts) -> Counts:
        """Return how many rows a gather of a request's first tokens has, padding included."""
        return self.num_kept(num_tokens, rank=0) * self.world_size

    def own_rows(self, gathered: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor that is to be gathered in place, a view.

        Args:
            gathered: ``[D * num_rows, ...]``.
        """
        num_rows = gathered.shape[0] // self.world_size
        first = self.gather_order[self.rank] * num_rows
        return gathered[first : first + num_rows]


# Each rank keeps all tokens.
UNSHARED = KVShards()

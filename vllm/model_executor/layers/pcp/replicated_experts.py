# SPDX-License-Identifier: Apache-2.0
"""Experts that every PCP rank has: all of them, or what TP leaves of them.

A rank computes its own rows, whatever the step, as one of P = 1 does. No layer of experts has a
collective over PCP, and the stock runner does; what it costs is P times the memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig


def wrap_make_parallel_config(
    original: Callable[..., FusedMoEParallelConfig],
) -> Callable[..., FusedMoEParallelConfig]:
    """Return what lays out a layer of experts as if the rank were alone on the PCP axis."""

    @functools.wraps(original)
    def make_parallel_config(*, pcp_size: int | None, **sizes: Any) -> FusedMoEParallelConfig:
        return original(pcp_size=1, **sizes)

    return make_parallel_config

# SPDX-License-Identifier: Apache-2.0
"""One rank, alone, that times the prefill attention of its layers."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from harness import cuda_event
from solo_rank import SoloRankWorker

from vllm.v1.attention.backends.pcp.mla.latent import PCPPrefillMetadata


class MLAPrefillWorker(SoloRankWorker):
    """``SoloRankWorker`` that notes what prefill attention of the last layer takes, each call."""

    def watch_prefill(self) -> None:
        """Time the last layer of the rank that is played now: up-projections and attention."""
        self._calls: list[tuple[bool, Callable[[], float]]] = []
        impl = self._attention_layers()[-1].impl
        impl.forward_mha = self._timed(type(impl).forward_mha.__get__(impl))

    def take_prefill(self) -> list[dict[str, float | bool]]:
        """Return ``seconds`` of each call since the last time, and whether it ``is_planned``."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        calls, self._calls = self._calls, []
        return [{"is_planned": is_planned, "seconds": read()} for is_planned, read in calls]

    def _timed(self, forward_mha: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> None:
            # q, kv_c_normed, k_pe, kv_cache, attn_metadata, ...
            is_planned = isinstance(args[4].prefill, PCPPrefillMetadata)
            if torch.cuda.is_available():
                begin, end = cuda_event(), cuda_event()
                begin.record()
                forward_mha(*args, **kwargs)
                end.record()
                self._calls.append((is_planned, lambda: begin.elapsed_time(end) / 1e3))
            else:
                start = perf_counter()
                forward_mha(*args, **kwargs)
                seconds = perf_counter() - start
                self._calls.append((is_planned, lambda: seconds))

        return timed

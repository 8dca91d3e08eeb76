# SPDX-License-Identifier: Apache-2.0
"""Looks into GPU workers: the time of a KV gather, of all communication of a step, of its parts.

``worker_extension_cls="communication.CommunicationProbe"`` adds the methods to any worker class,
beside those of ``dummy_weights.ExpertProbe``.
"""

from __future__ import annotations

import itertools
from functools import partial
from time import perf_counter, thread_time
from typing import Any

import torch
from dummy_weights import ExpertProbe
from harness import communicates, cuda_event
from torch.profiler import ProfilerActivity, profile

from vllm.distributed.pcp.kv_gather import get_kv_gather
from vllm.distributed.pcp.peer_caches import get_peer_caches

NUM_LONGEST = 20


def _gather(num_tokens: int, row_bytes: int) -> None:
    gather = get_kv_gather()
    gather.begin(num_tokens, row_bytes)
    gather.finish()


class CommunicationProbe(ExpertProbe):
    """Methods for ``LLM.collective_rpc``; all ranks run them together."""

    def time_kv_gather(self, num_tokens: int, num_repeats: int) -> dict[str, float | list[float]]:
        """Time how the new KV of one layer comes to all ranks, by a gather or by copies.

        Args:
            num_tokens: Rows of each rank.
            num_repeats: Exchanges to time, after as many that warm up.

        Returns:
            ``seconds`` of each, and the ``num_bytes`` of all ranks' rows.
        """
        runner: Any = self.model_runner
        row_bytes = runner._max_kv_row_bytes()
        peers = get_peer_caches()
        if peers is not None:
            caches = [tensor for tensor in runner.kv_caches if tensor.numel() > 0]
            first = peers.pcp_rank * num_tokens
            slots = torch.arange(first, first + num_tokens, device=self.device)
            exchange = partial(peers.copy, caches[0], slots)
        else:
            exchange = partial(_gather, num_tokens, row_bytes)
        events = [cuda_event() for _ in range(2 * num_repeats + 1)]
        exchange()
        for event in events:
            event.record()
            exchange()
        torch.cuda.synchronize()
        pairs = itertools.pairwise(events[num_repeats:])
        seconds = [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
        num_bytes = runner.pcp.pcp_world_size * num_tokens * row_bytes
        return {"seconds": seconds, "num_bytes": float(num_bytes)}

    def start_kernel_trace(self) -> None:
        """Start to record kernels."""
        torch.cuda.synchronize()
        self._kernel_trace = profile(activities=[ProfilerActivity.CUDA])
        self._kernel_trace.start()

    def stop_kernel_trace(self) -> dict[str, Any]:
        """Return the seconds of all kernels since the start, and of those that communicate.

        A rank that arrives early waits inside the kernel: the rank that waited least is nearest to
        the time on the link.

        Returns:
            ``kernels``, ``communication``, and ``longest``: name, count and seconds of those that
            take the most.
        """
        torch.cuda.synchronize()
        self._kernel_trace.stop()
        kernels = [
            (event.key, event.count, event.self_device_time_total / 1e6)
            for event in self._kernel_trace.key_averages()
        ]
        return {
            "kernels": sum(seconds for _, _, seconds in kernels),
            "communication": sum(seconds for name, _, seconds in kernels if communicates(name)),
            "longest": sorted(kernels, key=lambda kernel: -kernel[2])[:NUM_LONGEST],
        }

    def watch_step(self) -> None:
        """Take the time of the next step."""
        runner: Any = self.model_runner
        execute_model, sample_tokens = runner.execute_model, runner.sample_tokens
        model = self.get_model()
        self._times: dict[str, float] = {}
        events = self._events = [cuda_event(), cuda_event()]

        def begin(*args: Any, **kwargs: Any) -> Any:
            self._times.setdefault("step", perf_counter())
            output = execute_model(*args, **kwargs)
            if "enqueued" not in self._times and "forward" in self._times:
                self._times["enqueued"] = perf_counter()
                self._times["cpu"] += thread_time()
            return output

        def forward(*_: Any) -> None:
            hook.remove()
            self._times |= {"forward": perf_counter(), "cpu": -thread_time()}
            events[0].record()

        def sample(*args: Any, **kwargs: Any) -> Any:
            runner.execute_model, runner.sample_tokens = execute_model, sample_tokens
            output = sample_tokens(*args, **kwargs)
            events[1].record()
            return output

        hook = model.register_forward_pre_hook(forward)
        runner.execute_model, runner.sample_tokens = begin, sample

    def times_of_step(self) -> dict[str, float]:
        """Return the times of the step that was watched.

        Returns:
            When the ``step`` and its ``forward`` pass began, and when that was ``enqueued``, by
            ``perf_counter``, which all processes of a host share; the seconds of ``cpu`` time that
            enqueueing took, and those ``on_gpu`` from the forward pass to what was sampled.
        """
        torch.cuda.synchronize()
        begin, end = self._events
        return {**self._times, "on_gpu": begin.elapsed_time(end) / 1e3}

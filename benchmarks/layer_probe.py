# SPDX-License-Identifier: Apache-2.0
"""Looks into workers: what a step costs the host and the GPU, and what it is made of.

``worker_extension_cls="layer_probe.LayerProbe"`` adds the methods to any worker class.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from dummy_weights import ExpertProbe
from harness import cuda_event
from torch.profiler import ProfilerActivity, profile


class LayerProbe(ExpertProbe):
    """Methods for ``LLM.collective_rpc``; all ranks run them together.

    Depth and step times are of eager engines; profiles of any.
    """

    def set_depth(self, num_layers: int) -> None:
        """Run so many of the model's layers from now on, whatever comes of it."""
        model: Any = self.get_model()
        model.model.end_layer = num_layers

    def watch_steps(self) -> None:
        """From now on, time the model runner's part of each step, sampling apart."""
        self._steps: list[dict[str, float]] = []
        runner: Any = self.model_runner
        execute_model = runner.execute_model

        def timed(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduler_output.total_num_scheduled_tokens == 0:
                return execute_model(scheduler_output, *args, **kwargs)
            begin, end = self._start_timing()
            start = perf_counter()
            output = execute_model(scheduler_output, *args, **kwargs)
            host = perf_counter() - start
            self._steps.append({"host": host, "gpu": self._stop_timing(begin, end, start)})
            return output

        runner.execute_model = timed

    def take_steps(self) -> list[dict[str, float]]:
        """Return the seconds of the host and of the GPU for each step since the last call."""
        steps, self._steps = self._steps, []
        return steps

    def start_profile(self) -> None:
        """Start to record operators, launches and kernels."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop_profile(self) -> list[dict[str, Any]]:
        """Return count and seconds of everything since the start, by name.

        Returns:
            Of each ``name``: whether it ``is_kernel``, ``count``, and ``seconds``, on the GPU for
            kernels (copies between memories included), otherwise on the host and in nothing below.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()
        rows = []
        for event in self._profile.key_averages():
            is_kernel = event.device_type.name == "CUDA"
            time = event.self_device_time_total if is_kernel else event.self_cpu_time_total
            rows.append(
                {
                    "name": event.key,
                    "is_kernel": is_kernel,
                    "count": event.count,
                    "seconds": time / 1e6,
                }
            )
        return rows

    def _start_timing(self) -> tuple[Any, Any]:
        if not torch.cuda.is_available():
            return None, None
        torch.cuda.synchronize()
        begin, end = cuda_event(), cuda_event()
        begin.record()
        return begin, end

    def _stop_timing(self, begin: Any, end: Any, start: float) -> float:
        """Return the seconds of the step on the device; on CPUs the host is the device."""
        if not torch.cuda.is_available():
            return perf_counter() - start
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

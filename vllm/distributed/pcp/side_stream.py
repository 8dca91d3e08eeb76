# SPDX-License-Identifier: Apache-2.0
"""A CUDA stream for collectives that run while the current stream computes."""

from __future__ import annotations

import functools

import torch

from vllm.utils.torch_utils import current_stream


class SideStream:
    """Forks off the current stream, and joins it again; both may be captured into a CUDA graph.

    Attributes:
        stream: None on devices without streams, where nothing runs beside anything.
    """

    def __init__(self, device: torch.device) -> None:
        # Ahead of the current stream's kernels, which would else leave it no room until they end.
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._inputs: tuple[torch.Tensor, ...] = ()

    def fork(self, *inputs: torch.Tensor) -> None:
        """Let the stream go on from here.

        Args:
            *inputs: What is read there: kept until ``join``, lest the memory be used for something
                else. What is written there must be kept by the caller.
        """
        if self.stream is not None:
            self.stream.wait_stream(current_stream())
            self._inputs = inputs

    def join(self) -> None:
        """Make the current stream wait for what was enqueued since ``fork``."""
        if self.stream is not None:
            current_stream().wait_stream(self.stream)
            self._inputs = ()


@functools.cache
def side_stream(device: torch.device) -> SideStream:
    """Return the side stream of a device, the same one for all layers."""
    return SideStream(device)

# SPDX-License-Identifier: Apache-2.0
"""What only sampling reads, written behind the forward pass instead of ahead of it.

In every step the stock runner first hands the device what requests ask of the sampler, and how long
new ones are, while the device has nothing to do. Here it is busy with the forward pass by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.sample.sampler import Sampler

if TYPE_CHECKING:
    import torch

    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.output import SamplerOutput


class LateTensor(StagedWriteTensor):
    """Over a stock tensor, once built: writes when it is told so a second time."""

    def apply_write(self) -> None:
        """Leave what was staged for ``write``."""

    def write(self) -> None:
        """Write what was staged, in stream order."""
        super().apply_write()


class LateSampler(Sampler):
    """Over the stock sampler, once built: writes before it samples.

    A step that adds requests runs the model and samples, so that nothing stays staged for longer
    than the step.
    """

    _is_staged = False

    @classmethod
    def take_over(cls, sampler: Sampler) -> None:
        """Turn a stock sampler into one of these, and the lengths that it reads."""
        sampler.__class__ = cls
        sampler.req_states.total_len.__class__ = LateTensor

    def apply_staged_writes(self) -> None:
        """Leave what was staged for the call."""
        self._is_staged = True

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        """Write what was staged, then sample as usual."""
        if self._is_staged:
            self._is_staged = False
            total_len = self.req_states.total_len
            assert isinstance(total_len, LateTensor)
            total_len.write()
            super().apply_staged_writes()
        return super().__call__(logits, input_batch)

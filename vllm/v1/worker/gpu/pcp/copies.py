# SPDX-License-Identifier: Apache-2.0
"""Index arrays to the device."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from vllm.v1.worker.gpu.buffer_utils import async_copy_to_gpu


def copy_to_device(
    *arrays: npt.NDArray[np.int32], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Copy one-dimensional int32 arrays in one transfer that the host does not wait for.

    Each starts at a multiple of 16 bytes: kernels are compiled anew for pointers that do not.
    """
    starts = list(accumulate((-(-array.shape[0] // 4) * 4 for array in arrays), initial=0))
    together = np.empty(starts[-1], dtype=np.int32)
    for start, array in zip(starts, arrays, strict=False):
        together[start : start + array.shape[0]] = array
    on_device = async_copy_to_gpu(together, device=device)
    return tuple(
        on_device[start : start + array.shape[0]]
        for start, array in zip(starts, arrays, strict=False)
    )

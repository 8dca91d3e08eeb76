# SPDX-License-Identifier: Apache-2.0
"""Collectives over the PCP group that happen once a step.

Shapes that enter a collective come from the global batch, so that all ranks agree on them.
"""

from __future__ import annotations

import torch

from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.parallel_state import GroupCoordinator, get_pcp_group


def pynccl_communicator(group: GroupCoordinator) -> PyNcclCommunicator | None:
    """Return the group's NCCL communicator, which runs on the current stream, if it has one."""
    communicator = group.device_communicator
    if not isinstance(communicator, CudaCommunicator):
        return None
    pynccl = communicator.pynccl_comm
    return None if pynccl is None or pynccl.disabled else pynccl


def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return ``[P * num_rows, hidden_size]``, the rows of all ranks in rank order.

    Args:
        rows: ``[num_rows, hidden_size]``, contiguous, the same shape on every rank.

    Collectives: one all_gather on the PCP group.
    """
    return get_pcp_group().all_gather(rows, dim=0)


def broadcast_from_first_rank(tensor: torch.Tensor) -> None:
    """Overwrite ``tensor``, contiguous and of any shape, with PCP rank 0's.

    Collectives: one broadcast on the PCP group.
    """
    assert tensor.is_contiguous(), f"strides {tensor.stride()} of shape {tensor.shape}"
    group = get_pcp_group()
    pynccl = pynccl_communicator(group)
    if pynccl is None:
        group.broadcast(tensor, src=0)
    else:
        pynccl.broadcast(tensor, src=0)

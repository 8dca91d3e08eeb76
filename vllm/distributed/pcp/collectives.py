# SPDX-License-Identifier: Apache-2.0
"""Collectives over the PCP group that return a tensor of their own, and one over all ranks.

Once a step those of hidden rows and of sampled tokens, once a layer those of the experts. Shapes
that enter a collective come from the global batch, so that all ranks agree on them. On GPUs they
run on the current stream, or on one beside it, and never make the host wait.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.parallel_state import GroupCoordinator, get_pcp_group, get_world_group
from vllm.distributed.pcp.side_stream import SideStream


def pynccl_communicator(group: GroupCoordinator) -> PyNcclCommunicator | None:
    """Return the group's NCCL communicator, which runs on the current stream, if it has one."""
    communicator = group.device_communicator
    if not isinstance(communicator, CudaCommunicator):
        return None
    pynccl = communicator.pynccl_comm
    return None if pynccl is None or pynccl.disabled else pynccl


def do_all_ranks(is_so: bool) -> bool:
    """Return whether all P x TP ranks say so; at start-up.

    Collectives: one all_reduce on the CPU group of all ranks.
    """
    answer = torch.tensor(int(is_so))
    dist.all_reduce(answer, dist.ReduceOp.MIN, group=get_world_group().cpu_group)
    return bool(answer)


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


def gather_together(
    *tensors: torch.Tensor, side: SideStream | None = None
) -> tuple[torch.Tensor, ...]:
    """Return ``[P * num_rows, ...]`` for each tensor, the rows of all ranks in rank order.

    Args:
        *tensors: ``[num_rows, ...]``, of any types and strides; the same shapes on every rank.
        side: Where to gather, instead of on the current stream; the caller joins it before it uses
            the result.

    Collectives: an all_gather for each tensor on the PCP group, on GPUs as one NCCL group: one
    launch.
    """
    group = get_pcp_group()
    own = [tensor.contiguous() for tensor in tensors]
    gathered = tuple(
        tensor.new_empty((group.world_size * tensor.shape[0], *tensor.shape[1:])) for tensor in own
    )
    pynccl = pynccl_communicator(group)
    if pynccl is None:
        for output, tensor in zip(gathered, own, strict=True):
            dist.all_gather_into_tensor(output, tensor, group=group.device_group)
        return gathered
    stream = _fork(side, *own)
    pynccl.group_start()
    for output, tensor in zip(gathered, own, strict=True):
        pynccl.all_gather(output, tensor, stream=stream)
    pynccl.group_end()
    return gathered


def reduce_scatter_rows(rows: torch.Tensor, side: SideStream | None = None) -> torch.Tensor:
    """Return ``[num_rows, width]``: this rank's rows, summed over the ranks.

    Args:
        rows: ``[P * num_rows, width]``, rank by rank, the same shape on every rank.
        side: As in ``gather_together``.

    Collectives: one reduce_scatter on the PCP group.
    """
    group = get_pcp_group()
    rows = rows.contiguous()
    own = rows.new_empty((rows.shape[0] // group.world_size, *rows.shape[1:]))
    pynccl = pynccl_communicator(group)
    if pynccl is None:
        dist.reduce_scatter_tensor(own, rows, group=group.device_group)
    else:
        pynccl.reduce_scatter(own, rows, stream=_fork(side, rows))
    return own


def _fork(side: SideStream | None, *inputs: torch.Tensor) -> torch.cuda.Stream | None:
    """Return the stream to run a collective on, None for the current one."""
    if side is None:
        return None
    side.fork(*inputs)
    return side.stream

# SPDX-License-Identifier: Apache-2.0
"""All-reduces on the PCP group: of few rows by reading the memory of its other GPUs.

In a decode step each layer of experts that ranks share waits for one, and what that takes is
latency alone. vLLM has a kernel for it, ``CustomAllreduce``, and makes one for TP groups; this
module makes one for the PCP group and, as vLLM does for TP, shows it the capture of CUDA graphs: it
then learns where the graphs have their rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
from vllm.distributed.parallel_state import get_pcp_group
from vllm.distributed.pcp.collectives import do_all_ranks, pynccl_communicator
from vllm.distributed.pcp.peer_caches import check_reach, require_links
from vllm.logger import init_logger
from vllm.plugins.pcp.admission import memory_obstacles

logger = init_logger(__name__)

_direct: CustomAllreduce | None = None


def init_direct_all_reduce(device: torch.device) -> None:
    """Let ``all_reduce_rows`` read other GPUs' memory, where NVLink connects the ranks' GPUs.

    Not with ``--disable-custom-all-reduce``, nor with settings that keep ranks from each other's
    memory. vLLM logs what else keeps it from working, such as other numbers of ranks than 2, 4, 6
    and 8.

    Collectives: those of ``require_links``, ``check_reach`` and ``do_all_ranks``, and then those of
    ``CustomAllreduce`` on the PCP group and of ``do_all_ranks``.
    """
    global _direct
    group = get_pcp_group()
    is_wanted = parallel_state._ENABLE_CUSTOM_ALL_REDUCE and not memory_obstacles()
    if not is_wanted or pynccl_communicator(group) is None:
        return
    # vLLM tries nothing, and asks about the first GPUs of the host, whichever the ranks have.
    can = False
    try:
        if require_links(device, group):
            check_reach(device)
            can = True
    except RuntimeError as error:
        logger.info("Ranks add up what experts give by NCCL: %s.", error)
    # Ranks that did not all see the same would wait for each other, here or in different kernels.
    direct = CustomAllreduce(group.cpu_group, device) if do_all_ranks(can) else None
    if do_all_ranks(direct is not None and not direct.disabled):
        _direct = direct
        logger.info("Ranks add up what experts give by reading each other's memory.")
    elif direct is not None:
        direct.close()


def close_direct_all_reduce() -> None:
    """Leave the memory of the others, if it was opened."""
    global _direct
    if _direct is not None:
        _direct.close()
        _direct = None


@contextmanager
def captured_all_reduces() -> Iterator[None]:
    """Let CUDA graphs be captured; what runs meanwhile and is not captured gets no sums.

    Collectives: at the end one broadcast for each rank on the PCP group's CPU group.
    """
    if _direct is None:
        yield
        return
    # Not vLLM's own context, which has ranks exchange what they have captured after an error, too:
    # they have captured different graphs, or wait for a rank that has not failed.
    _direct._IS_CAPTURING = True
    try:
        yield
    finally:
        _direct._IS_CAPTURING = False
    _direct.register_graph_buffers()


def all_reduce_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return ``[num_rows, width]``: rows that all ranks share, summed over the ranks.

    Bitwise the same on every rank: an element is added up in one place, or in one order.

    Args:
        rows: ``[num_rows, width]``, the same shape on every rank; may be overwritten.

    Collectives: one all_reduce on the PCP group, directly if it is of less than 8 MiB.
    """
    rows = rows.contiguous()
    if _direct is not None and (summed := _direct.custom_all_reduce(rows)) is not None:
        return summed
    group = get_pcp_group()
    pynccl = pynccl_communicator(group)
    if pynccl is not None:
        return pynccl.all_reduce(rows)
    dist.all_reduce(rows, group=group.device_group)
    return rows

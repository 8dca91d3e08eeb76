# SPDX-License-Identifier: Apache-2.0
"""All-reduces of few rows on the PCP group by reading the memory of its other GPUs.

In a decode step each layer of experts that ranks share waits for one. What that takes is latency
alone, of which vLLM's kernel for TP groups, ``CustomAllreduce``, has less than NCCL. vLLM makes
none for other groups; this module makes one for the PCP group and, as vLLM does for TP, shows it
the capture of CUDA graphs: it then learns where the graphs have their rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
    """Make ``direct_all_reduce`` work, where NVLink connects the ranks' GPUs.

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


def direct_all_reduce(rows: torch.Tensor) -> torch.Tensor | None:
    """Return the sum over the PCP group's ranks, bitwise the same on each; None if it cannot.

    Args:
        rows: Contiguous, the same shape on every rank. Less than 8 MiB, a multiple of 16 bytes.
    """
    return None if _direct is None else _direct.custom_all_reduce(rows)

# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that a rank receives, at the collectives, beside what ``layer_probe`` sees.

``worker_extension_cls="traffic_probe.TrafficProbe"`` adds the methods to any worker class. Engines
are eager: nothing is counted when a CUDA graph is replayed.

What is counted is the size of the tensor that arrives, whatever the library makes of it: of an
all-reduce the whole tensor, once (a ring receives 2 (n - 1) / n of it). CPU ranks receive no KV:
what is counted are the rows of other ranks, which they read in shared memory.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from layer_probe import LayerProbe

from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.parallel_state import get_dcp_group, get_pcp_group, get_tp_group
from vllm.distributed.pcp.kv_gather import KVGather

# The first argument of each is what is received, or becomes it.
DIST_OPERATIONS = (
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter_tensor",
)
NCCL_OPERATIONS = ("all_gather", "all_reduce", "broadcast", "recv", "reduce_scatter")
KV, OTHER = "kv", "other"


def num_received(operation: str, tensor: torch.Tensor, group_size: int) -> int:
    """Return the bytes that come from other ranks.

    Args:
        operation: One of the above.
        tensor: Its first argument.
        group_size: Ranks.
    """
    if operation.startswith(("all_gather", "all_to_all")):
        return tensor.nbytes * (group_size - 1) // group_size
    if operation.startswith("reduce_scatter"):
        return tensor.nbytes * (group_size - 1)
    return tensor.nbytes


class TrafficProbe(LayerProbe):
    """Methods for ``LLM.collective_rpc``; all ranks run them together."""

    def count_traffic(self) -> None:
        """Count from now on."""
        self._traffic: Counter[str] = Counter()
        # Process groups, and what stands for them outside of torch.
        self._group_names: dict[Any, str] = {
            process_group: group.unique_name.partition(":")[0]
            for group in (get_tp_group(), get_pcp_group(), get_dcp_group())
            for process_group in (group.device_group, group.cpu_group)
        }
        for name in DIST_OPERATIONS:
            setattr(dist, name, self._counted_dist(getattr(dist, name)))
        for name in NCCL_OPERATIONS:
            counted = self._counted_nccl(getattr(PyNcclCommunicator, name))
            setattr(PyNcclCommunicator, name, counted)
        KVGather.finish = self._counted_kv(KVGather.finish)  # type: ignore[method-assign]

    def take_traffic(self) -> dict[str, int]:
        """Return the bytes since the last call: of gathered ``kv``, and of the rest by group."""
        taken, self._traffic = self._traffic, Counter()
        return dict(taken)

    def _counted_dist(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            num_bytes = num_received(operation.__name__, tensor, dist.get_world_size(group))
            self._traffic[self._group_names.get(group, OTHER)] += num_bytes
            return operation(tensor, *args, **kwargs)

        return counted

    def _counted_nccl(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def counted(
            communicator: PyNcclCommunicator, tensor: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            is_from_itself = operation.__name__ == "recv" and args[0] == communicator.rank
            if not is_from_itself:
                num_bytes = num_received(operation.__name__, tensor, communicator.world_size)
                self._traffic[self._group_names.get(communicator.group, OTHER)] += num_bytes
            return operation(communicator, tensor, *args, **kwargs)

        return counted

    def _counted_kv(self, finish: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(finish)
        def counted(gather: KVGather) -> torch.Tensor:
            traffic = self._traffic.copy()
            rows = finish(gather)
            # In place of what the collective in it has counted.
            self._traffic = traffic
            self._traffic[KV] += num_received("all_gather", rows, gather.pcp_world_size)
            return rows

        return counted

# SPDX-License-Identifier: Apache-2.0
"""A worker extension that writes down every collective of its rank, and what it samples from."""

from __future__ import annotations

import functools
import os
import signal
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from tests.chosen_tokens import ChosenTokens

if TYPE_CHECKING:
    from vllm.distributed.pcp.kv_gather import KVGather

OPERATIONS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "reduce_scatter_tensor",
)


def die(self: KVGather) -> torch.Tensor:
    """End this process as if it had been killed."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


class Recorder(ChosenTokens):
    """Worker methods for ``collective_rpc``, of an engine that is given this class by name."""

    def record_collectives(self) -> None:
        """Write down the collectives from here on."""
        from vllm.distributed import parallel_state
        from vllm.distributed.pcp.kv_gather import KVGather

        self._collectives: list[str] = []
        self._groups = {
            group: coordinator.unique_name.partition(":")[0]
            for coordinator in (
                parallel_state.get_world_group(),
                parallel_state.get_tp_group(),
                parallel_state.get_pcp_group(),
                parallel_state.get_dcp_group(),
            )
            for group in (coordinator.device_group, coordinator.cpu_group)
        }
        for name in OPERATIONS:
            setattr(dist, name, self._recorded(getattr(dist, name)))
        KVGather.begin = self._recorded_shape(KVGather.begin)  # type: ignore[method-assign]
        runner: Any = self.model_runner
        runner.sample = self._recorded_rows(runner.sample)

    def take_collectives(self) -> list[str]:
        """Return, and forget, "operation group shape dtype" of each collective, in order.

        Among them, "hidden_states shape checksum" of what each step sampled from.
        """
        taken, self._collectives = self._collectives, []
        return taken

    def is_pcp(self) -> bool:
        """Say whether this worker counts partitioned steps."""
        return hasattr(self, "pcp_stats")

    def reseed(self) -> None:
        """Put the source of seeds for unseeded requests into a known state."""
        np.random.seed(0)

    def die_in_next_gather(self, rank: int) -> None:
        """Let one rank end as if killed, in a layer where the others wait for it."""
        from vllm.distributed.pcp.kv_gather import KVGather

        if self.rank == rank:
            KVGather.finish = die  # type: ignore[method-assign]

    def _recorded(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def record(*args: Any, **kwargs: Any) -> Any:
            operands = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
            groups = [arg for arg in (*args, *kwargs.values()) if arg in self._groups]
            group = self._groups[groups[0]] if groups else "world"
            shapes = [f"{list(operand.shape)} {operand.dtype}" for operand in operands]
            self._collectives.append(" ".join([operation.__name__, group, *shapes]))
            return operation(*args, **kwargs)

        return record

    def _recorded_rows(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        """Write down what is sampled from, bit by bit, among the collectives."""

        @functools.wraps(sample)
        def record(hidden_states: torch.Tensor, *args: Any) -> Any:
            checksum = zlib.crc32(hidden_states.numpy().tobytes())
            self._collectives.append(f"hidden_states {list(hidden_states.shape)} {checksum:08x}")
            return sample(hidden_states, *args)

        return record

    def _recorded_shape(self, begin: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(begin)
        def record(gather: Any, num_tokens: int, row_bytes: int) -> torch.Tensor:
            self._collectives.append(f"kv_gather pcp [{num_tokens}, {row_bytes}]")
            return begin(gather, num_tokens, row_bytes)

        return record

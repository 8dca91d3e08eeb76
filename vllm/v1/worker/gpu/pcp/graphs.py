# SPDX-License-Identifier: Apache-2.0
"""PIECEWISE CUDA graphs of partitioned steps.

A rank of a short prefill is done with a layer on the GPU sooner than its host can launch the next
one: at 4k tokens and P = 2 a layer of DeepSeek-V2-Lite has 1.1 ms of kernels and takes the host
2.7. So between attention layers a partitioned step replays graphs, as smaller steps of vLLM do.
They are captured for some numbers of rows, whatever sizes other steps have; a step's rows are
padded to the next one, on every rank alike. Larger steps keep the GPU busy without.

Graphs of partitioned steps and of other steps differ where ranks exchange rows, in layers of
experts: a descriptor of their own tells them apart.

Attention and cache writes stand between graphs, with D > 1 above all: how much ranks exchange over
DCP, and whether they do, follows from the step's requests. How many rows a graph has does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, get_forward_context

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

# All that gathers keys, queries or partial results, by plans and into slots that are known when the
# step runs: never inside a graph.
EAGER_OPS = {
    "vllm::unified_attention_with_output",
    "vllm::unified_mla_attention_with_output",
    "vllm::unified_kv_cache_update",
    "vllm::unified_mla_kv_cache_update",
}
SMALL_SIZES = (64, 128)
ROW_STEP = 256
# Half of a chunk of 8192 tokens, and decodes beside it.
MAX_ROWS = 4608


@dataclass(frozen=True)
class PartitionedBatchDescriptor(BatchDescriptor):
    """The graphs of partitioned steps: equal to none of the others."""


class PartitionGraphs:
    """Which partitioned steps replay graphs, and what these read.

    Attributes:
        num_rows: ``[n]``, ascending, the numbers of rows that are captured; none before capture.
        input_ids: ``[max]`` int32, the rows' tokens.
        positions: ``[max]`` int64, the rows' positions.
    """

    def __init__(self) -> None:
        self.num_rows = np.empty(0, dtype=np.int64)
        self.replayed_rows: int | None = None
        self.input_ids = torch.empty(0, dtype=torch.int32)
        self.positions = torch.empty(0, dtype=torch.int64)

    @staticmethod
    def sizes(max_local_tokens: int) -> list[int]:
        """Return the numbers of rows to capture for ranks of at most ``max_local_tokens``."""
        largest = min(MAX_ROWS, max_local_tokens)
        sizes = (*SMALL_SIZES, *range(ROW_STEP, largest, ROW_STEP), largest)
        return sorted({size for size in sizes if size <= largest})

    @staticmethod
    def are_wanted(manager: CudaGraphManager) -> bool:
        """Say whether other steps replay PIECEWISE graphs, with what gathers between them."""
        config = manager.compilation_config
        return (
            manager.cudagraph_mode.has_piecewise_cudagraphs()
            and manager.needs_capture()
            and not manager.use_breakable_cg
            and not config.use_inductor_graph_partition
            and set(config.splitting_ops or ()) >= EAGER_OPS
        )

    def allocate(self, max_rows: int, device: torch.device) -> None:
        """Make room for the inputs of the largest graph."""
        self.input_ids = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.positions = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def pad(self, num_rows: int) -> int:
        """Return the rows that a step of ``num_rows`` runs."""
        index = int(np.searchsorted(self.num_rows, num_rows))
        return int(self.num_rows[index]) if index < self.num_rows.shape[0] else num_rows

    def replays(self, num_rows: int) -> bool:
        """Say whether a step of exactly so many rows replays graphs."""
        return num_rows in self.num_rows

    def select_inputs(
        self, input_ids: torch.Tensor, positions: torch.Tensor, index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[num_rows]`` tokens and positions, where a graph reads them if there is one.

        Args:
            input_ids: ``[num_tokens]`` int32, of the whole batch.
            positions: ``[num_tokens]`` int64.
            index: ``[num_rows]`` int32, the token of each row.
        """
        num_rows = index.shape[0]
        if not self.replays(num_rows):
            return input_ids.index_select(0, index), positions.index_select(0, index)
        own_ids, own_positions = self.input_ids[:num_rows], self.positions[:num_rows]
        torch.index_select(input_ids, 0, index, out=own_ids)
        torch.index_select(positions, 0, index, out=own_positions)
        return own_ids, own_positions

    def before_forward(self, *_: Any) -> None:
        """Switch the forward pass that begins to graphs; a pre-hook of the model."""
        if self.replayed_rows is None:
            return
        context = get_forward_context()
        context.cudagraph_runtime_mode = CUDAGraphMode.PIECEWISE
        context.batch_descriptor = PartitionedBatchDescriptor(num_tokens=self.replayed_rows)

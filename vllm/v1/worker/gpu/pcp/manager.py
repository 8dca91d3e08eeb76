# SPDX-License-Identifier: Apache-2.0
"""PCPManager: a scheduled batch becomes this rank's rows, hidden states the batch's again."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.distributed.parallel_state import get_pcp_group
from vllm.distributed.pcp.collectives import gather_rows
from vllm.distributed.pcp.kv_gather import KVGather, init_kv_gather
from vllm.distributed.pcp.peer_caches import PeerCaches, init_peer_caches
from vllm.distributed.pcp.shard_collectives import kv_shards
from vllm.logger import init_logger
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.pcp.copies import copy_to_device
from vllm.v1.worker.gpu.pcp.graphs import PartitionGraphs
from vllm.v1.worker.gpu.pcp.layout import (
    Int32Array,
    PartitionPlan,
    max_local_tokens,
    plan_partition,
)
from vllm.v1.worker.gpu.pcp.sampled_rows import SampledRows

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

LOG_INTERVAL_SECONDS = 60.0


@dataclass
class PCPStats:
    """Counters of one rank since start, over steps that ran the model.

    Attributes:
        num_steps: Steps.
        num_partitioned_steps: Steps with at least one partitioned prefill; the counters below are
            of these.
        num_scheduled_tokens: Tokens of the global batches.
        num_local_tokens: Tokens that this rank computed.
        num_padding_tokens: Rows that this rank ran only to be as long as the longest rank, or as a
            CUDA graph.
        num_sampled_steps: Steps whose last layer computed the rows that are sampled from alone.
        num_gathered_bytes: Bytes of KV rows gathered, or copied to other ranks, each row once, all
            layers, padding included.
    """

    num_steps: int = 0
    num_partitioned_steps: int = 0
    num_scheduled_tokens: int = 0
    num_local_tokens: int = 0
    num_padding_tokens: int = 0
    num_sampled_steps: int = 0
    num_gathered_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PCPStep:
    """One partitioned step on this rank, from ``partition_batch`` until hidden states are restored.

    Attributes:
        plan: The partition, the same on every rank.
        global_batch: The batch as scheduled.
        local_batch: The batch as run here.
        slot_idx: ``[P * L]`` int32 on the device, ``plan.slot_idx``.
        row_req: ``[W]`` int32 on the device, request of each local row.
        sampled: The rows that logits are computed from.
    """

    plan: PartitionPlan
    global_batch: InputBatch
    local_batch: InputBatch
    slot_idx: torch.Tensor
    row_req: torch.Tensor
    sampled: SampledRows


class PCPManager:
    """What prefill context parallelism does to a step, apart from attention.

    Args:
        vllm_config: The worker's configuration, P > 1.
        device: Where the model runs.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        group = get_pcp_group()
        self.pcp_world_size: int = group.world_size
        self.pcp_rank: int = group.rank_in_group
        self.device = device
        self.shards = kv_shards(vllm_config.parallel_config.cp_kv_cache_interleave_size)
        scheduler_config = vllm_config.scheduler_config
        self.max_local_tokens = max_local_tokens(
            scheduler_config.max_num_batched_tokens,
            scheduler_config.max_num_seqs,
            self.pcp_world_size,
        )
        self.stats = PCPStats()
        self.graphs = PartitionGraphs()
        self.kv_gather: KVGather | None = None
        self.peer_caches: PeerCaches | None = None
        self._next_log = 0.0

    @staticmethod
    def validate_config(vllm_config: VllmConfig) -> None:
        """Refuse what does not run with P > 1; the rules stand in ``vllm.plugins.pcp.admission``.

        Raises:
            ValueError, NotImplementedError: naming each feature, the value received and the way
                out.
        """
        from vllm.plugins.pcp.admission import validate_config

        validate_config(vllm_config)

    def init_kv_gather(self, max_row_bytes: int) -> KVGather:
        """Create the gather for a model whose widest layer has ``max_row_bytes`` of new KV a token.

        Collectives: those of ``vllm.distributed.pcp.kv_gather.init_kv_gather``.
        """
        self.kv_gather = init_kv_gather(self.max_local_tokens, max_row_bytes, self.device)
        return self.kv_gather

    def init_peer_caches(self, caches: Iterable[torch.Tensor]) -> None:
        """Let ranks write to each other's KV cache.

        Args:
            caches: Those of the layers, in the same order on every rank.

        Raises:
            RuntimeError: They cannot; on every rank alike.

        Collectives: those of ``vllm.distributed.pcp.peer_caches.init_peer_caches``.
        """
        self.peer_caches = init_peer_caches(caches, self.device)

    def begin_exchange(self) -> None:
        """Wait, on the device, until all ranks may write to each other's cache.

        Collectives: a meeting on the PCP group, if they do.
        """
        if self.peer_caches is not None:
            self.peer_caches.begin_step()

    def partition_batch(self, batch: InputBatch) -> PCPStep | None:
        """Partition a batch, or return None if none of its prefills is long enough.

        Args:
            batch: As scheduled, not padded, in the runner's own buffers; stays valid.
        """
        plan = plan_partition(
            batch.num_scheduled_tokens,
            batch.num_computed_tokens_np,
            batch.is_prefilling_np,
            pcp_world_size=self.pcp_world_size,
            pad=self._pad,
        )
        self.stats.num_steps += 1
        if plan is None:
            return None
        rank = self.pcp_rank
        row_req = plan.row_req[rank]
        row_len = plan.row_len[rank]
        num_rows = row_req.shape[0]
        num_tokens = int(plan.num_local_tokens[rank])
        query_start_loc_np = plan.query_start_loc(rank)
        row_stop = plan.row_offset[rank] + row_len
        num_behind = batch.num_scheduled_tokens[row_req] - row_stop
        gather_idx, slot_idx, query_start_loc, row_req_device, num_behind_device = copy_to_device(
            plan.gather_idx(rank),
            plan.slot_idx,
            query_start_loc_np,
            row_req,
            num_behind,
            device=self.device,
        )
        input_ids, positions = self.graphs.select_inputs(
            batch.input_ids, batch.positions, gather_idx
        )
        # Lengths come from those on the device, which the host's count may run ahead of.
        seq_lens = batch.seq_lens.index_select(0, row_req_device).sub_(num_behind_device)
        num_computed_tokens_np = batch.num_computed_tokens_np[row_req] + plan.row_offset[rank]
        prefill_len_np = batch.prefill_len_np[row_req]
        # Which rows are padding is left as it is: experts ask, with VLLM_MOE_SKIP_PADDING, and that
        # is refused.
        local_batch = dataclasses.replace(
            batch,
            req_ids=[batch.req_ids[i] for i in row_req.tolist()],
            num_reqs=num_rows,
            num_reqs_after_padding=num_rows,
            idx_mapping=batch.idx_mapping.index_select(0, row_req_device),
            idx_mapping_np=batch.idx_mapping_np[row_req],
            num_scheduled_tokens=row_len,
            num_tokens=num_tokens,
            num_tokens_after_padding=plan.num_tokens_after_padding,
            num_draft_tokens=0,
            num_draft_tokens_per_req=None,
            query_start_loc=query_start_loc,
            query_start_loc_np=query_start_loc_np,
            seq_lens=seq_lens,
            dcp_local_seq_lens=None
            if self.shards.world_size == 1
            else self.shards.num_kept(seq_lens, self.shards.rank),
            seq_lens_cpu_upper_bound=torch.from_numpy(num_computed_tokens_np + row_len),
            num_computed_tokens_np=num_computed_tokens_np,
            prefill_len_np=prefill_len_np,
            num_computed_prefill_tokens_np=np.minimum(num_computed_tokens_np, prefill_len_np),
            is_prefilling_np=batch.is_prefilling_np[row_req],
            input_ids=input_ids,
            positions=positions,
        )
        self._count(plan)
        sampled = SampledRows(plan, partial(logits_tokens, batch), rank, self.device)
        return PCPStep(plan, batch, local_batch, slot_idx, row_req_device, sampled)

    def _pad(self, num_tokens: int) -> int:
        """Return the rows to run, for as many tokens of the fullest rank."""
        num_rows = self.graphs.pad(num_tokens)
        if self.peer_caches is not None:
            # Even, so that each rank's slots begin at a multiple of 16 bytes: the cache writers of
            # some backends are compiled anew for those that do not.
            num_rows = min(num_rows + num_rows % 2, self.max_local_tokens)
        return num_rows

    def prepare_attn(
        self, step: PCPStep, block_tables: tuple[torch.Tensor, ...], slot_mappings: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Turn what attention needs for the global batch into what this rank needs.

        Args:
            step: The step.
            block_tables: For each KV cache group ``[num_reqs, max_num_blocks]`` int32, the global
                batch's.
            slot_mappings: ``[num_groups, num_tokens]`` int64, the global batch's.

        Returns:
            Block tables of the local rows ``[W, max_num_blocks]``, and slots ``[num_groups, P *
            L]`` of the gathered rows.
        """
        local_tables = tuple(table.index_select(0, step.row_req) for table in block_tables)
        return local_tables, self.prepare_slot_mappings(step, slot_mappings)

    def prepare_slot_mappings(self, step: PCPStep, slot_mappings: torch.Tensor) -> torch.Tensor:
        """Return ``[num_groups, P * L]`` int64: a token's slot at the gathered row that owns it."""
        if step.slot_idx.shape[0] == step.plan.num_tokens:
            # Each token stands there once: there is nothing else.
            return slot_mappings.index_select(1, step.slot_idx)
        gathered = slot_mappings.index_select(1, step.slot_idx.clamp_min(0))
        return gathered.masked_fill_(step.slot_idx < 0, PAD_SLOT_ID)

    def get_dummy_slot_mappings(self, num_groups: int, num_tokens: int) -> torch.Tensor:
        """Return ``[num_groups, P * num_tokens]`` int64: gathers, and writes nothing."""
        shape = (num_groups, self.pcp_world_size * num_tokens)
        return torch.full(shape, PAD_SLOT_ID, dtype=torch.int64, device=self.device)

    def restore_hidden_states(self, step: PCPStep, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return ``[num_tokens, hidden_size]``, the rows of the global batch in its order.

        Args:
            step: The step.
            hidden_states: ``[L, hidden_size]``, this rank's.

        Collectives: one all_gather on the PCP group.
        """
        (restore_idx,) = copy_to_device(step.plan.restore_idx(), device=self.device)
        return gather_rows(hidden_states).index_select(0, restore_idx)

    def restore_for_sampling(
        self, step: PCPStep, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, InputBatch]:
        """Bring back only the rows that logits are computed from.

        Args:
            step: The step.
            hidden_states: ``[L, hidden_size]``, this rank's, or those of ``step.sampled`` alone.

        Returns:
            ``[num_logits, hidden_size]`` in the order of the global batch's logits, and the global
            batch with ``logits_indices`` pointing into it.

        Collectives: one all_gather on the PCP group.
        """
        sampled = step.sampled
        if not sampled.is_applied:
            assert not sampled.is_partial, "rows were left out that are read"
            hidden_states = hidden_states.index_select(0, sampled.send_idx)
        self.stats.num_sampled_steps += sampled.is_applied
        rows = gather_rows(hidden_states.contiguous()).index_select(0, sampled.recv_idx)
        # Everything that is read at ``logits_indices`` shrinks to those rows: the sampler seeds its
        # noise with the position, and looks up the token.
        batch = step.global_batch
        return rows, dataclasses.replace(
            batch,
            input_ids=batch.input_ids.index_select(0, batch.logits_indices),
            positions=batch.positions.index_select(0, batch.logits_indices),
            logits_indices=torch.arange(rows.shape[0], device=self.device),
        )

    def _count(self, plan: PartitionPlan) -> None:
        stats = self.stats
        num_local_tokens = int(plan.num_local_tokens[self.pcp_rank])
        stats.num_partitioned_steps += 1
        stats.num_scheduled_tokens += plan.num_tokens
        stats.num_local_tokens += num_local_tokens
        stats.num_padding_tokens += plan.num_tokens_after_padding - num_local_tokens
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + LOG_INTERVAL_SECONDS
            self.log_stats()

    def snapshot(self) -> dict[str, int]:
        """Return the counters so far."""
        if (exchange := self.peer_caches or self.kv_gather) is not None:
            self.stats.num_gathered_bytes = exchange.num_gathered_bytes
        return dataclasses.asdict(self.stats)

    def reset_stats(self) -> None:
        """Set the counters to zero, after warm-up."""
        self.stats = PCPStats()
        if (exchange := self.peer_caches or self.kv_gather) is not None:
            exchange.num_gathered_bytes = 0

    def log_stats(self) -> None:
        """Log the counters of rank 0."""
        if self.pcp_rank == 0:
            counters = ", ".join(f"{name}={value}" for name, value in self.snapshot().items())
            logger.info("Prefill context parallelism: P=%d, %s", self.pcp_world_size, counters)


def logits_tokens(batch: InputBatch) -> Int32Array:
    """Return ``[num_logits]`` int32, the batch's tokens that logits are computed from.

    They are the last tokens of each request, as many as the request has logits.
    """
    num_logits = np.diff(batch.cu_num_logits_np)
    stop = batch.query_start_loc_np[1 : batch.num_reqs + 1]
    shift = stop - batch.cu_num_logits_np[1:]
    tokens = np.repeat(shift, num_logits) + np.arange(batch.cu_num_logits_np[-1], dtype=np.int32)
    return tokens.astype(np.int32)

# SPDX-License-Identifier: Apache-2.0
"""Where Model Runner V2 hands its steps to the PCPManager."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.counter import compilation_counter
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.parallel_state import get_dcp_group, graph_capture
from vllm.distributed.pcp.all_reduce import captured_all_reduces, close_direct_all_reduce
from vllm.distributed.pcp.collectives import (
    broadcast_from_first_rank,
    do_all_ranks,
    gather_rows,
)
from vllm.distributed.pcp.peer_caches import check_reach, close_peer_caches
from vllm.distributed.pcp.shard_collectives import exchange_blocks, gather_shards
from vllm.distributed.pcp.step import REPLICATED, StepState, set_step_state
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.plugins.pcp.admission import peer_obstacles
from vllm.plugins.pcp.options import kv_exchange, samples_last_layer
from vllm.v1.attention.backends.pcp import BACKENDS
from vllm.v1.attention.backends.pcp.mla.latent import PlannedPrefillMixin
from vllm.v1.attention.backends.pcp.mla.prefill_backend import AttendingPrefillBackend
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, get_kv_quant_mode
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.pcp.graphs import PartitionGraphs
from vllm.v1.worker.gpu.pcp.last_piece import LastPiece
from vllm.v1.worker.gpu.pcp.late_writes import LateSampler
from vllm.v1.worker.gpu.pcp.manager import PCPManager, PCPStep
from vllm.v1.worker.gpu.pcp.pooling import EmbeddingRunner
from vllm.v1.worker.gpu.pcp.token_ids import PackedTokenIds

if TYPE_CHECKING:
    from vllm.sequence import IntermediateTensors
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    _RunnerBase = GPUModelRunner
else:
    _RunnerBase = object

logger = init_logger(__name__)


class PCPRunnerMixin(_RunnerBase):
    """Over a V2 model runner that has been built: see ``make_pcp_runner``.

    A step without a partitioned prefill runs the stock forward pass, graphs included; in every step
    the host keeps near its GPU, and what only sampling reads is written late. A partitioned step
    replays graphs of its own (``graphs``), or none; between ``prepare_inputs`` and the restored
    hidden states the runner sees the local batch.
    """

    pcp: PCPManager
    _pcp_step: PCPStep | None = None
    _partitions_step: bool = False
    _is_gather_warm_up: bool = False
    _last_start: torch.cuda.Event | None = None
    _copies_to_peers: bool = False
    # Why the last layer computes all rows; None if it does not.
    _last_layer_obstacle: str | None = (
        "nothing of it is replayed in CUDA graphs of partitioned steps"
    )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, then size the KV gather by its layers; take over what is built here.

        Collectives: none, or those of ``check_reach`` and ``do_all_ranks``.
        """
        super().load_model(*args, **kwargs)
        max_row_bytes = self._max_kv_row_bytes()
        self._copies_to_peers = self._can_copy_to_peers()
        if not self._copies_to_peers:
            gather = self.pcp.init_kv_gather(max_row_bytes)
            # Profiling starts after this and counts what the model is said to take.
            self.model_memory_usage += gather.num_buffer_bytes
        if self.pooling_runner is not None:
            self.pooling_runner = EmbeddingRunner(self.model)
        if self.sampler is not None:
            LateSampler.take_over(self.sampler)

    def _can_copy_to_peers(self) -> bool:
        """Say whether ranks may and can write to each other's KV cache, and log it.

        Ahead of profiling, which counts the buffer of a gather.

        Raises:
            ValueError: They are to, and cannot.

        Collectives: none, or those of ``check_reach`` and ``do_all_ranks``.
        """
        wanted = kv_exchange(self.vllm_config)
        obstacles = ["pcp_kv_exchange=gather"] if wanted == "gather" else []
        obstacles += peer_obstacles(self.vllm_config)
        if not obstacles:
            error = None
            try:
                check_reach(self.device)
            except RuntimeError as raised:
                error = raised
            # TP ranks are in PCP groups of their own, and have to run as many rows.
            if not do_all_ranks(error is None):
                error = error or RuntimeError("ranks of another PCP group cannot")
                if wanted == "peer":
                    raise self._unreachable(error) from error
                obstacles.append(str(error))
        if obstacles:
            logger.info("Ranks gather new KV: %s.", ", ".join(obstacles))
        else:
            logger.info("Ranks copy new KV to each other's caches.")
        return not obstacles

    def _unreachable(self, error: RuntimeError) -> ValueError:
        return ValueError(
            "Prefill context parallelism cannot write to the KV caches of other ranks (got "
            f"pcp_kv_exchange={kv_exchange(self.vllm_config)}: {error}). Set pcp_kv_exchange to "
            "gather in --additional-config."
        )

    def _max_kv_row_bytes(self) -> int:
        """Return the most bytes of new KV that a token has in one layer.

        Raises:
            NotImplementedError: a layer was given an attention backend without support, whatever
                was configured.
        """
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        mla_layers = get_layers_from_vllm_config(self.vllm_config, MLAAttention)
        unsupported = {
            type(layer.impl).__name__: name
            for name, layer in (layers | mla_layers).items()
            if not layer.impl.supports_pcp
        }
        if unsupported:
            raise NotImplementedError(
                "Prefill context parallelism does not support the attention implementation that "
                f"vLLM chose, or the model brings along (got {unsupported}). Choose one of "
                f"{', '.join(BACKENDS)} with --attention-backend, or set "
                "--prefill-context-parallel-size 1."
            )
        dtype = self.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        row_elements = [
            layer.num_kv_heads * (layer.head_size + layer.head_size_v) for layer in layers.values()
        ]
        row_elements += [layer.head_size for layer in mla_layers.values()]
        return max(row_elements) * dtype.itemsize

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Return what each layer caches; of quantised latents, that they are.

        MLA layers of vLLM 0.25.1 leave it out, and a cache whose rows are wider than a latent,
        "fp8_ds_mla", is then laid out too narrow: vLLM issue 48896, repaired after 0.25.1.
        """
        specs: dict[str, KVCacheSpec] = super().get_kv_cache_spec()  # type: ignore[no-untyped-call]
        return {name: with_quant_mode(spec) for name, spec in specs.items()}

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache; where ranks share it, check how they do.

        Raises:
            ValueError: Kernels' blocks, in which slots are counted, do not hold whole runs; or
                ranks can write to each other's memory, but not to this.

        Collectives: none, or those of ``PeerCaches``.
        """
        super().initialize_kv_cache(kv_cache_config)
        if self.use_dcp:
            check_interleave(self.cp_interleave, self.kernel_block_sizes)
        if self._copies_to_peers:
            kinds: tuple[Any, ...] = (Attention, MLAAttention)
            caches = [
                layer.kv_cache
                for kind in kinds
                for layer in get_layers_from_vllm_config(self.vllm_config, kind).values()
            ]
            try:
                # Layers without a cache have an empty one.
                self.pcp.init_peer_caches([cache for cache in caches if cache.numel() > 0])
            except RuntimeError as error:
                raise self._unreachable(error) from error

    def _dummy_run(
        self, num_tokens: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Run no more tokens than one rank gets in any step.

        Profiling, and the warm-ups that follow it, ask for ``max_num_batched_tokens``: what P
        ranks share must not cost each of them KV capacity.
        """
        num_tokens = min(num_tokens, self.pcp.max_local_tokens)
        hidden_states, sampled = super()._dummy_run(num_tokens, *args, **kwargs)
        return hidden_states, sampled

    @torch.inference_mode()
    def profile_run(self) -> None:
        """Profile memory, the restored hidden states of a whole batch included.

        Layers of experts run as in a partitioned step: on the rows of all ranks. Attention does not
        run; where ranks share a GQA cache, what it would exchange stands for it.

        Collectives: those of the layers of experts; with D > 1 and GQA an exchange on the DCP
        group.
        """
        if self.use_dcp and get_layers_from_vllm_config(self.vllm_config, Attention):
            # NCCL allocates for two ranks when the first of them sends.
            blocks = torch.zeros(self.dcp_size, 16, dtype=torch.uint8, device=self.device)
            exchange_blocks((blocks, torch.empty_like(blocks)))
        dtype = self.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        for layer in get_layers_from_vllm_config(self.vllm_config, MLAAttention).values():
            if isinstance(layer.impl, PlannedPrefillMixin):
                # The short prompts of vLLM's warm-up are decodes to most backends.
                layer.impl.warm_up(dtype, self.device)
                break
        set_step_state(StepState(is_partitioned=True))
        super().profile_run()
        set_step_state(REPLICATED)
        shape = (2 * self.max_num_tokens, self.model_config.get_hidden_size())
        torch.empty(shape, dtype=dtype, device=self.device)

    @torch.inference_mode()
    def capture_model(self) -> int:
        """Capture the graphs of other steps, then those of partitioned ones.

        Returns:
            Bytes that the graphs take.

        Collectives: those of the layers of experts, of ``_leave_rows_out`` and of
        ``captured_all_reduces``.
        """
        with captured_all_reduces():
            num_bytes: int = super().capture_model()
            assert self.cudagraph_manager is not None
            if PartitionGraphs.are_wanted(self.cudagraph_manager):
                num_bytes += self._capture_partition_graphs()
        return num_bytes

    def _capture_partition_graphs(self) -> int:
        start, free_bytes = perf_counter(), torch.accelerator.get_memory_info()[0]
        num_captured = compilation_counter.num_cudagraph_captured
        graphs = self.pcp.graphs
        sizes = graphs.sizes(self.pcp.max_local_tokens)
        graphs.allocate(sizes[-1], self.device)
        hook = self.model.register_forward_pre_hook(graphs.before_forward)
        is_wanted = samples_last_layer(self.vllm_config)
        last_piece = LastPiece.take_over() if is_wanted else None
        set_step_state(StepState(is_partitioned=True))
        with graph_capture(device=self.device):
            # The largest first: the others fit into its memory.
            for num_rows in reversed(sizes):
                self._capture_partition_graph(num_rows)
                if compilation_counter.num_cudagraph_captured == num_captured:
                    # A model that is not compiled, or not in pieces: on every rank alike.
                    hook.remove()
                    break
            else:
                graphs.num_rows = np.array(sizes)
        if is_wanted:
            captured = reversed(graphs.num_rows.tolist())
            self._leave_rows_out(last_piece, [n for n in captured for _ in range(2)])
        set_step_state(REPLICATED)
        num_bytes = free_bytes - torch.accelerator.get_memory_info()[0]
        logger.info(
            "Captured CUDA graphs of partitioned steps of up to %d rows: %.0f s, %.2f GiB",
            graphs.num_rows.max(initial=0),
            perf_counter() - start,
            num_bytes / 2**30,
        )
        return num_bytes

    def _leave_rows_out(self, last_piece: LastPiece | None, num_rows: list[int]) -> None:
        """Leave rows out of the last layer from now on, if the model allows, on all ranks.

        Args:
            last_piece: What is behind its attention.
            num_rows: Of the runs that it has watched.

        Collectives: that of ``do_all_ranks``, and those of ``_try_sampled_rows``.
        """
        can = last_piece is not None and last_piece.settle(num_rows)
        if not do_all_ranks(can):
            if last_piece is not None:
                self._last_layer_obstacle = (
                    "what is compiled does not show which of its arguments are rows"
                )
            return
        # Looks for FlashAttention as it is imported.
        from vllm.v1.attention.backends.pcp.flash_attn import PCPFlashAttentionImpl

        with self._watched_mla_layers() as ran:
            self._last_layer_obstacle = self._try_sampled_rows(num_rows[-1])
        if self._last_layer_obstacle is not None:
            return
        kinds: tuple[Any, ...] = (Attention, MLAAttention)
        impls = [
            layer.impl
            for kind in kinds
            for layer in get_layers_from_vllm_config(self.vllm_config, kind).values()
        ]
        kind: type[Any]
        last: Any = ran[-1].impl if ran else PCPFlashAttentionImpl.ran_last
        if isinstance(last, PCPFlashAttentionImpl):
            can = last.dcp_world_size == 1
            kind = PCPFlashAttentionImpl
        else:
            backend = getattr(ran[-1], "prefill_backend", None) if ran else None
            has_plan = isinstance(backend, AttendingPrefillBackend)
            can = has_plan and not self.use_dcp
            kind = PlannedPrefillMixin
        attends = can and last in impls and all(isinstance(impl, kind) for impl in impls)
        if last is not None:
            last.attends_sampled_rows = attends
        logger.info(
            "The last layer of partitioned steps computes the rows that are sampled from, %s.",
            "attention included" if attends else "apart from attention",
        )

    @contextmanager
    def _watched_mla_layers(self) -> Iterator[list[MLAAttention]]:
        """Yield a list that grows with the layers of MLA that run."""
        ran: list[MLAAttention] = []
        layers: Any = get_layers_from_vllm_config(self.vllm_config, MLAAttention).values()

        def note(layer: Any, forward_impl: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            ran.append(layer)
            return forward_impl(*args, **kwargs)

        for layer in layers:
            layer.forward_impl = partial(note, layer, layer.forward_impl)
        try:
            yield ran
        finally:
            for layer in layers:
                del layer.forward_impl

    def _try_sampled_rows(self, num_rows: int) -> str | None:
        """Leave rows out of a run of so many, and say why not all ranks get the others back.

        A model is more than what is compiled, and that may count on all rows.

        Returns:
            None if they do; on every rank alike.

        Raises:
            RuntimeError: Some ranks failed, and others have gone on.

        Collectives: those of two partitioned steps, and two of ``do_all_ranks`` or three.
        """
        input_ids = self.pcp.graphs.input_ids[:num_rows]
        # Rows that are told apart.
        input_ids.copy_(torch.arange(1, num_rows + 1) % self.model_config.get_vocab_size())
        send_idx = torch.tensor([0, num_rows - 1], dtype=torch.int32, device=self.device)
        sampled: Any = SimpleNamespace(send_idx=send_idx, is_applied=False)
        obstacle, has_failed = None, False
        try:
            whole = self._run_rows(num_rows).index_select(0, send_idx)
            set_step_state(StepState(is_partitioned=True, sampled=sampled))
            rows = self._run_rows(num_rows)
            if not sampled.is_applied or rows.shape != whole.shape:
                obstacle = f"a trial came back with {tuple(rows.shape)}"
            elif ((rows - whole).norm(dim=1) > (rows - whole.flip(0)).norm(dim=1)).any():
                obstacle = "a trial came back with other rows"
        except Exception as error:  # noqa: BLE001  (of whatever the model does with rows)
            obstacle, has_failed = f"a trial failed: {error}", True
        set_step_state(StepState(is_partitioned=True))
        input_ids.zero_()
        if not do_all_ranks(not has_failed) and not do_all_ranks(has_failed):
            # What the others wait for would be paired with what comes next.
            raise RuntimeError(obstacle or "a trial of the last layer failed on another rank")
        if do_all_ranks(obstacle is None):
            return None
        return obstacle or "a trial went wrong on another rank"

    def _capture_partition_graph(self, num_rows: int) -> None:
        graphs = self.pcp.graphs
        # Once as it is, which compiles kernels, then to be captured.
        for replayed_rows in (None, num_rows):
            graphs.replayed_rows = replayed_rows
            self._run_rows(num_rows)
        graphs.replayed_rows = None

    def _run_rows(self, num_rows: int) -> Any:
        """Run the model on so many rows of no request."""
        inputs = {
            "input_ids": self.pcp.graphs.input_ids[:num_rows],
            "positions": self.pcp.graphs.positions[:num_rows],
            **self.model_state.prepare_dummy_inputs(min(num_rows, self.max_num_reqs), num_rows),
        }
        with set_forward_context(None, self.vllm_config, num_tokens=num_rows):
            return self.model(**inputs)

    @torch.inference_mode()
    def warm_up_gather(self) -> None:
        """Run every PCP collective once.

        The first request must not pay for connections and kernel compilation.

        Collectives: those of a partitioned step, of two tokens a rank.
        """
        self._is_gather_warm_up = True
        set_step_state(StepState(is_partitioned=True))
        try:
            hidden_states, _ = self._dummy_run(min(2, self.max_num_tokens))
        finally:
            self._is_gather_warm_up = False
            set_step_state(REPLICATED)
        assert hidden_states is not None
        gather_rows(hidden_states)
        broadcast_from_first_rank(torch.zeros(1, 1, dtype=torch.int64, device=self.device))
        if self.use_dcp:
            rows = torch.zeros(self.dcp_size, 16, dtype=torch.uint8, device=self.device)
            gather_shards(rows, self.pcp.shards.own_rows(rows))
        self.pcp.reset_stats()
        if samples_last_layer(self.vllm_config) and self._last_layer_obstacle is not None:
            logger.info(
                "The last layer of partitioned steps computes all rows: %s.",
                self._last_layer_obstacle,
            )

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Add requests, and note which embeddings are not to be normalised."""
        super().add_requests(scheduler_output)
        if isinstance(self.pooling_runner, EmbeddingRunner):
            self.pooling_runner.add_requests(scheduler_output.scheduled_new_reqs)

    def _remove_request(self, req_id: str) -> bool:
        if isinstance(self.pooling_runner, EmbeddingRunner):
            self.pooling_runner.raw_req_ids.discard(req_id)
        return super()._remove_request(req_id)

    def prepare_dummy_attn(
        self, input_batch: InputBatch
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return block tables and slots that write nothing; in the warm-up, slots that gather."""
        block_tables, slot_mappings = super().prepare_dummy_attn(input_batch)
        if self.use_dcp:
            # Where vLLM forgets it: in the buffer that a CUDA graph reads.
            num_kept = self.input_buffers.dcp_local_seq_lens[: input_batch.num_reqs]
            num_kept.copy_(self.pcp.shards.num_kept(input_batch.seq_lens, self.pcp.shards.rank))
            input_batch.dcp_local_seq_lens = num_kept
        if self._is_gather_warm_up:
            slot_mappings = self.pcp.get_dummy_slot_mappings(
                len(block_tables), input_batch.num_tokens
            )
            self.pcp.begin_exchange()
        return block_tables, slot_mappings

    @torch.inference_mode()
    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        intermediate_tensors: IntermediateTensors | None = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        is_profile: bool = False,
    ) -> ModelRunnerOutput | IntermediateTensors | None:
        """Run a step; leave the global batch and its hidden states for sampling.

        Collectives: in a partitioned step one gather a layer, or one meeting and one ahead of the
        first layer, and one all_gather of hidden rows; in every step those of the layers of
        experts.
        """
        self._stay_in_reach()
        self._partitions_step = not dummy_run and self._has_partitioned_prefill(scheduler_output)
        output = super().execute_model(
            scheduler_output,
            intermediate_tensors,
            dummy_run,
            skip_attn_for_dummy_run,
            # What a profiling run and a partitioned step have in common: none of vLLM's graphs.
            is_profile=is_profile or self._partitions_step or self._is_gather_warm_up,
        )
        step, self._pcp_step = self._pcp_step, None
        if step is not None:
            set_step_state(REPLICATED)
            self.pcp.graphs.replayed_rows = None
            self._restore(step)
        return output

    def _stay_in_reach(self) -> None:
        """Wait until this rank's GPU has come to the step before this one.

        vLLM writes what a step is to read to one of two host buffers in turn, and goes on when rank
        0 has answered. The others could fall behind by more, where steps have a broadcast alone.
        """
        if self.device.type != "cuda":
            return
        if self._last_start is None:
            self._last_start = torch.cuda.Event()
        else:
            self._last_start.synchronize()
        self._last_start.record()

    def _has_partitioned_prefill(self, scheduler_output: SchedulerOutput) -> bool:
        """Say ahead of the batch whether ``partition_batch`` will partition it."""
        num_scheduled_tokens = scheduler_output.num_scheduled_tokens
        min_tokens = 2 * self.pcp.pcp_world_size
        if max(num_scheduled_tokens.values(), default=0) < min_tokens:
            return False
        for request in scheduler_output.scheduled_new_reqs:
            if num_scheduled_tokens[request.req_id] >= min_tokens:
                return True
        cached = scheduler_output.scheduled_cached_reqs
        states = self.req_states
        return any(
            num_scheduled_tokens[req_id] >= min_tokens
            and num_computed_tokens < states.prefill_len.np[states.req_id_to_index[req_id]]
            for req_id, num_computed_tokens in zip(
                cached.req_ids, cached.num_computed_tokens, strict=True
            )
        )

    def prepare_inputs(
        self, scheduler_output: SchedulerOutput, batch_desc: BatchExecutionDescriptor
    ) -> InputBatch:
        """Return the batch to run: the scheduled one, or this rank's part of it."""
        batch = super().prepare_inputs(scheduler_output, batch_desc)
        self._pcp_step = self.pcp.partition_batch(batch)
        assert (self._pcp_step is not None) == self._partitions_step, (
            "the step was dispatched for another batch"
        )
        if self._pcp_step is None:
            return batch
        num_rows, graphs = self._pcp_step.plan.num_tokens_after_padding, self.pcp.graphs
        graphs.replayed_rows = num_rows if graphs.replays(num_rows) else None
        return self._pcp_step.local_batch

    def prepare_attn(
        self, input_batch: InputBatch
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return block tables of the rows to run, and the slots to write."""
        step = self._pcp_step
        if step is None:
            return super().prepare_attn(input_batch)
        leaves_rows_out = self._last_layer_obstacle is None and not self._needs_all_hidden_states(
            step.global_batch
        )
        sampled = step.sampled if leaves_rows_out else None
        set_step_state(StepState(is_partitioned=True, plan=step.plan, sampled=sampled))
        block_tables, slot_mappings = super().prepare_attn(step.global_batch)
        self.pcp.begin_exchange()
        return self.pcp.prepare_attn(step, block_tables, slot_mappings)

    def _restore(self, step: PCPStep) -> None:
        """Replace the local batch and its hidden states by the global ones."""
        state = self.execute_model_state
        assert state is not None
        assert state.hidden_states is not None
        if self._needs_all_hidden_states(step.global_batch):
            batch = step.global_batch
            hidden_states = self.pcp.restore_hidden_states(step, state.hidden_states)
        else:
            hidden_states, batch = self.pcp.restore_for_sampling(step, state.hidden_states)
        self.execute_model_state = state._replace(input_batch=batch, hidden_states=hidden_states)

    def _needs_all_hidden_states(self, batch: InputBatch) -> bool:
        """Say whether more than the rows of the logits is read: prompt logprobs."""
        worker = self.prompt_logprobs_worker
        return worker is not None and bool(
            np.any(worker.uses_prompt_logprobs[batch.idx_mapping_np])
        )

    def sample(
        self,
        hidden_states: torch.Tensor,
        input_batch: InputBatch,
        grammar_output: GrammarOutput | None,
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        """Sample on every rank, and keep PCP rank 0's tokens.

        Ranks sample from hidden states that are equal up to the last bit or, after a step that each
        ran on its own, nearly so. A token that differed would make their requests diverge for good.

        Collectives: one broadcast on the PCP group.
        """
        output, num_sampled, num_rejected = super().sample(
            hidden_states, input_batch, grammar_output
        )
        broadcast_from_first_rank(output.sampled_token_ids)
        return output, num_sampled, num_rejected

    def shutdown(self) -> None:
        """Log the counters, then release what the stock runner releases, and CUDA graphs.

        The groups are destroyed next, and NCCL waits there for all graphs that send something.
        """
        self.pcp.log_stats()
        try:
            super().shutdown()
        finally:
            close_peer_caches()
            if self.cudagraph_manager is not None:
                self.cudagraph_manager.graphs.clear()
            for wrapper in (CUDAGraphWrapper, BreakableCUDAGraphWrapper):
                wrapper.clear_all_graphs()
            # After an error on the GPU the process ends here.
            close_direct_all_reduce()


def check_interleave(interleave: int, kernel_block_sizes: list[int]) -> None:
    """Check that a run of tokens that a rank keeps lies in one block.

    vLLM compares with the blocks of the scheduler alone, which kernels may divide.

    Args:
        interleave: Tokens of a run.
        kernel_block_sizes: Tokens of a kernel's block, of each group of layers.

    Raises:
        ValueError: It does not; tokens would be written to the slots of others.
    """
    wrong = sorted({size for size in kernel_block_sizes if size % interleave})
    if wrong:
        raise ValueError(
            "Prefill context parallelism does not support decode context parallelism with runs of "
            f"tokens that kernels' blocks cut (got --cp-kv-cache-interleave-size {interleave}, and "
            f"from the attention backend blocks of {wrong} tokens). Set "
            f"--cp-kv-cache-interleave-size to a divisor of {math.gcd(*kernel_block_sizes)}, or "
            "--decode-context-parallel-size 1."
        )


def with_quant_mode(spec: KVCacheSpec) -> KVCacheSpec:
    """Return the description of a cache, completed where its rows are wider than its vectors."""
    if not isinstance(spec, MLAAttentionSpec) or spec.cache_dtype_str != "fp8_ds_mla":
        return spec
    return dataclasses.replace(spec, kv_quant_mode=get_kv_quant_mode(spec.cache_dtype_str))


def make_pcp_runner(runner: Any) -> PCPRunnerMixin:
    """Turn a V2 runner that has just been built into a PCP runner, whatever its class."""
    stock = type(runner)
    manager = PCPManager(runner.vllm_config, runner.device)
    runner.__class__ = type(f"PCP{stock.__name__}", (PCPRunnerMixin, stock), {})
    assert isinstance(runner, PCPRunnerMixin)
    runner.pcp = manager
    PackedTokenIds.take_over(runner.req_states.all_token_ids)
    # The stock runner has asked the group that vLLM had cut out of TP.
    runner.dcp_rank = get_dcp_group().rank_in_group
    return runner

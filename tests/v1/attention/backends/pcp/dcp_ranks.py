# SPDX-License-Identifier: Apache-2.0
"""All ranks of a step, one after the other in one process, and what they must compute.

A rank runs until a collective that others have yet to enter, and is started over once they have:
what each put in is kept. So the code under test needs neither processes nor threads, and what it
put in, in which order, can be compared between ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tests.v1.attention.backends.pcp import dense_attention
from tests.v1.worker.gpu.pcp.oracle import Batch, Request, edge_lengths
from vllm import _custom_ops
from vllm.config import (
    CacheConfig,
    CUDAGraphMode,
    ModelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import parallel_state
from vllm.distributed.pcp import kv_gather, shard_collectives
from vllm.distributed.pcp.step import REPLICATED, StepState, set_step_state
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn as stock
from vllm.v1.attention.backends.pcp import flash_attn, flash_attn_metadata, merge_partials
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu.pcp import copies
from vllm.v1.worker.gpu.pcp.layout import plan_partition

MAX_NUM_TOKENS, MAX_NUM_SEQS = 4096, 64
# What vLLM has FlashAttention 3 split the keys into at most, in steps that may be in a CUDA graph.
GRAPH_SPLITS = 32

# What ranks must agree on: name, size of the group, shapes and dtypes.
Entry = tuple[str, int, tuple[tuple[torch.Size, torch.dtype], ...]]


class NotEnteredError(Exception):
    """A collective waits for ranks that have yet to enter it."""


@dataclass(frozen=True)
class Setting:
    """Sizes of the groups, the cache and the heads of one rank."""

    pcp_world_size: int
    tp_world_size: int = 1
    interleave: int = 1
    block_size: int = 16
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 8
    fa_version: Literal[2, 3] = 2
    kv_cache_dtype: str = "auto"
    row_step: int = 1
    has_graphs: bool = False
    device: str = "cpu"

    @property
    def dcp_world_size(self) -> int:
        """All ranks; the TP axis is left out unless D spans it."""
        return self.pcp_world_size * self.tp_world_size

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    @property
    def is_quantized(self) -> bool:
        """Whether the cache holds FP8, and queries come as such."""
        return self.kv_cache_dtype == "fp8"

    def pad(self, num_rows: int) -> int:
        """Return the rows that every rank runs, as where there are CUDA graphs."""
        return -(-num_rows // self.row_step) * self.row_step

    def holds(self, rank: int, token: int) -> int | None:
        """Return the token's place among those of its request that a rank's cache holds."""
        turn, place = divmod(token, self.interleave)
        rounds, owner = divmod(turn, self.dcp_world_size)
        return rounds * self.interleave + place if owner == rank else None


@cache
def make_config(setting: Setting) -> VllmConfig:
    """Return a configuration with heads of one rank."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(
            json.dumps(
                {
                    "architectures": ["Qwen3ForCausalLM"],
                    "model_type": "qwen3",
                    "hidden_size": setting.num_heads * setting.head_size,
                    "intermediate_size": 128,
                    "num_hidden_layers": 1,
                    "num_attention_heads": setting.num_heads,
                    "num_key_value_heads": setting.num_kv_heads,
                    "head_dim": setting.head_size,
                    "vocab_size": 128,
                    "max_position_embeddings": 4096,
                }
            )
        )
        model = ModelConfig(folder, skip_tokenizer_init=True, dtype=setting.dtype)
    cache_config = CacheConfig(block_size=setting.block_size)
    cache_config.cache_dtype = setting.kv_cache_dtype  # type: ignore[assignment]
    config = VllmConfig(model_config=model, cache_config=cache_config)
    config.parallel_config.decode_context_parallel_size = setting.dcp_world_size
    config.parallel_config.cp_kv_cache_interleave_size = setting.interleave
    config.scheduler_config.max_num_batched_tokens = MAX_NUM_TOKENS
    config.scheduler_config.max_num_seqs = MAX_NUM_SEQS
    config.attention_config.flash_attn_version = setting.fa_version
    if setting.has_graphs:
        config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        config.compilation_config.max_cudagraph_capture_size = MAX_NUM_TOKENS
    return config


@contextmanager
def no_host_sync(device: str) -> Iterator[None]:
    """Fail if the host waits for the device."""
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@dataclass
class Rank:
    """One rank: its code under test, its cache, and the collectives that it entered."""

    index: int
    impl: Any
    builder: Any
    kv_cache: torch.Tensor
    entered: list[Entry] = field(default_factory=list)


class Ranks(kv_gather.KVGather):
    """All ranks of a DCP group; also their KV gather."""

    def __init__(self, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
        self.setting = setting
        self.device = torch.device(setting.device)
        group: Any = SimpleNamespace(world_size=setting.pcp_world_size, rank_in_group=0)
        super().__init__(group, MAX_NUM_TOKENS, self.device)
        self.memory = torch.zeros(1 << 24, dtype=torch.uint8, device=self.device)
        self.put_in: list[dict[int, tuple[torch.Tensor, ...]]] = []
        self.current = Rank(0, None, None, self.memory)
        self.computes = True
        # The splits of each launch of attention.
        self.launches: list[int] = []
        self._stand_in(monkeypatch)
        self.ranks = [self._make_rank(index) for index in range(setting.dcp_world_size)]

    def _stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def group_of(members: Callable[[], list[int]]) -> Callable[[], Any]:
            return lambda: SimpleNamespace(
                world_size=len(members()),
                rank_in_group=members().index(self.current.index),
                ranks=[self.place(member) for member in members()],
            )

        everybody = list(range(self.setting.dcp_world_size))
        for module in (parallel_state, shard_collectives):
            monkeypatch.setattr(module, "get_dcp_group", group_of(lambda: everybody))
        for module in (parallel_state, flash_attn_metadata):
            monkeypatch.setattr(module, "get_pcp_group", group_of(self._pcp_ranks))
        # It makes the host wait, which no CPU shows.
        monkeypatch.setattr(stock, "get_dcp_local_seq_lens", None)
        monkeypatch.setattr(kv_gather, "_kv_gather", self)
        monkeypatch.setattr(flash_attn, "gather_shards", self.gather_shards)
        monkeypatch.setattr(flash_attn, "exchange_blocks", self.exchange_blocks)
        monkeypatch.setattr(flash_attn, "gather_heads", self.gather_heads)
        monkeypatch.setattr(workspace, "_manager", None)
        workspace.init_workspace_manager(self.device)
        if self.device.type == "cuda":
            return
        monkeypatch.setattr(
            copies, "async_copy_to_gpu", lambda array, device: torch.from_numpy(array)
        )
        twins = pytest.importorskip("vllm_cpu_trial.flash_attention", reason="no twins of kernels")
        write = twins.reshape_and_cache_flash
        monkeypatch.setattr(_custom_ops, "reshape_and_cache_flash", write)
        monkeypatch.setattr(stock, "reshape_and_cache_flash", write, raising=False)
        monkeypatch.setattr(stock, "get_flash_attn_version", twins.flash_attn_version)
        plan = twins.get_scheduler_metadata
        monkeypatch.setattr(stock, "get_scheduler_metadata", plan, raising=False)
        self._attend = twins.flash_attn_varlen_func
        monkeypatch.setattr(stock, "flash_attn_varlen_func", self._flash_attn, raising=False)
        monkeypatch.setattr(flash_attn, "merge_partials", self._merge_partials)

    def _flash_attn(self, **arguments: Any) -> Any:
        self.launches.append(arguments["num_splits"])
        if self.computes:
            return self._attend(**arguments)
        query = arguments["q"]
        return arguments["out"], torch.zeros(query.shape[1], query.shape[0])

    def _merge_partials(self, *arguments: Any) -> None:
        if self.computes:
            merge_partials.merge_partials(*arguments)

    def _make_rank(self, index: int) -> Rank:
        setting = self.setting
        config = make_config(setting)
        self.current = rank = Rank(index, None, None, self.memory)
        spec = FullAttentionSpec(
            block_size=setting.block_size,
            num_kv_heads=setting.num_kv_heads,
            head_size=setting.head_size,
            dtype=setting.dtype,
        )
        with set_current_vllm_config(config):
            rank.builder = flash_attn_metadata.PCPFlashAttentionMetadataBuilder(
                spec, ["layer"], config, self.device
            )
            rank.impl = flash_attn.PCPFlashAttentionImpl(
                setting.num_heads,
                setting.head_size,
                setting.head_size**-0.5,
                setting.num_kv_heads,
                None,
                None,
                setting.kv_cache_dtype,
            )
        assert rank.impl.vllm_flash_attn_version == setting.fa_version
        rank.impl.process_weights_after_loading(setting.dtype)
        return rank

    def place(self, rank: int) -> int:
        """Return a rank's number among all, TP-minor; DCP ranks go along the PCP axis first."""
        tp_rank, pcp_rank = divmod(rank, self.setting.pcp_world_size)
        return pcp_rank * self.setting.tp_world_size + tp_rank

    def _dcp_ranks(self) -> list[int]:
        """Return DCP ranks as they stand in what is gathered."""
        return sorted(range(self.setting.dcp_world_size), key=self.place)

    def _pcp_ranks(self) -> list[int]:
        size = self.setting.pcp_world_size
        first = self.current.index // size * size
        return list(range(first, first + size))

    def _tp_ranks(self) -> list[int]:
        size = self.setting.pcp_world_size
        return list(range(self.current.index % size, self.setting.dcp_world_size, size))

    def _enter(
        self, name: str, members: list[int], *tensors: torch.Tensor
    ) -> list[tuple[torch.Tensor, ...]]:
        """Return what each member put in, or give up until all have."""
        entered = self.current.entered
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        entered.append((name, len(members), shapes))
        position = len(entered) - 1
        if not self.computes:
            return [tensors] * len(members)
        if position == len(self.put_in):
            self.put_in.append({})
        put_in = self.put_in[position]
        put_in[self.current.index] = tuple(tensor.clone() for tensor in tensors)
        if not all(member in put_in for member in members):
            raise NotEnteredError
        return [put_in[member] for member in members]

    def _buffer(self) -> torch.Tensor:
        return self.memory

    def _exchange(self, rows: torch.Tensor, own_rows: torch.Tensor) -> None:
        entered = self._enter("gather of KV", self._pcp_ranks(), own_rows)
        rows.copy_(torch.cat([received for (received,) in entered]))

    def gather_shards(self, gathered: torch.Tensor, own_rows: torch.Tensor) -> None:
        """Stand in for the collective of that name."""
        assert gathered.is_contiguous()
        own_place = self.place(self.current.index)
        assert own_rows.data_ptr() == gathered[own_place * own_rows.shape[0]].data_ptr()
        entered = self._enter("gather of queries", self._dcp_ranks(), own_rows)
        gathered.copy_(torch.cat([received for (received,) in entered]))

    def gather_heads(self, q: torch.Tensor) -> torch.Tensor:
        """Stand in for the collective of that name."""
        entered = self._enter("gather of heads", self._tp_ranks(), q)
        heads = [heads.contiguous().view(torch.uint8) for (heads,) in entered]
        return torch.cat(heads, dim=1).view(q.dtype)

    def exchange_blocks(self, *exchanges: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Stand in for the collective of that name."""
        assert all(tensor.is_contiguous() for pair in exchanges for tensor in pair)
        own_place = self.place(self.current.index)
        entered = self._enter("exchange", self._dcp_ranks(), *(sent for sent, _ in exchanges))
        for place, blocks in enumerate(entered):
            for block, (_, received) in zip(blocks, exchanges, strict=True):
                assert received.shape == (len(entered), *block.shape[1:])
                received[place].copy_(block[own_place % block.shape[0]])

    def play(self, run: Callable[[Rank], Any]) -> list[Any]:
        """Run all ranks to the end; return what each returned."""
        results: dict[int, Any] = {}
        self.put_in.clear()
        while len(results) < len(self.ranks):
            num_put_in = sum(map(len, self.put_in))
            for rank in self.ranks:
                self.current = rank
                self.pcp_rank = rank.index % self.setting.pcp_world_size
                rank.entered.clear()
                self.launches.clear()
                try:
                    results[rank.index] = run(rank)
                except NotEnteredError:
                    continue
            if len(results) < len(self.ranks):
                assert sum(map(len, self.put_in)) > num_put_in, "ranks wait for each other"
        return [results[rank.index] for rank in self.ranks]


class Step:
    """One step: its batch, all that was computed before it, and who runs what.

    Args:
        batch: The step's requests.
        ranks: Who runs it.
        seed: Of queries, keys and values.
    """

    def __init__(self, batch: Batch, ranks: Ranks, seed: int = 0) -> None:
        self.batch, self.ranks, self.setting = batch, ranks, ranks.setting
        self.plan = plan_partition(
            np.array([request.num_scheduled for request in batch.requests], dtype=np.int32),
            np.array([request.num_computed for request in batch.requests], dtype=np.int32),
            np.array([request.is_prefilling for request in batch.requests]),
            pcp_world_size=self.setting.pcp_world_size,
            pad=self.setting.pad,
        )
        # Request and position of each token of the batch, in its order.
        self.tokens = [
            (r, request.num_computed + token)
            for r, request in enumerate(batch.requests)
            for token in range(request.num_scheduled)
        ]
        if ranks.computes:
            self._fill(seed)

    def _fill(self, seed: int) -> None:
        setting, rng = self.setting, Random(seed)
        generator = torch.Generator().manual_seed(seed)
        lengths = [request.num_computed + request.num_scheduled for request in self.batch.requests]

        def random(length: int, num_heads: int) -> torch.Tensor:
            rows = torch.randn(length, num_heads, setting.head_size, generator=generator)
            if setting.is_quantized:  # what comes of it must not depend on rounding
                rows = rows.to(torch.float8_e4m3fn)
            return rows.to(setting.dtype).to(setting.device)

        num_heads = setting.num_heads * setting.tp_world_size
        self.queries = [random(length, num_heads) for length in lengths]
        self.keys = [random(length, setting.num_kv_heads) for length in lengths]
        self.values = [random(length, setting.num_kv_heads) for length in lengths]

        per_block = setting.block_size * setting.dcp_world_size
        self.num_blocks = [-(-length // per_block) for length in lengths]
        blocks = list(range(1, 1 + sum(self.num_blocks)))
        rng.shuffle(blocks)
        self.tables = torch.zeros(len(lengths), max(self.num_blocks), dtype=torch.int32)
        for r, num_blocks in enumerate(self.num_blocks):
            self.tables[r, :num_blocks] = torch.tensor(blocks[:num_blocks])
            del blocks[:num_blocks]
        shape = (1 + sum(self.num_blocks), 2, setting.block_size, *self.keys[0].shape[1:])
        for rank in self.ranks.ranks:
            # What must not be read: as bad as kernels stand, which multiply masked values by 0.
            unread = torch.nan if setting.device == "cpu" else 400.0
            rank.kv_cache = self._as_cached(
                torch.full(shape, unread, dtype=setting.dtype, device=setting.device)
            )
            for r, request in enumerate(self.batch.requests):
                self._cache(rank, r, range(request.num_computed))

    def _cache(self, rank: Rank, r: int, positions: Sequence[int]) -> None:
        held = [p for p in positions if self.slot(rank.index, r, p) >= 0]
        slots = torch.tensor([self.slot(rank.index, r, p) for p in held], dtype=torch.long)
        block, place = slots // self.setting.block_size, slots % self.setting.block_size
        rank.kv_cache[block, 0, place] = self._as_cached(self.keys[r][held])
        rank.kv_cache[block, 1, place] = self._as_cached(self.values[r][held])

    def _as_cached(self, rows: torch.Tensor) -> torch.Tensor:
        is_quantized = self.setting.is_quantized
        return rows.to(torch.float8_e4m3fn).view(torch.uint8) if is_quantized else rows

    def slot(self, rank: int, r: int, position: int) -> int:
        """Return where a rank's cache holds a token, -1 if it does not."""
        place = self.setting.holds(rank, position)
        if place is None:
            return -1
        block, offset = divmod(place, self.setting.block_size)
        return int(self.tables[r, block]) * self.setting.block_size + offset

    def rows(self, rank: int) -> list[tuple[int, int, int]]:
        """Return request, first position and length of each row of a rank."""
        if self.plan is None:
            return [(r, q.num_computed, q.num_scheduled) for r, q in enumerate(self.batch.requests)]
        pcp_rank = rank % self.setting.pcp_world_size
        computed = [request.num_computed for request in self.batch.requests]
        return [
            (r, computed[r] + offset, length)
            for r, offset, length in zip(
                self.plan.row_req[pcp_rank].tolist(),
                self.plan.row_offset[pcp_rank].tolist(),
                self.plan.row_len[pcp_rank].tolist(),
                strict=True,
            )
        ]

    def local_tokens(self, rank: int) -> list[tuple[int, int]]:
        """Return request and position of each token that a rank runs."""
        return [
            (r, position)
            for r, start, length in self.rows(rank)
            for position in range(start, start + length)
        ]

    def metadata(self, rank: Rank) -> Any:
        """Have the builder under test build, from what the runner would hand it."""
        rows = self.rows(rank.index)
        starts = np.cumsum([0, *(length for _, _, length in rows)]).astype(np.int32)
        seq_lens = torch.tensor([start + n for _, start, n in rows], dtype=torch.int32)
        if self.ranks.computes:
            tables = self.tables[[r for r, _, _ in rows]]
        else:
            tables = torch.zeros(len(rows), 1, dtype=torch.int32)
        held = [
            sum(self.setting.holds(rank.index, token) is not None for token in range(length))
            for length in (seq_lens.tolist() if self.ranks.computes else [])
        ]
        device = self.setting.device
        common = CommonAttentionMetadata(
            query_start_loc=torch.from_numpy(starts).to(device),
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens=seq_lens.to(device),
            seq_lens_cpu_upper_bound=seq_lens,
            max_seq_len=int(seq_lens.max()),
            num_reqs=len(rows),
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(length for _, _, length in rows),
            block_table_tensor=tables.to(device),
            slot_mapping=self.slots(rank).to(device),
            dcp_local_seq_lens=torch.tensor(held, dtype=torch.int32, device=device),
        )
        set_step_state(REPLICATED if self.plan is None else StepState(True, self.plan))
        try:
            with no_host_sync(self.setting.device):
                return rank.builder.build(0, common)
        finally:
            set_step_state(REPLICATED)

    def slots(self, rank: Rank) -> torch.Tensor:
        """Return the slot mapping that the runner hands a layer."""
        if not self.ranks.computes:
            return torch.zeros(1, dtype=torch.int64)
        of_batch = [self.slot(rank.index, r, position) for r, position in self.tokens]
        if self.plan is None:
            return torch.tensor(of_batch)
        return torch.tensor([-1 if t < 0 else of_batch[t] for t in self.plan.slot_idx.tolist()])

    def num_local_rows(self, rank: int) -> int:
        """Return how many tokens a rank runs, padding included."""
        return len(self.tokens) if self.plan is None else self.plan.num_tokens_after_padding

    def run(self, rank: Rank) -> torch.Tensor:
        """Run a layer on a rank: ``[num_tokens, H, head_size]``, padding left out."""
        setting = self.setting
        metadata = self.metadata(rank)
        tokens = self.local_tokens(rank.index)
        num_padding = self.num_local_rows(rank.index) - len(tokens)
        group = rank.index // setting.pcp_world_size
        heads = slice(group * setting.num_heads, (group + 1) * setting.num_heads)

        def pick(of_requests: list[torch.Tensor]) -> torch.Tensor:
            rows = torch.stack([of_requests[r][position] for r, position in tokens])
            # Padding has values of its own; models hand over slices, strided.
            rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, num_padding), value=3.0)
            wide = torch.nn.functional.pad(rows.flatten(1), (0, 8))
            return wide[:, : rows[0].numel()].view_as(rows)

        query = pick([rows[:, heads] for rows in self.queries])
        key, value = pick(self.keys), pick(self.values)
        one = torch.ones((), device=self.setting.device)
        layer = SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)
        output = torch.full_like(query.contiguous(), torch.nan)
        if setting.is_quantized:  # as the layer does
            query = query.contiguous().to(torch.float8_e4m3fn)
        rank.impl.do_kv_cache_update(layer, key, value, rank.kv_cache, metadata.slot_mapping)
        with no_host_sync(setting.device):
            rank.impl.forward(layer, query, key, value, rank.kv_cache, metadata, output)
        return output[: len(tokens)]

    def enter_collectives(self, rank: Rank) -> None:
        """Run a layer for the sake of its collectives, with nothing in its tensors."""
        setting, num_rows = self.setting, self.num_local_rows(rank.index)
        query = torch.empty(num_rows, setting.num_heads, setting.head_size)
        key = torch.empty(num_rows, setting.num_kv_heads, setting.head_size)
        one = torch.ones(())
        layer = SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)
        if self.plan is not None:
            row_bytes = 2 * key[0].numel() * key.element_size()
            self.ranks.begin(num_rows, row_bytes)
            self.ranks.finish()
        metadata = self.metadata(rank)
        kv_cache = key.new_empty(1, 2, setting.block_size, *key.shape[1:])
        rank.impl.forward(layer, query, key, key, kv_cache, metadata, torch.empty_like(query))

    def expected(self, rank: int) -> torch.Tensor:
        """Return what a rank must compute: each token attends to all of its request so far."""
        setting = self.setting
        group = rank // setting.pcp_world_size
        heads = slice(group * setting.num_heads, (group + 1) * setting.num_heads)
        results = [
            dense_attention.attention(
                self.queries[r][start : start + length, heads],
                self.keys[r][: start + length],
                self.values[r][: start + length],
                setting.head_size**-0.5,
                causal=True,
            )[0]
            for r, start, length in self.rows(rank)
        ]
        return torch.cat(results)


def batches(
    pcp_world_size: int, num_batches: int, *, max_cached: int = 70, seed: int = 0
) -> Iterator[Batch]:
    """Yield batches of decodes, and prefills of any length behind prefixes of any length.

    One in six has decodes alone, one in six replicated rows alone.
    """
    rng = Random(f"{pcp_world_size}-{seed}")
    long = [2 * pcp_world_size, 2 * pcp_world_size + 1, 9 * pcp_world_size - 1]

    def prefix() -> int:
        return rng.choice([0, 0, 1, 2, 16, rng.randint(1, max_cached)])

    for i in range(num_batches):
        decodes = [
            Request(1, rng.randint(1, max_cached), is_prefilling=False)
            for _ in range(rng.randint(0, 3))
        ]
        short = [
            Request(rng.choice(edge_lengths(pcp_world_size)[:4]), prefix())
            for _ in range(rng.randint(0, 2))
        ]
        partitioned = [
            Request(rng.choice([*long, rng.randint(*long[::2])]), prefix())
            for _ in range(rng.randint(1, 3))
        ]
        requests = [decodes, decodes + short, decodes + short + partitioned][min(i % 6, 2)]
        rng.shuffle(requests)
        yield Batch(pcp_world_size, tuple(requests or partitioned))

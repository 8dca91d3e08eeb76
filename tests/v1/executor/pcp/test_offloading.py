# SPDX-License-Identifier: Apache-2.0
"""Blocks that are offloaded and loaded again hold, on each rank, what the rank has to keep.

Scheduler, KV cache manager and connector are vLLM's, on the configuration that the engine core has.
The ranks are dictionaries: for each block, the tokens that a rank keeps of it. Rank d of D keeps
runs of tokens, one run in D; P does not appear.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.pcp.test_admission import LLAMA
from tests.v1.executor.pcp.test_kv_ownership import BLOCK_SIZE, NUM_BLOCKS, caches, kv_cache
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer import (
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
    kv_transfer_state,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.pcp import scheduler_view
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.metadata import (
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
)
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.pcp.mixin import PCPWorkerMixin

# P, TP, D.
WORLDS = ((1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 1, 2), (4, 1, 4), (2, 2, 2), (2, 2, 4))
# Blocks of the cache in a block of the native connector's tier; 0 for the simple connector.
FACTORS = (1, 2, 0)
NUM_OFFLOADED_BLOCKS = 4 * NUM_BLOCKS
INTERLEAVE = 4
Make = Callable[[int, int, int, int], VllmConfig]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return what makes the configuration of workers, with P, TP, D and a factor."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 2048}))
    monkeypatch.setattr(
        "vllm.model_executor.models.registry._run_in_subprocess", lambda look: look()
    )

    def make_config(pcp: int, tp: int, dcp: int, factor: int) -> VllmConfig:
        page_bytes = caches()[0].page_size_bytes
        extra = {"cpu_bytes_to_use": NUM_OFFLOADED_BLOCKS * page_bytes * pcp * tp}
        if factor:
            extra["block_size"] = factor * dcp * BLOCK_SIZE
        name = "OffloadingConnector" if factor else "SimpleCPUOffloadConnector"
        args = EngineArgs(
            model=str(tmp_path),
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            block_size=BLOCK_SIZE,
            max_model_len=512 * dcp,
            max_num_batched_tokens=100,
            kv_transfer_config=KVTransferConfig(
                name, kv_role="kv_both", kv_connector_extra_config=extra
            ),
        )
        config = args.create_engine_config()
        config.parallel_config.prefill_context_parallel_size = pcp
        config.parallel_config.tensor_parallel_size = tp
        config.parallel_config.decode_context_parallel_size = dcp
        config.parallel_config.world_size = pcp * tp
        config.cache_config.num_gpu_blocks = NUM_BLOCKS
        config.scheduler_config.async_scheduling = False
        return config

    return make_config


def engine_core_config(config: VllmConfig) -> VllmConfig:
    view = copy.copy(config)
    view.parallel_config = scheduler_view(config.parallel_config)
    return view


@dataclass
class Job:
    """Blocks that a rank has been asked to copy, and who waits for them."""

    number: int
    stores: bool
    blocks: list[int]
    places: list[tuple[int, int]]
    req_ids: set[str] = field(default_factory=set)
    age: int = 0


def jobs(meta: Any, factor: int) -> Iterator[Job]:
    """Yield what the connector asks workers for in a step, loads first."""
    if isinstance(meta, SimpleCPUOffloadMetadata):
        if meta.load_event >= 0:
            places = [(block, 0) for block in meta.load_cpu_blocks]
            req_ids = set(meta.load_event_to_reqs[meta.load_event])
            yield Job(meta.load_event, False, meta.load_gpu_blocks, places, req_ids)
        if meta.store_event >= 0:
            places = [(block, 0) for block in meta.store_cpu_blocks]
            yield Job(meta.store_event, True, meta.store_gpu_blocks, places)
        return
    assert isinstance(meta, OffloadingConnectorMetadata)
    for number, job in meta.load_jobs.items():
        yield Job(number, False, *native_blocks(job.dst_spec, job.src_spec, factor), {job.req_id})
    for number, job in meta.store_jobs.items():
        yield Job(number, True, *native_blocks(job.src_spec, job.dst_spec, factor))


def native_blocks(cache: Any, tier: Any, factor: int) -> tuple[list[int], list[tuple[int, int]]]:
    assert isinstance(cache, GPULoadStoreSpec)
    assert isinstance(tier, BlockIDsLoadStoreSpec)
    (first,) = cache.block_indices
    indices = range(first, first + len(cache.block_ids))
    tier_blocks = tier.block_ids.tolist()
    places = [(tier_blocks[i // factor - first // factor], i % factor) for i in indices]
    return cache.block_ids.tolist(), places


class Rank:
    """A worker: its part of the cache, and its own tier. Its copies take ``delay`` steps."""

    def __init__(self, dcp_rank: int, dcp: int, factor: int, delay: int) -> None:
        self.dcp_rank, self.dcp, self.factor, self.delay = dcp_rank, dcp, factor, delay
        self.cache: dict[int, dict[int, int]] = {}
        self.tier: dict[tuple[int, int], dict[int, int]] = {}
        self.jobs: list[Job] = []

    def positions(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the positions that this rank keeps, where their blocks stand, and their places."""
        for position in range(start, stop):
            if position // INTERLEAVE % self.dcp == self.dcp_rank:
                yield position, *divmod(position, self.dcp * BLOCK_SIZE)

    def step(self, meta: Any, rows: list[tuple[list[int], list[int], int, int]]) -> Any:
        """Attend to what is cached, write what is new; return what the connector's worker says.

        Args:
            meta: What the connector asks for.
            rows: Of each request that runs its tokens, its blocks, and where it starts and stops.
        """
        new = list(jobs(meta, self.factor))
        if isinstance(meta, SimpleCPUOffloadMetadata):
            flushed = {job.number for job in self.jobs} if meta.need_flush else set()
        else:
            flushed = meta.jobs_to_flush or set()
        for job in self.jobs:
            if job.number in flushed:
                self.copy(job)
        for tokens, blocks, start, stop in rows:
            for position, index, place in self.positions(0, start):
                assert self.cache[blocks[index]][place] == tokens[position], position
            for position, index, place in self.positions(start, stop):
                self.cache.setdefault(blocks[index], {})[place] = tokens[position]
        self.jobs += new
        done = [job for job in self.jobs if job.age >= self.delay]
        self.jobs = [job for job in self.jobs if job.age < self.delay]
        for job in self.jobs:
            job.age += 1
        for job in done:
            self.copy(job)
        finished = {req_id for job in done for req_id in job.req_ids}
        return KVConnectorOutput(
            finished_recving=finished, kv_connector_worker_meta=self.report(meta, done)
        )

    def copy(self, job: Job) -> None:
        """Copy blocks, unless that was done ahead of time."""
        for block, place in zip(job.blocks, job.places, strict=True):
            if job.stores:
                self.tier[place] = dict(self.cache[block])
            else:
                self.cache[block] = dict(self.tier[place])
        job.blocks, job.places = [], []

    def report(self, meta: Any, done: list[Job]) -> Any:
        if isinstance(meta, SimpleCPUOffloadMetadata):
            stored = {job.number: 1 for job in done if job.stores}
            return SimpleCPUOffloadWorkerMetadata(stored) if stored else None
        return OffloadingWorkerMetadata({job.number: 1 for job in done}) if done else None


class Engine:
    """vLLM's half of the engine core over ranks."""

    def __init__(self, config: VllmConfig, cache: KVCacheConfig, factor: int) -> None:
        size, hash_size = resolve_kv_cache_block_sizes(cache, config)
        self.scheduler = Scheduler(
            config, cache, StructuredOutputManager(config), size, hash_block_size=hash_size
        )
        connector = self.scheduler.connector
        assert connector is not None
        parallel = config.parallel_config
        dcp = parallel.decode_context_parallel_size
        self.ranks = [Rank(r % dcp, dcp, factor, r) for r in range(parallel.world_size)]
        self.aggregator = KVOutputAggregator.from_connector(connector, parallel.world_size)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(hash_size, sha256)
        # Of requests, how many tokens they did not have to compute.
        self.num_cached: dict[str, int] = {}

    def add(self, name: str, prompt: list[int]) -> None:
        # The simple connector offloads the last blocks of a prompt in the step behind it.
        params = SamplingParams(max_tokens=2)
        self.scheduler.add_request(Request(name, prompt, params, None, block_hasher=self.hasher))

    def run(self) -> dict[str, int]:
        while self.scheduler.has_unfinished_requests():
            self.step()
        return self.num_cached

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        rows, sampled = [], []
        for new in output.scheduled_new_reqs:
            self.num_cached[new.req_id] = new.num_computed_tokens
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[req_id]
            (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(req_id)
            stop = request.num_computed_tokens
            rows.append((list(request.all_token_ids), blocks, stop - num_tokens, stop))
            sampled.append([1] if stop == request.num_tokens else [])
        names = list(output.num_scheduled_tokens)
        outputs: list[ModelRunnerOutput | None] = [
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
                kv_connector_output=rank.step(output.kv_connector_metadata, rows),
            )
            for rank in self.ranks
        ]
        merged = self.aggregator.aggregate(outputs)
        assert merged is not None
        self.scheduler.update_from_output(output, merged)
        return output


@pytest.fixture(params=WORLDS, ids=lambda world: "pcp{}-tp{}-dcp{}".format(*world))
def world(request: pytest.FixtureRequest) -> tuple[int, int, int]:
    """Return P, TP and D."""
    pcp, tp, dcp = request.param
    return pcp, tp, dcp


def prompts(num_tokens: int) -> Iterator[list[int]]:
    """Yield prompts of which no two share a token."""
    for start in range(0, 1 << 30, num_tokens):
        yield list(range(start, start + num_tokens))


@pytest.mark.parametrize("factor", FACTORS)
def test_evicted_prefixes_come_back(make: Make, world: tuple[int, int, int], factor: int) -> None:
    config = engine_core_config(make(*world, factor))
    engine = Engine(config, kv_cache(caches()[0]), factor)
    # Six take more blocks than there are; an odd block is not offloaded two at a time.
    num_blocks, whole = 9, 8 if factor == 2 else 9
    size = world[2] * BLOCK_SIZE
    texts = prompts(num_blocks * size + 5)
    first, second, *others = (next(texts) for _ in range(6))
    for index, prompt in enumerate((first, second, *others)):
        engine.add(str(index), prompt)
        engine.run()
    engine.add("first again", [*first, *next(texts)[:30]])
    engine.add("new", next(texts))
    engine.add("second again", [*second[:-3], 7])
    loaded = {name: num_tokens for name, num_tokens in engine.run().items() if num_tokens}
    assert loaded == {"first again": whole * size, "second again": whole * size}


def test_a_block_is_there_when_all_ranks_have_it(make: Make, world: tuple[int, int, int]) -> None:
    config = engine_core_config(make(*world, 1))
    engine = Engine(config, kv_cache(caches()[0]), 1)
    *_, last = engine.ranks
    last.delay = 1 << 30
    prompt = next(prompts(4 * world[2] * BLOCK_SIZE + 1))
    engine.add("first", prompt)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    engine.add("second", prompt)
    assert not any(engine.step().num_scheduled_tokens for _ in range(2 * len(engine.ranks)))
    last.delay = 0
    assert engine.run() == {"first": 0, "second": len(prompt) - 1}


class StockWorker:
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.kv_cache_config = kv_cache_config


class Worker(PCPWorkerMixin, StockWorker):
    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config


@pytest.mark.parametrize("factor", FACTORS)
def test_workers_agree_with_the_engine_core(
    make: Make, world: tuple[int, int, int], factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer_state, "_sync_engine_id_across_tp", lambda config: None)
    config, cache = make(*world, factor), kv_cache(caches()[0])
    engine = Engine(engine_core_config(config), cache, factor)
    worker = Worker(config)
    worker.initialize_from_config(cache)
    assert worker.kv_cache_config is cache
    assert config.parallel_config.prefill_context_parallel_size == world[0]
    ours, theirs = get_kv_transfer_group(), engine.scheduler.connector
    ensure_kv_transfer_shutdown()
    if factor:
        assert isinstance(ours, OffloadingConnector)
        assert isinstance(theirs, OffloadingConnector)
        assert ours.connector_worker is not None
        assert theirs.connector_scheduler is not None
        spec = ours.connector_worker.spec
        assert isinstance(spec, CPUOffloadingSpec)
        (group,) = theirs.connector_scheduler.config.kv_group_configs
        assert spec.gpu_block_size == (group.gpu_block_size,) == (world[2] * BLOCK_SIZE,)
        assert spec.block_size_factor == factor
        assert spec.num_blocks == NUM_OFFLOADED_BLOCKS // factor
        assert theirs.connector_scheduler.config.num_workers == world[0] * world[1]
    else:
        assert isinstance(ours, SimpleCPUOffloadConnector)
        assert isinstance(theirs, SimpleCPUOffloadConnector)
        assert ours.worker_handler is not None
        assert theirs.scheduler_manager is not None
        page_bytes = caches()[0].page_size_bytes
        assert ours.worker_handler.cpu_capacity_bytes == NUM_OFFLOADED_BLOCKS * page_bytes
        assert theirs.scheduler_manager.num_cpu_blocks == NUM_OFFLOADED_BLOCKS

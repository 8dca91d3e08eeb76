# SPDX-License-Identifier: Apache-2.0
"""Takes an engine through its scenarios, step by step.

Imports vLLM, so that a process that has imported this can be forked into one engine after the
other: an engine cannot be taken down and another one set up in the same process.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.chosen_tokens import Choice
from tests.e2e.results import EngineResults, ScenarioResults, Spec
from tests.e2e.scenarios import GREEDY, OFFLOADED, Request, random_tokens, scenarios
from vllm import PoolingParams, PoolingRequestOutput, RequestOutput, SamplingParams, TokensPrompt
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.reader import Counter


class Driver:
    """An engine whose core is in this process."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.engine = start(spec)
        client = self.engine.engine_core
        assert isinstance(client, InprocClient)
        scheduler = client.engine_core.scheduler
        assert isinstance(scheduler, Scheduler)
        self.scheduler = scheduler
        self.num_loaded_tokens = 0
        if scheduler.connector is not None:
            self._count_loaded_tokens(scheduler.connector)
        self.has_pcp = spec.pcp > 1
        if self.has_pcp:
            self.engine.collective_rpc("record_collectives")
            # It polls for the ranks' answers, and they need the cores.
            os.nice(19)
        if spec.is_sparse:
            self.engine.collective_rpc("record_choices")

    def _count_loaded_tokens(self, connector: KVConnectorBase_V1) -> None:
        """Note what it has found; vLLM's counter leaves out steps that give no request a token."""
        stock = connector.update_state_after_alloc

        def note(request: Any, blocks: Any, num_external_tokens: int) -> None:
            self.num_loaded_tokens += num_external_tokens
            stock(request, blocks, num_external_tokens)

        connector.update_state_after_alloc = note  # type: ignore[method-assign]

    def run(self) -> EngineResults:
        """Run the scenarios one after the other."""
        spec = self.spec
        chosen = {
            name: scenario
            for name, scenario in scenarios(spec.sizes, self._tokens()).items()
            if (name in spec.scenarios if spec.scenarios else name not in OFFLOADED)
        }
        is_pcp = self.engine.collective_rpc("is_pcp")
        return EngineResults(
            {name: self._run_scenario(requests) for name, requests in chosen.items()},
            len(is_pcp),
            sum(is_pcp),
            len(self.scheduler.kv_cache_config.kv_cache_groups),
            bool(self.scheduler.scheduler_config.async_scheduling),
            self.scheduler.cache_config.kv_cache_size_tokens,
        )

    def _tokens(self) -> list[int]:
        if self.spec.text is None:
            return random_tokens()
        return self.engine.get_tokenizer().encode(Path(self.spec.text).read_text())

    def _run_scenario(self, requests: Sequence[Request]) -> ScenarioResults:
        self.engine.collective_rpc("reseed")
        stats = self._stats()
        num_preemptions = self._num_preemptions()
        num_loaded_tokens = self.num_loaded_tokens
        results = ScenarioResults([])
        results.requests, results.num_steps = self._drive(requests)
        results.num_preemptions = self._num_preemptions() - num_preemptions
        results.num_loaded_tokens = self.num_loaded_tokens - num_loaded_tokens
        results.kv_cache_usage = self.scheduler.kv_cache_manager.usage
        if self.has_pcp:
            results.stats = [
                {name: count - before[name] for name, count in after.items()}
                for before, after in zip(stats, self._stats(), strict=True)
            ]
            results.collectives = self.engine.collective_rpc("take_collectives")
        if self.spec.is_sparse:
            results.choices = checksums(self.engine.collective_rpc("take_choices"))
        return results

    def _drive(self, requests: Sequence[Request]) -> tuple[list[dict[str, Any] | None], int]:
        outputs: dict[str, dict[str, Any]] = {}
        last_arrival = max(request.arrives for request in requests)
        step = 0
        while step <= last_arrival or self.engine.has_unfinished_requests():
            for index, request in enumerate(requests):
                if request.arrives == step:
                    prompt = TokensPrompt(prompt_token_ids=list(request.prompt))
                    self.engine.add_request(str(index), prompt, self._params(request))
            self.engine.abort_request(
                [str(index) for index, request in enumerate(requests) if request.aborted == step]
            )
            for output in self.engine.step():
                outputs[output.request_id] = summary(output)
            step += 1
        return [outputs.get(str(index)) for index in range(len(requests))], step

    def _params(self, request: Request) -> SamplingParams | PoolingParams:
        if self.spec.is_pooling:
            return PoolingParams(task="embed")
        return sampling_params(request)

    def _stats(self) -> list[dict[str, int]]:
        return self.engine.collective_rpc("pcp_stats") if self.has_pcp else []

    def _num_preemptions(self) -> int:
        (count,) = (
            metric.value
            for metric in self.engine.get_metrics()
            if isinstance(metric, Counter) and metric.name == "vllm:num_preemptions"
        )
        return count


def run_scenarios(spec: Path, results: Path) -> None:
    """Run the engine of one file, write another."""
    driver = Driver(Spec.load(spec))
    driver.run().save(results)
    driver.engine.engine_core.shutdown()


def checksums(choices_of_ranks: Sequence[Sequence[Choice]]) -> dict[str, int]:
    """Return a checksum of each query's choice; ranks that share a row must agree."""
    sums: dict[str, int] = {}
    for layer, req, position, tokens in itertools.chain.from_iterable(choices_of_ranks):
        # vLLM makes names of requests unique by what it puts behind.
        key = f"{layer} {req.partition('-')[0]} {position}"
        checksum = zlib.crc32(repr(sorted(tokens)).encode())
        assert sums.setdefault(key, checksum) == checksum, f"ranks chose differently: {key}"
    return sums


def start(spec: Spec) -> LLMEngine:
    """Start an engine."""
    config = EngineArgs(**engine_args(spec)).create_engine_config()
    if spec.forks:
        # Only now: to create the configuration for CPUs set it to "spawn".
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return LLMEngine.from_vllm_config(config)


def engine_args(spec: Spec) -> dict[str, Any]:
    """Return an engine's arguments."""
    sizes, version = spec.sizes, spec.flash_attn_version
    attention = {} if version is None else {"backend": "FLASH_ATTN", "flash_attn_version": version}
    return {
        "model": spec.checkpoint,
        "runner": "pooling" if spec.is_pooling else "generate",
        "prefill_context_parallel_size": spec.pcp,
        "tensor_parallel_size": spec.tp,
        "decode_context_parallel_size": spec.dcp,
        "cp_kv_cache_interleave_size": spec.interleave,
        "enable_prefix_caching": spec.caches_prefixes,
        "enable_expert_parallel": spec.experts == "ep",
        "additional_config": {"pcp_experts": "replicated"} if spec.experts == "replicated" else {},
        "attention_config": attention,
        "async_scheduling": spec.is_async,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": sizes.block_size // spec.dcp,
        "num_gpu_blocks_override": sizes.num_blocks,
        "max_num_batched_tokens": sizes.max_num_batched_tokens,
        "max_model_len": sizes.max_model_len,
        "max_num_seqs": sizes.max_num_seqs,
        "kv_cache_memory_bytes": 64 << 20,
        "gpu_memory_utilization": 0.1,
        # Random models would put in white space for ever.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "worker_extension_cls": "tests.e2e.collectives.Recorder",
        **(CONNECTORS[spec.offloading](spec) if spec.offloading else {}),
    }


# More than all prompts of a scenario take.
_OFFLOADED_BYTES = 256 << 20


def _connector(name: str, **extra: Any) -> dict[str, Any]:
    extra["cpu_bytes_to_use"] = _OFFLOADED_BYTES
    config = KVTransferConfig(name, kv_role="kv_both", kv_connector_extra_config=extra)
    return {"kv_transfer_config": config}


# What offloads the KV cache: the arguments of an engine that say so.
CONNECTORS: dict[str, Callable[[Spec], dict[str, Any]]] = {
    "native": lambda spec: {"kv_offloading_size": _OFFLOADED_BYTES / 2**30},
    "native, two blocks at a time": lambda spec: _connector(
        "OffloadingConnector", block_size=2 * spec.sizes.block_size
    ),
    "simple": lambda spec: _connector("SimpleCPUOffloadConnector"),
    "simple, late": lambda spec: _connector("SimpleCPUOffloadConnector", lazy_offload=True),
}


def sampling_params(request: Request) -> SamplingParams:
    """Return the parameters of a request."""
    # The samples of a request come together, as from LLM.generate.
    params = {**GREEDY, **request.params, "output_kind": RequestOutputKind.FINAL_ONLY}
    if "structured_outputs" in params:
        params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
    return SamplingParams(**params)


def summary(output: RequestOutput | PoolingRequestOutput) -> dict[str, Any]:
    """Return what is compared, as plain data."""
    if isinstance(output, PoolingRequestOutput):
        return {
            "num_cached_tokens": output.num_cached_tokens,
            "embedding": output.outputs.data.tolist(),
        }
    return {
        "num_cached_tokens": output.num_cached_tokens,
        "prompt_logprobs": _plain_logprobs(output.prompt_logprobs),
        "outputs": [
            {
                "tokens": list(sample.token_ids),
                "logprobs": _plain_logprobs(sample.logprobs),
                "text": sample.text,
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
            }
            for sample in output.outputs
        ],
    }


def _plain_logprobs(positions: Sequence[Any] | None) -> list[dict[str, float]] | None:
    if positions is None:
        return None
    return [
        {str(token): entry.logprob for token, entry in (position or {}).items()}
        for position in positions
    ]

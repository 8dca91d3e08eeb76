# SPDX-License-Identifier: Apache-2.0
"""Engines to be timed, and how they are timed: offline, token-id prompts, no tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from harness import communicates
from turns import wait_for_turn

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.inputs import TokensPrompt as Prompt

# As an engine's additional_config: each PCP rank has all experts.
REPLICATED_EXPERTS = {"pcp_experts": "replicated"}
# And: new KV goes through a collective, as it does in what ranks on one GPU are compared with.
GATHERED_KV = {"pcp_kv_exchange": "gather"}


def is_cpu_build() -> bool:
    """Say whether the installed vLLM runs on CPUs, without importing it."""
    return "cpu" in version("vllm")


def one_gpu_options(
    num_ranks: int, worker_cls: str = "vllm.v1.worker.pcp.gpu_worker.OneGpuPCPWorker"
) -> dict[str, Any]:
    """Return arguments of an engine all of whose ranks share GPU 0, none for CPUs."""
    if is_cpu_build():
        return {}
    return {
        "worker_cls": worker_cls,
        "distributed_executor_backend": "mp",
        "disable_custom_all_reduce": True,
        "gpu_memory_utilization": 0.85 / num_ranks,
    }


def solo_rank_options(
    pcp_world_size: int, worker_cls: str = "solo_rank.SoloRankWorker"
) -> dict[str, Any]:
    """Return arguments of an engine that plays one rank of P at a time, see ``solo_rank.py``."""
    additional_config = {
        "pcp_world_size": pcp_world_size,
        **GATHERED_KV,
        **REPLICATED_EXPERTS,
    }
    return {"worker_cls": worker_cls, "additional_config": additional_config}


def start_engine(model: str, *, kv_gib: float | None = None, **options: Any) -> LLM:
    """Start an engine with Model Runner V2, prefix caching off, and wait for its turn.

    Args:
        model: Model folder.
        kv_gib: Size of a rank's KV cache; by default most of what is free on its GPU.
        **options: Arguments of ``vllm.LLM``, over the defaults of this function.
    """
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    defaults: dict[str, Any] = {
        "load_format": "dummy_routed",
        "worker_extension_cls": "dummy_weights.ExpertProbe",  # makes workers know the format
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,  # time_per_output_token reads them
        "dtype": "bfloat16",
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.85,
    }
    if is_cpu_build():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        defaults |= {
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_memory_bytes": 1 << 30,
            "gpu_memory_utilization": 0.1,
        }
    if kv_gib is not None:
        # The utilisation then tells only what must be free at the start.
        options |= {"kv_cache_memory_bytes": int(kv_gib * 2**30), "gpu_memory_utilization": 0.05}
    from vllm import LLM

    llm = LLM(model=model, **(defaults | options))
    wait_for_turn()
    return llm


def random_prompts(num_tokens: Sequence[int], vocab_size: int) -> list[Prompt]:
    """Return one prompt of random tokens for each length, always the same ones."""
    rng = np.random.default_rng(0)
    return [{"prompt_token_ids": rng.integers(vocab_size, size=n).tolist()} for n in num_tokens]


def greedy(max_tokens: int, logprobs: int | None = None) -> SamplingParams:
    """Return parameters for exactly ``max_tokens`` greedy tokens."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=logprobs,
    )


def generate(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> list[RequestOutput]:
    """Run prompts all at once, without a progress bar."""
    return llm.generate(list(prompts), params, use_tqdm=False)


def time_to_first_token(llm: LLM, prompt: Prompt) -> float:
    """Return the seconds that a request of one output token takes alone."""
    params = greedy(1)
    start = perf_counter()
    generate(llm, [prompt], params)
    return perf_counter() - start


def time_per_output_token(llm: LLM, prompts: Sequence[Prompt], num_tokens: int) -> float:
    """Return the mean seconds between tokens of requests that run together, the first one apart."""
    seconds = []
    for output in generate(llm, prompts, greedy(num_tokens)):
        stats = output.metrics
        assert stats is not None
        seconds.append((stats.last_token_ts - stats.first_token_ts) / (num_tokens - 1))
    return float(np.mean(seconds))


def count_kernels(llm: LLM, run: Callable[[], object]) -> dict[str, float]:
    """Profile a run, and return what all ranks together have on the GPU; nothing on CPUs.

    Args:
        llm: An engine with ``layer_probe.LayerProbe``.
        run: What it is to do.

    Returns:
        ``num_kernels`` and ``kernel_seconds`` of those that do not communicate, and
        ``num_collectives``.
    """
    llm.collective_rpc("start_profile")
    run()
    events = [event for rank in llm.collective_rpc("stop_profile") for event in rank]
    kernels = [event for event in events if event["is_kernel"]]
    work = [event for event in kernels if not communicates(event["name"])]
    num_kernels = sum(event["count"] for event in work)
    return {
        "num_kernels": num_kernels,
        "kernel_seconds": sum(event["seconds"] for event in work),
        "num_collectives": sum(event["count"] for event in kernels) - num_kernels,
    }


def num_kv_tokens(llm: LLM) -> int:
    """Return how many tokens the KV cache of a rank holds."""
    cache_config = llm.llm_engine.vllm_config.cache_config
    assert cache_config.num_gpu_blocks is not None
    return cache_config.num_gpu_blocks * cache_config.block_size


def require_partitioned_steps(llm: LLM) -> dict[str, int]:
    """Return rank 0's counters.

    Raises:
        RuntimeError: no step was partitioned, so that whatever was timed is not PCP.
    """
    stats: dict[str, int] = llm.collective_rpc("pcp_stats")[0]
    if stats["num_partitioned_steps"] == 0:
        raise RuntimeError(f"No step was partitioned: {stats}")
    return stats

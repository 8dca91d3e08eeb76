# SPDX-License-Identifier: Apache-2.0
"""Same answers from a KV cache that was offloaded to CPU memory and came back, P = 2 on one GPU.

    python tests/gpu/offload.py --json offload.json [--models mla] [--jobs 4]

Models x who holds the KV cache x connectors. Some prompts fill the cache, others evict them; the
first ones come back with other endings. How much of them was loaded is counted; the answers are
judged as in ``equality.py``, against the model in fp32 and P = 1 without offloading. A block that
is not there in time, or is another one's, is off by far more.

Half of the engines have CUDA graphs. All of them schedule a step before the last one is known.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import equality
from checkpoints import KINDS, VOCAB_SIZE, Reference, save_checkpoint
from harness import write_json

# Tokens of a block on all ranks that share it, and of the whole KV cache.
SHARED_BLOCK_SIZE, CACHE_TOKENS = 128, 6144
PREFIX = 12 * SHARED_BLOCK_SIZE
FIRST_ENDINGS, LAST_ENDINGS = (37, 1, 90), (37, 5, 700)
FILLERS = (1900, 1900, 1900, 1900)
OFFLOADED_BYTES = 2**31
CONNECTORS = {
    "native": "OffloadingConnector",
    "simple": "SimpleCPUOffloadConnector",
}
# Connector: CUDA graphs with it.
GRAPHS = {"native": "FULL_AND_PIECEWISE", "simple": "eager", "none": "eager"}
BACKENDS = {"gqa": "FLASH_ATTN", "mla": "FLASH_ATTN_MLA"}


@dataclass(frozen=True)
class Case:
    """One engine: its ranks, how many of them share a KV cache, and what offloads it."""

    model: str
    size: int
    num_shards: int
    connector: str

    @property
    def name(self) -> str:
        """Unique and fit for a file."""
        return f"{self.model}-P{self.size}-D{self.num_shards}-{self.connector}"

    @property
    def plain(self) -> Case:
        """The case to compare with."""
        return Case(self.model, 1, 1, "none")


def make_prompts() -> list[list[list[int]]]:
    """Return batches of prompts: those that fill the cache, that evict them, that come back."""
    import numpy as np

    rng = np.random.default_rng(0)

    def prompt(length: int) -> list[int]:
        return [int(token) for token in rng.integers(0, VOCAB_SIZE, length)]

    prefixes = [prompt(PREFIX) for _ in FIRST_ENDINGS]
    first = [prefix + prompt(n) for prefix, n in zip(prefixes, FIRST_ENDINGS, strict=True)]
    last = [prefix + prompt(n) for prefix, n in zip(prefixes, LAST_ENDINGS, strict=True)]
    fillers = [prompt(length) for length in FILLERS]
    return [*([one] for one in (*first, *fillers)), [last[0]], [*last[1:], prompt(1000)]]


def engine_options(case: Case, folder: Path) -> dict[str, Any]:
    """Return the arguments of an engine."""
    block_size = SHARED_BLOCK_SIZE // case.num_shards
    options: dict[str, Any] = {
        "model": str(folder / case.model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "attention_backend": BACKENDS[case.model],
        "max_model_len": 4096,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 1024,
        "gpu_memory_utilization": 0.04,
        "kv_cache_memory_bytes": 2**29,
        "block_size": block_size,
        "num_gpu_blocks_override": CACHE_TOKENS // SHARED_BLOCK_SIZE,
    }
    if case.connector != "none":
        options["kv_transfer_config"] = {
            "kv_connector": CONNECTORS[case.connector],
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": OFFLOADED_BYTES},
        }
    if case.size > 1:
        options |= {
            "prefill_context_parallel_size": case.size,
            "decode_context_parallel_size": case.num_shards,
            "worker_cls": "vllm.v1.worker.pcp.gpu_worker.OneGpuPCPWorker",
            "distributed_executor_backend": "mp",
            "disable_custom_all_reduce": True,
        }
    if GRAPHS[case.connector] == "eager":
        options["enforce_eager"] = True
    else:
        options["compilation_config"] = {
            "cudagraph_mode": GRAPHS[case.connector],
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512],
        }
    return options


def run_engine(case: Case, folder: Path) -> None:
    """Generate with one engine and write what it answered."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(**engine_options(case, folder))
    core: Any = llm.llm_engine.engine_core
    loaded = count_loaded_tokens(core.engine_core.scheduler.connector)
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=equality.NUM_OUTPUT_TOKENS,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
    )
    batches = make_prompts()
    if case.connector == "none":
        # Together they are no yardstick.
        batches = [[prompt] for batch in batches for prompt in batch]
    answers = []
    for batch in batches:
        requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in batch]
        for output in llm.generate(requests, sampling, use_tqdm=False):
            completion = output.outputs[0]
            tokens = list(completion.token_ids)
            steps: Any = completion.logprobs
            logprobs = [step[token].logprob for step, token in zip(steps, tokens, strict=True)]
            answers.append({"tokens": tokens, "logprobs": logprobs})
    stats = llm.collective_rpc("pcp_stats")[0] if case.size > 1 else None
    result = {"answers": answers, "stats": stats, "loaded": sum(loaded)}
    (folder / f"{case.name}.json").write_text(json.dumps(result))
    del llm


def count_loaded_tokens(connector: Any) -> list[int]:
    """Return a list that grows with the tokens that a connector finds for each request."""
    counts: list[int] = []
    if connector is not None:
        stock = connector.update_state_after_alloc

        def note(request: Any, blocks: Any, num_external_tokens: int) -> None:
            counts.append(num_external_tokens)
            stock(request, blocks, num_external_tokens)

        connector.update_state_after_alloc = note
    return counts


def judge(cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    """Compare every case with fp32, and with P = 1 without offloading."""
    prompts = list(itertools.chain.from_iterable(make_prompts()))
    references = {model: Reference(folder / model) for model in {case.model for case in cases}}
    rows, worst = [], {}
    for case in cases:
        row = asdict(case) | {"verdict": "did not run"}
        rows.append(row)
        path = folder / f"{case.name}.json"
        if not path.exists():
            continue
        run = json.loads(path.read_text())
        errors = [
            error_of(answer, references[case.model].logprobs(prompt, answer["tokens"]))
            for prompt, answer in zip(prompts, run["answers"], strict=True)
        ]
        worst[case] = max(errors)
        row |= {"error": worst[case], "loaded": run["loaded"], "verdict": "reference"}
        if case.size > 1 and case.plain in worst:
            factor = 4 if KINDS[case.model].has_experts else 2
            is_ok = worst[case] <= factor * worst[case.plain] + equality.TINY
            is_ok &= run["loaded"] == len(FIRST_ENDINGS) * PREFIX
            is_ok &= run["stats"]["num_partitioned_steps"] > 0
            row["verdict"] = "ok" if is_ok else "FAILED"
    return rows


def error_of(answer: dict[str, Any], expected: list[float]) -> float:
    """Return the largest error of an answer's log-probabilities."""
    logprobs: list[float] = answer["logprobs"]
    return max(abs(a - b) for a, b in zip(logprobs, expected, strict=True))


def select(models: list[str]) -> list[Case]:
    """Return the cases of some models, those to compare with first."""
    cases = [Case(model, 1, 1, "none") for model in models]
    for model, num_shards, connector in itertools.product(models, (1, 2), CONNECTORS):
        cases.append(Case(model, 2, num_shards, connector))
    return cases


def main() -> int:
    """Run, judge, print; exit status 1 unless every case is ok."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="where results and logs go")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    equality.set_environment()
    import vllm.v1.worker.gpu.model_runner  # noqa: F401  (forked engines have it)

    start = time.monotonic()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="pcp_offload_"))
    for model in args.models:
        if not (folder / model / "model.safetensors").exists():
            process = equality.FORK.Process(target=save_checkpoint, args=(model, folder / model))
            process.start()
            process.join()
    cases = select(args.models)
    missing = [case for case in cases if not (folder / f"{case.name}.json").exists()]
    print(f"{len(missing)} of {len(cases)} engines to run, in {folder}", flush=True)
    deadline = start + 60 * args.minutes
    equality.run_all(missing, folder, args.jobs, 1, deadline, run_engine)
    rows = judge(cases, folder)
    for row in rows:
        error = f"{row['error']:.3f}" if "error" in row else "-"
        print(
            "{model:<4} P={size} D={num_shards} {connector:<7} loaded {loaded:>5} ".format(
                **{"loaded": "-", **row}
            ),
            f"max err {error:>6}  {row['verdict']}",
        )
    if args.json:
        seconds = time.monotonic() - start
        write_json(args.json, "offload", [], cases=rows, seconds=seconds)
    return 0 if all(row["verdict"] in ("ok", "reference") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

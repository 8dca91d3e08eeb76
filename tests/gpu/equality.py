# SPDX-License-Identifier: Apache-2.0
"""Same answers with P > 1 on one GPU: attention backends x KV cache dtypes x CUDA graph modes x P.

    python tests/gpu/equality.py --json equality.json [--jobs 9] [--backends FLASH_ATTN]

All ranks of an engine share GPU 0 (``OneGpuPCPWorker``): right tokens, no speed. Engines run a
small GQA checkpoint with proper initialisation on prompts of 1 to 5000 tokens, alone, together, and
as prefix-cache hits. Ranks sum in another order than one rank does, so that bf16 near-ties may
flip. Each run is therefore judged against the same model in fp32 (transformers): the error of its
log-probabilities may be at most twice that of vLLM with P = 1 in the same configuration. A wrong
row, slot or graph is off by orders of magnitude more. No line of this package may make the host
wait for the GPU in a step.

Engines are forked from this process, which has imported vLLM but not touched the GPU: that saves
the imports of each rank. ``--jobs`` of them run at a time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from harness import write_json

BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")
KV_DTYPES = ("auto", "fp8")
GRAPH_MODES = ("eager", "NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL")
TOGETHER = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 100, 257, 300, 511, 1000, 1537, 3000, 5000)
ALONE = (1, 3, 4, 5, 8, 9, 100, 400, 1000, 5000)
SHARED_PREFIX = 1500
SUFFIXES = (1, 3, 4, 8, 37, 700)
NUM_OUTPUT_TOKENS = 12
# fp32 against itself is good to about this much.
TINY = 1e-3


@dataclass(frozen=True)
class Case:
    """One engine."""

    backend: str
    kv_dtype: str
    graphs: str
    size: int

    @property
    def name(self) -> str:
        """Unique and fit for a file."""
        return f"{self.backend}-{self.kv_dtype}-{self.graphs}-P{self.size}"


def make_checkpoint(folder: Path) -> None:
    """Save a 4-layer Qwen3-style model whose logits are well separated."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=8192,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def make_prompts() -> list[list[list[int]]]:
    """Return batches of prompts; a batch is sent at once, batches one after the other."""
    import numpy as np

    rng = np.random.default_rng(0)

    def prompt(length: int) -> list[int]:
        return [int(token) for token in rng.integers(0, 2048, length)]

    prefix = prompt(SHARED_PREFIX)
    batches = [[prompt(length) for length in TOGETHER]]
    batches += [[prompt(length)] for length in ALONE]
    batches += [[prefix]]
    batches += [[prefix + prompt(length)] for length in SUFFIXES]
    return batches


def run_engine(case: Case, checkpoint: Path, result: Path) -> None:
    """Generate with one engine and write what it answered."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams, TokensPrompt

    options: dict[str, Any] = {}
    if case.size > 1:
        options |= {
            "prefill_context_parallel_size": case.size,
            "worker_cls": "vllm.v1.worker.pcp.gpu_worker.OneGpuPCPWorker",
            "distributed_executor_backend": "mp",
            "disable_custom_all_reduce": True,
        }
    if case.graphs == "eager":
        options["enforce_eager"] = True
    else:
        options["compilation_config"] = {
            "cudagraph_mode": case.graphs,
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512],
        }
    llm = LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        kv_cache_dtype=case.kv_dtype,
        attention_backend=case.backend,
        max_model_len=8192,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        gpu_memory_utilization=0.04,
        kv_cache_memory_bytes=2**29,
        **options,
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, logprobs=0
    )
    answers = []
    for batch in make_prompts():
        requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in batch]
        for output in llm.generate(requests, sampling, use_tqdm=False):
            completion = output.outputs[0]
            tokens = list(completion.token_ids)
            steps: Any = completion.logprobs
            logprobs = [step[token].logprob for step, token in zip(steps, tokens, strict=True)]
            answers.append(
                {"tokens": tokens, "logprobs": logprobs, "cached": output.num_cached_tokens}
            )
    stats = llm.collective_rpc("pcp_stats")[0] if case.size > 1 else None
    llm.collective_rpc(watch_synchronisation)
    llm.generate(TokensPrompt(prompt_token_ids=[*range(1999)]), sampling, use_tqdm=False)
    syncs = sorted(set(llm.collective_rpc(synchronisations)[0]))
    result.write_text(json.dumps({"answers": answers, "stats": stats, "syncs": syncs}))
    del llm


def watch_synchronisation(worker: Any) -> None:
    """From now on, note where this worker's host waits for the GPU."""
    import warnings

    import torch

    def note(message: Any, category: Any, filename: str, lineno: int, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            worker.syncs.append(f"{filename}:{lineno}")

    worker.syncs = []
    warnings.simplefilter("always")
    warnings.showwarning = note
    torch.cuda.set_sync_debug_mode("warn")


def synchronisations(worker: Any) -> list[str]:
    """Return the places noted."""
    noted: list[str] = worker.syncs
    return noted


def child(case: Case, checkpoint: Path, folder: Path) -> None:
    """Run one engine with its output in a log file of its own."""
    log = os.open(folder / f"{case.name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        run_engine(case, checkpoint, folder / f"{case.name}.json")
    except BaseException:
        traceback.print_exc()
        raise


def run_all(cases: list[Case], checkpoint: Path, folder: Path, jobs: int, deadline: float) -> None:
    """Run every case, some at a time; what has not started by the deadline is left out."""
    context = multiprocessing.get_context("fork")
    waiting = list(cases)
    running: dict[Any, tuple[Case, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs and time.monotonic() < deadline:
            case = waiting.pop(0)
            process = context.Process(target=child, args=(case, checkpoint, folder), daemon=False)
            process.start()
            running[process.sentinel] = (case, process, time.monotonic())
        if not running:
            break
        for sentinel in multiprocessing.connection.wait(list(running), timeout=5):
            case, process, start = running.pop(sentinel)
            process.join()
            print(
                f"{case.name}: exit {process.exitcode}, {time.monotonic() - start:.0f} s",
                flush=True,
            )
        if time.monotonic() > deadline + 120:
            for case, process, _ in running.values():
                print(f"{case.name}: out of time", flush=True)
                process.kill()


class Reference:
    """The model in fp32; log-probabilities of given continuations."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        from transformers import Qwen3ForCausalLM

        model: Any = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self.model = model.cuda().eval()
        self.known: dict[tuple[int, tuple[int, ...]], list[float]] = {}

    def logprobs(self, index: int, prompt: list[int], tokens: list[int]) -> list[float]:
        """Return the log-probability of each token after the prompt and the tokens before it."""
        import torch

        key = (index, tuple(tokens))
        if key not in self.known:
            with torch.inference_mode():
                ids = torch.tensor([prompt + tokens], device="cuda")
                logits = self.model(ids, logits_to_keep=len(tokens) + 1).logits[0, :-1]
                picked = logits.log_softmax(-1).gather(
                    1, torch.tensor(tokens, device="cuda")[:, None]
                )
            self.known[key] = picked[:, 0].tolist()
        return self.known[key]


def judge(cases: list[Case], folder: Path, checkpoint: Path) -> list[dict[str, Any]]:
    """Compare every case with fp32, and with P = 1 in its own configuration."""
    prompts = [prompt for batch in make_prompts() for prompt in batch]
    reference = Reference(checkpoint)
    loaded = {}
    for case in cases:
        path = folder / f"{case.name}.json"
        loaded[case] = json.loads(path.read_text()) if path.exists() else None
    errors = {}
    for case, run in loaded.items():
        if run is not None:
            errors[case] = [
                max(
                    abs(a - b)
                    for a, b in zip(
                        answer["logprobs"],
                        reference.logprobs(i, prompt, answer["tokens"]),
                        strict=True,
                    )
                )
                for i, (prompt, answer) in enumerate(zip(prompts, run["answers"], strict=True))
            ]
    rows = []
    for case, run in loaded.items():
        plain = Case(case.backend, case.kv_dtype, case.graphs, 1)
        row = asdict(case) | {"verdict": "did not run"}
        if run is not None:
            row |= {
                "outputs": len(run["answers"]),
                "error": max(errors[case]),
                "mean_error": sum(errors[case]) / len(errors[case]),
                "partitioned_steps": run["stats"]["num_partitioned_steps"] if run["stats"] else 0,
                "verdict": "reference",
            }
        plain_run = loaded.get(plain)
        if run is not None and case.size > 1 and plain_run is not None:
            row |= compare(run, plain_run, errors[case], errors[plain])
        rows.append(row)
    return rows


def compare(
    run: dict[str, Any], plain_run: dict[str, Any], errors: list[float], plain_errors: list[float]
) -> dict[str, Any]:
    """Return the verdict on a run with P > 1, given the errors of both against fp32."""
    differ, gap = 0, 0.0
    for ours, plain in zip(run["answers"], plain_run["answers"], strict=True):
        differ += ours["tokens"] != plain["tokens"]
        steps = zip(
            ours["tokens"], plain["tokens"], ours["logprobs"], plain["logprobs"], strict=True
        )
        for token, plain_token, logprob, plain_logprob in steps:
            if token != plain_token:
                break
            gap = max(gap, abs(logprob - plain_logprob))
    mean_error, mean_plain_error = (sum(e) / len(e) for e in (errors, plain_errors))
    syncs = [place for place in run["syncs"] if "/pcp/" in place]
    is_ok = (
        max(errors) <= 2 * max(plain_errors) + TINY
        and mean_error <= 2 * mean_plain_error + TINY
        and run["stats"]["num_partitioned_steps"] > 0
        and any(answer["cached"] for answer in run["answers"])
        and not syncs
    )
    verdict = "ok" if is_ok else "FAILED"
    return {"differ": differ, "gap": gap, "syncs": syncs, "verdict": verdict}


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    form = "{:<12} {:<5} {:<19} {:>2} {:>7} {:>7} {:>8} {:>9} {:>9} {:>6}  {}"
    heads = ("backend", "kv", "graphs", "P", "outputs", "differ", "gap", "max err", "mean err")
    print(form.format(*heads, "steps", "verdict"))
    for row in rows:
        error = f"{row['error']:.4f}" if "error" in row else "-"
        mean = f"{row['mean_error']:.5f}" if "error" in row else "-"
        gap = f"{row['gap']:.4f}" if "gap" in row else "-"
        counts = (row.get("outputs", "-"), row.get("differ", "-"), gap, error, mean)
        config = (row["backend"], row["kv_dtype"], row["graphs"], row["size"])
        print(form.format(*config, *counts, row.get("partitioned_steps", "-"), row["verdict"]))


def select(args: argparse.Namespace) -> list[Case]:
    """Return the cases asked for; first, and together, those that compile what others share."""
    return [
        Case(backend, kv_dtype, graphs, size)
        for graphs in args.graphs
        for size in sorted({1, *args.sizes})
        for kv_dtype in args.kv_dtypes
        for backend in args.backends
    ]


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--backends", nargs="+", default=BACKENDS)
    parser.add_argument("--kv-dtypes", nargs="+", default=KV_DTYPES)
    parser.add_argument("--graphs", nargs="+", default=GRAPH_MODES)
    parser.add_argument("--sizes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument(
        "--folder", type=Path, help="where results and logs go; finished cases are kept"
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="start no engine after this time"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    """Run, judge, print; exit status 1 unless every case is ok."""
    args = parse_args()
    os.environ |= {
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "HF_HUB_OFFLINE": "1",
        # A pool of OpenMP threads does not survive a fork.
        "OMP_NUM_THREADS": "1",
    }
    import vllm.v1.worker.gpu.model_runner  # noqa: F401  (forked engines have it)

    start = time.monotonic()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="pcp_equality_"))
    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        make_checkpoint(checkpoint)
    cases = select(args)
    missing = [case for case in cases if not (folder / f"{case.name}.json").exists()]
    run_all(missing, checkpoint, folder, args.jobs, start + 60 * args.minutes)
    rows = judge(cases, folder, checkpoint)
    print_rows(sorted(rows, key=lambda row: (row["backend"], row["kv_dtype"])))
    if args.json:
        seconds = time.monotonic() - start
        write_json(args.json, "equality", [], cases=rows, seconds=seconds)
    return 0 if all(row["verdict"] in ("ok", "reference") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

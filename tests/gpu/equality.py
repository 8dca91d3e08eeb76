# SPDX-License-Identifier: Apache-2.0
"""Same answers with P > 1, the ranks of an engine on one GPU, for all that a model can run with.

    python tests/gpu/equality.py --json equality.json [--jobs 9] [--models mla] [--sizes 2]

Models x attention backends x KV cache dtypes x graphs x P x who holds the experts, the cache; GQA
alone without ``--models``.

All ranks of an engine share a GPU (``OneGpuPCPWorker``): right tokens, no speed. Engines run small
checkpoints with proper initialisation on prompts of 1 to 5000 tokens, alone, together, and as
prefix-cache hits. Ranks sum in another order than one rank does, so that bf16 near-ties may flip.
Each run is therefore judged against the same model in fp32 (transformers): the error of its
log-probabilities may be at most twice that of vLLM with P = 1 in the same configuration, at worst
and on average. A wrong row, slot or graph is off by far more. No line of this package may make the
host wait for the GPU in a step (other than for an event of the step before, which does not show).

With dense MLA P = 1 is wrong about some of the prompts that ran together: vLLM 0.25.1 is, where a
short first chunk stands ahead of a long continuation. So the worst error is compared with that of
its prompts that ran alone, and the average of those that ran together with their median. Where
tokens are routed, rounding may pick another expert, a jump that one token may see and another may
not: there the worst error may be four times as large.

Where a query chooses which tokens to attend to, rounding chooses a few others, of bf16 a tenth of
them. Outputs whose prompt is short enough for all tokens to be chosen are therefore judged apart
from the others, each kind by P = 1 of the same kind. A choice from a part of the prompt would stay
within the bounds of the others. So engines without graphs also write down which tokens some queries
chose, and P > 1 is compared with P = 1: in the first layer both score the same embeddings, and may
differ only where two scores are as good as equal; 19 of 20 tokens have to be the same, for each
query. Keys of another rank that were not there in time would be missed by a quarter and more. In
later layers the rounding before them chooses as well: there the share is printed, not judged.
``sparse_long`` has prompts of up to 32k tokens, for which fp32 has no room: the distance to P = 1
in bf16 takes the place of the error, and may be ``MAX_GAP``.

With MLA and an FP8 cache, P = 1 reads the new tokens of a prompt in bf16, P > 1 out of the cache.
On average that is an error 1.4 times as large (emulated in fp32), within the bound.

Engines are forked from this process, which has imported vLLM but not touched the GPU: that saves
the imports of each rank. ``--jobs`` of them run at a time, spread over ``--gpus``; the ranks of one
engine share a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from checkpoints import KINDS, VOCAB_SIZE, Reference, save_checkpoint
from harness import environment, write_json

TOGETHER = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 100, 257, 300, 511, 1000, 1537, 5000, 3000)
ALONE = (1, 3, 4, 5, 8, 9, 100, 400, 1000, 5000)
SHARED_PREFIX = 1500
# A little more than the longest prompt: what ranks gather of sparse MLA has room for as many, and
# the step in which 5000 tokens end and 3000 begin has more.
MAX_MODEL_LEN = 5120
SUFFIXES = (1, 3, 4, 8, 37, 700)
# By themselves, and the second one again with another ending.
LONG = (3, 12000, 32768)
# Of log-probabilities of tokens far into a prompt; losing a sixth of it makes 0.5 and more.
MAX_GAP = 0.5
# Of queries that choose tokens, one in so many writes down its choice.
CHOICE_STRIDE = 61
LONG_STRIDE = 307
# Of the tokens that a query of the first layer chooses, how many are the same with P = 1.
MIN_SAME_CHOICE = 0.95
# Models whose prompts vLLM gets wrong with P = 1 when they run together.
WRONG_TOGETHER = ("mla",)
# Models with long prompts.
LONG_MODELS = ("sparse_long",)
NUM_OUTPUT_TOKENS = 12
# Of a prompt that runs alone: such decode steps cost the most, as each rank waits for its turn.
NUM_TOKENS_ALONE = 4
# Seconds between engines that start: they find in caches what those before have compiled.
START_INTERVAL = 1.5
# fp32 against itself is good to about this much.
TINY = 1e-3
FORK = multiprocessing.get_context("fork")
# Which of the experts' weights a rank holds: a slice of each expert, some whole experts, or all.
EXPERTS = ("sliced", "parallel", "replicated")
# Whether each rank has all of the KV cache, by a gather or by copies from rank to rank, or all of
# them share one: D = P, or D = TP x P with two TP ranks each.
CACHES = ("whole", "copied", "shared", "shared_tp2")
# Which rows of a partitioned step the last layer computes.
LAST_LAYERS = ("all", "sampled")


@dataclass(frozen=True)
class Case:
    """One engine."""

    model: str
    backend: str
    kv_dtype: str
    graphs: str
    size: int
    experts: str = EXPERTS[0]
    cache: str = CACHES[0]
    last_layer: str = LAST_LAYERS[0]

    @property
    def name(self) -> str:
        """Unique and fit for a file."""
        names = (self.model, self.backend, self.kv_dtype, self.graphs, self.experts, self.cache)
        return "-".join((*names, self.last_layer, f"P{self.size}"))

    @property
    def num_shards(self) -> int:
        """How many ranks share a KV cache, D."""
        return {"shared": self.size, "shared_tp2": 2 * self.size}.get(self.cache, 1)

    @property
    def plain(self) -> Case:
        """The case to compare with: one rank has all experts and all of the cache."""
        return replace(self, size=1, experts=EXPERTS[0], cache=CACHES[0], last_layer=LAST_LAYERS[0])


@dataclass(frozen=True)
class Grid:
    """All combinations of some choices."""

    backends: tuple[str, ...]
    kv_dtypes: tuple[str, ...] = ("auto",)
    graphs: tuple[str, ...] = ("eager", "FULL_AND_PIECEWISE")
    sizes: tuple[int, ...] = (2, 4)
    experts: tuple[str, ...] = EXPERTS[:1]
    caches: tuple[str, ...] = CACHES[:1]
    last_layers: tuple[str, ...] = LAST_LAYERS[:1]

    def cases(self, model: str) -> list[Case]:
        """Return the cases with P > 1."""
        choices = (
            self.backends,
            self.kv_dtypes,
            self.graphs,
            self.sizes,
            self.experts,
            self.caches,
            self.last_layers,
        )
        return [Case(model, *choice) for choice in itertools.product(*choices)]


GRAPHS = ("FULL_AND_PIECEWISE",)
SAMPLED = ("sampled",)
# What each kind of model runs by default. FLASH_ATTN_MLA and its sparse kind have no FP8 cache,
# FLASHINFER_MLA_SPARSE none of Hopper's kernels.
GRIDS: dict[str, tuple[Grid, ...]] = {
    "gqa": (
        Grid(
            ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"),
            ("auto", "fp8"),
            ("eager", "NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL"),
        ),
        Grid(
            ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"),
            ("auto", "fp8"),
            ("eager", "FULL_AND_PIECEWISE"),
            caches=("copied",),
        ),
        Grid(("FLASH_ATTN",), caches=("shared",)),
        Grid(("FLASH_ATTN",), ("fp8",), sizes=(2,), caches=("shared",)),
        Grid(("FLASH_ATTN", "TRITON_ATTN"), ("auto", "fp8"), GRAPHS, last_layers=SAMPLED),
        Grid(("FLASH_ATTN",), ("auto",), GRAPHS, caches=("copied",), last_layers=SAMPLED),
        Grid(("FLASH_ATTN",), ("auto",), GRAPHS, (2,), caches=("shared",), last_layers=SAMPLED),
    ),
    "mqa": (Grid(("FLASH_ATTN",), sizes=(2,), caches=("shared_tp2",)),),
    "mla": (
        Grid(("FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA")),
        Grid(("FLASHMLA", "TRITON_MLA"), ("fp8",)),
        Grid(("FLASH_ATTN_MLA", "FLASHMLA"), graphs=("FULL_DECODE_ONLY",)),
        Grid(("FLASH_ATTN_MLA",), experts=("parallel",)),
        Grid(("FLASH_ATTN_MLA",), sizes=(2,), experts=("replicated",)),
        Grid(("FLASH_ATTN_MLA",), ("auto",), GRAPHS, experts=EXPERTS, last_layers=SAMPLED),
        Grid(("FLASHMLA", "TRITON_MLA"), ("auto", "fp8"), GRAPHS, (2,), last_layers=SAMPLED),
        Grid(("FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA"), caches=("copied",)),
        Grid(("FLASHMLA",), ("fp8",), caches=("copied",)),
        Grid(
            ("FLASH_ATTN_MLA",), ("auto",), GRAPHS, (2,), EXPERTS, ("copied",), last_layers=SAMPLED
        ),
        Grid(("FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA"), caches=("shared",)),
        Grid(("FLASHMLA",), ("fp8",), caches=("shared",)),
    ),
    "sparse": (
        Grid(("FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE")),
        Grid(("FLASHMLA_SPARSE",), ("fp8_ds_mla",)),
        Grid(("FLASHMLA_SPARSE",), ("fp8_ds_mla",), ("PIECEWISE", "FULL_DECODE_ONLY"), (2,)),
        Grid(("FLASH_ATTN_MLA_SPARSE",), sizes=(2,), experts=("parallel",)),
        Grid(("FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE"), caches=("shared",)),
        Grid(("FLASHMLA_SPARSE",), ("fp8_ds_mla",), sizes=(2,), caches=("shared", "shared_tp2")),
        Grid(("FLASHMLA_SPARSE",), ("fp8_ds_mla",), GRAPHS, (2,), last_layers=SAMPLED),
    ),
    "sparse_few_heads": (Grid(("FLASHMLA_SPARSE",), ("fp8_ds_mla",), sizes=(2,)),),
    "sparse_long": (
        Grid(("FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE")),
        Grid(("FLASHMLA_SPARSE",), ("fp8_ds_mla",)),
        Grid(("FLASHMLA_SPARSE",), ("fp8_ds_mla",), sizes=(2,), caches=("shared",)),
    ),
    "moe": (
        Grid(("FLASH_ATTN",), experts=EXPERTS),
        Grid(("FLASH_ATTN",), sizes=(2,), caches=("copied",)),
        Grid(
            ("FLASH_ATTN",),
            ("auto",),
            GRAPHS,
            (2,),
            EXPERTS,
            ("whole", "copied"),
            last_layers=SAMPLED,
        ),
    ),
    "glm4_moe": (Grid(("FLASH_ATTN",), sizes=(2,), experts=EXPERTS),),
    "gpt_oss": (
        Grid(("FLASH_ATTN",), sizes=(2,), experts=("sliced", "parallel")),
        Grid(("FLASH_ATTN",), ("auto",), GRAPHS, (2,), caches=("copied",), last_layers=SAMPLED),
    ),
}


def make_prompts(model: str) -> list[list[list[int]]]:
    """Return batches of prompts; a batch is sent at once, batches one after the other."""
    import numpy as np

    rng = np.random.default_rng(0)

    def prompt(length: int) -> list[int]:
        return [int(token) for token in rng.integers(0, VOCAB_SIZE, length)]

    if model in LONG_MODELS:
        batches = [[prompt(length)] for length in LONG]
        return [*batches, [batches[1][0] + prompt(SUFFIXES[-1])]]
    prefix = prompt(SHARED_PREFIX)
    batches = [[prompt(length) for length in TOGETHER]]
    batches += [[prompt(length)] for length in ALONE]
    batches += [[prefix]]
    batches += [[prefix + prompt(length)] for length in SUFFIXES]
    return batches


def engine_options(case: Case) -> dict[str, Any]:
    """Return what one case's engine has and others have not."""
    options: dict[str, Any] = {}
    if case.size > 1:
        options |= {
            "prefill_context_parallel_size": case.size,
            "enable_expert_parallel": case.experts == "parallel",
            "tensor_parallel_size": 2 if case.cache == "shared_tp2" else 1,
            "decode_context_parallel_size": case.num_shards,
            "worker_cls": "vllm.v1.worker.pcp.gpu_worker.OneGpuPCPWorker",
            "distributed_executor_backend": "mp",
            "disable_custom_all_reduce": True,
        }
        options["additional_config"] = {
            "pcp_kv_exchange": "peer" if case.cache == "copied" else "gather",
            "pcp_experts": "replicated" if case.experts == "replicated" else "sharded",
            "pcp_last_layer": "auto" if case.last_layer == "sampled" else "all",
        }
    if case.graphs == "eager":
        options["enforce_eager"] = True
    else:
        options["compilation_config"] = {
            "cudagraph_mode": case.graphs,
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512],
        }
    return options


def run_engine(case: Case, folder: Path) -> None:
    """Generate with one engine and write what it answered."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    index_topk = KINDS[case.model].index_topk
    if index_topk:
        prepare_for_sparse_attention(case)
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        str(folder / case.model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        kv_cache_dtype=case.kv_dtype,
        attention_backend=case.backend,
        max_model_len=max(LONG) + 128 if case.model in LONG_MODELS else MAX_MODEL_LEN,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        gpu_memory_utilization=0.04,
        kv_cache_memory_bytes=2**29,
        **engine_options(case),
    )

    def sampling(num_tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)

    watches_choices = bool(index_topk) and case.graphs == "eager"
    if watches_choices:
        stride = LONG_STRIDE if case.model in LONG_MODELS else CHOICE_STRIDE
        llm.collective_rpc(watch_choices, args=(index_topk, stride))
    answers = []
    choices: dict[str, list[int]] = {}
    for index, batch in enumerate(make_prompts(case.model)):
        requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in batch]
        num_tokens = NUM_OUTPUT_TOKENS if len(batch) > 1 else NUM_TOKENS_ALONE
        for output in llm.generate(requests, sampling(num_tokens), use_tqdm=False):
            completion = output.outputs[0]
            tokens = list(completion.token_ids)
            steps: Any = completion.logprobs
            logprobs = [step[token].logprob for step, token in zip(steps, tokens, strict=True)]
            answers.append(
                {"tokens": tokens, "logprobs": logprobs, "cached": output.num_cached_tokens}
            )
        if watches_choices:
            chosen = itertools.chain.from_iterable(llm.collective_rpc(take_choices))
            # Requests of one batch are not told apart, and answers may differ.
            if len(batch) == 1:
                choices |= {
                    f"{index} {layer} {position}": tokens
                    for layer, position, tokens in chosen
                    if position < len(batch[0])
                }
    stats = llm.collective_rpc("pcp_stats")[0] if case.size > 1 else None
    llm.collective_rpc(watch_synchronisation)
    prompt = TokensPrompt(prompt_token_ids=[*range(1999)])
    llm.generate(prompt, sampling(NUM_TOKENS_ALONE), use_tqdm=False)
    syncs = sorted(set(llm.collective_rpc(synchronisations)[0]))
    result = {
        "commit": environment()["commit"],
        "answers": answers,
        "stats": stats,
        "syncs": syncs,
        "choices": choices,
    }
    (folder / f"{case.name}.json").write_text(json.dumps(result))
    del llm


def prepare_for_sparse_attention(case: Case) -> None:
    """Let this process, and those it forks, run models that choose tokens."""
    # Little enough that scoring a chunk takes several parts, and ranks fewer than P = 1.
    os.environ["VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"] = "4"
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.v1.attention.backends.pcp.mla import shared_rows
    from vllm.v1.worker.gpu.pcp.model_runner import with_quant_mode

    # One request's at a time, if it is long: some steps gather twice.
    shared_rows.MIN_GATHERED_ROWS = 0

    if case.size == 1:
        # vLLM 0.25.1 cannot lay out the cache otherwise; with P > 1 our runner sees to it.
        layer_class: Any = MLAAttention
        get_kv_cache_spec = layer_class.get_kv_cache_spec
        layer_class.get_kv_cache_spec = lambda layer, config: with_quant_mode(
            get_kv_cache_spec(layer, config)
        )


def watch_choices(worker: Any, index_topk: int, stride: int) -> None:
    """From now on, note what some queries choose, of those with more tokens than they choose."""
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

    runner = worker.model_runner
    prepare_inputs = runner.prepare_inputs

    def note_batch(*args: Any) -> Any:
        worker.batch = prepare_inputs(*args)
        return worker.batch

    def note_choices(indexer: Any, _: Any, output: Any) -> None:
        positions = worker.batch.positions[: worker.batch.num_tokens].tolist()
        for row, position in enumerate(positions):
            if position >= index_topk and position % stride == 0:
                worker.choices.append((indexer.k_cache.prefix, position, output[row].tolist()))

    worker.choices = []
    runner.prepare_inputs = note_batch
    for module in runner.get_model().modules():
        if isinstance(module, SparseAttnIndexer):
            module.register_forward_hook(note_choices)


def take_choices(worker: Any) -> list[tuple[str, int, list[int]]]:
    """Return the choices noted, layer, position and tokens, and forget them."""
    noted: list[tuple[str, int, list[int]]] = list(worker.choices)
    worker.choices.clear()
    return noted


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


def child(case: Any, folder: Path, gpu: int, run: Callable[[Any, Path], None]) -> None:
    """Run one engine on one GPU with its output in a log file of its own."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    log = os.open(folder / f"{case.name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        run(case, folder)
    except BaseException:
        traceback.print_exc()
        raise


def run_all(
    cases: Sequence[Any],
    folder: Path,
    jobs: int,
    gpus: int,
    deadline: float,
    run: Callable[[Any, Path], None] = run_engine,
) -> None:
    """Run every case, some at a time; what has not started by the deadline is left out.

    Args:
        cases: With a ``name`` each.
        folder: Where results and logs go.
        jobs: Engines at a time.
        gpus: Over which they are spread.
        deadline: Of ``time.monotonic()``.
        run: Runs a case and writes its results to the folder.
    """
    waiting = list(cases)
    places = [job % gpus for job in reversed(range(jobs))]
    running: dict[Any, tuple[Any, Any, int, float]] = {}
    while waiting or running:
        now = time.monotonic()
        if waiting and places and now < deadline:
            case, gpu = waiting.pop(0), places.pop()
            process = FORK.Process(target=child, args=(case, folder, gpu, run), daemon=False)
            process.start()
            running[process.sentinel] = (case, process, gpu, now)
        elif not running:
            break
        for sentinel in multiprocessing.connection.wait(list(running), timeout=START_INTERVAL):
            case, process, gpu, start = running.pop(sentinel)
            process.join()
            places.append(gpu)
            print(
                f"{case.name}: exit {process.exitcode}, {time.monotonic() - start:.0f} s",
                flush=True,
            )
        if now > deadline + 120:
            for case, process, _, _ in running.values():
                print(f"{case.name}: out of time", flush=True)
                process.kill()


def worst_errors(model: str, run: dict[str, Any], reference: Reference) -> list[float]:
    """Return the largest error of each output's log-probabilities."""
    prompts = itertools.chain.from_iterable(make_prompts(model))
    errors = []
    for prompt, answer in zip(prompts, run["answers"], strict=True):
        expected = reference.logprobs(prompt, answer["tokens"])
        pairs = zip(answer["logprobs"], expected, strict=True)
        errors.append(max(abs(logprob - right) for logprob, right in pairs))
    return errors


def kinds_of_outputs(model: str) -> list[list[int]]:
    """Return outputs to judge together: those that choose among tokens, and those that need not."""
    prompts = list(itertools.chain.from_iterable(make_prompts(model)))
    index_topk = KINDS[model].index_topk
    if not index_topk:
        return [list(range(len(prompts)))]
    chooses = [len(prompt) + NUM_OUTPUT_TOKENS > index_topk for prompt in prompts]
    return [
        [index for index, value in enumerate(chooses) if value == kind] for kind in (False, True)
    ]


def is_as_good(case: Case, errors: list[float], plain_errors: list[float]) -> bool:
    """Compare errors with those of P = 1, where its prompts are a yardstick."""
    if case.model in LONG_MODELS:
        return max(errors) <= MAX_GAP
    if case.model in WRONG_TOGETHER:
        num = len(TOGETHER)
        worst = max(plain_errors[num:])
        kinds = [
            (errors[:num], worst, median(plain_errors[:num])),
            (errors[num:], worst, mean(plain_errors[num:])),
        ]
    else:
        kinds = []
        for indices in kinds_of_outputs(case.model):
            plain = [plain_errors[index] for index in indices]
            kinds.append(([errors[index] for index in indices], max(plain), mean(plain)))
    return all(
        max(ours) <= bound(case) * worst + TINY and mean(ours) <= 2 * usual + TINY
        for ours, worst, usual in kinds
    )


def judge(cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    """Compare every case with fp32, and with P = 1 in its own configuration."""
    paths = {case: folder / f"{case.name}.json" for case in cases}
    runs = {case: json.loads(path.read_text()) for case, path in paths.items() if path.exists()}
    models = {case.model for case in runs} - set(LONG_MODELS)
    references = {model: Reference(folder / model) for model in models}
    errors = {}
    for case, run in runs.items():
        if case.model in references:
            errors[case] = worst_errors(case.model, run, references[case.model])
        else:
            errors[case] = gaps(run, runs.get(case.plain, run))
    rows = []
    for case in cases:
        row = asdict(case) | {"verdict": "did not run"}
        if case in runs:
            stats = runs[case]["stats"]
            row |= {
                "commit": runs[case]["commit"],
                "outputs": len(errors[case]),
                "error": max(errors[case]),
                "error_alone": max(errors[case][len(TOGETHER) :], default=0.0),
                "mean_error": mean(errors[case]),
                "partitioned_steps": stats["num_partitioned_steps"] if stats else 0,
                "sampled_steps": stats["num_sampled_steps"] if stats else 0,
                "verdict": "reference",
            }
        if case.size > 1 and case in runs and case.plain in runs:
            row |= differences(runs[case], runs[case.plain])
            is_ok = is_as_good(case, errors[case], errors[case.plain])
            is_ok &= row["partitioned_steps"] > 0 and row["cached"] and not row["syncs"]
            is_ok &= (row["sampled_steps"] > 0) == (case.last_layer == "sampled")
            is_ok &= row.get("same_choice_first_layer", 1.0) >= MIN_SAME_CHOICE
            row["verdict"] = "ok" if is_ok else "FAILED"
        rows.append(row)
    return rows


def bound(case: Case) -> int:
    """Return how much larger than with P = 1 the worst error may be."""
    return 4 if KINDS[case.model].has_experts else 2


def differences(run: dict[str, Any], plain_run: dict[str, Any]) -> dict[str, Any]:
    """Return how a run with P > 1 differs from one with P = 1, and what else it must show."""
    pairs = zip(run["answers"], plain_run["answers"], strict=True)
    return {
        "differ": sum(ours["tokens"] != plain["tokens"] for ours, plain in pairs),
        "gap": max(gaps(run, plain_run)),
        "syncs": [place for place in run["syncs"] if "/pcp/" in place],
        "cached": any(answer["cached"] for answer in run["answers"]),
        **differences_of_choices(run["choices"], plain_run["choices"]),
    }


def gaps(run: dict[str, Any], plain_run: dict[str, Any]) -> list[float]:
    """Return by how much the log-probabilities of an output differ, to the first other token."""
    largest = []
    for ours, plain in zip(run["answers"], plain_run["answers"], strict=True):
        gap = 0.0
        steps = zip(
            ours["tokens"], plain["tokens"], ours["logprobs"], plain["logprobs"], strict=True
        )
        for token, plain_token, logprob, plain_logprob in steps:
            if token != plain_token:
                break
            gap = max(gap, abs(logprob - plain_logprob))
        largest.append(gap)
    return largest


def differences_of_choices(
    choices: dict[str, list[int]], plain: dict[str, list[int]]
) -> dict[str, float]:
    """Return which share of the tokens that queries chose P = 1 chose too; nothing if not noted."""
    if not plain:
        return {}
    first_layer, same = [], []
    for key, tokens in plain.items():
        share = len(set(tokens) & set(choices.get(key, ()))) / len(set(tokens))
        same.append(share)
        if ".layers.0." in key:
            first_layer.append(share)
    return {"same_choice_first_layer": min(first_layer), "same_choice": mean(same)}


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    form = "{:<16} {:<21} {:<10} {:<18} {:<10} {:<6} {:<7} {:>1}"
    form += " {:>6} {:>7} {:>7} {:>8} {:>11} {:>5}  {}"
    keys = ("model", "backend", "kv_dtype", "graphs", "experts", "cache", "last_layer", "size")
    heads = (
        "model",
        "backend",
        "kv",
        "graphs",
        "experts",
        "cache",
        "last",
        "P",
        "differ",
        "gap",
        "max err",
    )
    print(form.format(*heads, "mean err", "choices", "steps", "verdict"))
    for row in rows:
        gap, error, mean_error = (
            f"{row[key]:.{digits}f}" if key in row else "-"
            for key, digits in (("gap", 3), ("error", 3), ("mean_error", 4))
        )
        names = [row[key] for key in keys]
        choices = "-"
        if "same_choice" in row:
            choices = f"{row['same_choice_first_layer']:.3f}/{row['same_choice']:.3f}"
        counts = (row.get("differ", "-"), gap, error, mean_error, choices)
        print(form.format(*names, *counts, row.get("partitioned_steps", "-"), row["verdict"]))


def select(args: argparse.Namespace) -> list[Case]:
    """Return the cases asked for; first, and together, those that compile what others share."""
    chosen: set[Case] = set()
    for model in args.models:
        for case in itertools.chain.from_iterable(grid.cases(model) for grid in GRIDS[model]):
            choices = (
                (args.backends, case.backend),
                (args.kv_dtypes, case.kv_dtype),
                (args.graphs, case.graphs),
                (args.sizes, case.size),
                (args.experts, case.experts),
                (args.caches, case.cache),
                (args.last_layers, case.last_layer),
            )
            if all(values is None or value in values for values, value in choices):
                chosen |= {case, case.plain}
    return sorted(chosen, key=lambda case: (case.graphs != "eager", case.graphs, *astuple(case)))


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=GRIDS, default=["gqa"])
    only = parser.add_argument_group("of what a model runs by default, only")
    only.add_argument("--backends", nargs="+")
    only.add_argument("--kv-dtypes", nargs="+")
    only.add_argument("--graphs", nargs="+")
    only.add_argument("--sizes", nargs="+", type=int, help="P beside 1")
    only.add_argument("--experts", nargs="+", choices=EXPERTS)
    only.add_argument("--caches", nargs="+", choices=CACHES)
    only.add_argument("--last-layers", nargs="+", choices=LAST_LAYERS)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument(
        "--folder", type=Path, help="where results and logs go; finished cases are kept"
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="start no engine after this time"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def set_environment() -> None:
    """Prepare this process for forking engines, ahead of the first import of vLLM."""
    os.environ |= {
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "HF_HUB_OFFLINE": "1",
        # A pool of OpenMP threads does not survive a fork.
        "OMP_NUM_THREADS": "1",
    }


def main() -> int:
    """Run, judge, print; exit status 1 unless every case is ok."""
    args = parse_args()
    set_environment()
    import vllm.v1.worker.gpu.model_runner  # noqa: F401  (forked engines have it)

    start = time.monotonic()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="pcp_equality_"))
    cases = select(args)
    for model in args.models:
        if not (folder / model / "model.safetensors").exists():
            # In a process of its own: this one must not touch the GPU before it forks engines.
            process = FORK.Process(target=save_checkpoint, args=(model, folder / model))
            process.start()
            process.join()
    missing = [case for case in cases if not (folder / f"{case.name}.json").exists()]
    print(f"{len(missing)} of {len(cases)} engines to run, in {folder}", flush=True)
    run_all(missing, folder, args.jobs, args.gpus, start + 60 * args.minutes)
    rows = judge(cases, folder)
    print_rows(sorted(rows, key=lambda row: (row["model"], row["backend"], row["kv_dtype"])))
    if args.json:
        seconds = time.monotonic() - start
        write_json(args.json, "equality", [], cases=rows, seconds=seconds)
    return 0 if all(row["verdict"] in ("ok", "reference") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Time to first token and per output token on the GPUs of one host: one GPU, PCP = n, TP = n.

    python benchmarks/ttft_gpus.py --gpus 2 --shapes deepseek-v2-lite --modes eager --measures ttft

Dummy weights that route tokens to all experts, bf16, prefix caching off, at most 32768 tokens a
step. TTFT: one request at a time, one output token, after two warm-ups. Decode: prompts of one
token, 256 out, 1, 16 or 64 at a time; TPOT without the first token. The eager engines also time the
KV gather of a layer alone, and the kernels of one prefill, to see how much of it is communication,
and how evenly tokens go to the experts. ``equality`` compares the greedy tokens of PCP with those
of one GPU, engines as they are by default, on a small checkpoint of the shape's kind; with dense
MLA, what ran together is no yardstick (one GPU may be wrong there). ``parts`` tells what a time to
first token is made of: on the way to the workers, before the forward pass, on the GPU, and on the
way back; ``decode_trace`` which kernels decode steps run.

"EP" gives whole experts to a rank, "replicated" gives it all; PCP and TP without either give each
rank a slice of every expert.
"DCP": ranks share one KV cache, which costs where a step finds tokens in it (``--batched-tokens``).
"gather": ranks gather new KV, instead of writing to each other's caches. "all rows": the last layer
computes more than the rows that are sampled from.

One engine a shape, layout and mode, in a subprocess; a run that was cut short goes on where it was.
``--together 4 --kv-gib 4`` starts four at a time, if a GPU can hold them, and measures in turn.
"one GPU" is the first of them; "GPU 1" is the next one, by itself.
To be expected of an engine, on H200s: a minute to start, two with graphs, TTFT of all lengths half
a minute to a minute, decode a minute. Figures are printed, and kept, as they come. With
``--one-gpu`` all ranks share GPU 0: that tries the script, its times say nothing.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from checkpoints import KINDS, VOCAB_SIZE, checkpoint_folder
from engine import (
    REPLICATED_EXPERTS,
    generate,
    greedy,
    is_cpu_build,
    num_kv_tokens,
    one_gpu_options,
    random_prompts,
    require_partitioned_steps,
    start_engine,
    time_per_output_token,
    time_to_first_token,
)
from shapes import SHAPES, kind, model_folder
from steps import Row, run_steps, step_parser
from ttft_gpus_report import EQUALITY, MODES, ONE, print_report, summarise

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

NAME = "ttft_gpus"
NUM_WARMUPS = 2
PCP, TP = "prefill_context_parallel_size", "tensor_parallel_size"
DCP = "decode_context_parallel_size"
EP, EXTRA = "enable_expert_parallel", "additional_config"
GATHER = {"pcp_kv_exchange": "gather"}
ALL_ROWS = {"pcp_last_layer": "all"}
# Prompts for comparing tokens: around 2P, around blocks of 16, in one step and in several.
EQUALITY_LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 100, 257, 1000, 2047, 2500, 5000)
EQUALITY_TOKENS = 16
DEFAULT_SHAPES = ("qwen3-8b", "deepseek-v2-lite", "qwen3-30b-a3b", "deepseek-v32-8-layers")


def layouts(shape: str, num_gpus: int) -> dict[str, dict[str, Any]]:
    """Return the layouts of a shape as arguments of the engine, in the order of measuring."""
    several: dict[str, dict[str, Any]] = {
        f"PCP{num_gpus}": {PCP: num_gpus},
        f"TP{num_gpus}": {TP: num_gpus},
    }
    if KINDS[kind(shape)].has_experts:
        several[f"PCP{num_gpus} EP"] = {PCP: num_gpus, EP: True}
        several[f"PCP{num_gpus} replicated"] = {PCP: num_gpus, EXTRA: REPLICATED_EXPERTS}
    if not is_cpu_build():
        several[f"PCP{num_gpus} DCP{num_gpus}"] = {PCP: num_gpus, DCP: num_gpus}
        several[f"PCP{num_gpus} all rows"] = {PCP: num_gpus, EXTRA: ALL_ROWS}
        if not KINDS[kind(shape)].index_topk:
            several[f"PCP{num_gpus} gather"] = {PCP: num_gpus, EXTRA: GATHER}
            several[f"PCP{num_gpus} gather, all rows"] = {PCP: num_gpus, EXTRA: GATHER | ALL_ROWS}
    if num_gpus == 4:
        several["TP2xPCP2"] = {TP: 2, PCP: 2}
    # GPUs of one host differ by some per cent, and the slowest one sets the pace.
    others: dict[str, dict[str, Any]] = {f"GPU {gpu}": {} for gpu in range(1, num_gpus)}
    return {ONE: {}, **({} if is_cpu_build() else others), **several}


def environ(step: str) -> dict[str, str]:
    """Return which GPU one of the others is."""
    _, layout, _ = step.split("/")
    is_other = layout.startswith("GPU ")
    return {"CUDA_VISIBLE_DEVICES": layout.removeprefix("GPU ")} if is_other else {}


def engine_options(args: argparse.Namespace, layout: dict[str, Any]) -> dict[str, Any]:
    """Return a layout as arguments of the engine, with what all engines get here."""
    options: dict[str, Any] = {**layout}
    if not is_cpu_build():
        options["worker_extension_cls"] = "communication.CommunicationProbe"
    if args.one_gpu and PCP in layout:
        options |= one_gpu_options(args.gpus)
    elif args.one_gpu and layout:
        options |= one_gpu_options(args.gpus, "one_gpu.OneGpuWorker")
    return options


def measure(
    args: argparse.Namespace, step: str, tasks: Sequence[str]
) -> Iterator[tuple[str, list[Row]]]:
    """Run tasks, ``kind/number``, on a shape, layout and mode."""
    shape, layout, mode = step.split("/")
    ranks = layouts(shape, args.gpus)[layout]
    options = engine_options(args, ranks)
    common: Row = {"shape": shape, "layout": layout, "mode": mode}
    if mode == EQUALITY:
        options["kv_gib"] = args.kv_gib
        yield tasks[0], [{**common, **greedy_tokens(kind(shape), options, is_pcp=PCP in ranks)}]
        return
    llm = start_engine(
        model_folder(shape),
        enforce_eager=mode == "eager",
        max_model_len=max(args.lengths) + args.decode_tokens,
        max_num_batched_tokens=args.batched_tokens,
        kv_gib=args.kv_gib,
        **options,
    )
    common["num_kv_tokens"] = num_kv_tokens(llm)
    args.vocab_size = SHAPES[shape]["vocab_size"]
    for task in tasks:
        measured, _, number = task.partition("/")
        row = MEASURES[measured](llm, args, int(number))
        if measured == "ttft" and PCP in ranks:
            require_partitioned_steps(llm)
        if measured in ("ttft", "decode"):
            print(f"{step} {task}: {1e3 * median(row['seconds']):.1f} ms", flush=True)
        yield task, [{**common, "kind": measured, **row}]


def measure_ttft(llm: LLM, args: argparse.Namespace, num_tokens: int) -> Row:
    """Time one request at a time."""
    (prompt,) = random_prompts([num_tokens], args.vocab_size)
    seconds = [time_to_first_token(llm, prompt) for _ in range(NUM_WARMUPS + args.repeats)]
    return {"num_tokens": num_tokens, "seconds": seconds[NUM_WARMUPS:]}


def measure_decode(llm: LLM, args: argparse.Namespace, concurrency: int) -> Row:
    """Time requests of one token in and many out."""
    prompts = random_prompts([1] * concurrency, args.vocab_size)
    seconds = [time_per_output_token(llm, prompts, args.decode_tokens) for _ in range(4)]
    return {"concurrency": concurrency, "seconds": seconds[1:]}


def measure_gather(llm: LLM, args: argparse.Namespace, num_tokens: int) -> Row:
    """Time the exchange of new KV of one layer in a step of so many tokens, with PCP alone."""
    gathers = llm.collective_rpc("time_kv_gather", args=(-(-num_tokens // args.gpus), 50))
    # The rank that waits least; the others wait for it to come.
    seconds = min((gather["seconds"] for gather in gathers), key=median)
    return {"num_tokens": num_tokens, "num_bytes": gathers[0]["num_bytes"], "seconds": seconds}


def measure_trace(llm: LLM, args: argparse.Namespace, num_tokens: int) -> Row:
    """Record the kernels of one prefill on every rank."""
    (prompt,) = random_prompts([num_tokens], args.vocab_size)
    llm.collective_rpc("start_kernel_trace")
    seconds = time_to_first_token(llm, prompt)
    return {
        "num_tokens": num_tokens,
        "seconds": seconds,
        "ranks": llm.collective_rpc("stop_kernel_trace"),
    }


def measure_decode_trace(llm: LLM, args: argparse.Namespace, concurrency: int) -> Row:
    """Record the kernels of decode steps on every rank, after some that are not recorded."""
    prompts = random_prompts([1] * concurrency, args.vocab_size)
    time_per_output_token(llm, prompts, args.decode_tokens)
    llm.collective_rpc("start_kernel_trace")
    seconds = time_per_output_token(llm, prompts, args.decode_tokens)
    return {
        "concurrency": concurrency,
        "num_steps": args.decode_tokens,
        "seconds": seconds,
        "ranks": llm.collective_rpc("stop_kernel_trace"),
    }


def measure_parts(llm: LLM, args: argparse.Namespace, num_tokens: int) -> Row:
    """Cut the time to first token into parts, as rank 0 sees them.

    Beside these, how long the rank that takes longest enqueues the forward pass.
    """
    (prompt,) = random_prompts([num_tokens], args.vocab_size)
    parts: dict[str, list[float]] = {"to_workers": [], "prepare": [], "on_gpu": [], "back": []}
    totals: list[float] = []
    hosts: list[tuple[float, float]] = []
    for _ in range(NUM_WARMUPS + args.repeats):
        llm.collective_rpc("watch_step")
        start = perf_counter()
        totals.append(time_to_first_token(llm, prompt))
        ranks = llm.collective_rpc("times_of_step")
        times = ranks[0]
        hosts.append(max((rank["enqueued"] - rank["forward"], rank["cpu"]) for rank in ranks))
        parts["to_workers"].append(times["step"] - start)
        parts["prepare"].append(times["forward"] - times["step"])
        parts["on_gpu"].append(times["on_gpu"])
        parts["back"].append(start + totals[-1] - times["forward"] - times["on_gpu"])
    return {
        "num_tokens": num_tokens,
        "seconds": totals[NUM_WARMUPS:],
        "parts": {name: median(seconds[NUM_WARMUPS:]) for name, seconds in parts.items()},
        "enqueue_seconds": [seconds for seconds, _ in hosts[NUM_WARMUPS:]],
        "enqueue_cpu_seconds": [seconds for _, seconds in hosts[NUM_WARMUPS:]],
    }


def measure_experts(llm: LLM, args: argparse.Namespace, num_tokens: int) -> Row:
    """See how evenly the tokens of one prefill go to the experts."""
    (prompt,) = random_prompts([num_tokens], args.vocab_size)
    llm.collective_rpc("watch_experts")
    time_to_first_token(llm, prompt)
    return {"num_tokens": num_tokens, "busiest_experts": llm.collective_rpc("busiest_experts")[0]}


MEASURES = {
    "ttft": measure_ttft,
    "parts": measure_parts,
    "decode": measure_decode,
    "gather": measure_gather,
    "trace": measure_trace,
    "decode_trace": measure_decode_trace,
    "experts": measure_experts,
}


def greedy_tokens(kind: str, options: dict[str, Any], *, is_pcp: bool) -> Row:
    """Return tokens and logprobs of prompts that run alone, then all together, in short steps."""
    llm = start_engine(
        checkpoint_folder(kind),
        load_format="auto",
        max_num_batched_tokens=2048,
        **options,
    )
    prompts = random_prompts(EQUALITY_LENGTHS, VOCAB_SIZE)
    params = greedy(EQUALITY_TOKENS, logprobs=0)
    alone = [output for prompt in prompts for output in generate(llm, [prompt], params)]
    together = generate(llm, prompts, params)
    if is_pcp:
        require_partitioned_steps(llm)
    return {"kind": EQUALITY, "alone": answers(alone), "together": answers(together)}


def answers(outputs: Sequence[RequestOutput]) -> Row:
    """Return the tokens of each output, and their logprobs."""
    tokens, logprobs = [], []
    for output in outputs:
        completion = output.outputs[0]
        assert completion.logprobs is not None
        tokens.append(list(completion.token_ids))
        logprobs.append(
            [
                position[token].logprob
                for token, position in zip(completion.token_ids, completion.logprobs, strict=True)
                if position is not None
            ]
        )
    return {"tokens": tokens, "logprobs": logprobs}


def tasks_of(args: argparse.Namespace, step: str) -> list[str]:
    """Return what is measured on one engine."""
    shape, layout, mode = step.split("/")
    if mode == EQUALITY:
        return ["tokens"]
    ranks = layouts(shape, args.gpus)[layout]
    numbers: dict[str, Sequence[int]] = {"ttft": args.lengths, "decode": args.concurrencies}
    if not is_cpu_build():
        numbers["parts"] = [n for n in args.lengths if n <= args.batched_tokens]
        numbers["decode_trace"] = args.concurrencies
    if mode == "eager" and not is_cpu_build():
        if ranks:
            numbers["trace"] = args.lengths
        if list(ranks) == [PCP]:
            numbers["gather"] = [n for n in args.lengths if n <= args.batched_tokens]
        if ranks and KINDS[kind(shape)].has_experts:
            numbers["experts"] = args.lengths[:1]
    return [f"{name}/{n}" for name in args.measures for n in numbers.get(name, ())]


def select(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the engines asked for, and what is measured on each."""
    steps = {}
    for shape in args.shapes:
        for mode in args.modes:
            for layout, ranks in layouts(shape, args.gpus).items():
                is_asked_for = args.layouts is None or layout in args.layouts
                step = f"{shape}/{layout}/{mode}"
                is_asked_for &= not (args.one_gpu and environ(step))
                # Where there are no graphs, nothing is left out.
                is_asked_for &= mode != "eager" or "pcp_last_layer" not in ranks.get(EXTRA, {})
                if is_asked_for and (mode != EQUALITY or layout == ONE or PCP in ranks):
                    steps[step] = tasks_of(args, step)
    return steps


def main() -> None:
    """Measure and print."""
    parser = step_parser(__doc__, NAME, may_start_together=True)
    parser.set_defaults(step_timeout=540)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on GPU 0, to try it out")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=DEFAULT_SHAPES)
    parser.add_argument(
        "--modes", nargs="+", choices=(*MODES, EQUALITY), default=(*MODES, EQUALITY)
    )
    parser.add_argument("--layouts", nargs="+", help='such as "PCP2 EP"; all by default')
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 32768, 102400])
    parser.add_argument("--concurrencies", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--decode-tokens", type=int, default=256)
    parser.add_argument("--batched-tokens", type=int, default=32768, help="most tokens of a step")
    parser.add_argument("--repeats", type=int, default=5, help="of a time to first token")
    args = parser.parse_args()
    known = {name for shape in args.shapes for name in layouts(shape, args.gpus)}
    if unknown := sorted(set(args.layouts or ()) - known):
        parser.error(f"unknown --layouts {unknown}; there are {sorted(known)}")

    rows = run_steps(
        args,
        NAME,
        select(args),
        functools.partial(measure, args),
        functools.partial(summarise, args.gpus),
        environ,
    )
    print_report(args.gpus, rows)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Time to first token and per output token on the GPUs of one host: one GPU, PCP = n, TP = n.

    python benchmarks/ttft_gpus.py --gpus 2 [--modes eager graphs] [--lengths 4096 32768]

Dummy weights, bf16, prefix caching off, at most 32768 tokens a step. TTFT: one request at a time,
one output token, after two warm-ups. Decode: prompts of one token, 256 out, 1, 16 or 64 at a time;
TPOT without the first token. The eager engines also time the KV gather of a layer alone, and the
kernels of one prefill, to see how much of it is communication. ``equality`` compares the greedy
tokens of PCP with those of one GPU on a small checkpoint.

One engine a layout and mode, in a subprocess; a run that was cut short goes on where it was. With
``--one-gpu`` all ranks share GPU 0: that tries the script, its times say nothing.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from math import prod
from statistics import median
from typing import TYPE_CHECKING, Any

from engine import (
    generate,
    greedy,
    is_cpu_build,
    num_kv_tokens,
    random_prompts,
    require_partitioned_steps,
    start_engine,
    time_per_output_token,
    time_to_first_token,
)
from shapes import CHECKPOINT_VOCAB_SIZE, SHAPES, model_folder, random_checkpoint
from steps import Row, run_steps, step_parser
from ttft_gpus_report import EQUALITY, MODES, ONE, print_report, summarise

if TYPE_CHECKING:
    from vllm import LLM

NAME = "ttft_gpus"
NUM_WARMUPS = 2
PCP, TP = "prefill_context_parallel_size", "tensor_parallel_size"
# Prompts for comparing tokens: around 2P, around blocks of 16, in one step and in several.
EQUALITY_LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 100, 257, 1000, 2047, 2500, 5000)
EQUALITY_TOKENS = 16


def layouts(num_gpus: int) -> dict[str, dict[str, int]]:
    """Return the ranks of each layout, in the order in which they are measured."""
    several = {f"PCP{num_gpus}": {PCP: num_gpus}, f"TP{num_gpus}": {TP: num_gpus}}
    if num_gpus == 4:
        several["TP2xPCP2"] = {TP: 2, PCP: 2}
    return {ONE: {}, **several}


def engine_options(args: argparse.Namespace, ranks: dict[str, int]) -> dict[str, Any]:
    """Return a layout as arguments of the engine."""
    options: dict[str, Any] = {**ranks}
    if not is_cpu_build():
        options["worker_extension_cls"] = "communication.CommunicationProbe"
    if args.one_gpu and ranks:
        pcp_worker = "vllm.v1.worker.pcp.gpu_worker.OneGpuPCPWorker"
        options |= {
            "worker_cls": pcp_worker if PCP in ranks else "one_gpu.OneGpuWorker",
            "distributed_executor_backend": "mp",
            "disable_custom_all_reduce": True,
            "gpu_memory_utilization": 0.85 / prod(ranks.values()),
        }
    return options


def measure(
    args: argparse.Namespace, step: str, tasks: Sequence[str]
) -> Iterator[tuple[str, list[Row]]]:
    """Run tasks, ``kind/number``, on a layout and mode."""
    layout, _, mode = step.partition("/")
    ranks = layouts(args.gpus)[layout]
    options = engine_options(args, ranks)
    if mode == EQUALITY:
        yield tasks[0], [{"layout": layout, **greedy_tokens(options, is_pcp=PCP in ranks)}]
        return
    llm = start_engine(
        model_folder(args.shape),
        enforce_eager=mode == "eager",
        max_model_len=max(args.lengths) + args.decode_tokens,
        max_num_batched_tokens=args.batched_tokens,
        **options,
    )
    common = {"layout": layout, "mode": mode, "num_kv_tokens": num_kv_tokens(llm)}
    for task in tasks:
        kind, _, number = task.partition("/")
        row = MEASURES[kind](llm, args, int(number))
        if kind == "ttft" and PCP in ranks:
            require_partitioned_steps(llm)
        yield task, [{**common, "kind": kind, **row}]


def measure_ttft(llm: LLM, args: argparse.Namespace, num_tokens: int) -> Row:
    """Time one request at a time."""
    (prompt,) = random_prompts([num_tokens], SHAPES[args.shape]["vocab_size"])
    seconds = [time_to_first_token(llm, prompt) for _ in range(NUM_WARMUPS + args.repeats)]
    return {"num_tokens": num_tokens, "seconds": seconds[NUM_WARMUPS:]}


def measure_decode(llm: LLM, args: argparse.Namespace, concurrency: int) -> Row:
    """Time requests of one token in and many out."""
    prompts = random_prompts([1] * concurrency, SHAPES[args.shape]["vocab_size"])
    seconds = [time_per_output_token(llm, prompts, args.decode_tokens) for _ in range(4)]
    return {"concurrency": concurrency, "seconds": seconds[1:]}


def measure_gather(llm: LLM, args: argparse.Namespace, num_tokens: int) -> Row:
    """Time the gather of one layer in a step of so many tokens, with PCP alone."""
    gathers = llm.collective_rpc("time_kv_gather", args=(-(-num_tokens // args.gpus), 50))
    # The rank that waits least; the others wait for it to come.
    seconds = min((gather["seconds"] for gather in gathers), key=median)
    return {"num_tokens": num_tokens, "num_bytes": gathers[0]["num_bytes"], "seconds": seconds}


def measure_trace(llm: LLM, args: argparse.Namespace, num_tokens: int) -> Row:
    """Record the kernels of one prefill on every rank."""
    (prompt,) = random_prompts([num_tokens], SHAPES[args.shape]["vocab_size"])
    llm.collective_rpc("start_kernel_trace")
    seconds = time_to_first_token(llm, prompt)
    return {
        "num_tokens": num_tokens,
        "seconds": seconds,
        "ranks": llm.collective_rpc("stop_kernel_trace"),
    }


MEASURES = {
    "ttft": measure_ttft,
    "decode": measure_decode,
    "gather": measure_gather,
    "trace": measure_trace,
}


def greedy_tokens(options: dict[str, Any], *, is_pcp: bool) -> Row:
    """Return tokens and their logprobs from the checkpoint, all prompts together in short steps."""
    llm = start_engine(
        random_checkpoint(),
        load_format="auto",
        enforce_eager=True,
        max_num_batched_tokens=2048,
        **options,
    )
    prompts = random_prompts(EQUALITY_LENGTHS, CHECKPOINT_VOCAB_SIZE)
    tokens, logprobs = [], []
    for output in generate(llm, prompts, greedy(EQUALITY_TOKENS, logprobs=0)):
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
    if is_pcp:
        require_partitioned_steps(llm)
    return {"kind": "equality", "tokens": tokens, "logprobs": logprobs}


def tasks_of(args: argparse.Namespace, mode: str, ranks: dict[str, int]) -> list[str]:
    """Return what is measured on one engine."""
    tasks = [f"ttft/{n}" for n in args.lengths] + [f"decode/{n}" for n in args.concurrencies]
    if mode == "eager" and ranks and not is_cpu_build():
        tasks += [f"trace/{n}" for n in args.lengths]
        if list(ranks) == [PCP]:
            tasks += [f"gather/{n}" for n in args.lengths if n <= args.batched_tokens]
    return tasks


def main() -> None:
    """Measure and print."""
    parser = step_parser(__doc__, NAME)
    parser.set_defaults(step_timeout=540)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on GPU 0, to try it out")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument(
        "--modes", nargs="+", choices=(*MODES, EQUALITY), default=(*MODES, EQUALITY)
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 32768, 102400])
    parser.add_argument("--concurrencies", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--decode-tokens", type=int, default=256)
    parser.add_argument("--batched-tokens", type=int, default=32768, help="most tokens of a step")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    steps = {}
    for mode in args.modes:
        for layout, ranks in layouts(args.gpus).items():
            if mode != EQUALITY:
                steps[f"{layout}/{mode}"] = tasks_of(args, mode, ranks)
            elif not ranks or PCP in ranks:
                steps[f"{layout}/{mode}"] = ["tokens"]
    rows = run_steps(
        args,
        NAME,
        steps,
        functools.partial(measure, args),
        functools.partial(summarise, args.gpus),
    )
    print_report(args.gpus, rows)


if __name__ == "__main__":
    main()

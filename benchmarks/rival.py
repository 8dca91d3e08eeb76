# SPDX-License-Identifier: Apache-2.0
"""Side by side with the PCP of a later vLLM (0.26.0: MLA models only), all ranks on one GPU.

    python benchmarks/rival.py --rival-site /tmp/site026 [--sizes 2 4] [--lengths 2048 12288 32768]

Each engine runs in a process of its own. Ours find vLLM 0.25.1 and this package on PYTHONPATH as it
is; for the rival's, a folder with the other vLLM is put in front of it, and plugins are left out.
DeepSeek-V2-Lite's shape by default, dummy weights that route tokens to all experts, bf16, prefix
caching off.

Ranks share GPU 0 and talk through sockets (``one_gpu.py``), ours when they exchange new KV, too. So
a wall time is the work of all ranks and their communication, one after the other: it compares two
implementations, and says nothing about time to first token on several GPUs. Kernels that do not
communicate, of all ranks together, are counted and timed by the profiler in a prefill of their own;
while several ranks have some to run, the time of one holds that of others. Decode steps run prompts
of one token. CUDA graphs are ours by default, PIECEWISE the rival's, whose PCP takes no others;
vLLM's own are of the batch sizes that decode steps are timed with, and of no others.
``--sizes 1`` tells what the two versions of vLLM differ by without PCP.

To be expected of an engine with all that it measures: three minutes. Figures are printed, and kept,
as they come.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from statistics import median
from typing import TYPE_CHECKING, Any

from engine import (
    GATHERED_KV,
    REPLICATED_EXPERTS,
    count_kernels,
    one_gpu_options,
    random_prompts,
    require_partitioned_steps,
    start_engine,
    time_per_output_token,
    time_to_first_token,
)
from harness import print_table, spread
from shapes import SHAPES, model_folder
from steps import Row, run_steps, step_parser

if TYPE_CHECKING:
    from vllm import LLM

NAME = "rival"
OURS, RIVAL = "ours", "rival"
MODES = ("eager", "graphs")
NUM_WARMUPS = 2


def environ(args: argparse.Namespace, step: str) -> Mapping[str, str]:
    """Return where a step finds its vLLM."""
    variables = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    if step.startswith(RIVAL):
        paths = [args.rival_site, os.environ.get("PYTHONPATH", "")]
        variables |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "VLLM_PLUGINS": "none"}
    return variables


def engine_options(args: argparse.Namespace, whose: str, size: int) -> dict[str, Any]:
    """Return the layout as arguments of the engine."""
    if size == 1:
        return {}
    shared = (
        one_gpu_options(size) if whose == OURS else one_gpu_options(size, "one_gpu.OneGpuWorker")
    )
    extra = GATHERED_KV | (REPLICATED_EXPERTS if args.experts == "replicated" else {})
    return {
        "prefill_context_parallel_size": size,
        "enable_expert_parallel": args.experts == "parallel",
        "additional_config": extra if whose == OURS else {},
        **shared,
    }


def measure(
    args: argparse.Namespace, step: str, tasks: Sequence[str]
) -> Iterator[tuple[str, list[Row]]]:
    """Run tasks, ``kind/number``, on one engine."""
    whose, size, mode = step.split("/")
    options = engine_options(args, whose, int(size))
    if mode == "graphs":
        # Each size is run before it is captured, and collectives through sockets take long.
        graphs: dict[str, Any] = {"cudagraph_capture_sizes": sorted(args.batches)}
        if whose == RIVAL and size != "1":
            # It takes no other ones.
            graphs["cudagraph_mode"] = "PIECEWISE"
        options["compilation_config"] = graphs
    llm = start_engine(
        model_folder(args.shape),
        worker_extension_cls="layer_probe.LayerProbe",
        enforce_eager=mode == "eager",
        max_model_len=max(args.lengths) + args.decode_tokens,
        max_num_batched_tokens=max(args.lengths),
        kv_gib=args.kv_gib,
        **options,
    )
    common = {"whose": whose, "vllm": version("vllm"), "pcp_world_size": int(size), "mode": mode}
    for task in tasks:
        kind, _, number = task.partition("/")
        row = MEASURES[kind](llm, args, int(number))
        if whose == OURS and kind == "prefill" and size != "1":
            require_partitioned_steps(llm)
        print(f"{step} {task}: {1e3 * median(row['seconds']):.1f} ms", flush=True)
        yield task, [{**common, "kind": kind, "number": int(number), **row}]


def measure_prefill(llm: LLM, args: argparse.Namespace, num_tokens: int) -> Row:
    """Time requests of one output token, and count the kernels of one."""
    (prompt,) = random_prompts([num_tokens], SHAPES[args.shape]["vocab_size"])
    seconds = [time_to_first_token(llm, prompt) for _ in range(NUM_WARMUPS + args.repeats)]
    return {
        "seconds": seconds[NUM_WARMUPS:],
        **count_kernels(llm, lambda: time_to_first_token(llm, prompt)),
    }


def measure_decode(llm: LLM, args: argparse.Namespace, batch_size: int) -> Row:
    """Time decode steps."""
    prompts = random_prompts([1] * batch_size, SHAPES[args.shape]["vocab_size"])
    seconds = [
        time_per_output_token(llm, prompts, args.decode_tokens) for _ in range(1 + args.repeats)
    ]
    return {"seconds": seconds[1:]}


MEASURES = {"prefill": measure_prefill, "decode": measure_decode}


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return ours beside the rival's, with the spread of both."""
    pairs: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        place = {key: row[key] for key in ("kind", "mode", "number", "pcp_world_size")}
        pair = pairs.setdefault(tuple(place.values()), place)
        pair[row["whose"]] = {
            **spread(row["seconds"]),
            **{
                key: row[key]
                for key in ("num_kernels", "kernel_seconds", "num_collectives")
                if key in row
            },
        }
    for pair in pairs.values():
        if OURS in pair and RIVAL in pair:
            pair["speed_up"] = pair[RIVAL]["median"] / pair[OURS]["median"]
    return {"pairs": [pairs[place] for place in sorted(pairs)]}


def print_report(rows: Sequence[Row]) -> None:
    """Print a line for each point."""
    table = []
    for pair in summarise(rows)["pairs"]:
        line = [pair[key] for key in ("kind", "mode", "number", "pcp_world_size")]
        for whose in (OURS, RIVAL):
            side = pair.get(whose, {})
            line += [1e3 * side[key] if key in side else "" for key in ("median", "p10", "p90")]
            line.append(1e3 * side["kernel_seconds"] if "kernel_seconds" in side else "")
            line.append(side.get("num_kernels", ""))
        line.append(f"{pair['speed_up']:.2f}x" if "speed_up" in pair else "")
        table.append(line)
    headers = ["", "mode", "tokens", "P"]
    for whose in (OURS, RIVAL):
        headers += [f"{whose} ms", "p10", "p90", "kernels ms", "kernels"]
    print("Prefills by prompt tokens, decode steps by requests; kernels of all ranks, without NCCL")
    print_table([*headers, "ours faster"], table)


def select(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the engines, ours and the rival's in turn, and the tasks of each."""
    tasks = [f"prefill/{n}" for n in args.lengths if "prefill" in args.measures]
    tasks += [f"decode/{n}" for n in args.batches if "decode" in args.measures]
    return {
        f"{whose}/{size}/{mode}": tasks
        for mode in args.modes
        for size in args.sizes
        for whose in args.sides
    }


def main() -> None:
    """Measure and print."""
    parser = step_parser(__doc__, NAME, may_start_together=True)
    parser.set_defaults(step_timeout=420)
    parser.add_argument("--rival-site", required=True, help="folder with the other vLLM")
    parser.add_argument("--shape", choices=SHAPES, default="deepseek-v2-lite")
    parser.add_argument(
        "--experts",
        choices=("sharded", "parallel", "replicated"),
        default="sharded",
        help="by width; whole ones on each rank; all of them on each of our ranks, the rival's by "
        "width",
    )
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=(OURS, RIVAL),
        default=(OURS, RIVAL),
        help="to start; the other one may run elsewhere at the same time",
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 12288, 32768])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    rows = run_steps(
        args,
        NAME,
        select(args),
        functools.partial(measure, args),
        summarise,
        functools.partial(environ, args),
    )
    print_report(rows)


if __name__ == "__main__":
    main()

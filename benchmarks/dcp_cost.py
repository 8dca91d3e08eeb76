# SPDX-License-Identifier: Apache-2.0
"""What sharing the KV cache costs: P ranks with D = P beside the same ranks with D = 1, on one GPU.

    python benchmarks/dcp_cost.py [--shapes qwen3-8b] [--sizes 2 4] [--measures prefill decode]

Ranks share GPU 0 and talk through sockets, new KV with D = 1 included. So a wall time is the work
of all ranks and all of their traffic through the host, one after the other, and no latency over
NVLink; that traffic is most of it. Beside it stand the kernels that do not communicate, of all
ranks together, from the profiler in a run of its own (while several ranks have some to run, the
time of one holds that of others), and the bytes that a rank receives: counted at the collectives
(``traffic_probe.py``) and, for new KV and what goes over DCP, by the formula of
docs/design/collectives.md (``traffic_formula.py``). The rest is hidden rows for experts and logits,
and sampled tokens. Bytes are of eager engines: replayed graphs are not counted.

prefill: time to first token, in steps of ``--batched-tokens``; longer prompts attend to what they
have in the cache. chunk: the same for one such step behind a cached prefix. decode: time of a step
of so many requests, each with ``--context`` tokens in the cache, or as many as fit one rank's with
D = 1 (``--kv-gib``). Prefix caching is on, no two prompts of a task begin alike but for what is to
be cached. Dummy weights that route tokens to all experts, bf16.

On CPUs, to try the script out (MLA alone, small): no kernels, and KV is not sent but read.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from engine import (
    GATHERED_KV,
    count_kernels,
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
from harness import print_table, spread
from shapes import SHAPES, kind, model_folder
from steps import Row, run_steps, step_parser
from traffic_formula import decode_bytes, prefill_bytes

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.inputs import TokensPrompt as Prompt

NAME = "dcp_cost"
MODES = ("eager", "graphs")
BLOCK_SIZE = 16
# Contexts are multiples of this, whole blocks of up to eight ranks: all of one is found again.
CONTEXT_UNIT = 8 * BLOCK_SIZE
# Tokens of a request while decode steps are looked into.
NUM_WATCHED = 8


def measure(
    args: argparse.Namespace, step: str, tasks: Sequence[str]
) -> Iterator[tuple[str, list[Row]]]:
    """Run tasks, ``measure/number``, on one engine."""
    shape, layout, mode = step.split("/")
    size, num_shards = map(int, layout.split("x"))
    options = one_gpu_options(size)
    if not is_cpu_build():
        options["attention_backend"] = "FLASH_ATTN_MLA" if kind(shape) == "mla" else "FLASH_ATTN"
    llm = start_engine(
        model_folder(shape),
        prefill_context_parallel_size=size,
        decode_context_parallel_size=num_shards,
        worker_extension_cls="traffic_probe.TrafficProbe",
        additional_config=GATHERED_KV,
        enable_prefix_caching=True,
        block_size=BLOCK_SIZE,
        enforce_eager=mode == "eager",
        max_model_len=max(*args.lengths, args.context + CONTEXT_UNIT + args.decode_tokens) + 1,
        max_num_batched_tokens=args.batched_tokens,
        kv_gib=args.kv_gib,
        **options,
    )
    if mode == "eager":
        llm.collective_rpc("count_traffic")
    common = {"shape": shape, "mode": mode, "pcp_world_size": size, "dcp_world_size": num_shards}
    for task in tasks:
        measured, _, number = task.partition("/")
        llm.reset_prefix_cache()
        row = MEASURES[measured](llm, args, {**common, "kind": measured, "number": int(number)})
        require_partitioned_steps(llm)
        print(f"{step} {task}: {1e3 * median(row['seconds']):.1f} ms", flush=True)
        yield task, [row]


def measure_prefill(llm: LLM, args: argparse.Namespace, row: Row) -> Row:
    """Time requests of one output token, nothing of which is cached."""
    return time_prefills(llm, args, row, 0, row["number"])


def measure_chunk(llm: LLM, args: argparse.Namespace, row: Row) -> Row:
    """Time one step of requests that have a prefix in the cache."""
    return time_prefills(llm, args, row, row["number"], args.batched_tokens)


def time_prefills(
    llm: LLM, args: argparse.Namespace, row: Row, num_cached: int, num_tokens: int
) -> Row:
    """Time one request after the other, and look into one more."""
    shape = SHAPES[row["shape"]]
    lengths = [num_cached, *[num_tokens] * (args.repeats + 2)]
    prefix, *rest = (
        prompt["prompt_token_ids"] for prompt in random_prompts(lengths, shape["vocab_size"])
    )
    prompts: list[Prompt] = [{"prompt_token_ids": prefix + tokens} for tokens in rest]
    time_to_first_token(llm, prompts[0])
    watched = watch(llm, row, lambda: time_to_first_token(llm, prompts[1]))
    end = num_cached + num_tokens
    steps = [
        (first, min(first + args.batched_tokens, end))
        for first in range(num_cached, end, args.batched_tokens)
    ]
    layout = row["pcp_world_size"], row["dcp_world_size"]
    return {
        **row,
        "seconds": [time_to_first_token(llm, prompt) for prompt in prompts[2:]],
        **watched,
        "by_formula": prefill_bytes(shape, itemsize(), *layout, steps),
    }


def measure_decode(llm: LLM, args: argparse.Namespace, row: Row) -> Row:
    """Time decode steps of requests whose prompts, but for a token, are in the cache."""
    shape = SHAPES[row["shape"]]
    batch_size = row["number"]
    rest = args.decode_tokens + CONTEXT_UNIT
    context = min(args.context, num_kv_tokens(llm) // batch_size - rest)
    context = context // CONTEXT_UNIT * CONTEXT_UNIT
    prompts = random_prompts([context + 1] * batch_size, shape["vocab_size"])
    generate(llm, prompts, greedy(1))
    watched = watch(llm, row, lambda: generate(llm, prompts, greedy(NUM_WATCHED)), NUM_WATCHED)
    return {
        **row,
        "context": context,
        "seconds": [
            time_per_output_token(llm, prompts, args.decode_tokens) for _ in range(args.repeats)
        ],
        **watched,
        "by_formula": decode_bytes(shape, itemsize(), row["dcp_world_size"], batch_size),
    }


MEASURES: dict[str, Callable[[LLM, argparse.Namespace, Row], Row]] = {
    "prefill": measure_prefill,
    "chunk": measure_chunk,
    "decode": measure_decode,
}


def watch(llm: LLM, row: Row, run: Callable[[], object], num_steps: int = 1) -> Row:
    """Return kernels and, in eager engines, bytes of a run, by step if it has several alike."""
    watched: Row = {}
    if row["mode"] == "eager":
        llm.collective_rpc("take_traffic")
    kernels = count_kernels(llm, run)
    if row["mode"] == "eager":
        ranks = llm.collective_rpc("take_traffic")
        watched["received"] = [
            {name: num_bytes / num_steps for name, num_bytes in rank.items()} for rank in ranks
        ]
    return watched | {name: value / num_steps for name, value in kernels.items()}


def itemsize() -> int:
    """Return the bytes of an element."""
    return 4 if is_cpu_build() else 2


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return each point with its spread, the bytes of the rank that receives most, and by D = 1."""
    places = ("shape", "mode", "kind", "number", "pcp_world_size")
    points = []
    for row in rows:
        point = {key: row[key] for key in (*places, "dcp_world_size")}
        point |= {"context": row.get("context", ""), **spread(row["seconds"])}
        point["kernel_seconds"] = row["kernel_seconds"] if row["num_kernels"] else None
        point["by_formula"] = row["by_formula"]
        if "received" in row:
            most = max(row["received"], key=lambda rank: sum(rank.values()))
            own = {name: most.get(name, 0) for name in ("kv", "dcp")}
            point["received"] = {**own, "rest": sum(most.values()) - sum(own.values())}
        points.append(point)
    unshared = {
        tuple(point[key] for key in places): point["median"]
        for point in points
        if point["dcp_world_size"] == 1
    }
    for point in points:
        base = unshared.get(tuple(point[key] for key in places))
        point["to_unshared"] = base and point["median"] / base
    return {"points": sorted(points, key=in_order)}


def in_order(point: Row) -> tuple[Any, ...]:
    """Return where a point stands in the tables."""
    measured = list(MEASURES).index(point["kind"])
    layout = point["pcp_world_size"], point["dcp_world_size"]
    return point["shape"], MODES.index(point["mode"]), measured, point["number"], *layout


HEADERS = (
    *("shape", "mode", "", "tokens or requests", "context", "P", "D", "ms", "p10", "p90"),
    *("to D = 1", "kernels, ms", "KV, MiB", "formula", "DCP, MiB", "formula", "rest, MiB"),
)


def cells(point: Row) -> list[Any]:
    """Return a line of the table."""
    names = ("shape", "mode", "kind", "number", "context", "pcp_world_size", "dcp_world_size")
    line = [point[name] for name in names]
    line += [f"{1e3 * point[name]:.2f}" for name in ("median", "p10", "p90")]
    line.append("" if point["to_unshared"] is None else f"{point['to_unshared']:.3f}")
    seconds = point["kernel_seconds"]
    line.append("no GPU" if seconds is None else f"{1e3 * seconds:.2f}")
    for name in ("kv", "dcp"):
        for num_bytes in (point.get("received", {}).get(name), point["by_formula"][name]):
            line.append("not counted" if num_bytes is None else f"{num_bytes / 2**20:.4g}")
    line.append(f"{point['received']['rest'] / 2**20:.4g}" if "received" in point else "")
    return line


def print_report(rows: Sequence[Row]) -> None:
    """Print a line for each point."""
    print("Wall times: work and socket traffic of all ranks. Kernels: of all ranks, without NCCL")
    print("MiB: received by a rank; of a prefill, or of one decode step")
    print_table(HEADERS, [cells(point) for point in summarise(rows)["points"]])


def select(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the engines, D = 1 and D = P in turn, and the tasks of each."""
    prefix = max(args.lengths) - args.batched_tokens
    numbers = {
        "prefill": args.lengths,
        "chunk": [prefix // CONTEXT_UNIT * CONTEXT_UNIT],
        "decode": args.batches,
    }
    tasks = [f"{name}/{number}" for name in args.measures for number in numbers[name]]
    return {
        f"{shape}/{size}x{num_shards}/{mode}": tasks
        for shape in args.shapes
        for mode in args.modes
        for size in args.sizes
        for num_shards in (1, size)
    }


def main() -> None:
    """Measure and print."""
    parser = step_parser(__doc__, NAME, may_start_together=True)
    # What the longest prompt takes with D = 1, and four ranks of Qwen3-8B leave of an H200.
    parser.set_defaults(kv_gib=1 / 16 if is_cpu_build() else 15.0)
    # Blocks of sparse MLA are larger.
    shapes = [shape for shape in SHAPES if kind(shape) != "sparse"]
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=["qwen3-8b"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4], help="P, and D")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 32768, 102400])
    parser.add_argument("--batched-tokens", type=int, default=8192, help="most tokens of a step")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=8192, help="cached tokens of a decode")
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    rows = run_steps(args, NAME, select(args), functools.partial(measure, args), summarise)
    print_report(rows)


if __name__ == "__main__":
    main()

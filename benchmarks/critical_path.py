# SPDX-License-Identifier: Apache-2.0
"""What each rank has to do by itself, on one GPU: time to first token by P, and decode with P > 1.

    python benchmarks/critical_path.py [--steps prefill eager graphs] [--lengths 8192 32768 131072]

``prefill`` times a request of one output token on every rank of every P, one rank at a time
(``solo_rank.py``), and divides the time of one GPU by P times that of the slowest rank: the share
of ideal that is left without time on a link. ``eager`` and ``graphs`` time decode steps without and
with CUDA graphs on rank 0 of P; the broadcast of sampled tokens is on no link here. One engine
each, in which ranks take turns, every other repeat in reverse. Qwen3-8B's shape by default,
bf16, dummy weights, prefix caching off, at most 32768 tokens a step.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from engine import (
    random_prompts,
    require_partitioned_steps,
    solo_rank_options,
    start_engine,
    time_per_output_token,
    time_to_first_token,
)
from harness import print_table, spread
from shapes import SHAPES, model_folder
from steps import Row, run_steps, step_parser

if TYPE_CHECKING:
    from vllm import LLM

NAME = "critical_path"
STEPS = ("prefill", "eager", "graphs")
LONG = 100_000  # prompts from here on are repeated less often
BARS = (
    "Share of ideal at 32k and 128k at least 95 %.",
    "Decode with P > 1 within 2 % of P = 1.",
)
Rank = tuple[int, int]  # P, r


def measure(
    args: argparse.Namespace, step: str, tasks: Sequence[str]
) -> Iterator[tuple[str, list[Row]]]:
    """Run the tasks of a step: prompt lengths, or batch sizes."""
    llm = start_engine(
        model_folder(args.shape),
        enforce_eager=step != "graphs",
        max_model_len=max(args.lengths) + args.decode_tokens,
        max_num_batched_tokens=args.batched_tokens,
        **solo_rank_options(min(args.sizes)),
    )
    for task in tasks:
        if step == "prefill":
            yield task, measure_prefill(llm, args, int(task))
        else:
            yield task, measure_decode(llm, args, int(task))


def measure_prefill(llm: LLM, args: argparse.Namespace, num_tokens: int) -> list[Row]:
    """Return one row for each rank of each P."""
    (prompt,) = random_prompts([num_tokens], SHAPES[args.shape]["vocab_size"])
    ranks = [(size, rank) for size in [1, *args.sizes] for rank in range(size)]
    rows: dict[Rank, Row] = {
        (size, rank): {
            "pcp_world_size": size,
            "pcp_rank": rank,
            "seconds": [],
            "gpu_seconds": [],
            "indexer_seconds": [],
        }
        for size, rank in ranks
    }
    num_warmups, num_repeats = (1, 3) if num_tokens >= LONG else (2, args.repeats)
    for repeat in range(num_warmups + num_repeats):
        for rank in ranks[:: -1 if repeat % 2 else 1]:
            llm.collective_rpc("play_rank", args=rank)
            seconds = time_to_first_token(llm, prompt)
            (steps,) = llm.collective_rpc("take_step_seconds")
            (indexers,) = llm.collective_rpc("take_indexer_seconds")
            if rank[0] > 1:
                stats = require_partitioned_steps(llm)
                rows[rank]["num_gathered_bytes"] = stats["num_gathered_bytes"]
                rows[rank]["num_local_tokens"] = stats["num_local_tokens"]
                (rows[rank]["num_collectives"],) = llm.collective_rpc("num_collectives")
            if repeat >= num_warmups:
                rows[rank]["seconds"].append(seconds)
                rows[rank]["gpu_seconds"].append(sum(steps))
                rows[rank]["indexer_seconds"].append(sum(indexers))
    return [{"num_tokens": num_tokens, **row} for row in rows.values()]


def measure_decode(llm: LLM, args: argparse.Namespace, batch_size: int) -> list[Row]:
    """Return one row for rank 0 of each P."""
    prompts = random_prompts([1] * batch_size, SHAPES[args.shape]["vocab_size"])
    sizes = [1, *args.decode_sizes]
    samples: dict[int, list[float]] = {size: [] for size in sizes}
    for repeat in range(1 + args.repeats):
        for size in sizes[:: -1 if repeat % 2 else 1]:
            llm.collective_rpc("play_rank", args=(size, 0))
            samples[size].append(time_per_output_token(llm, prompts, args.decode_tokens))
    return [
        {"batch_size": batch_size, "pcp_world_size": size, "seconds": seconds[1:]}
        for size, seconds in samples.items()
    ]


def prefill_summary(rows: Sequence[Row]) -> list[Row]:
    """Return the slowest rank of each length and P, and the share of ideal."""
    prefill = [row for row in rows if row["step"] == "prefill"]
    summary = []
    for num_tokens in sorted({row["num_tokens"] for row in prefill}):
        by_size: dict[int, list[Row]] = {}
        for row in prefill:
            if row["num_tokens"] == num_tokens:
                by_size.setdefault(row["pcp_world_size"], []).append(row)
        one_gpu = median(by_size[1][0]["seconds"])
        for size, ranks in sorted(by_size.items()):
            slowest = max(ranks, key=lambda row: median(row["seconds"]))
            fastest = min(ranks, key=lambda row: median(row["seconds"]))
            seconds = spread(slowest["seconds"])
            summary.append(
                {
                    "num_tokens": num_tokens,
                    "pcp_world_size": size,
                    "slowest_rank": slowest["pcp_rank"],
                    "seconds": seconds,
                    "gpu_seconds": spread(slowest["gpu_seconds"]),
                    "indexer_seconds": spread(slowest.get("indexer_seconds", [0.0])),
                    "slowest_to_fastest": seconds["median"] / median(fastest["seconds"]),
                    "speed_up": one_gpu / seconds["median"],
                    "share_of_ideal": one_gpu / seconds["median"] / size,
                }
            )
    return summary


def decode_summary(rows: Sequence[Row]) -> list[Row]:
    """Return the time per output token of each step, batch size and P, and its ratio to P = 1."""
    decode = [row for row in rows if row["step"] != "prefill"]
    one_gpu = {
        (row["step"], row["batch_size"]): median(row["seconds"])
        for row in decode
        if row["pcp_world_size"] == 1
    }
    return [
        {
            "step": row["step"],
            "batch_size": row["batch_size"],
            "pcp_world_size": row["pcp_world_size"],
            "seconds": spread(row["seconds"]),
            "to_one_gpu": median(row["seconds"]) / one_gpu[row["step"], row["batch_size"]],
        }
        for row in decode
    ]


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of the tables, and the speed-ups as a plot."""
    prefill = prefill_summary(rows)
    lines: dict[str, list[list[float]]] = {}
    for row in prefill:
        line = lines.setdefault(f"{row['num_tokens'] / 1024:.3g}k tokens", [[], []])
        line[0].append(row["pcp_world_size"])
        line[1].append(row["speed_up"])
    sizes = sorted({row["pcp_world_size"] for row in prefill})
    plot = {
        "title": "Time to first token by a rank's own work (no link)",
        "x_label": "P",
        "y_label": "times as fast as one GPU",
        "lines": lines,
        "ideal": [sizes, sizes],
    }
    return {"bars": BARS, "prefill": prefill, "decode": decode_summary(rows), "plot": plot}


def print_report(rows: Sequence[Row]) -> None:
    """Print a table of prefills and one of decodes, times in ms."""
    table = []
    for row in prefill_summary(rows):
        seconds = row["seconds"]
        table.append(
            [
                row["num_tokens"],
                row["pcp_world_size"],
                row["slowest_rank"],
                *(1e3 * seconds[key] for key in ("median", "p10", "p90")),
                1e3 * row["gpu_seconds"]["median"],
                1e3 * row["indexer_seconds"]["median"],
                row["slowest_to_fastest"],
                f"{row['speed_up']:.2f}x",
                f"{row['share_of_ideal']:.1%}",
            ]
        )
    headers = [
        "tokens",
        "P",
        "slowest rank",
        "median ms",
        "p10",
        "p90",
        "GPU ms",
        "indexers ms",
        "to fastest",
    ]
    print_table([*headers, "speed-up", "of ideal"], table)
    table = []
    for row in decode_summary(rows):
        times = [1e3 * row["seconds"][key] for key in ("median", "p10", "p90")]
        ratio = f"{row['to_one_gpu']:.3f}"
        table.append([row["step"], row["batch_size"], row["pcp_world_size"], *times, ratio])
    print()
    print_table(["decode", "batch", "P", "median ms", "p10", "p90", "to P = 1"], table)
    print()
    print("\n".join(BARS))


def main() -> None:
    """Measure and print."""
    parser = step_parser(__doc__, NAME)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8], help="P beside 1")
    parser.add_argument("--decode-sizes", type=int, nargs="+", default=[2, 4], help="P beside 1")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--decode-tokens", type=int, default=128)
    parser.add_argument("--batched-tokens", type=int, default=32768, help="most tokens of a step")
    parser.add_argument("--repeats", type=int, default=5, help=f"3 from {LONG} tokens on")
    args = parser.parse_args()

    tasks = {
        step: list(map(str, args.lengths if step == "prefill" else args.batches))
        for step in args.steps
    }
    print_report(run_steps(args, NAME, tasks, functools.partial(measure, args), summarise))


if __name__ == "__main__":
    main()

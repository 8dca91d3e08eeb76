# SPDX-License-Identifier: Apache-2.0
"""Tokens that the KV cache holds, by P and D, as each engine itself reports them.

    python benchmarks/kv_capacity.py [--layouts 1x1 2x1 2x2 4x1 4x4] [--shapes qwen3-8b]

One engine start each, all P ranks on GPU 0. Ranks load and profile as they always do, each with
``gpu_memory_utilization`` of a whole GPU to fill; the KV cache that the engine then decides on is
not allocated, and nothing is run (``capacity_workers.py``). bf16, eager.

With experts P > 1 holds more: each rank has a slice of every expert, unless they are replicated.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from engine import is_cpu_build, one_gpu_options, start_engine
from harness import print_table
from shapes import SHAPES, model_folder
from steps import Row, run_steps, step_parser

NAME = "kv_capacity"
BAR = (
    "Tokens with P > 1 and D = 1 at least 99 % of those with P = 1, "
    "with D > 1 at least 99 % of D times those with D = 1."
)


def measure(
    args: argparse.Namespace, step: str, tasks: Sequence[str]
) -> Iterator[tuple[str, list[Row]]]:
    """Start the engine of a shape, layout and limit of tokens a step, and read its report."""
    shape, layout, batched_tokens = step.split("/")
    size, num_shards = map(int, layout.split("x"))
    options: dict[str, Any] = {}
    if size > 1:
        options |= one_gpu_options(size, "capacity_workers.ReportOnlyPCPWorker")
        options["prefill_context_parallel_size"] = size
        options["decode_context_parallel_size"] = num_shards
    elif not is_cpu_build():
        options["worker_cls"] = "capacity_workers.ReportOnlyWorker"
    if not is_cpu_build():
        options["gpu_memory_utilization"] = args.gpu_memory_utilization
    llm = start_engine(
        model_folder(shape),
        enforce_eager=True,
        max_model_len=32768,
        max_num_batched_tokens=int(batched_tokens),
        max_num_seqs=args.max_num_seqs,
        **options,
    )
    row = {
        "shape": shape,
        "pcp_world_size": size,
        "dcp_world_size": num_shards,
        "max_num_batched_tokens": int(batched_tokens),
        "max_num_seqs": args.max_num_seqs,
        "num_kv_tokens": llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens,
    }
    for task in tasks:
        yield task, [row]


def ratios(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their ratios to P = 1 and to the same P with D = 1, None without."""
    tokens = {place(row, row["pcp_world_size"]): row["num_kv_tokens"] for row in unshared(rows)}
    summary = []
    for row in rows:
        bases = tokens.get(place(row, 1)), tokens.get(place(row, row["pcp_world_size"]))
        one_gpu, of_shards = (base and row["num_kv_tokens"] / base for base in bases)
        summary.append(row | {"to_one_gpu": one_gpu, "to_unshared": of_shards})
    return summary


def unshared(rows: Sequence[Row]) -> list[Row]:
    """Return those with D = 1."""
    return [row for row in rows if row["dcp_world_size"] == 1]


def place(row: Row, pcp_world_size: int) -> tuple[str, int, int]:
    """Return what two rows to be compared have in common."""
    return row["shape"], row["max_num_batched_tokens"], pcp_world_size


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the ratios."""
    return {"bar": BAR, "ratios": ratios(rows)}


HEADERS = ("shape", "tokens a step", "P", "D", "KV tokens", "to P = 1", "to D = 1")


def cells(row: Row) -> list[Any]:
    """Return a line of the table."""
    names = ("shape", "max_num_batched_tokens", "pcp_world_size", "dcp_world_size", "num_kv_tokens")
    compared = (row["to_one_gpu"], row["to_unshared"])
    line = [row[name] for name in names]
    return line + ["" if ratio is None else f"{ratio:.4f}" for ratio in compared]


def print_report(rows: Sequence[Row]) -> None:
    """Print one line for each engine."""
    print_table(HEADERS, [cells(row) for row in ratios(rows)])
    print(BAR)


def main() -> None:
    """Measure and print."""
    parser = step_parser(__doc__, NAME)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3-8b"])
    layouts = ["1x1", "2x1", "2x2", "4x1", "4x4"]
    parser.add_argument("--layouts", nargs="+", default=layouts, help="P x D")
    parser.add_argument("--batched-tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    args = parser.parse_args()

    steps = {
        f"{shape}/{layout}/{n}": ["capacity"]
        for shape in args.shapes
        for n in args.batched_tokens
        for layout in args.layouts
    }
    print_report(run_steps(args, NAME, steps, functools.partial(measure, args), summarise))


if __name__ == "__main__":
    main()

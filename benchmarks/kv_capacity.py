# SPDX-License-Identifier: Apache-2.0
"""Tokens that the KV cache of one GPU holds, by P, as each engine itself reports them.

    python benchmarks/kv_capacity.py [--sizes 1 2 4 8] [--batched-tokens 8192 32768]

One engine start each: stock for P = 1, or else rank 0 of P alone (``solo_rank.py``), which profiles
and allocates what a rank does. NCCL's own buffers, which TP has too, are not in it. Qwen3-8B's
shape, bf16, eager, the same ``gpu_memory_utilization``.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from engine import num_kv_tokens, start_engine
from harness import print_table
from shapes import SHAPES, model_folder
from steps import Row, run_steps, step_parser

NAME = "kv_capacity"
BAR = "Tokens with P > 1 at least 99 % of those with P = 1."


def measure(
    args: argparse.Namespace, step: str, tasks: Sequence[str]
) -> Iterator[tuple[str, list[Row]]]:
    """Start the engine of one P and limit of tokens a step, and read its report."""
    size, batched_tokens = map(int, step.split("/"))
    options: dict[str, Any] = {}
    if size > 1:
        options["worker_cls"] = "solo_rank.SoloRankWorker"
        options["additional_config"] = {"pcp_world_size": size}
    llm = start_engine(
        model_folder(args.shape),
        enforce_eager=True,
        max_model_len=32768,
        max_num_batched_tokens=batched_tokens,
        max_num_seqs=args.max_num_seqs,
        gpu_memory_utilization=args.gpu_memory_utilization,
        **options,
    )
    row = {
        "pcp_world_size": size,
        "max_num_batched_tokens": batched_tokens,
        "max_num_seqs": args.max_num_seqs,
        "num_kv_tokens": num_kv_tokens(llm),
    }
    for task in tasks:
        yield task, [row]


def to_one_gpu(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their ratio to P = 1, None where that is missing."""
    one_gpu = {
        row["max_num_batched_tokens"]: row["num_kv_tokens"]
        for row in rows
        if row["pcp_world_size"] == 1
    }
    summary = []
    for row in rows:
        base = one_gpu.get(row["max_num_batched_tokens"])
        summary.append(row | {"to_one_gpu": base and row["num_kv_tokens"] / base})
    return summary


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the ratios."""
    return {"bar": BAR, "ratios": to_one_gpu(rows)}


def print_report(rows: Sequence[Row]) -> None:
    """Print one line for each engine."""
    table = []
    for row in to_one_gpu(rows):
        ratio = "" if row["to_one_gpu"] is None else f"{row['to_one_gpu']:.4f}"
        values = [row["max_num_batched_tokens"], row["pcp_world_size"], row["num_kv_tokens"]]
        table.append([*values, ratio])
    print_table(["tokens a step", "P", "KV tokens", "to P = 1"], table)
    print(BAR)


def main() -> None:
    """Measure and print."""
    parser = step_parser(__doc__, NAME)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--batched-tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    args = parser.parse_args()

    steps = {f"{size}/{n}": ["capacity"] for n in args.batched_tokens for size in args.sizes}
    print_report(run_steps(args, NAME, steps, functools.partial(measure, args), summarise))


if __name__ == "__main__":
    main()

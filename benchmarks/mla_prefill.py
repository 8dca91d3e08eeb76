# SPDX-License-Identifier: Apache-2.0
"""What it saves to read and up-project the context of a request once for its two rows.

    python benchmarks/mla_prefill.py [--sizes 2 8] [--lengths 32768 131072]

Three layers with DeepSeek-V2-Lite's attention and a dense MLP, bf16, dummy weights, eager, at most
32768 tokens a step. Every rank of every P runs alone on one GPU (``solo_rank.py``). What is timed
is the prefill attention of the last layer, from queries and cache to output, over all steps of a
prompt; the first layer makes the plan of a step, once for all.
``planned`` is ours: latents from 0 to the end of the request's last row are read and up-projected
once, and each row attends to a prefix of them. ``by row`` is vLLM's own path with the same rows:
each reads and up-projects its own context, attends to it and to its new tokens apart, and merges.
P = 1 is vLLM's own path on one GPU. The slowest rank counts.
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
    time_to_first_token,
)
from harness import print_table, spread
from shapes import SHAPES, model_folder
from steps import Row, run_steps, step_parser

if TYPE_CHECKING:
    from vllm import LLM

NAME = "mla_prefill"
PLANNED, BY_ROW = "planned", "by row"


def measure(
    args: argparse.Namespace, step: str, tasks: Sequence[str]
) -> Iterator[tuple[str, list[Row]]]:
    """Run every rank on prompts of the tasks' lengths."""
    llm = start_engine(
        model_folder(args.shape, num_hidden_layers=3, first_k_dense_replace=3),
        enforce_eager=True,
        max_model_len=max(args.lengths) + 1,
        max_num_batched_tokens=args.batched_tokens,
        **solo_rank_options(min(args.sizes), "mla_prefill_rank.MLAPrefillWorker"),
    )
    for task in tasks:
        (prompt,) = random_prompts([int(task)], SHAPES[args.shape]["vocab_size"])
        rows = []
        for size in (1, *args.sizes):
            for rank in range(size):
                for path in (BY_ROW,) if size == 1 else (PLANNED, BY_ROW):
                    seconds = measure_rank(llm, args, prompt, size, rank, path)
                    place = {"num_tokens": int(task), "pcp_world_size": size, "pcp_rank": rank}
                    rows.append({**place, "path": path, "seconds": seconds})
        yield task, rows


def measure_rank(
    llm: LLM, args: argparse.Namespace, prompt: Any, size: int, rank: int, path: str
) -> list[float]:
    """Return the seconds of the layer's prefill attention in each of several prompts."""
    llm.collective_rpc("play_rank", args=(size, rank))
    llm.collective_rpc("prefill_as_stock", args=(path == BY_ROW,))
    llm.collective_rpc("watch_prefill")
    seconds = []
    for _ in range(1 + args.repeats):
        time_to_first_token(llm, prompt)
        calls = llm.collective_rpc("take_prefill")[0]
        assert calls, "no row was long enough to be prefilled"
        assert all(call["is_planned"] == (path == PLANNED) for call in calls)
        seconds.append(sum(call["seconds"] for call in calls))
    if size > 1:
        require_partitioned_steps(llm)
    return seconds[1:]


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the slowest rank of each length, P and path."""
    slowest: dict[tuple[int, int, str], Row] = {}
    for row in rows:
        place = (row["num_tokens"], row["pcp_world_size"], row["path"])
        if place not in slowest or median(row["seconds"]) > median(slowest[place]["seconds"]):
            slowest[place] = row
    keys = ("num_tokens", "pcp_world_size", "path", "pcp_rank")
    return {
        "slowest": [
            {**{key: row[key] for key in keys}, "seconds": spread(row["seconds"])}
            for row in slowest.values()
        ]
    }


def print_report(rows: Sequence[Row]) -> None:
    """Print a line for each length and P."""
    slowest = {
        (row["num_tokens"], row["pcp_world_size"], row["path"]): 1e3 * row["seconds"]["median"]
        for row in summarise(rows)["slowest"]
    }
    table = []
    for (num_tokens, size, path), by_row in slowest.items():
        if path == BY_ROW:
            planned = slowest.get((num_tokens, size, PLANNED))
            one_gpu = slowest[num_tokens, 1, BY_ROW]
            line = [num_tokens, size, by_row, f"{one_gpu / by_row / size:.1%}"]
            if planned is not None:
                saved = f"{1 - planned / by_row:.1%}"
                line += [planned, f"{one_gpu / planned / size:.1%}", saved]
            table.append(line + [""] * (7 - len(line)))
    headers = ["tokens", "P", "by row ms", "of ideal", "planned ms", "of ideal", "saved"]
    print("Prefill attention of a layer, slowest rank")
    print_table(headers, table)


def main() -> None:
    """Measure and print."""
    parser = step_parser(__doc__, NAME)
    parser.set_defaults(step_timeout=300)
    parser.add_argument("--shape", choices=SHAPES, default="deepseek-v2-lite")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 8], help="P beside 1")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--batched-tokens", type=int, default=32768, help="most tokens of a step")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    steps = {"ranks": list(map(str, args.lengths))}
    print_report(run_steps(args, NAME, steps, functools.partial(measure, args), summarise))


if __name__ == "__main__":
    main()

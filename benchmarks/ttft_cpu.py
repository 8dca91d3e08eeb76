# SPDX-License-Identifier: Apache-2.0
"""Time to first token on CPU ranks of one core each: one rank, PCP = 2, and TP = 2 of stock vLLM.

    python benchmarks/ttft_cpu.py [--lengths 1024 2048 4096 8192] [--rounds 2] [--repeats 2]

Eight layers of Qwen3-0.6B's shape, fp32, dummy weights, prefix caching off, the prompt in one step,
one output token, one request at a time. One engine at a time; every other round runs the layouts in
reverse, so that a machine that drifts favours none. The engine's own process is bound to no core:
one rank has the second core to itself for it.

A run goes on where its ``--json`` file stops, by default the one in results/: give another one to
measure anew.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from engine import (
    random_prompts,
    require_partitioned_steps,
    start_engine,
    time_to_first_token,
)
from harness import print_table, spread
from shapes import SHAPES, model_folder
from steps import Row, run_steps, step_parser

NAME = "ttft_cpu"
LAYOUTS: dict[str, dict[str, int]] = {
    "one rank": {},
    "PCP2": {"prefill_context_parallel_size": 2},
    "TP2": {"tensor_parallel_size": 2},
}
NUM_RANKS = 2
BAR = "At 4096 tokens PCP2 at least 1.95x faster than one rank, and not behind TP2."


def measure(
    args: argparse.Namespace, step: str, tasks: Sequence[str]
) -> Iterator[tuple[str, list[Row]]]:
    """Time each length on the layout of a step."""
    layout, _, round_ = step.partition("/")
    options = LAYOUTS[layout]
    cores = sorted(os.sched_getaffinity(0))[: prod(options.values())]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores))
    llm = start_engine(
        model_folder(args.shape),
        max_model_len=max(args.lengths) + 1,
        max_num_batched_tokens=max(args.lengths),
        max_num_seqs=4,
        **options,
    )
    for task in tasks:
        (prompt,) = random_prompts([int(task)], SHAPES[args.shape]["vocab_size"])
        seconds = [time_to_first_token(llm, prompt) for _ in range(args.warmups + args.repeats)]
        if "prefill_context_parallel_size" in options:
            require_partitioned_steps(llm)
        row = {"layout": layout, "round": int(round_), "num_tokens": int(task)}
        yield task, [row | {"seconds": seconds[args.warmups :]}]


def times(rows: Sequence[Row]) -> dict[int, dict[str, dict[str, float]]]:
    """Return the spread of seconds over all rounds, by number of tokens and layout."""
    samples: dict[int, dict[str, list[float]]] = {}
    for row in sorted(rows, key=lambda row: row["num_tokens"]):
        by_layout = samples.setdefault(row["num_tokens"], {})
        by_layout.setdefault(row["layout"], []).extend(row["seconds"])
    return {
        num_tokens: {layout: spread(seconds) for layout, seconds in by_layout.items()}
        for num_tokens, by_layout in samples.items()
    }


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the speed-ups over one rank as a plot."""
    lines: dict[str, list[list[float]]] = {}
    for num_tokens, by_layout in times(rows).items():
        for layout, seconds in by_layout.items():
            if layout == "one rank" or "one rank" not in by_layout:
                continue
            line = lines.setdefault(layout, [[], []])
            line[0].append(num_tokens)
            line[1].append(by_layout["one rank"]["median"] / seconds["median"])
    lengths = sorted({row["num_tokens"] for row in rows})
    plot = {
        "title": "Time to first token on two CPU cores",
        "x_label": "prompt tokens",
        "y_label": "times as fast as one core",
        "lines": lines,
        "ideal": [lengths, [NUM_RANKS] * len(lengths)],
    }
    return {"bar": BAR, "plot": plot}


def print_report(rows: Sequence[Row]) -> None:
    """Print one line for each length and layout."""
    table = []
    for num_tokens, by_layout in times(rows).items():
        for layout, seconds in by_layout.items():
            speed_up: list[Any] = ["", ""]
            if "one rank" in by_layout and layout != "one rank":
                ratio = by_layout["one rank"]["median"] / seconds["median"]
                speed_up = [f"{ratio:.2f}x", f"{ratio / NUM_RANKS:.1%}"]
            values = [seconds["median"], seconds["p10"], seconds["p90"], seconds["n"]]
            table.append([num_tokens, layout, *values, *speed_up])
    print_table(["tokens", "layout", "median s", "p10", "p90", "n", "speed-up", "of ideal"], table)
    print(BAR)


def main() -> None:
    """Measure and print."""
    parser = step_parser(__doc__, NAME)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b-8-layers")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=2, help="engine starts of each layout")
    parser.add_argument("--warmups", type=int, default=1, help="of each length and start")
    parser.add_argument("--repeats", type=int, default=2, help="of each length and start")
    args = parser.parse_args()

    tasks = [str(length) for length in sorted(args.lengths)]
    steps = {}
    for round_ in range(args.rounds):
        for layout in list(LAYOUTS)[:: -1 if round_ % 2 else 1]:
            steps[f"{layout}/{round_}"] = tasks
    print_report(run_steps(args, NAME, steps, functools.partial(measure, args), summarise))


if __name__ == "__main__":
    main()

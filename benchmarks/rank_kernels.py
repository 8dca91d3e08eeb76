# SPDX-License-Identifier: Apache-2.0
"""What does not shrink with P: the kernels of a rank's prefill beside those of one GPU.

    python benchmarks/rank_kernels.py [--shape qwen3-8b] [--modes graphs] [--lengths 32768]

All ranks of P run one at a time on one GPU, with nothing on a link and each with all experts
(``solo_rank.py``). Kernels of one prefill each, by the profiler: listed are those that take longer
or shorter on some rank than a P-th of what they take on one GPU, by how much in all.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from engine import random_prompts, solo_rank_options, start_engine, time_to_first_token
from harness import print_table
from shapes import SHAPES, model_folder
from steps import Row, run_steps, step_parser

if TYPE_CHECKING:
    from vllm import LLM

NAME = "rank_kernels"
MODES = ("eager", "graphs")
NUM_WARMUPS = 2
NUM_LISTED, NAME_WIDTH = 15, 70


def measure(
    args: argparse.Namespace, mode: str, tasks: Sequence[str]
) -> Iterator[tuple[str, list[Row]]]:
    """Run prompts of some lengths on one engine."""
    llm = start_engine(
        model_folder(args.shape),
        worker_extension_cls="layer_probe.LayerProbe",
        enforce_eager=mode == "eager",
        max_model_len=max(args.lengths) + 16,
        max_num_batched_tokens=args.batched_tokens,
        **solo_rank_options(args.size),
    )
    ranks = [(1, 0), *((args.size, rank) for rank in range(args.size))]
    for task in tasks:
        (prompt,) = random_prompts([int(task)], SHAPES[args.shape]["vocab_size"])
        common = {"shape": args.shape, "mode": mode, "num_tokens": int(task)}
        yield task, [{**common, **measure_rank(llm, args, rank, prompt)} for rank in ranks]


def measure_rank(llm: LLM, args: argparse.Namespace, rank: tuple[int, int], prompt: Any) -> Row:
    """Time a prefill on the GPU, then profile one."""
    llm.collective_rpc("play_rank", args=rank)
    seconds = []
    for _ in range(NUM_WARMUPS + args.repeats):
        time_to_first_token(llm, prompt)
        (steps,) = llm.collective_rpc("take_step_seconds")
        seconds.append(sum(steps))
    llm.collective_rpc("start_profile")
    time_to_first_token(llm, prompt)
    (events,) = llm.collective_rpc("stop_profile")
    kernels: dict[str, float] = {}
    for event in events:
        if event["is_kernel"]:
            name = event["name"][:NAME_WIDTH]
            kernels[name] = kernels.get(name, 0.0) + event["seconds"]
    return {
        "pcp_world_size": rank[0],
        "pcp_rank": rank[1],
        "gpu_seconds": seconds[NUM_WARMUPS:],
        "kernels": kernels,
    }


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return, for each prompt, what kernels take beyond their share, on the rank with the most."""
    points: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        points.setdefault((row["shape"], row["mode"], row["num_tokens"]), []).append(row)
    summary = []
    for (shape, mode, num_tokens), (one_gpu, *ranks) in points.items():
        size = ranks[0]["pcp_world_size"]
        names = {name for row in (one_gpu, *ranks) for name in row["kernels"]}
        beyond = {
            name: max(row["kernels"].get(name, 0.0) for row in ranks)
            - one_gpu["kernels"].get(name, 0.0) / size
            for name in names
        }
        summary.append(
            {
                "shape": shape,
                "mode": mode,
                "num_tokens": num_tokens,
                "pcp_world_size": size,
                "one_gpu_seconds": median(one_gpu["gpu_seconds"]),
                "slowest_seconds": max(median(row["gpu_seconds"]) for row in ranks),
                "beyond": dict(sorted(beyond.items(), key=lambda item: -abs(item[1]))),
            }
        )
    return {"prefills": summary}


def print_report(rows: Sequence[Row]) -> None:
    """Print a table for each prompt."""
    for prefill in summarise(rows)["prefills"]:
        print("{shape}, {mode}, {num_tokens} tokens, P = {pcp_world_size}".format(**prefill))
        times = [1e3 * prefill[key] for key in ("one_gpu_seconds", "slowest_seconds")]
        print("one GPU {:.1f} ms, slowest rank {:.1f} ms".format(*times))
        listed = list(prefill["beyond"].items())[:NUM_LISTED]
        print_table(
            ["ms beyond its share", "kernel"],
            [[1e3 * seconds, name] for name, seconds in listed],
        )
        print()


def main() -> None:
    """Measure and print."""
    parser = step_parser(__doc__, NAME)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["graphs"])
    parser.add_argument("--size", type=int, default=2, help="P")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--batched-tokens", type=int, default=32768, help="most tokens of a step")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    tasks = {mode: list(map(str, args.lengths)) for mode in args.modes}
    print_report(run_steps(args, NAME, tasks, functools.partial(measure, args), summarise))


if __name__ == "__main__":
    main()

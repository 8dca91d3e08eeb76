# SPDX-License-Identifier: Apache-2.0
"""What a layer costs in a partitioned prefill, on the host and on the GPU, and what it is made of.

    python benchmarks/layer_profile.py --gpus 2 [--shapes deepseek-v2-lite] [--layouts P1 "P2 EP"]

One prompt in one eager step, with few of the model's layers and with more: what they differ by is
a layer, the rest is the step. Host: time in which the model runner enqueues a step on an idle GPU.
GPU: from the first kernel to the last. Kernels, launches, collectives and operators are counted by
the profiler in runs of their own. Rank 0 of each layout; dummy weights that route tokens.

With ``--gpus 1`` all ranks share GPU 0: counts and host times hold, GPU times do not. An engine,
one for each shape and layout, takes a minute and a half at most.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from engine import (
    REPLICATED_EXPERTS,
    one_gpu_options,
    random_prompts,
    require_partitioned_steps,
    start_engine,
    time_to_first_token,
)
from harness import communicates, print_table
from shapes import SHAPES, model_folder
from steps import Row, run_steps, step_parser

if TYPE_CHECKING:
    from vllm import LLM

NAME = "layer_profile"
NUM_WARMUPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "P1": {},
    "P2": {"prefill_context_parallel_size": 2},
    "P2 EP": {"prefill_context_parallel_size": 2, "enable_expert_parallel": True},
    "P2 replicated": {
        "prefill_context_parallel_size": 2,
        "additional_config": REPLICATED_EXPERTS,
    },
}
# Parts of the names of what the host enqueues work on the GPU with.
LAUNCHES = ("LaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cuMemcpy", "cuMemset")
# Events of a layer that are kept, and that are printed.
NUM_KEPT, NUM_TOP = 20, 5


def measure(
    args: argparse.Namespace, step: str, tasks: Sequence[str]
) -> Iterator[tuple[str, list[Row]]]:
    """Profile one layout of one shape."""
    shape, _, layout = step.partition("/")
    options = dict(LAYOUTS[layout])
    if options and args.gpus == 1:
        options |= one_gpu_options(2)
    llm = start_engine(
        model_folder(shape, num_hidden_layers=args.depths[1]),
        worker_extension_cls="layer_probe.LayerProbe",
        enforce_eager=True,
        max_model_len=max(args.lengths) + 1,
        max_num_batched_tokens=max(args.lengths),
        max_num_seqs=16,
        kv_gib=args.kv_gib,
        **options,
    )
    llm.collective_rpc("watch_steps")
    for task in tasks:
        (prompt,) = random_prompts([int(task)], SHAPES[shape]["vocab_size"])
        runs = [profile(llm, args, depth, prompt) for depth in args.depths]
        if options:
            require_partitioned_steps(llm)
        layer = per_layer(runs)
        for run in runs:
            del run["events"]
        row = {"shape": shape, "layout": layout, "num_tokens": int(task)}
        yield task, [{**row, "layer": layer, "runs": runs}]


def profile(llm: LLM, args: argparse.Namespace, depth: int, prompt: Any) -> Row:
    """Return times and events of a step through so many layers, on rank 0."""
    llm.collective_rpc("set_depth", args=(depth,))
    for _ in range(NUM_WARMUPS):
        time_to_first_token(llm, prompt)
    llm.collective_rpc("take_steps")
    for _ in range(args.repeats):
        time_to_first_token(llm, prompt)
    steps = llm.collective_rpc("take_steps")[0]
    llm.collective_rpc("start_profile")
    time_to_first_token(llm, prompt)
    return {
        "num_layers": depth,
        "host_seconds": [step["host"] for step in steps],
        "gpu_seconds": [step["gpu"] for step in steps],
        "events": llm.collective_rpc("stop_profile")[0],
    }


def per_layer(runs: Sequence[Row]) -> Row:
    """Return what a layer adds: the difference of two depths, by layer."""
    few, many = runs
    num_layers = many["num_layers"] - few["num_layers"]
    layer: Row = {
        f"{key}_seconds": (median(many[f"{key}_seconds"]) - median(few[f"{key}_seconds"]))
        / num_layers
        for key in ("host", "gpu")
    }
    # The step without any layer.
    layer["rest_host_seconds"] = (
        median(few["host_seconds"]) - few["num_layers"] * layer["host_seconds"]
    )
    events = differences(few["events"], many["events"], num_layers)
    kernels = [event for event in events if event["is_kernel"]]
    collectives = [event for event in kernels if communicates(event["name"])]
    operators = [event for event in events if not event["is_kernel"]]
    launches = [event for event in operators if any(part in event["name"] for part in LAUNCHES)]
    layer |= {
        "num_kernels": total(kernels, "count"),
        "kernel_seconds": total(kernels, "seconds"),
        "num_launches": total(launches, "count"),
        "launch_seconds": total(launches, "seconds"),
        "num_collectives": total(collectives, "count"),
        "collective_seconds": total(collectives, "seconds"),
        "num_operators": total(operators, "count"),
        "kernels": most(kernels),
        "operators": most(operators),
    }
    return layer


def differences(few: Sequence[Row], many: Sequence[Row], num_layers: int) -> list[Row]:
    """Return count and seconds that each event has more in ``many`` than in ``few``, by layer."""
    before = {(event["is_kernel"], event["name"]): event for event in few}
    events = []
    for event in many:
        base = before.get((event["is_kernel"], event["name"]), {"count": 0, "seconds": 0.0})
        count = (event["count"] - base["count"]) / num_layers
        if count:
            seconds = (event["seconds"] - base["seconds"]) / num_layers
            events.append({**event, "count": count, "seconds": seconds})
    return events


def total(events: Sequence[Row], key: str) -> float:
    """Return the sum over some events."""
    return float(sum(event[key] for event in events))


def most(events: Sequence[Row]) -> list[Row]:
    """Return the events that take most of the time; names of kernels can be very long."""
    chosen = sorted(events, key=lambda event: -event["seconds"])[:NUM_KEPT]
    return [{**event, "name": event["name"][:120]} for event in chosen]


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return nothing beside the rows."""
    return {}


def print_report(rows: Sequence[Row]) -> None:
    """Print a line for each layout, and the operators that cost the host most."""
    table, top = [], []
    for row in rows:
        layer = row["layer"]
        names = [row["shape"], row["num_tokens"], row["layout"]]
        times = [
            1e3 * layer[f"{key}_seconds"]
            for key in ("host", "gpu", "kernel", "collective", "rest_host")
        ]
        counts = [f"{layer[f'num_{key}']:.1f}" for key in ("launches", "kernels", "collectives")]
        table.append([*names, *times, *counts])
        for event in layer["operators"][:NUM_TOP]:
            name = event["name"][:40]
            top.append([*names, 1e3 * event["seconds"], f"{event['count']:.1f}", name])
    headers = ["shape", "tokens", "layout"]
    times = ["host ms", "GPU ms", "kernel ms", "collective ms", "host ms, rest of step"]
    print("A layer")
    print_table([*headers, *times, "launches", "kernels", "collectives"], table)
    print("Where the host is, with the profiler on, ms a layer")
    print_table([*headers, "ms", "times", "in"], top)


def main() -> None:
    """Measure and print."""
    parser = step_parser(__doc__, NAME, may_start_together=True)
    parser.set_defaults(step_timeout=280)
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1)
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=["deepseek-v2-lite", "qwen3-30b-a3b"]
    )
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    parser.add_argument("--depths", type=int, nargs=2, default=[4, 12], help="layers to run")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()

    steps = {
        f"{shape}/{layout}": list(map(str, args.lengths))
        for shape in args.shapes
        for layout in args.layouts
    }
    print_report(run_steps(args, NAME, steps, functools.partial(measure, args), summarise))


if __name__ == "__main__":
    main()

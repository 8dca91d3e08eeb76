# SPDX-License-Identifier: Apache-2.0
"""What ``ttft_gpus.py`` has measured, as tables and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import numpy as np
from harness import print_table, spread
from steps import Row

# Title, headers, lines.
Table = tuple[str, Sequence[str], list[list[Any]]]
ONE = "one GPU"
MODES = ("eager", "graphs")
EQUALITY = "equality"
BARS = (
    "Dense GQA, PCP of two: 1.8x at 4k, 1.9x at 8k, 1.95x at 32k and 100k; of four: 3.7x at 32k.",
    "MLA and experts, PCP of two: not slower than one GPU at 4k, 1.8x at 32k.",
    "PCP ahead of TP from 8k on; TPOT within 2 % of one GPU's.",
)


def summarise(num_gpus: int, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of the tables, and speed-ups (eager, if measured) as a plot."""
    ttft = compared_with_one_gpu(rows, "ttft", "num_tokens")
    shapes = {row["shape"] for row in ttft}
    lines: dict[str, list[list[float]]] = {}
    for row in ttft:
        if row["mode"] == ttft[0]["mode"] and row["layout"] != ONE and row["speed_up"]:
            name = row["layout"] if len(shapes) == 1 else f"{row['shape']}, {row['layout']}"
            line = lines.setdefault(name, [[], []])
            line[0].append(row["num_tokens"])
            line[1].append(row["speed_up"])
    lengths = sorted({row["num_tokens"] for row in ttft})
    plot = {
        "title": f"Time to first token on {num_gpus} GPUs",
        "x_label": "prompt tokens",
        "y_label": "times as fast as one GPU",
        "lines": lines,
        "ideal": [lengths, [num_gpus] * len(lengths)],
    }
    decode = compared_with_one_gpu(rows, "decode", "concurrency")
    return {"num_gpus": num_gpus, "bars": BARS, "ttft": ttft, "decode": decode, "plot": plot}


def compared_with_one_gpu(rows: Sequence[Row], kind: str, x: str) -> list[Row]:
    """Return mean, P99, spread and speed-up of one kind of rows, by shape, mode and ``x``.

    Speed-ups are of medians.
    """
    rows = [row for row in rows if row["kind"] == kind]

    def place(row: Row) -> tuple[Any, ...]:
        return row["shape"], MODES.index(row["mode"]), row[x]

    one_gpu = {place(row): median(row["seconds"]) for row in rows if row["layout"] == ONE}
    summary = []
    for row in sorted(rows, key=place):
        seconds = median(row["seconds"])
        base = one_gpu.get(place(row))
        summary.append(
            {
                **{key: row[key] for key in ("shape", "mode", x, "layout")},
                "mean": mean(row["seconds"]),
                "p99": float(np.percentile(row["seconds"], 99)),
                **spread(row["seconds"]),
                "speed_up": None if base is None else base / seconds,
            }
        )
    return summary


def compare_tokens(row: Row, reference: Row) -> tuple[int, float]:
    """Return how many outputs differ at some token, and the worst logprob difference up to there.

    Where two tokens are as good as equal, the better one is as probable on both sides, too.
    """
    num_different, worst = 0, 0.0
    for tokens, reference_tokens, logprobs, reference_logprobs in zip(
        *(each[key] for key in ("tokens", "logprobs") for each in (row, reference)), strict=True
    ):
        is_same = np.equal(tokens, reference_tokens)
        num_same = len(tokens) if is_same.all() else int(np.argmin(is_same))
        num_different += num_same < len(tokens)
        differences = np.abs(np.subtract(logprobs, reference_logprobs))
        worst = max(worst, float(differences[: num_same + 1].max()))
    return num_different, worst


def print_report(num_gpus: int, rows: Sequence[Row]) -> None:
    """Print all tables that have anything in them."""
    for title, headers, table in (
        ttft_table(num_gpus, rows),
        parts_table(rows),
        decode_table(rows),
        gather_table(num_gpus, rows),
        trace_table(rows),
        decode_trace_table(rows),
        experts_table(rows),
        equality_table(rows),
    ):
        if table:
            print(title)
            print_table(headers, table)
            print()
    print("\n".join(BARS))


def ttft_table(num_gpus: int, rows: Sequence[Row]) -> Table:
    """Return times to first token."""
    table = []
    for row in compared_with_one_gpu(rows, "ttft", "num_tokens"):
        times = [1e3 * row[key] for key in ("mean", "p99", "std")]
        speed_up, of_ideal = "", ""
        if row["speed_up"] is not None and row["layout"] != ONE:
            speed_up, of_ideal = f"{row['speed_up']:.2f}x", f"{row['speed_up'] / num_gpus:.1%}"
        names = [row["shape"], row["mode"], row["num_tokens"], row["layout"]]
        table.append([*names, *times, row["n"], speed_up, of_ideal])
    headers = [
        "shape",
        "mode",
        "tokens",
        "layout",
        "mean",
        "P99",
        "std",
        "n",
        "speed-up",
        "of ideal",
    ]
    return "Time to first token, ms", headers, table


def parts_table(rows: Sequence[Row]) -> Table:
    """Return what times to first token are made of."""
    rows = [row for row in rows if row["kind"] == "parts"]
    hosts = {"enqueue_seconds": "slowest host", "enqueue_cpu_seconds": "of it CPU"}
    # Results from before these were taken lack them.
    hosts = {key: header for key, header in hosts.items() if all(key in row for row in rows)}
    table = []
    for row in rows:
        names = [row[key] for key in ("shape", "mode", "num_tokens", "layout")]
        times = [median(row["seconds"]), *row["parts"].values()]
        times += [median(row[key]) for key in hosts]
        table.append([*names, *(1e3 * seconds for seconds in times)])
    table.sort(key=lambda line: line[:3])
    parts = ["TTFT", "to workers", "prepare", "GPU", "back", *hosts.values()]
    headers = ["shape", "mode", "tokens", "layout", *parts]
    return "Parts of the time to first token, medians, ms", headers, table


def decode_table(rows: Sequence[Row]) -> Table:
    """Return times per output token."""
    table = []
    for row in compared_with_one_gpu(rows, "decode", "concurrency"):
        times = [1e3 * row[key] for key in ("mean", "p99", "std")]
        ratio = "" if row["speed_up"] is None else f"{1 / row['speed_up']:.3f}"
        names = [row["shape"], row["mode"], row["concurrency"], row["layout"]]
        table.append([*names, *times, row["n"], ratio])
    headers = ["shape", "mode", "requests", "layout", "mean", "P99", "std", "n", "to one GPU"]
    return "Time per output token, ms", headers, table


def gather_table(num_gpus: int, rows: Sequence[Row]) -> Table:
    """Return how long it takes until all ranks have the new KV of a layer."""
    table = []
    for row in rows:
        if row["kind"] == "gather":
            seconds, num_bytes = median(row["seconds"]), row["num_bytes"]
            received = num_bytes * (num_gpus - 1) / num_gpus
            sizes = [row["num_tokens"], num_bytes / 2**20]
            times = [1e3 * seconds, received / seconds / 1e9]
            table.append([row["shape"], row["layout"], *sizes, *times])
    headers = ["shape", "layout", "tokens", "MiB", "median ms", "GB/s into a GPU"]
    return "New KV of one layer to all ranks, alone", headers, table


def step_times(row: Row) -> list[float]:
    """Return what a profiled step took, its kernels, and those that communicate, in ms."""
    rank = min(row["ranks"], key=lambda rank: rank["communication"])
    num_steps = row.get("num_steps", 1)
    kernels = [rank[key] / num_steps for key in ("kernels", "communication")]
    return [1e3 * seconds for seconds in (row["seconds"], *kernels)]


def trace_table(rows: Sequence[Row]) -> Table:
    """Return how much of a prefill is communication."""
    table = []
    for row in rows:
        if row["kind"] == "trace":
            times = step_times(row)
            names = [row["shape"], row["layout"], row["num_tokens"]]
            table.append([*names, *times, f"{times[-1] / times[0]:.1%}"])
    headers = ["shape", "layout", "tokens", "TTFT", "kernels", "communication", "of TTFT"]
    return "Kernels of one prefill, on the rank that waited least, ms", headers, table


def decode_trace_table(rows: Sequence[Row]) -> Table:
    """Return how much of a decode step are kernels and communication."""
    table = []
    for row in rows:
        if row["kind"] == "decode_trace":
            names = [row["shape"], row["mode"], row["concurrency"], row["layout"]]
            table.append([*names, *step_times(row)])
    table.sort(key=lambda line: line[:3])
    headers = ["shape", "mode", "requests", "layout", "TPOT", "kernels", "communication"]
    title = "Kernels of a decode step, profiled, on the rank that waited least, ms"
    return title, headers, table


def experts_table(rows: Sequence[Row]) -> Table:
    """Return how evenly tokens go to the experts."""
    table = [
        [row["shape"], row["layout"], row["num_tokens"], max(row["busiest_experts"])]
        for row in rows
        if row["kind"] == "experts"
    ]
    headers = ["shape", "layout", "tokens", "to the mean"]
    return "Load of the busiest expert of any layer", headers, table


def equality_table(rows: Sequence[Row]) -> Table:
    """Return how the tokens of PCP compare with one GPU's."""
    outputs = {(row["shape"], row["layout"]): row for row in rows if row["kind"] == EQUALITY}
    table = []
    for (shape, layout), row in outputs.items():
        if layout != ONE and (shape, ONE) in outputs:
            for prompts in ("alone", "together"):
                reference = outputs[shape, ONE][prompts]
                num_different, worst = compare_tokens(row[prompts], reference)
                names = [shape, layout, prompts, len(row[prompts]["tokens"])]
                table.append([*names, num_different, f"{worst:.4f}"])
    headers = ["shape", "layout", "prompts", "outputs", "that differ", "worst logprob difference"]
    return "Greedy tokens against one GPU, small checkpoints", headers, table

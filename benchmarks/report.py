# SPDX-License-Identifier: Apache-2.0
"""Write the page of results from the JSON files beside it: no figure on it is typed by hand.

python benchmarks/report.py
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

from ttft_cpu import LAYOUTS, times

RESULTS = Path(__file__).parent / "results"


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return a Markdown table."""
    lines = [headers, ["---"] * len(headers), *rows]
    return ["", *(f"| {' | '.join(map(str, line))} |" for line in lines), ""]


def source(result: dict[str, Any]) -> str:
    """Say where a result was measured, and by which command."""
    at = result["environment"]
    hardware = ", ".join(at["gpus"] or [f"{at['cpu']}, {at['cores']} cores"])
    versions = f"commit {at['commit']}, vLLM {at['vllm']}, torch {at['torch']}"
    return f"`{at['command']}`, {at['date'][:10]}, {versions}, {hardware}."


def milliseconds(seconds: dict[str, float], digits: int = 1) -> str:
    """Return the median and, in brackets, 10th to 90th percentile."""
    median, p10, p90 = (1e3 * seconds[key] for key in ("median", "p10", "p90"))
    return f"{median:.{digits}f} ({p10:.{digits}f} to {p90:.{digits}f})"


def critical_path(result: dict[str, Any]) -> list[str]:
    """Each rank alone: prefill."""
    rows = [
        (
            f"{row['num_tokens'] // 1024}k",
            row["pcp_world_size"],
            milliseconds(row["seconds"]),
            f"{row['speed_up']:.2f}x",
            f"{100 * row['share_of_ideal']:.1f} %",
        )
        for row in result["prefill"]
    ]
    return table(("tokens", "P", "ms, median (p10 to p90)", "speed-up", "of ideal"), rows)


def decode(result: dict[str, Any]) -> list[str]:
    """Each rank alone: decode."""
    rows = [
        (
            row["batch_size"],
            row["pcp_world_size"],
            milliseconds(row["seconds"], 3),
            f"{row['to_one_gpu']:.3f}",
        )
        for row in result["decode"]
    ]
    return table(("requests", "P", "ms, median (p10 to p90)", "to P = 1"), rows)


def kv_capacity(result: dict[str, Any]) -> list[str]:
    """Tokens that fit the KV cache."""
    rows = [
        (row["pcp_world_size"], row["num_kv_tokens"], f"{row['to_one_gpu']:.3f}")
        for row in result["ratios"]
    ]
    return table(("P", "tokens", "to P = 1"), rows)


def equality(result: dict[str, Any]) -> list[str]:
    """The same answers on a GPU."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for case in result["cases"]:
        groups[case["backend"], case["kv_dtype"]].append(case)
    rows = []
    for (backend, kv_dtype), cases in sorted(groups.items()):
        plain = [case["error"] for case in cases if case["size"] == 1]
        split = [case for case in cases if case["size"] > 1]
        num_ok = sum(case["verdict"] == "ok" for case in split)
        num_other = sum(case["differ"] for case in split)
        num_outputs = sum(case["outputs"] for case in split)
        rows.append(
            (
                backend,
                kv_dtype,
                ", ".join(dict.fromkeys(case["graphs"] for case in cases)),
                f"{num_ok} of {len(split)}",
                f"{max(case['error'] for case in split):.3f}",
                f"{min(plain):.3f} to {max(plain):.3f}",
                f"{num_other} of {num_outputs}",
            )
        )
    heads = ("backend", "KV", "graphs", "ok", "largest error", "with P = 1", "another token")
    return table(heads, rows)


def ttft_cpu(result: dict[str, Any]) -> list[str]:
    """Real ranks on CPU cores."""
    rows = [
        (
            num_tokens,
            *(milliseconds(spreads[layout], 0) for layout in LAYOUTS),
            *(
                f"{spreads['one rank']['median'] / spreads[layout]['median']:.2f}x"
                for layout in ("PCP2", "TP2")
            ),
        )
        for num_tokens, spreads in times(result["rows"]).items()
    ]
    heads = ("tokens", "one rank, ms", "PCP2, ms", "TP2 of stock vLLM, ms", "PCP2", "TP2")
    return table(heads, rows)


def layout_overhead(result: dict[str, Any]) -> list[str]:
    """Host time of the plan."""
    rows = [
        (
            row["num_reqs"],
            row["pcp_world_size"],
            "{median:.3f} ({p10:.3f} to {p90:.3f})".format(**row["step_ms"]),
        )
        for row in result["rows"]
    ]
    return table(("requests", "P", "ms, median (p10 to p90)"), rows)


# File without its ending, heading, what it says, table.
SECTIONS: tuple[tuple[str, str, str, Callable[[dict[str, Any]], list[str]]], ...] = (
    (
        "ttft_cpu",
        "CPU ranks, one core each: time to first token",
        """
        Eight layers of Qwen3-0.6B's shape, fp32, dummy weights, one output token; median (p10 to
        p90). The bar is 1.95x at 4096 tokens, and not behind TP2.
        """,
        ttft_cpu,
    ),
    (
        "critical_path_h200",
        "One H200: a rank's own time to first token",
        """
        Qwen3-8B shape, bf16, dummy weights, eager, 32768 tokens a step, one output token. Ranks
        run one at a time on one GPU, with all of their work and nothing on a link; the slowest
        rank counts. The bar is 95 % of ideal at 32k and 128k: met but for P = 8 at 32k, where a
        rank has 4096 tokens. Some of what is missing is known: every rank writes the KV of all
        tokens, and the time that the GPU is not busy, 3 to 6 ms a step, does not shrink with P.
        The rest has not been profiled.
        """,
        critical_path,
    ),
    (
        "decode_h200",
        "One H200: decode",
        """
        The same shape with default compilation and CUDA graphs; time of a decode step. The
        broadcast of the tokens is not on a link here. The bar is 2 %.
        """,
        decode,
    ),
    (
        "kv_capacity_h200",
        "One H200: KV capacity",
        """
        Tokens that the engine reports room for, the same shape, 8192 tokens a step, NCCL's own
        buffers not counted. The bar is 0.99. This run did not count the gather buffers either, 38
        MiB for P = 2 and 152 MiB for P = 8 (about 270 and 1080 tokens); since then they are.
        """,
        kv_capacity,
    ),
    (
        "equality_h200",
        "One H200: the same answers",
        """
        Small GQA model, bf16, 37 outputs an engine (1 to 5000 tokens, alone, together, prefix
        hits), all ranks of P = 2 and 4 on one GPU. Errors are of log-probabilities against the
        same model in fp32; ok means at most twice those of P = 1 in the same configuration,
        partitioned steps, prefix hits, and no line of ours that waits for the GPU. The last column
        counts outputs with another token than P = 1 somewhere: bf16 near-ties. The one error of
        11.7 is stock vLLM's, P = 1 with FULL graphs and FLASH_ATTN.
        """,
        equality,
    ),
    (
        "layout_overhead",
        "Host time of partition and index building",
        """
        Half decodes, half prefills of 1 to 300 tokens. The bar is 0.3 ms for 256 requests and
        P = 8. A step without a partitioned prefill builds nothing.
        """,
        layout_overhead,
    ),
)

NOT_MEASURED = """
Time to first token over a link between GPUs (`benchmarks/ttft_gpus.py`), decode with the broadcast
on a link, more than one host, AMX and NEON, FlashAttention 2 and 4.
"""


def main() -> None:
    """Read the results that are there, write the page."""
    lines = ["# Results", "", "Written by `python benchmarks/report.py`.", ""]
    for name, heading, text, rows in SECTIONS:
        path = RESULTS / f"{name}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        lines += [f"## {heading}", "", *dedent(text).strip().splitlines(), *rows(result)]
        if path.with_suffix(".png").exists():
            lines += [f"![{heading}]({name}.png)", ""]
        lines += [source(result), ""]
    lines += ["## Not measured", "", *NOT_MEASURED.strip().splitlines()]
    (RESULTS / "README.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

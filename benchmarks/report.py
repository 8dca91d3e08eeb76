# SPDX-License-Identifier: Apache-2.0
"""Write the page of results from the JSON files beside it; no figure in its tables is typed.

python benchmarks/report.py
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import dcp_cost
import kv_capacity
from ttft_cpu import LAYOUTS, times
from ttft_gpus_report import (
    ONE,
    decode_trace_table,
    equality_table,
    experts_table,
    gather_table,
    parts_table,
    trace_table,
)

RESULTS = Path(__file__).parent / "results"
# What the equality script calls the ways to fill and to share KV caches.
SHARED_CACHES = {
    "copied": " with copies to other ranks",
    "shared": " with D = P",
    "shared_tp2": " with TP = 2 and D = TP x P",
}
# And where the experts are.
EXPERTS = {"parallel": " with EP", "replicated": " with replicated experts"}
# Listed of each prefill, those that are furthest from their share.
NUM_KERNELS = 8


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return a Markdown table."""
    lines = [headers, ["---"] * len(headers), *rows]
    return ["", *(f"| {' | '.join(map(str, line))} |" for line in lines), ""]


def source(result: dict[str, Any]) -> str:
    """Say where a result was measured, and by which command."""
    at = result["environment"]
    gpus = Counter(at["gpus"] or [f"{at['cpu']}, {at['cores']} cores"])
    hardware = ", ".join(f"{n} x {name}" if n > 1 else name for name, n in gpus.items())
    measured = (row.get("commit") for row in (*result["rows"], *result.get("cases", ())))
    commits = ", ".join(sorted({at["commit"], *filter(None, measured)}))
    versions = f"commit {commits}, vLLM {at['vllm']}, torch {at['torch']}"
    return f"`{at['command']}`, {at['date'][:10]}, {versions}, {hardware}."


def milliseconds(seconds: dict[str, float], digits: int = 1) -> str:
    """Return the median and, in brackets, 10th to 90th percentile."""
    median, p10, p90 = (1e3 * seconds[key] for key in ("median", "p10", "p90"))
    return f"{median:.{digits}f} ({p10:.{digits}f} to {p90:.{digits}f})"


def critical_path(result: dict[str, Any]) -> list[str]:
    """Each rank alone: prefill."""
    heads = ["tokens", "P", "ms, median (p10 to p90)", "speed-up", "of ideal"]
    rows = [
        [
            f"{row['num_tokens'] // 1024}k",
            row["pcp_world_size"],
            milliseconds(row["seconds"]),
            f"{row['speed_up']:.2f}x",
            f"{100 * row['share_of_ideal']:.1f} %",
        ]
        for row in result["prefill"]
    ]
    indexers = [row.get("indexer_seconds", {}).get("median", 0.0) for row in result["prefill"]]
    if any(indexers):
        heads += ["of it indexers, ms", "share"]
        for line, row, seconds in zip(rows, result["prefill"], indexers, strict=True):
            share = seconds / row["seconds"]["median"]
            line += [f"{1e3 * seconds:.1f}", f"{100 * share:.0f} %"]
    return table(heads, rows)


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


def capacity(result: dict[str, Any]) -> list[str]:
    """Tokens that fit the KV cache."""
    return table(kv_capacity.HEADERS, [kv_capacity.cells(row) for row in result["ratios"]])


def shared_cache(result: dict[str, Any]) -> list[str]:
    """D = P beside D = 1."""
    return table(dcp_cost.HEADERS, [dcp_cost.cells(point) for point in result["points"]])


def equality(result: dict[str, Any]) -> list[str]:
    """The same answers on a GPU."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for case in result["cases"]:
        groups[case["model"], case["backend"], case["kv_dtype"]].append(case)
    rows = []
    for names, cases in sorted(groups.items()):
        # With dense MLA vLLM is wrong where prompts run together, see the script.
        error = "error_alone" if names[0] == "mla" else "error"
        plain = [case[error] for case in cases if case["size"] == 1]
        split = [case for case in cases if case["size"] > 1]
        num_ok = sum(case["verdict"] == "ok" for case in split)
        num_other = sum(case["differ"] for case in split)
        num_outputs = sum(case["outputs"] for case in split)
        ways = [
            (case["graphs"], case["experts"], case["cache"], case.get("last_layer", "all"))
            for case in split
        ]
        rows.append(
            (
                *names,
                ", ".join(
                    graphs
                    + EXPERTS.get(experts, "")
                    + SHARED_CACHES.get(cache, "")
                    + (" with the last layer of sampled rows" if last_layer == "sampled" else "")
                    for graphs, experts, cache, last_layer in dict.fromkeys(ways)
                ),
                f"{num_ok} of {len(split)}",
                f"{max(case['error'] for case in split):.3f}",
                f"{min(plain):.3f} to {max(plain):.3f}",
                f"{num_other} of {num_outputs}",
            )
        )
    heads = ("model", "backend", "KV", "graphs", "ok", "largest error", "with P = 1", "other token")
    return table(heads, rows)


def offload(result: dict[str, Any]) -> list[str]:
    """Caches that came back from CPU memory."""
    plain = {case["model"]: case["error"] for case in result["cases"] if case["size"] == 1}
    keys = ("model", "size", "num_shards", "connector", "loaded")
    rows = [
        (
            *(case[key] for key in keys),
            f"{case['error']:.3f}",
            f"{plain[case['model']]:.3f}",
            case["verdict"],
        )
        for case in result["cases"]
        if case["size"] > 1
    ]
    heads = ("model", "P", "D", "connector", "tokens loaded", "largest error", "with P = 1", "")
    return table(heads, rows)


def by_layout(result: dict[str, Any], kind: str, x: str, digits: int) -> list[str]:
    """A line for each shape, mode and x: one layout beside the other."""
    lines: dict[tuple[Any, ...], dict[str, str]] = defaultdict(dict)
    for row in result[kind]:
        text = milliseconds(row, digits)
        if row["layout"] != ONE and row["speed_up"] is not None:
            text += f", {row['speed_up']:.2f}x"
        lines[row["shape"], row["mode"], row[x]][row["layout"]] = text
    layouts = list(dict.fromkeys(row["layout"] for row in result[kind]))
    rows = [
        (*place, *(line.get(layout, "") for layout in layouts)) for place, line in lines.items()
    ]
    return table(("shape", "mode", x.replace("num_", ""), *layouts), rows)


def ttft_gpus(result: dict[str, Any]) -> list[str]:
    """Several GPUs."""
    num_gpus, rows = result["num_gpus"], result["rows"]
    lines = []
    if result["ttft"]:
        lines += by_layout(result, "ttft", "num_tokens", 1)
    if result["decode"]:
        lines += by_layout(result, "decode", "concurrency", 2)
    for title, headers, cells in (
        parts_table(rows),
        gather_table(num_gpus, rows),
        trace_table(rows),
        decode_trace_table(rows),
        experts_table(rows),
        equality_table(rows),
    ):
        if cells:
            texts = [[f"{x:.4g}" if isinstance(x, float) else x for x in line] for line in cells]
            lines += ["", f"{title}:", *table(headers, texts)]
    return lines


def layer_profile(result: dict[str, Any]) -> list[str]:
    """What a layer costs."""
    rows = []
    for row in result["rows"]:
        layer = row["layer"]
        times = (f"{1e3 * layer[f'{key}_seconds']:.3f}" for key in ("host", "gpu", "kernel"))
        counts = (f"{layer[f'num_{key}']:.1f}" for key in ("launches", "kernels", "collectives"))
        rows.append((row["shape"], row["num_tokens"], row["layout"], *times, *counts))
    heads = ("shape", "tokens", "layout", "host, ms", "GPU, ms", "kernels, ms")
    return table((*heads, "launches", "kernels", "collectives"), rows)


def rival(result: dict[str, Any]) -> list[str]:
    """Ours and a later vLLM's."""
    rows = [
        (
            pair["kind"],
            pair["mode"],
            pair["number"],
            pair["pcp_world_size"],
            *(milliseconds(pair[whose], 2) if whose in pair else "" for whose in ("ours", "rival")),
            f"{pair['speed_up']:.2f}x" if "speed_up" in pair else "",
        )
        for pair in result["pairs"]
    ]
    heads = ("", "mode", "tokens or requests", "P", "ours, ms", "vLLM 0.26.0, ms", "ours faster")
    return table(heads, rows)


def rank_kernels(result: dict[str, Any]) -> list[str]:
    """Each kernel on the rank where it takes most, beside what it takes on one GPU."""
    lines = [""]
    for prefill in result["prefills"]:
        whole, slowest = prefill["one_gpu_seconds"], prefill["slowest_seconds"]
        share = whole / prefill["pcp_world_size"] / slowest
        lines.append(
            f"{prefill['num_tokens']} tokens, P = {prefill['pcp_world_size']}: one GPU "
            f"{1e3 * whole:.1f} ms, the slowest rank {1e3 * slowest:.1f} ms, {share:.1%} of ideal."
        )
        beyond = list(prefill["beyond"].items())[:NUM_KERNELS]
        rows = [(f"`{name}`", f"{1e3 * seconds:.2f}") for name, seconds in beyond]
        lines += table(("kernel", "beyond its share, ms"), rows)
    return lines


def mla_prefill(result: dict[str, Any]) -> list[str]:
    """The context of a request, up-projected once or twice."""
    lines: dict[tuple[int, int], dict[str, Any]] = defaultdict(dict)
    for row in result["slowest"]:
        lines[row["num_tokens"], row["pcp_world_size"]][row["path"]] = row["seconds"]
    rows = []
    for (num_tokens, size), paths in sorted(lines.items()):
        line = [f"{num_tokens // 1024}k", str(size), milliseconds(paths["by row"], 2), "", "", ""]
        if "planned" in paths:
            planned = paths["planned"]["median"]
            saved = 1 - planned / paths["by row"]["median"]
            of_ideal = lines[num_tokens, 1]["by row"]["median"] / size / planned
            shares = [f"{100 * share:.1f} %" for share in (of_ideal, saved)]
            line[3:] = [milliseconds(paths["planned"], 2), *shares]
        rows.append(line)
    return table(("tokens", "P", "by row, ms", "planned, ms", "of ideal", "saved"), rows)


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
        p90). The bar is 1.95x at 4096 tokens, and not behind TP2. Two rounds, one of 8192 tokens.
        With another file behind `--json` the command measures anew.
        """,
        ttft_cpu,
    ),
    (
        "critical_path_h200",
        "One H200: a rank's own time to first token",
        """
        Qwen3-8B shape, bf16, dummy weights, eager, 32768 tokens a step, one output token. Ranks run
        one at a time on one GPU, with all of their work and nothing on a link; the slowest rank
        counts. The bar is 95 % of ideal at 32k and 128k: met but for P = 8 at 32k, where a rank has
        4096 tokens. Some of what is missing is known: every rank writes the KV of all tokens (as
        where ranks gather; copies, the default over NVLink, were not measured), and the time that
        the GPU is not busy, 3 to 6 ms a step, does not shrink with P. The rest has not been
        profiled.
        """,
        critical_path,
    ),
    (
        "critical_path_sparse_h200",
        "One H200: a rank's own time to first token, sparse MLA",
        """
        The same of 8 layers in the style of DeepSeek-V3.2, hidden size 4096, 64 heads, 64 experts
        that every rank has, index_topk 2048; other engines ran on the other GPU of the host.
        Indexers: from their input to the selected tokens, in all layers and steps of the slowest
        rank. Below 95 % of ideal are P = 4 and 8 at 32k and P = 8 at 128k. With P = 8 at 32k a rank
        has 4096 tokens, and its step is on the GPU for 92 of the 97 ms (P = 1: 605 of 610); it is
        not the indexers that do not shrink with P, and what does not has not been profiled.
        """,
        critical_path,
    ),
    (
        "decode_h200",
        "One H200: decode",
        """
        Qwen3-8B's shape with default compilation and CUDA graphs; time of a decode step. The
        broadcast of the tokens is not on a link here. The bar is 2 %.
        """,
        decode,
    ),
    (
        "kv_capacity_h200",
        "One H200: KV capacity",
        """
        Tokens that the engine reports room for, by P and D. The bar is 0.99, met. Other shapes were
        not measured. The figure of P = 8 is of commit a1ffff5 and an earlier form of the
        script (`--sizes 1 2 8`): of rank 0 alone, NCCL's own buffers not counted.
        """,
        capacity,
    ),
    (
        "dcp_cost_h200",
        "One H200: what sharing the KV cache costs",
        """
        P ranks with D = P beside the same ranks with D = 1; dummy weights, bf16, 8192 tokens a
        step. All ranks on one GPU, talking through sockets, other engines on the other GPU of the
        host: a wall time is the work and the socket traffic of all ranks, not latency over NVLink.
        Kernels: of all ranks, those that communicate apart; while several ranks have kernels to
        run, the GPU goes from one to the other, and the time of a kernel holds that of others, so
        that these sums are no measure of work. MiB: received by a rank, counted at the collectives,
        of a prefill or of one decode step, and by the formula of
        [collectives](../../docs/design/collectives.md); rest: logits and sampled tokens. A chunk is
        one step behind so many cached tokens. D = 4 had no time for more requests and a chunk. A
        decode step with D = 4 exchanges queries and partial outputs in each of 36 layers, here
        between ranks that take turns on the GPU.
        """,
        shared_cache,
    ),
    (
        "equality_h200",
        "H200: the same answers",
        """
        Small GQA model, bf16, 37 outputs an engine (1 to 5000 tokens, alone, together, prefix
        hits), all ranks of P = 2 and 4 on one GPU. Errors are of log-probabilities against the
        same model in fp32; ok means at most twice those of P = 1 in the same configuration,
        partitioned steps, prefix hits, and no line of ours that waits for the GPU. The last column
        counts outputs with another token than P = 1 somewhere: bf16 near-ties. The errors of 11.7
        and 6.4 are stock vLLM's, P = 1 with FULL graphs and FLASH_ATTN. D = P: ranks share the KV
        cache. Run in two calls, the second one for what the first had no time for; two cases with
        D = TP x P, which this model is refused with, are left out and `--models mqa` has them now.
        """,
        equality,
    ),
    (
        "equality_mla_moe_h200",
        "H200: the same answers, MLA and experts",
        """
        Small models in the style of DeepSeek-V2 (mla; it has experts, too) and of Qwen3-MoE (moe),
        P = 2, judged the same way. With mla the error with P = 1 is that of prompts that ran alone.
        Where tokens are routed, a near-tie between experts is a jump: there the worst error may be
        four times that of P = 1, the mean twice. EP: whole experts on each rank.
        """,
        equality,
    ),
    (
        "equality_eager_h200",
        "H200: the same answers, all kinds of MLA and experts, mostly eager",
        """
        As above, all but one eager; P = 2, of dense MLA also 4, but for FLASH_ATTN_MLA and
        TRITON_MLA where ranks share the cache. sparse: in the style of DeepSeek-V3.2, of 8 layers;
        mqa: one KV head. Two calls: the command below, and `--models mla mqa moe glm4_moe gpt_oss`,
        of which not all engines had time to run; judged on a CPU. Commit
        84c3b60, which is not kept, is 59b54a8 with another estimate of memory.
        """,
        equality,
    ),
    (
        "equality_graphs_h200",
        "H200: the same answers, sparse MLA and shared KV caches of MLA, with CUDA graphs",
        """
        As above, P = 2 and 4, with 4 tokens for each prompt that runs alone; sparse_few_heads: 16
        heads, which FLASHMLA_SPARSE pads. Two calls: the command below, and `--jobs 9 --models mla
        --caches shared --graphs FULL_AND_PIECEWISE`, judged on a CPU; its engines with P > 1
        answered and then hung as they ended, as CUDA graphs outlived what they communicate with
        (7d3368a is to repair it; these cases have not run again).
        """,
        equality,
    ),
    (
        "equality_sparse_h200",
        "H200: the same answers, sparse MLA with shared caches and with prompts of 32k tokens",
        """
        As above. sparse: D = P = 2 and 4, and TP = 2, P = 2, D = 4; two engines with CUDA graphs
        had no time, FLASH_ATTN_MLA_SPARSE with P = 4 and FLASHMLA_SPARSE in FP8 with D = TP x P.
        Eagerly, what queries select in the first layer is the same, all of it. sparse_long: prompts
        of 3, 12000 and 32768 tokens and one that finds 12000 in the cache, P = 2 and 4; fp32 has no
        room for these, so P = 1 in bf16 takes its place, error is the distance to it, and the bar
        is 0.5; no token differs, nor what queries select in the first layer. Engines of commit
        597c97c answered in an earlier call. Three calls: those for sparse, judged by the command
        below, and `--jobs 5 --models sparse_long --caches whole`.
        """,
        equality,
    ),
    (
        "equality_more_h200",
        "H200: the same answers, what else was missing, with CUDA graphs",
        """
        As above: FLASH_ATTN_MLA, FLASHMLA and TRITON_MLA, whole latents gathered and all rows of
        the last layer, P = 2 and 4; experts of Qwen3-MoE's style with P = 4; the last layer of
        sampled rows, with attention, in GQA over an FP8 cache, MLA and Qwen3-MoE's style, there
        also with copies, whole and replicated experts; gpt-oss's style with copies and sampled
        rows; D = TP x P with one KV head; MLA with D = P = 4, eagerly. Six calls: the command
        below; `--models mla --backends FLASH_ATTN_MLA FLASHMLA --kv-dtypes auto fp8 --experts
        sliced --caches whole --last-layers all --graphs FULL_AND_PIECEWISE --sizes 2 4`; `--models
        moe --experts sliced parallel --caches whole --last-layers all --graphs FULL_AND_PIECEWISE
        eager --sizes 4`; `--models mla moe
        --last-layers sampled --backends FLASH_ATTN_MLA TRITON_MLA FLASH_ATTN --caches whole copied
        --graphs FULL_AND_PIECEWISE --sizes 2`, judged on a CPU, and the same for FLASHMLA and
        gpt-oss's style; `--models mla --backends FLASH_ATTN_MLA --caches shared --graphs eager
        --sizes 4`; `--models gqa --kv-dtypes fp8 --last-layers sampled --backends FLASH_ATTN
        --caches whole --graphs FULL_AND_PIECEWISE --sizes 2`. TRITON_MLA in FP8, 1.5 times the
        average error of P = 1, was failed by the script of that commit, which held answers of 12
        tokens against some of 4. Today's has judged the same answers on a CPU: `--models mla
        --backends TRITON_MLA --kv-dtypes fp8 --caches whole --last-layers all --graphs
        FULL_AND_PIECEWISE --minutes 0`.
        """,
        equality,
    ),
    (
        "equality_copies_h200",
        "H200: the same answers, as is the default where NVLink is: KV copied to other ranks",
        """
        As above, P = 2 and 4, all ranks on one GPU: nothing of this went over NVLink. With the last
        layer of sampled rows: CUDA graphs, P = 2. Two calls: the command below, and `--jobs 27
        --models gqa mla --caches copied --graphs FULL_AND_PIECEWISE`, of which FLASHINFER had no
        time to compile its kernels; that one was judged on a CPU.
        """,
        equality,
    ),
    (
        "offload_h200",
        "H200: the same answers, from KV caches that were offloaded to CPU memory",
        """
        P = 2 on one GPU; CUDA graphs with the native connector. Three prompts of 1536 tokens and a
        bit come back with other endings after others have evicted them. The largest error of a
        log-probability, against fp32; ok means all three were loaded, and at most twice (mla: four
        times) the error of P = 1 without offloading.
        """,
        offload,
    ),
    (
        "ttft_gpus_h200",
        "Two H200s: time to first token",
        """
        Dummy weights, routers that route tokens to all experts, bf16, 32768 tokens a step, one
        request at a time, one output token; then time per output token. Medians, also of the
        factors to one GPU, which is the first of the two; the other one was not timed alone. TP2 is
        stock vLLM's. The bars with P = 2 are, for Qwen3-8B's shape, 1.8x at 4k, met, 1.9x at 8k,
        missed by less than 1 %, 1.95x at 32k and 100k, met (1.92x and, at 32k, 1.94x in "what the
        defaults save"); ahead of TP from 8k on, met, and at 4k too; time per output token within 2
        % of one GPU's, met. Two calls: the command below, and the same with `--shapes
        deepseek-v2-lite --measures ttft --kv-gib 4 --layouts 'one GPU' PCP2 'PCP2 replicated'`.
        """,
        ttft_gpus,
    ),
    (
        "ttft_gpus_mla_h200",
        "Two H200s: time to first token, MLA and experts",
        """
        The same on another machine and a later commit. "PCP2 sampled", then an option, leaves rows
        out of the attention of the last layer, too, which is the default since. The bars are not to
        be slower at 4k, met, 1.8x at 32k, met by "PCP2 sampled" (and above with replicated
        experts), missed with whole experts (EP); ahead of TP from 8k on, met, and at 4k too; time
        per output token within 2 % of one GPU's: met with 16 and 64 requests, with one it takes 1.1
        times as long (1.05 in the next section). Two calls: the command below, and the
        same with `--measures ttft decode --layouts 'one GPU' PCP2 'PCP2 sampled'`.
        """,
        ttft_gpus,
    ),
    (
        "ttft_gpus_experts_h200",
        "Two H200s: time to first token, three shapes with experts",
        """
        The same on another machine and a later commit, with which experts of decode steps are added
        up in the memory of the other GPU. DeepSeek-V3.2's style has 8 layers. The bars are not to
        be slower at 4k, met; 1.8x at 32k, met but for Qwen3-30B-A3B's shape, which misses it by 1
        %; ahead of TP from 8k on, met by DeepSeek-V3.2's style (for Qwen3-30B-A3B's it was not
        timed); time per output token within 2 % of one GPU's: missed with one request, but for
        DeepSeek-V3.2's style, met with 16 and 64. With replicated experts there is no all-reduce,
        and it takes 1.020 to 1.025 of one GPU's, which misses it by up to 0.5 %. Three calls: the
        command below, and `--measures ttft decode` with all lengths, `--shapes qwen3-30b-a3b
        --layouts 'one GPU' PCP2 --together 2 --kv-gib 10` and `--shapes deepseek-v32-8-layers
        --layouts 'one GPU' PCP2 TP2`.
        """,
        ttft_gpus,
    ),
    (
        "ttft_gpus_more_experts_h200",
        "Two H200s: experts whole and replicated, and the kernels of decode steps",
        """
        The same on another machine and a later commit. With replicated experts Qwen3-30B-A3B's
        shape meets 1.8x at 32k, and its tokens take as long as on one GPU; with experts that ranks
        share it misses that by 1 % again, and with whole experts by 4 %. The 32k of these two are
        of a form that is not kept, of commit 8cbf237: one half of the rows was exchanged while
        experts computed the other, and the factor is that of the section before. A token of
        DeepSeek-V2-Lite's shape takes 0.96 of one GPU's with one request here, 1.05 on the machine
        of the section before; why is not known. The second GPU alone takes 1.003 of the first.
        Three calls: the command below, of which TP2 had no room, the same with `--layouts 'one GPU'
        PCP2 --together 2 --kv-gib 8`, and `--measures decode decode_trace --concurrencies 1
        --shapes deepseek-v2-lite --layouts 'one GPU' 'GPU 1' PCP2 'PCP2 replicated' --together 4
        --kv-gib 3`.
        """,
        ttft_gpus,
    ),
    (
        "ttft_gpus_eager_h200",
        "Two H200s: eager engines",
        """
        The machine and commit of "three shapes with experts", `--enforce-eager`. Qwen3-8B's shape
        is ahead of TP at all lengths, below its bars (of default graphs) by up to 3 %.
        DeepSeek-V2-Lite's shape is slower than one GPU at 4k, where ranks wait for the host:
        kernels that do not wait for another rank take a fifth of the time. Of 32k tokens the
        exchange of hidden rows and latents is 7 % of the time, of Qwen3-8B's shape that of KV 1.5
        %, with TP 10 %. Two calls: the command below, and `--measures ttft trace gather experts
        --lengths 4096 32768 --shapes deepseek-v2-lite --layouts 'one GPU' PCP2 'PCP2 EP' --kv-gib
        4`.
        """,
        ttft_gpus,
    ),
    (
        "ttft_gpus_eager_mla_h200",
        "Two H200s: an eager engine of MLA and experts",
        """
        The same on another machine and a later commit. Up to 8k tokens the host decides: P = 2
        takes 103 ms at 4k, twice one GPU's time, and 105 at 8k, the same; TP took 84 ms in the
        first two runs at 4k, 52 to 56 in the other three, and what the host does for a layer has
        not been timed in such a run. From 32k on P = 2 is ahead of TP. By default, with graphs,
        P = 2 takes 35 and 63 ms at 4k and 8k.
        """,
        ttft_gpus,
    ),
    (
        "ttft_gpus_equality_h200",
        "Two H200s: the same answers over NVLink",
        """
        Small checkpoints in the style of each shape, engines as by default: CUDA graphs, KV copied
        to the other GPU, the last layer of sampled rows, experts added up in the other GPU's
        memory. 18 prompts of 1 to 5000 tokens, alone and then together, 2048 tokens a step, 16
        greedy tokens each. The last column compares the log-probabilities of the chosen tokens up
        to the first one that differs, that one included. The 0.24 is one GPU's error: alone, that
        prompt has P = 2's figure there, too; vLLM 0.25.1 is wrong about some prompts of dense MLA
        that run together.
        """,
        ttft_gpus,
    ),
    (
        "ttft_options_h200",
        "Two H200s: what the defaults save",
        """
        The same on another machine, and an earlier commit, when these were options: PCP2 gathers
        and computes all rows of the last layer; "sampled" computes what is sampled from, and
        "everything" copies KV to other ranks' caches besides, which both are the default since (the
        layouts are "PCP2 gather, all rows", "PCP2 gather" and "PCP2" now, but that MLA's attention
        leaves rows out, too). The last table has times as rank 0 sees them. DeepSeek-V2-Lite on one
        GPU takes 55 or 90 ms at 4k from one measurement to the next, for a reason that is not
        known. Two calls: the command below, and the same with `--shapes deepseek-v2-lite --kv-gib
        3` and its layouts.
        """,
        ttft_gpus,
    ),
    (
        "layer_profile_h200",
        "What a layer costs in a partitioned prefill",
        """
        Eager; a layer of experts, as the difference of two depths. Host: time to enqueue it. Rank
        0. Since then steps of up to 4608 tokens a rank replay graphs by default.
        """,
        layer_profile,
    ),
    (
        "rival_h200",
        "One H200: beside the PCP of vLLM 0.26.0",
        """
        DeepSeek-V2-Lite's shape, default graphs, the rival's PIECEWISE, which is all that its PCP
        takes; ours on vLLM 0.25.1. All ranks on one GPU, talking through sockets: the work of all
        ranks and their communication, not time to first token on several GPUs. Beside P = 2 other
        engines ran on the other GPU of the host. With P = 4 both sides ran at once, each on a GPU
        of its own: `--sizes 4 --sides ours` and `--sides rival`.
        """,
        rival,
    ),
    (
        "rival_p4_h200",
        "One H200: beside the PCP of vLLM 0.26.0, P = 4",
        """
        The same shape and graphs, one side after the other on one GPU, nothing beside them:
        `--sizes 4 --sides ours`, then `--sides rival`. Prompts of 2k and 12k on one machine
        (commit 3613b54, 3 repeats), the rest on another, each with 16 cores. A
        prefill has 328 of our collectives, or 532 of the rival's, of the four ranks together.
        """,
        rival,
    ),
    (
        "rival_sparse_h200",
        "One H200: beside the PCP of vLLM 0.26.0, sparse MLA",
        """
        8 layers in the style of DeepSeek-V3.2, both eager, ours on vLLM 0.25.1. P = 2, both ranks
        on one GPU, talking through sockets, other engines on the other GPU of the host: their work
        and their communication, not time to first token on two GPUs.
        """,
        rival,
    ),
    (
        "rank_kernels_sparse_h200",
        "One H200: what does not shrink with P, sparse MLA",
        """
        8 layers in the style of DeepSeek-V3.2, eager; the ranks of P = 2 one at a time, with
        nothing on a link and each with all experts. What each kernel takes on the rank where it
        takes most, less a half of what it takes on one GPU; matrix products are other kernels for
        other sizes.
        """,
        rank_kernels,
    ),
    (
        "mla_prefill_h200",
        "One H200: context of a request up-projected once for its two rows",
        """
        Prefill attention of one layer of DeepSeek-V2-Lite's shape, all steps of a prompt, 32768
        tokens a step; the slowest rank, ranks one at a time. By row: vLLM's own path; of ideal and
        saved: by the plan. Other engines ran on the other GPU of the host.
        """,
        mla_prefill,
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

TESTS = """
`python -m pytest -m gpu tests/distributed/pcp/test_all_reduce.py
tests/distributed/pcp/test_peer_caches.py`, 2026-11-30, commit 795a05b, 2 x NVIDIA H200: 2 passed.
Memory of the other GPU is read and written there over NVLink.

`python -m pytest -m gpu tests/distributed tests/v1 tests/model_executor`, 2026-12-01, commit
3613b54, one NVIDIA H200: 165 passed, 72 skipped (FlashAttention 2, two GPUs, interpreted kernels),
2 failed: `test_merge_partials.py`, whose oracle merged what the twin had merged. Repaired, its 8
passed (commit cc5b649).
"""

NOT_MEASURED = """
Code later than the commits named above: on GPUs it has not run. Over a link between GPUs: P above
2, TP x P, ranks that share the KV cache, answers with experts whole or replicated
(`benchmarks/ttft_gpus.py`), times of several prompts at once; Qwen3-30B-A3B's shape with TP; decode
steps of DeepSeek-V2-Lite's with whole experts and with TP; DeepSeek-V3.2's style eagerly. KV
capacity of other shapes (`kv_capacity.py`). What sharing the KV cache costs in decode steps of
several requests and with CUDA graphs (`dcp_cost.py`), kernels that do not shrink with P of other
shapes, at 128k and with other P (`rank_kernels.py`); beside the PCP of vLLM 0.26.0, sparse MLA with
P = 4 (`rival.py`). Answers on GPUs: with CUDA graphs gpt-oss's style, gathered, and GLM-4-MoE's
with whole experts; replicated experts with P = 4; copies to other ranks with FLASHINFER and
TRITON_MLA, with TP, with GLM-4-MoE's style and, of experts of GQA models, with P = 4; the last
layer of sampled rows with P = 4, with other GQA backends than FLASH_ATTN, and with D > 1; with D >
1 other graph modes than FULL_AND_PIECEWISE; sparse MLA with D > 1 and CUDA graphs where TP ranks
share the cache, too, and on FLASH_ATTN_MLA_SPARSE with P = 4; accuracies of real models
(`tests/evals/gsm8k`). Blackwell (CUTLASS_MLA, FLASHINFER_MLA, FLASHINFER_MLA_SPARSE),
engines with FLASH_ATTN_DIFFKV, more than one host, AMX and NEON, FlashAttention 2 and 4.
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
    lines += ["## Tests on GPUs", "", *TESTS.strip().splitlines(), ""]
    lines += ["## Not measured", "", *NOT_MEASURED.strip().splitlines()]
    (RESULTS / "README.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Host time that a step spends on partition and index building, by batch size and ``P``.

    python benchmarks/layout_overhead.py [--json PATH]

Half of the requests are decodes, half prefills of 1 to 300 tokens, at least one of them long enough
to be partitioned. Timed is what a rank does once a step: plan, query starts, gather index, and the
way back for the last token of each request. ``decode only`` is a step of as many decodes, which is
left as it is. Every repeat has another batch.
"""

from __future__ import annotations

import argparse
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
from harness import print_table, spread, write_json

from vllm.v1.worker.gpu.pcp.layout import BoolArray, Int32Array, plan_partition

NUM_REQS = (1, 16, 64, 256)
PCP_WORLD_SIZES = (2, 4, 8, 16)
NUM_WARMUP = 50
BAR = {"num_reqs": 256, "pcp_world_size": 8, "median_ms": 0.3}


class Batch(NamedTuple):
    """Arguments of plan_partition, and the last token of each request in the global batch."""

    num_scheduled_tokens: Int32Array
    num_computed_tokens: Int32Array
    is_prefilling: BoolArray
    last_tokens: Int32Array


def make_batch(
    rng: np.random.Generator, num_reqs: int, pcp_world_size: int, *, decode_only: bool = False
) -> Batch:
    """Decodes first, as the scheduler's batches are ordered."""
    num_decodes = num_reqs if decode_only else num_reqs // 2
    num_scheduled_tokens = np.ones(num_reqs, dtype=np.int32)
    num_scheduled_tokens[num_decodes:] = rng.integers(1, 301, num_reqs - num_decodes)
    if not decode_only:
        num_scheduled_tokens[-1] = rng.integers(2 * pcp_world_size, 301)
    is_prefilling = np.arange(num_reqs) >= num_decodes
    num_computed_tokens = rng.integers(1, 1000, num_reqs).astype(np.int32)
    num_computed_tokens[is_prefilling & (rng.random(num_reqs) < 0.5)] = 0
    last_tokens = np.cumsum(num_scheduled_tokens, dtype=np.int32) - 1
    return Batch(num_scheduled_tokens, num_computed_tokens, is_prefilling, last_tokens)


def run_step(batch: Batch, pcp_world_size: int, pcp_rank: int) -> None:
    """Do once what a rank does once a step."""
    plan = plan_partition(*batch[:3], pcp_world_size=pcp_world_size)
    if plan is None:
        return
    plan.query_start_loc(pcp_rank)
    plan.gather_idx(pcp_rank)
    plan.plan_restore(batch.last_tokens)


def time_ms(batches: list[Batch], pcp_world_size: int) -> dict[str, float]:
    """Time one step a batch, after the warm-up; the ranks take turns."""
    samples = []
    for i, batch in enumerate(batches):
        start = perf_counter_ns()
        run_step(batch, pcp_world_size, i % pcp_world_size)
        samples.append((perf_counter_ns() - start) / 1e6)
    return spread(samples[NUM_WARMUP:])


def measure(num_reqs: int, pcp_world_size: int, num_repeats: int) -> dict[str, Any]:
    """Return one row of the result, times in ms."""
    rng = np.random.default_rng(0)
    row: dict[str, Any] = {"num_reqs": num_reqs, "pcp_world_size": pcp_world_size}
    for key, decode_only in (("step_ms", False), ("decode_only_ms", True)):
        batches = [
            make_batch(rng, num_reqs, pcp_world_size, decode_only=decode_only)
            for _ in range(NUM_WARMUP + num_repeats)
        ]
        row[key] = time_ms(batches, pcp_world_size)
    return row


def main() -> None:
    """Print the table and, if asked to, keep it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", metavar="PATH", help="write the result there")
    parser.add_argument("--repeats", type=int, default=500, help="timed steps of each row")
    args = parser.parse_args()

    rows = [measure(n, size, args.repeats) for n in NUM_REQS for size in PCP_WORLD_SIZES]
    headers = ["requests", "P", "median ms", "p10", "p90", "decode only ms"]
    table = []
    for row in rows:
        step = row["step_ms"]
        times = [step["median"], step["p10"], step["p90"], row["decode_only_ms"]["median"]]
        table.append([row["num_reqs"], row["pcp_world_size"], *times])
    print_table(headers, table)
    print(
        "Bar: a median below {median_ms} ms at {num_reqs} requests, P = {pcp_world_size}.".format(
            **BAR
        )
    )
    if args.json:
        write_json(args.json, "layout_overhead", rows, bar=BAR)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Ranks that initialise vLLM's groups, then ours, and use them; each saves what it sees.

    python -m tests.distributed.pcp.ranks FOLDER 1x1x2x2x4 ...

Each DPxPPxPxTPxD is a set of processes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.pcp.groups import init_dcp_group
from vllm.distributed.pcp.kv_shards import KVShards
from vllm.distributed.pcp.shard_collectives import (
    exchange_blocks,
    gather_heads,
    gather_lse,
    gather_shards,
    kv_shards,
    sum_over_shards,
)

GROUPS = ("tp", "dcp", "pcp", "pp", "dp", "ep")


def ranks_of_groups() -> dict[str, list[int]]:
    """Return the ranks of this rank's group of each kind."""
    return {name: getattr(parallel_state, f"get_{name}_group")().ranks for name in GROUPS}


def exchanged(shards: KVShards, num_query_groups: int) -> list[torch.Tensor]:
    """Return what comes back of one block for all, one for each TP rank and one for each rank.

    A block holds the sender's DCP rank and its own number.
    """
    exchanges = []
    for num_blocks in (1, num_query_groups, shards.world_size):
        sent = torch.tensor([(shards.rank, block) for block in range(num_blocks)])
        exchanges.append((sent, torch.full((shards.world_size, 2), -1)))
    exchange_blocks(*exchanges)
    return [received for _, received in exchanges]


def use_groups() -> dict[str, Any]:
    """Run each collective once, with the rank's DCP rank for values, and return what comes back."""
    shards = kv_shards(interleave=2)
    gathered = torch.full((3 * shards.world_size, 2), -1.0)
    own_rows = shards.own_rows(gathered)
    own_rows.fill_(shards.rank)
    gather_shards(gathered, own_rows)
    value = torch.full((2, 3), float(shards.rank))
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    num_query_groups = max(1, shards.world_size // parallel_state.get_pcp_group().world_size)
    return {
        "dcp_rank": shards.rank,
        "gather_order": shards.gather_order,
        "gathered": gathered,
        "exchanged": exchanged(shards, num_query_groups),
        "lse": gather_lse(value),
        "sum": sum_over_shards(value.clone()),
        "heads": gather_heads(torch.full((2, 1, 3), float(tp_rank))),
    }


def run_rank(rank: int, world: str, folder: Path) -> None:
    """Run one rank of a world."""
    dp, pp, pcp, tp, dcp = (int(size) for size in world.split("x"))
    torch.set_num_threads(1)
    os.environ["VLLM_DIST_IDENT"] = f"groups-{os.getppid()}-{world}"
    config = VllmConfig(device_config=DeviceConfig("cpu"))
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            dp * pp * pcp * tp, rank, f"file://{folder}/store-{world}", rank, "gloo"
        )
        # Only now: vLLM would take each replica for a world of its own ranks.
        config.parallel_config.data_parallel_size = dp
        parallel_state.initialize_model_parallel(tp, pp, pcp, dcp)
        before = ranks_of_groups()
        stock = parallel_state.get_dcp_group()
        num_groups = len(dist.distributed_c10d._world.pg_map)
        init_dcp_group()
        results = {
            "before": before,
            "after": ranks_of_groups(),
            "is_stock": parallel_state.get_dcp_group() is stock,
            "num_new_groups": len(dist.distributed_c10d._world.pg_map) - num_groups,
            **use_groups(),
        }
        torch.save(results, folder / f"{world}-{rank}.pt")
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def main(folder: Path, worlds: list[str]) -> None:
    """Run each set of ranks to its end, one after the other."""
    context = multiprocessing.get_context("fork")
    for world in worlds:
        dp, pp, pcp, tp, _ = (int(size) for size in world.split("x"))
        ranks = [
            context.Process(target=run_rank, args=(rank, world, folder))
            for rank in range(dp * pp * pcp * tp)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(f"{world}: ranks ended with {[process.exitcode for process in ranks]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

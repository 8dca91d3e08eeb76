# SPDX-License-Identifier: Apache-2.0
"""DCP groups go along the PCP axis first, and nothing else changes; on paper and with processes."""

from __future__ import annotations

from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.processes import run_module
from vllm.distributed.pcp.groups import dcp_group_ranks

# DP x PP x P x TP x D.
WORLDS = (
    "1x1x2x2x1",
    "1x1x2x2x2",
    "1x1x2x2x4",
    "1x1x3x1x3",
    "2x1x2x1x2",
    "1x2x2x2x4",
)


def one_by_one(outer: int, tp: int, pcp: int, dcp: int) -> list[list[int]]:
    """Return the groups of every block of P x TP ranks, rank by rank."""
    groups: list[list[int]] = []
    for block in range(outer):
        by_head = [
            block * pcp * tp + pcp_rank * tp + tp_rank
            for tp_rank in range(tp)
            for pcp_rank in range(pcp)
        ]
        while by_head:
            groups.append([by_head.pop(0) for _ in range(dcp)])
    return groups


@pytest.mark.parametrize(
    ("tp", "pcp", "dcp", "expected"),
    [
        (2, 2, 1, [[0], [2], [1], [3]]),
        (2, 2, 2, [[0, 2], [1, 3]]),
        (2, 2, 4, [[0, 2, 1, 3]]),
        (1, 4, 4, [[0, 1, 2, 3]]),
        (4, 2, 2, [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_the_pcp_axis_comes_first(tp: int, pcp: int, dcp: int, expected: list[list[int]]) -> None:
    assert dcp_group_ranks(tp * pcp, tp, pcp, dcp) == expected


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("pcp", [2, 3, 4, 8])
def test_groups_of_any_legal_size(tp: int, pcp: int) -> None:
    for outer, dcp in product((1, 2, 6), (1, pcp, tp * pcp)):
        groups = dcp_group_ranks(outer * pcp * tp, tp, pcp, dcp)
        assert groups == one_by_one(outer, tp, pcp, dcp)
        # Ranks that differ in DP or PP are never together.
        assert all(len({rank // (pcp * tp) for rank in group}) == 1 for group in groups)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of what each rank of each world saw."""
    if "cpu" not in version("vllm"):
        pytest.skip("the ranks are CPU processes")
    folder = tmp_path_factory.mktemp("groups")
    run_module("tests.distributed.pcp.ranks", folder, *WORLDS, log=folder / "ranks.log")
    return folder


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> list[int]:
    """Return the sizes of a world."""
    return [int(size) for size in request.param.split("x")]


@pytest.fixture
def ranks(world: list[int], folder: Path) -> list[dict[str, Any]]:
    """Return what each rank of the world saw."""
    dp, pp, pcp, tp, _ = world
    name = "x".join(map(str, world))
    return [torch.load(folder / f"{name}-{rank}.pt") for rank in range(dp * pp * pcp * tp)]


@pytest.mark.slow
def test_processes_have_these_groups_and_all_others_as_before(
    world: list[int], ranks: list[dict[str, Any]]
) -> None:
    dp, pp, pcp, tp, dcp = world
    groups = one_by_one(dp * pp, tp, pcp, dcp)
    for rank, seen in enumerate(ranks):
        (own,) = (group for group in groups if rank in group)
        assert seen["after"]["dcp"] == own
        assert seen["dcp_rank"] == own.index(rank)
        for name in ("tp", "pcp", "pp", "dp", "ep"):
            assert seen["after"][name] == seen["before"][name], name


@pytest.mark.slow
def test_a_group_of_vllm_stays_where_it_is_right_and_goes_where_it_is_not(
    world: list[int], ranks: list[dict[str, Any]]
) -> None:
    tp, dcp = world[3:]
    assert {seen["is_stock"] for seen in ranks} == {tp == 1 or dcp == 1}
    # As many process groups as before: the old ones are destroyed.
    assert {seen["num_new_groups"] for seen in ranks} == {0}


@pytest.mark.slow
def test_collectives_of_real_ranks(world: list[int], ranks: list[dict[str, Any]]) -> None:
    tp, dcp = world[3:]
    for seen in ranks:
        # torch.distributed has an order of its own; this says where each DCP rank's rows are.
        by_rank = seen["gathered"].view(dcp, 3, 2)[list(seen["gather_order"])]
        assert torch.equal(by_rank, torch.arange(dcp)[:, None, None].expand(dcp, 3, 2).float())
        assert sorted(seen["lse"][:, 0, 0].tolist()) == list(range(dcp))
        assert seen["lse"].shape == (dcp, 2, 3)
        assert (seen["sum"] == sum(range(dcp))).all()
        assert seen["heads"][0, :, 0].tolist() == list(range(tp))


@pytest.mark.slow
def test_blocks_reach_whom_they_are_for(world: list[int], ranks: list[dict[str, Any]]) -> None:
    _, _, pcp, tp, dcp = world
    for rank, seen in enumerate(ranks):
        order = seen["gather_order"]
        senders = sorted(range(dcp), key=lambda sender: order[sender])
        tp_rank = rank % tp if dcp > pcp else 0
        own = (0, tp_rank, order[seen["dcp_rank"]])
        for block, received in zip(own, seen["exchanged"], strict=True):
            assert received.tolist() == [[sender, block] for sender in senders]


@pytest.mark.slow
def test_gathered_rows_are_not_in_the_order_of_dcp_ranks(folder: Path) -> None:
    """Whoever takes them to be so reads other ranks' tokens."""
    seen = torch.load(folder / "1x1x2x2x4-0.pt")
    assert seen["gather_order"] == (0, 2, 1, 3)
    assert seen["gathered"][:, 0].tolist() == [0, 0, 0, 2, 2, 2, 1, 1, 1, 3, 3, 3]

# SPDX-License-Identifier: Apache-2.0
"""Selected tokens are looked up where they stand: against loops over tokens, kernels and twins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import Interpreter
from vllm.distributed.pcp.kv_shards import KVShards
from vllm.v1.attention.backends.pcp.mla.selected_slots import gathered_slots, kept_slots

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
NUM_ROWS, NUM_SELECTED, BLOCK_SIZE, NUM_BLOCKS = 6, 12, 4, 9
# Tokens of each row's request; less than are selected, and none.
LENGTHS = (60, 7, 0, 1, 31, 12)

pytestmark: list[pytest.MarkDecorator] = [pytest.mark.gpu] if HAS_GPU else []


def selections() -> torch.Tensor:
    """Return what rows selected, views of a wider tensor, gaps among them."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.full((NUM_ROWS, NUM_SELECTED + 3), -1, dtype=torch.int32)
    for row, length in enumerate(LENGTHS):
        tokens = torch.randperm(length, generator=generator)[: NUM_SELECTED - row % 2]
        wide[row, : len(tokens)] = tokens.int()
    wide[4, 2] = -1
    return wide[:, :NUM_SELECTED]


def block_table() -> torch.Tensor:
    """Return the blocks of each row's request, a view of a wider tensor."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randperm(NUM_ROWS * (NUM_BLOCKS + 2), generator=generator).int()
    return blocks.view(NUM_ROWS, -1)[:, :NUM_BLOCKS]


def expected_kept(shards: KVShards) -> tuple[list[list[int]], list[int]]:
    """Return slots, one token after the other."""
    slots = []
    for positions, blocks in zip(selections().tolist(), block_table().tolist(), strict=True):
        # What the rank keeps of a request, one behind the other.
        kept = [
            position
            for position in range(max(LENGTHS))
            if position // shards.interleave % shards.world_size == shards.rank
        ]
        local = [kept.index(position) for position in positions if position in kept]
        slots.append([blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in local])
    return [row + [-1] * (NUM_SELECTED - len(row)) for row in slots], [len(row) for row in slots]


def kept_by_kernel(shards: KVShards) -> Any:
    """Return slots from the kernel, interpreted or not."""
    from vllm.v1.attention.backends.pcp.mla import selected_slots

    positions, table = selections(), block_table()
    slots, num_slots = positions.new_empty(positions.shape), positions.new_empty(NUM_ROWS)
    kernel: Any = selected_slots._kept_slots_kernel
    kernel[(NUM_ROWS,)](
        slots,
        num_slots,
        positions,
        table,
        positions.stride(0),
        table.stride(0),
        shards.rank,
        shards.world_size,
        shards.interleave,
        BLOCK_SIZE,
        NUM_SELECTED,
        16,
    )
    return slots.tolist(), num_slots.tolist()


SHARDS = [KVShards(2, 0), KVShards(2, 1, 4), KVShards(3, 2, 2), KVShards(4, 3)]


@pytest.mark.parametrize("shards", SHARDS)
def test_slots_of_what_a_rank_keeps(shards: KVShards) -> None:
    slots, num_slots = kept_slots(
        selections().to(DEVICE), block_table().to(DEVICE), shards, BLOCK_SIZE
    )
    assert (slots.tolist(), num_slots.tolist()) == expected_kept(shards)
    assert slots.dtype == num_slots.dtype == torch.int32


@pytest.mark.skipif(HAS_GPU, reason="the function is the kernel there")
@pytest.mark.parametrize("shards", SHARDS[1:3])
def test_the_kernel_finds_what_a_rank_keeps(interpreter: Interpreter, shards: KVShards) -> None:
    assert interpreter(kept_by_kernel, shards) == expected_kept(shards)


def test_ranks_keep_each_selected_token_once() -> None:
    num_kept = sum(sum(expected_kept(KVShards(4, rank))[1]) for rank in range(4))
    assert num_kept == int((selections() >= 0).sum())


def expected_gathered() -> tuple[torch.Tensor, torch.Tensor, list[list[int]], list[int]]:
    """Return where requests begin, a row for each token, and the slots."""
    order = torch.randperm(sum(LENGTHS) + 5, generator=torch.Generator().manual_seed(2)).int()
    order = order[: sum(LENGTHS)]
    first = torch.tensor([sum(LENGTHS[:row]) for row in range(NUM_ROWS)], dtype=torch.int32)
    slots = [
        [-1 if token < 0 else int(order[start + token]) for token in row]
        for row, start in zip(selections().tolist(), first.tolist(), strict=True)
    ]
    return first, order, slots, [sum(slot >= 0 for slot in row) for row in slots]


def gathered_by_kernel() -> Any:
    """Return slots from the kernel, interpreted or not."""
    from vllm.v1.attention.backends.pcp.mla import selected_slots

    first, order, _, _ = expected_gathered()
    positions = selections()
    slots, num_slots = positions.new_empty(positions.shape), positions.new_empty(NUM_ROWS)
    kernel: Any = selected_slots._gathered_slots_kernel
    kernel[(NUM_ROWS,)](
        slots, num_slots, positions, first, order, positions.stride(0), NUM_SELECTED, 16
    )
    return slots.tolist(), num_slots.tolist()


def test_slots_among_gathered_rows() -> None:
    first, order, expected, num_expected = expected_gathered()
    slots, num_slots = gathered_slots(selections().to(DEVICE), first.to(DEVICE), order.to(DEVICE))
    assert slots.tolist() == expected
    assert num_slots.tolist() == num_expected
    assert slots.dtype == num_slots.dtype == torch.int32


@pytest.mark.skipif(HAS_GPU, reason="the function is the kernel there")
def test_the_kernel_finds_gathered_rows(interpreter: Interpreter) -> None:
    assert interpreter(gathered_by_kernel) == expected_gathered()[2:]

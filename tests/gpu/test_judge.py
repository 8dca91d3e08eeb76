# SPDX-License-Identifier: Apache-2.0
"""What ``equality.py`` lets pass, and what not; needs no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from equality import TOGETHER, Case, is_as_good

NUM_TOGETHER, NUM_ALONE = len(TOGETHER), 17
MLA = Case("mla", "TRITON_MLA", "fp8", "eager", 2)
GQA = Case("gqa", "FLASH_ATTN", "auto", "eager", 2)


def errors(together: float, alone: float, *worst: tuple[int, float]) -> list[float]:
    """Return the error of each output, but for some other ones."""
    errors = [together] * NUM_TOGETHER + [alone] * NUM_ALONE
    for index, error in worst:
        errors[index] = error
    return errors


# Outputs of prompts that run together are of more tokens, so that the worst of them is worse. Of
# P = 1 one of them is wrong.
PLAIN = errors(0.08, 0.045, (3, 8.0), (-1, 0.08))


@pytest.mark.parametrize(
    ("ours", "is_ok"),
    [
        (errors(0.113, 0.078), True),
        (errors(0.17, 0.05), False),
        (errors(0.09, 0.1), False),
        (errors(0.08, 0.05, (5, 0.31)), True),
        (errors(0.08, 0.05, (5, 0.33)), False),
        (errors(0.08, 0.05, (-2, 0.33)), False),
        (PLAIN, False),
    ],
    ids=[
        "as FP8 has it",
        "together twice as bad",
        "alone twice as bad",
        "a jump",
        "a wrong row together",
        "a wrong row alone",
        "wrong where P = 1 is",
    ],
)
def test_dense_mla_is_compared_with_what_one_rank_has_right(ours: list[float], is_ok: bool) -> None:
    assert is_as_good(MLA, ours, PLAIN) == is_ok


@pytest.mark.parametrize(("factor", "is_ok"), [(1.9, True), (2.1, False)])
@pytest.mark.parametrize("index", [0, -1])
def test_the_worst_error_is_at_most_twice_that_of_one_rank(
    index: int, factor: float, is_ok: bool
) -> None:
    plain = errors(0.05, 0.05, (index, 0.1))
    assert is_as_good(GQA, errors(0.05, 0.05, (index, 0.1 * factor)), plain) == is_ok

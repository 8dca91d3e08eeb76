# SPDX-License-Identifier: Apache-2.0
"""What layers may know of the step that is running, beside its tensors.

Set by the runner ahead of the forward pass, the same on every rank but for ``sampled``, of which
each has as many. Layers read it when they run, never when they are built or traced: a step's kind
is not a constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.pcp.layout import PartitionPlan
    from vllm.v1.worker.gpu.pcp.sampled_rows import SampledRows


@dataclass(frozen=True, slots=True)
class StepState:
    """The running step.

    Attributes:
        is_partitioned: Ranks run different rows, ``L`` each. Otherwise all ranks run the same.
        plan: The rows of all ranks; None where each row is a request of its own: where all ranks
            run the same, and in runs of no requests.
        sampled: This rank's rows that the last layer is wanted for; None for all of them.
    """

    is_partitioned: bool
    plan: PartitionPlan | None = None
    sampled: SampledRows | None = None


REPLICATED = StepState(is_partitioned=False)

_state = REPLICATED


def set_step_state(state: StepState) -> None:
    """Announce the step whose attention metadata is built next."""
    global _state
    _state = state


def get_step_state() -> StepState:
    """Return the running step's state."""
    return _state

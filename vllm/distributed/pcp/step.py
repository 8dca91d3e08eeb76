# SPDX-License-Identifier: Apache-2.0
"""What layers may know of the step that is running, beside its tensors.

Set by the runner ahead of the forward pass. Whether the step is partitioned is the same on every
rank; the order of rows is a rank's own. Layers read it when they run, never when they are built or
traced: a step's kind is not a constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.pcp.layout import PartitionPlan


@dataclass(frozen=True, slots=True)
class StepState:
    """The running step.

    Attributes:
        is_partitioned: Ranks run different rows, ``L`` each. Otherwise all ranks run the same.
        row_req: ``[W]`` int32, the request (position in the batch) of each attention row of this
            rank; None where each row is a request of its own.
        req_end: ``[num_reqs]`` int32, tokens of each request after the step, all ranks' rows of it
            included; None as above.
        num_decodes: Rows that are decodes, ahead of all others and on all ranks the same; 0 where
            nothing is partitioned.
        plan: The rows of all ranks; None where all ranks run the same.
    """

    is_partitioned: bool
    row_req: npt.NDArray[np.int32] | None = None
    req_end: npt.NDArray[np.int32] | None = None
    num_decodes: int = 0
    plan: PartitionPlan | None = None


REPLICATED = StepState(is_partitioned=False)

_state = REPLICATED


def set_step_state(state: StepState) -> None:
    """Announce the step whose attention metadata is built next."""
    global _state
    _state = state


def get_step_state() -> StepState:
    """Return the running step's state."""
    return _state

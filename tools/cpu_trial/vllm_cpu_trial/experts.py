# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism.

Symptom: wrong tokens, or an index out of range, with ``--enable-expert-parallel``. Cause: the
experts of vLLM's CPU build take the number of an expert among all for its place among this rank's.
It can go when they read the map between the two.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm.model_executor.layers.fused_moe import cpu_fused_moe


class OwnExperts(cpu_fused_moe.CPUFusedMOE):
    """Computes this rank's experts; those of other ranks weigh nothing.

    Not fast: a row of another rank's expert is computed with this rank's first one, for nothing.
    """

    forward_method: Callable[..., torch.Tensor]

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        if layer.expert_map is not None:
            self._all_experts, self.forward_method = self.forward_method, self._own_experts

    def _own_experts(
        self,
        layer: Any,
        rows: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        *args: Any,
    ) -> torch.Tensor:
        places = layer.expert_map[experts.long()]
        weights = weights.masked_fill(places < 0, 0.0)
        return self._all_experts(layer, rows, weights, places.clamp_min(0), *args)


REPLACEMENTS: Sequence[tuple[object, str, object]] = ((cpu_fused_moe, "CPUFusedMOE", OwnExperts),)

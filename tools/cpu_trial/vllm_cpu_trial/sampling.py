# SPDX-License-Identifier: Apache-2.0
"""Sampling under Triton's interpreter: what it cannot run, and what it runs too slowly.

Top-k and top-p. Symptom: ``AttributeError: 'int' object has no attribute 'to'`` ends the engine.
Cause: loop variables of interpreted kernels are Python integers, and the kernel of vLLM 0.25.1
converts one as a tensor. It can go when either of the two changes.

Blocks. Symptom: with 49k tokens in the vocabulary a greedy token costs 0.1 s, a random one 0.5 s,
the logprobs of a token 0.15 s. Cause: an interpreted block costs much the same whatever its
width, and the kernels take 1024 tokens of the vocabulary at a time. It can go with the
interpreter.
"""

from collections.abc import Callable, Sequence
from typing import Any

# Has to come before the modules of the runner: they copy bindings that it replaces.
import vllm.v1.worker.cpu.shm  # noqa: F401  # isort: skip

import triton

from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu.sample import gumbel, logprob, min_p


class WholeRows:
    """Launches a sampling kernel with one block for a row of logits.

    The kernel's last positional argument is the size of the vocabulary.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return the launcher for ``grid``: the rows, then perhaps the blocks of a row."""

        def launch(*args: Any, **constants: Any) -> None:
            constants["BLOCK_SIZE"] = triton.next_power_of_2(args[-1])
            self.kernel[(grid[0],)](*args, **constants)

        return launch


class GumbelRows(WholeRows):
    """The same for the Gumbel kernel, whose caller compares the maxima of a row's blocks.

    The kernel draws its noise by token id, so the samples do not depend on the width.
    """

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return the launcher for ``grid``: the rows, then the blocks of a row."""
        launch_rows = super().__getitem__(grid)

        def launch(
            local_argmax: Any, stride: int, local_max: Any, *args: Any, **kwargs: Any
        ) -> None:
            local_max[:, 1:] = float("-inf")
            launch_rows(local_argmax, stride, local_max, *args, **kwargs)

        return launch


REPLACEMENTS: Sequence[tuple[object, str, object]] = (
    # Selects vLLM's own torch version.
    (topk_topp_sampler, "HAS_TRITON", False),
    (gumbel, "_gumbel_sample_kernel", GumbelRows(gumbel._gumbel_sample_kernel)),
    (logprob, "_topk_log_softmax_kernel", WholeRows(logprob._topk_log_softmax_kernel)),
    (logprob, "_ranks_kernel", WholeRows(logprob._ranks_kernel)),
    (min_p, "_min_p_kernel", WholeRows(min_p._min_p_kernel)),
)

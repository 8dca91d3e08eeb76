# SPDX-License-Identifier: Apache-2.0
"""Grammar bitmasks on a machine without an accelerator.

Symptom: a request with structured output ends the engine with "Found no NVIDIA driver".
Cause: ``StructuredOutputsWorker.apply_grammar_bitmask`` of vLLM 0.25.1 builds its row mapping in
pinned memory, which torch allocates through an accelerator only. Its streams are no-ops already.
It can go when the CPU build of vLLM builds the mapping in pageable memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

# Has to come before the modules of the runner: they copy bindings that it replaces.
import vllm.v1.worker.cpu.shm  # noqa: F401  # isort: skip

from torch.overrides import TorchFunctionMode

from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

_apply_grammar_bitmask = StructuredOutputsWorker.apply_grammar_bitmask


class PageableMemory(TorchFunctionMode):
    """Makes every torch call inside it allocate pageable host memory."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` without its ``pin_memory`` argument."""
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*args, **kwargs)


def apply_grammar_bitmask(self: StructuredOutputsWorker, *args: Any) -> None:
    """Mask the logits in place, as the original does, without pinned memory."""
    with PageableMemory():
        _apply_grammar_bitmask(self, *args)


REPLACEMENTS: Sequence[tuple[object, str, object]] = (
    (StructuredOutputsWorker, "apply_grammar_bitmask", apply_grammar_bitmask),
)

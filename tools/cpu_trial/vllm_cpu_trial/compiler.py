# SPDX-License-Identifier: Apache-2.0
"""The compiler half of the Triton backend: it exists, and refuses to compile."""

from types import ModuleType
from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend, GPUTarget


class InterpretedCompiler(BaseBackend):
    """Stands for a compiler where kernels are interpreted and never compiled."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        """Return whether ``target`` is the CPU."""
        return target.backend == "cpu"

    def hash(self) -> str:
        """Return the identity of this backend; nothing is ever cached under it."""
        return "cpu-interpreter"

    def parse_options(self, options: dict[str, Any]) -> NoReturn:
        """Refuse.

        Raises:
            NotImplementedError: Always, because a kernel was about to be compiled.
        """
        raise NotImplementedError(
            "The CPU trial interprets Triton kernels and cannot compile them "
            f"(got options {sorted(options)}). Set TRITON_INTERPRET=1 before Triton is imported."
        )

    def add_stages(self, stages: dict[str, Any], options: object) -> None:
        """Add nothing: there is no compilation."""

    def load_dialects(self, context: object) -> None:
        """Load nothing: there is no compilation."""

    def get_module_map(self) -> dict[str, ModuleType]:
        """Return no replacement modules: the interpreter does not ask for any."""
        return {}

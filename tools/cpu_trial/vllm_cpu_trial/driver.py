# SPDX-License-Identifier: Apache-2.0
"""The driver half of the Triton backend: the CPU as the one active target."""

import os
from typing import NoReturn

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class InterpreterDriver(DriverBase):
    """Says that Triton runs on the CPU, one lane wide."""

    @classmethod
    def is_active(cls) -> bool:
        """Return whether kernels are interpreted in this process."""
        return os.environ.get("TRITON_INTERPRET") == "1"

    def map_python_to_cpp_type(self, ty: str) -> NoReturn:
        """Refuse.

        Raises:
            NotImplementedError: Always, because no launcher is generated.
        """
        raise NotImplementedError(f"The CPU trial generates no kernel launcher (got type {ty!r}).")

    def get_current_target(self) -> GPUTarget:
        """Return the CPU, architecture 0, warps of one lane."""
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        """Return the device whose tensors kernels read and write."""
        return torch.device("cpu")

    def get_benchmarker(self) -> NoReturn:
        """Refuse.

        Raises:
            NotImplementedError: Always; the time of an interpreted kernel decides nothing.
        """
        raise NotImplementedError("The CPU trial does not time interpreted Triton kernels.")

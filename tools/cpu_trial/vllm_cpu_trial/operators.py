# SPDX-License-Identifier: Apache-2.0
"""Defines operators where vLLM looks for those of a GPU build."""

from collections.abc import Callable
from functools import cache

import torch

from vllm.utils.torch_utils import direct_register_custom_op


@cache
def define(namespace: str, operator: Callable[..., None], *written: str) -> None:
    """Define an operator for CPUs, once.

    Args:
        namespace: As in ``torch.ops.<namespace>``.
        operator: What it does; it has the name of the function.
        written: The arguments that it writes to.
    """
    direct_register_custom_op(
        operator.__name__,
        operator,
        mutates_args=list(written),
        target_lib=_library(namespace),
        dispatch_key="CPU",
    )


@cache
def _library(namespace: str) -> torch.library.Library:
    # Operators live as long as their library.
    return torch.library.Library(namespace, "FRAGMENT")

# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter, without what it does anew for every launch.

Symptom: small engines spend most of their time in interpreted kernels, on what computes nothing.
Cause: each launch looks up all of ``triton.language`` by introspection, puts the interpreter's
functions in place, and the old ones back; and each sum or product of 32-bit integers is computed a
second time in 64 bits, to tell whether it is too large. Here the functions stay in place (a process
that interprets has no other use for the language), and nothing is checked: what is tried on CPUs is
far smaller than 2**31. It can go when Triton's interpreter keeps its functions in place.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patch_lang: Callable[[Any], Any] = interpreter._patch_lang
_MODULES = (tl, tl.core)
# By which of the modules a kernel sees.
_in_place: dict[tuple[bool, ...], "Kept"] = {}


class Kept:
    """Stands for replaced functions that stay."""

    def restore(self) -> None:
        """Leave them where they are."""


def patch_lang(kernel: Any) -> Kept:
    """Put the interpreter's functions in place for a kernel, unless they are there already."""
    seen = [value for value in kernel.__globals__.values() if inspect.ismodule(value)]
    key = tuple(module in seen for module in _MODULES)
    if key not in _in_place:
        _patch_lang(kernel)
        _in_place[key] = Kept()
    return _in_place[key]


REPLACEMENTS: Sequence[tuple[object, str, object]] = (
    (interpreter, "_patch_lang", patch_lang),
    (
        interpreter.interpreter_builder,
        "options",
        dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False),
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""The device function that vLLM's samplers call and Triton's interpreter leaves undefined.

Symptom: sampling at a temperature above 0 ends the engine.
Cause: ``triton.language.extra.libdevice`` holds empty stubs. A compiler puts a module of its
backend in their place; the interpreter runs the stub, and the kernel goes on with None.
It can go when the interpreter of Triton has these functions itself.
"""

from collections.abc import Sequence

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.interpreter import TensorHandle


def log1p(x: tl.tensor) -> tl.tensor:
    """Return ``log(1 + x)`` of a float tensor of an interpreted kernel, elementwise."""
    # The constructor takes the type of a block as well, which its annotation leaves out.
    return tl.tensor(TensorHandle(np.log1p(x.handle.data), x.dtype), x.type)  # type: ignore[arg-type]


REPLACEMENTS: Sequence[tuple[object, str, object]] = ((libdevice, "log1p", log1p),)

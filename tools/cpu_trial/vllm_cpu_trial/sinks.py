# SPDX-License-Identifier: Apache-2.0
"""Attention sinks of models that do not run in bfloat16.

Symptom: GPT-OSS in float32 ends with "expected scalar type BFloat16 but found Float".
Cause: the attention kernel of vLLM's CPU build reads sinks as bfloat16, and its caller hands them
over in the dtype of the model. It can go when one of them converts. Sinks of released checkpoints
are bfloat16, so that nothing is lost.
"""

from collections.abc import Sequence
from typing import Any

import torch

from vllm import _custom_ops

_attention = _custom_ops.cpu_attention_with_kv_cache


def attention(*args: Any, s_aux: torch.Tensor | None, **kwargs: Any) -> None:
    """Call the kernel with sinks that it can read."""
    kwargs["s_aux"] = None if s_aux is None else s_aux.bfloat16()
    _attention(*args, **kwargs)


REPLACEMENTS: Sequence[tuple[object, str, object]] = (
    (_custom_ops, "cpu_attention_with_kv_cache", attention),
)

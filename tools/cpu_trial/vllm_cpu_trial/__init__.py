# SPDX-License-Identifier: Apache-2.0
"""Lets model runner V2 of vLLM's CPU build run without a GPU, for trials and tests.

The distribution is named ``vllm`` because vLLM recognises a CPU build by the version of that
distribution; it holds no module of that name. Beside the name it carries

* ``compiler`` and ``driver``: a Triton backend that is active under ``TRITON_INTERPRET=1`` only,
* ``libdevice``: a device function that the interpreter leaves undefined,
* ``sampling``: top-k, top-p and Gumbel sampling that the interpreter runs, and runs fast,
* ``structured_outputs``: grammar bitmasks without pinned memory.
"""

import os


def register() -> None:
    """Replace what fails on the CPU; without the interpreter, nothing.

    vLLM calls it once in each of its processes.

    Raises:
        AttributeError: The installed vLLM or Triton lacks a name that is to be replaced.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from vllm_cpu_trial import libdevice, sampling, structured_outputs

    for module in (libdevice, sampling, structured_outputs):
        for owner, name, replacement in module.REPLACEMENTS:
            getattr(owner, name)
            setattr(owner, name, replacement)

# SPDX-License-Identifier: Apache-2.0
"""Lets model runner V2 of vLLM's CPU build run without a GPU, for trials and tests.

The distribution is named ``vllm`` because vLLM recognises a CPU build by the version of that
distribution; it holds no module of that name. Beside the name it carries

* ``compiler`` and ``driver``: a Triton backend that is active under ``TRITON_INTERPRET=1`` only,
* ``interpreter``: Triton's interpreter, faster,
* ``libdevice``: a device function that the interpreter leaves undefined,
* ``sampling``: top-k, top-p and Gumbel sampling that the interpreter runs, and runs fast,
* ``shared_memory``: segments of shared memory that do not outlive their engine,
* ``structured_outputs``: grammar bitmasks without pinned memory,
* ``platform``: a platform that lets MLA in, active under the interpreter only,
* ``mla``, ``mla_cache`` and ``mla_prefill``: dense MLA in torch, where vLLM has kernels for GPUs,
* ``sparse_mla`` and ``indexer``: sparse MLA, in the same way,
* ``flash_attention``: the FLASH_ATTN backend, for those who ask for it,
* ``operators``: what defines operators for them,
* ``sinks``: attention sinks in other dtypes than bfloat16,
* ``experts``: expert parallelism,
* ``offloading``: the KV cache offloaded, the copies late and in torch.
"""

import os


def platform_class() -> str | None:
    """Return the path of the trial's platform; without the interpreter, None."""
    return "vllm_cpu_trial.platform.TrialPlatform" if _is_interpreted() else None


def register() -> None:
    """Replace what fails on the CPU; without the interpreter, nothing.

    vLLM calls it once in each of its processes.

    Raises:
        AttributeError: The installed vLLM or Triton lacks a name that is to be replaced.
    """
    if not _is_interpreted():
        return
    # Has to come before the modules of the runner: they copy bindings that it replaces.
    import vllm.v1.worker.cpu.shm  # noqa: F401
    from vllm.v1.attention.backends.mla.prefill.registry import (
        MLAPrefillBackendEnum,
        register_mla_prefill_backend,
    )
    from vllm_cpu_trial import (
        experts,
        flash_attention,
        indexer,
        interpreter,
        libdevice,
        mla,
        mla_cache,
        offloading,
        operators,
        sampling,
        shared_memory,
        sinks,
        sparse_mla,
        structured_outputs,
    )

    for module in (
        experts,
        flash_attention,
        indexer,
        interpreter,
        libdevice,
        mla,
        offloading,
        sampling,
        shared_memory,
        sinks,
        sparse_mla,
        structured_outputs,
    ):
        for owner, name, replacement in module.REPLACEMENTS:
            getattr(owner, name)
            setattr(owner, name, replacement)
    for owner, name, addition in flash_attention.ADDITIONS:
        setattr(owner, name, addition)
    for module in (flash_attention, indexer, mla_cache, sparse_mla):
        for namespace, operator, *written in module.OPERATORS:
            operators.define(namespace, operator, *written)
    register_mla_prefill_backend(
        MLAPrefillBackendEnum.FLASH_ATTN, "vllm_cpu_trial.mla_prefill.TorchPrefillBackend"
    )
    flash_attention.init_workspace()


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"

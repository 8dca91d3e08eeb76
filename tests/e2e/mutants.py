# SPDX-License-Identifier: Apache-2.0
"""Engines that lack a part, for tests that must notice it. Each runs in a process of its own."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.e2e.engine import run_scenarios, start
from tests.e2e.results import Spec
from vllm.v1.attention.backends.pcp.kv_gather import GatherKVMixin
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.pcp import PCPMultiprocExecutor


def without_scheduler_view(spec: Path, outcome: Path) -> None:
    """Let the engine core see P; write what it says when it refuses to start."""
    _remove("_post_init_executor")
    try:
        start(Spec.load(spec))
    except AssertionError as refusal:
        outcome.write_text(str(refusal))


def without_scheduler_view_or_assertion(spec: Path, results: Path) -> None:
    """Let the engine core see P, and run."""
    _remove("_post_init_executor")
    _remove("initialize_from_config")
    run_scenarios(spec, results)


def without_gather(spec: Path, results: Path) -> None:
    """Let each rank write its own keys and values only."""
    GatherKVMixin.do_kv_cache_update = _write_own_rows  # type: ignore[method-assign]
    run_scenarios(spec, results)


def _remove(method: str) -> None:
    setattr(PCPMultiprocExecutor, method, getattr(MultiprocExecutor, method))


def _write_own_rows(
    self: GatherKVMixin,
    layer: torch.nn.Module,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    num_tokens = key.shape[0]
    if slot_mapping.shape[0] > num_tokens:
        slot_mapping = slot_mapping[self.pcp_rank * num_tokens :][:num_tokens]
    super(GatherKVMixin, self).do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

# SPDX-License-Identifier: Apache-2.0
"""What a test asks of an engine, and what it gets back, as files between processes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tests.e2e.scenarios import Sizes

Experts: TypeAlias = Literal["width", "ep", "replicated"]


@dataclass(frozen=True, slots=True)
class Spec:
    """One engine.

    Attributes:
        checkpoint: Folder of the model.
        sizes: Of the engine.
        pcp: Ranks that a prefill is split over.
        tp: Ranks that heads are split over.
        scenarios: Names of those to run; empty for all but ``OFFLOADED``.
        text: File that prompts are cut from; None for random tokens.
        is_pooling: Embeds prompts, instead of generating.
        is_sparse: Chooses the tokens to attend to, and has the choices written down.
        experts: What a rank has of them: a part of the "width" of each, whole ones of its own
            ("ep"), or those of a rank of P = 1 ("replicated").
        dcp: Ranks that share one copy of the KV cache.
        interleave: Tokens that such a rank keeps in a row.
        caches_prefixes: Whether prompts are looked up in the KV cache.
        offloading: Connector that offloads the KV cache to CPU memory, one of
            ``tests.e2e.engine.CONNECTORS``; empty for none.
        flash_attn_version: Attends by FLASH_ATTN, of this version; None for what CPUs do otherwise.
        is_async: Schedules the next step before the last one is known, so that what is in a step
            depends on time, too.
        forks: Forks its ranks, which saves time; spawned ranks, the normal ones, differ in the
            order of their sets.
    """

    checkpoint: str
    sizes: Sizes
    pcp: int = 1
    tp: int = 1
    scenarios: Sequence[str] = ()
    text: str | None = None
    is_pooling: bool = False
    is_sparse: bool = False
    experts: Experts = "width"
    dcp: int = 1
    interleave: int = 1
    caches_prefixes: bool = True
    offloading: str = ""
    flash_attn_version: int | None = None
    is_async: bool = False
    forks: bool = False

    def save(self, path: Path) -> None:
        """Write to a file."""
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Spec:
        """Read from a file."""
        fields = json.loads(path.read_text())
        return cls(**{**fields, "sizes": Sizes(**fields["sizes"])})


@dataclass(slots=True)
class ScenarioResults:
    """What came out of one scenario.

    Attributes:
        requests: Of each the output, as ``tests.e2e.engine`` summarizes it, or None if it was
            aborted.
        stats: By how much each rank's ``pcp_stats`` went up; empty if P = 1.
        collectives: Of each rank, in order; empty if P = 1.
        choices: Of models with sparse attention: for each "layer request position" a checksum of
            the tokens that it attends to.
        num_steps: Steps of the engine.
        num_preemptions: Requests preempted.
        kv_cache_usage: Share of the KV cache in use at the end.
        num_loaded_tokens: Tokens that a connector found, and loaded into the KV cache.
    """

    requests: list[dict[str, Any] | None]
    stats: list[dict[str, int]] = field(default_factory=list)
    collectives: list[list[str]] = field(default_factory=list)
    choices: dict[str, int] = field(default_factory=dict)
    num_steps: int = 0
    num_preemptions: int = 0
    kv_cache_usage: float = 0.0
    num_loaded_tokens: int = 0


@dataclass(slots=True)
class EngineResults:
    """What came out of an engine.

    Attributes:
        scenarios: By name.
        num_ranks: Workers.
        num_pcp_ranks: Workers that are PCP workers.
        num_kv_cache_groups: Groups of layers with block tables of their own.
        is_async: Whether the next step is scheduled before the last one is known.
        num_kv_cache_tokens: Tokens that fit into the KV cache, as the engine reports it.
    """

    scenarios: dict[str, ScenarioResults]
    num_ranks: int
    num_pcp_ranks: int
    num_kv_cache_groups: int
    is_async: bool
    num_kv_cache_tokens: int | None

    def save(self, path: Path) -> None:
        """Write to a file."""
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: Path) -> EngineResults:
        """Read from a file."""
        fields = json.loads(path.read_text())
        results = {name: ScenarioResults(**value) for name, value in fields["scenarios"].items()}
        return cls(**{**fields, "scenarios": results})

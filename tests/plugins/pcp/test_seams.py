# SPDX-License-Identifier: Apache-2.0
"""All seams or none: what is installed, and what is said when it cannot be."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm.config import VllmConfig
from vllm.plugins import pcp
from vllm.plugins.pcp import seams
from vllm.plugins.pcp.routing import wrap_create_engine_config, wrap_vllm_config_post_init
from vllm.plugins.pcp.seams import EXPERT_SEAMS, SEAMS, Seam, UpstreamMismatchError, install

REPO = Path(__file__).parents[3]


def first() -> str:
    return "first"


def second() -> str:
    return "second"


def foreign(function: Any) -> Any:
    """Wrap like another plugin would; inspect.getsource still shows the original."""

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with two functions to wrap, and an empty record of what is installed."""
    module = ModuleType("pcp_test_upstream")
    module.first, module.second = first, second  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(seams, "_installed", {})
    return module


def seam(function: Any, **changes: Any) -> Seam:
    made = Seam(
        module="pcp_test_upstream",
        qualname=function.__name__,
        digest=seams.source_digest(function),
        build=lambda original: lambda: f"wrapped {original()}",
        why="",
        retire_when="",
    )
    return dataclasses.replace(made, **changes)


def test_installs_every_seam(upstream: Any) -> None:
    install([seam(first), seam(second)])
    assert (upstream.first(), upstream.second()) == ("wrapped first", "wrapped second")


def test_installs_once(upstream: Any) -> None:
    install([seam(first)])
    install([seam(first)])
    assert upstream.first() == "wrapped first"


def test_one_difference_keeps_everything_out_and_all_are_listed(
    upstream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.26.0+cpu")
    with pytest.raises(UpstreamMismatchError) as error:
        install([seam(first), seam(second, digest="0" * 12), seam(first, qualname="third")])
    message = str(error.value)
    assert "vllm==0.26.0, expected vllm==0.25.1" in message
    assert "pcp_test_upstream:second: source is" in message
    assert "pcp_test_upstream:third: not found" in message
    assert "pcp_test_upstream:first" not in message
    assert "Install vllm==0.25.1, or uninstall vllm-prefill-context-parallel." in message
    assert (upstream.first, upstream.second) == (first, second)


def test_a_foreign_wrapper_is_a_difference(upstream: Any) -> None:
    upstream.first = foreign(first)
    with pytest.raises(UpstreamMismatchError, match="first: wrapped by something else"):
        install([seam(first)])


def test_a_wrapper_put_over_ours_is_a_difference(upstream: Any) -> None:
    install([seam(first)])
    upstream.first = foreign(upstream.first)
    with pytest.raises(UpstreamMismatchError):
        install([seam(first)])


def test_the_pinned_vllm_is_installed_and_wrapped() -> None:
    """``register`` compares the real sources with the pins; a drifted pin raises here."""
    pcp.register()
    assert VllmConfig.__post_init__.__module__ == VllmConfig.__module__
    assert hasattr(VllmConfig.__post_init__, "__wrapped__")


def test_the_pinned_layers_of_experts_are_installed() -> None:
    """No process but workers looks for them, so no start-up of a test would tell."""
    pins = {seam.name: seam.digest for seam in EXPERT_SEAMS}
    functions = {seam.name: getattr(seam.owner(), seam.attribute) for seam in EXPERT_SEAMS}
    assert {name: seams.source_digest(f) for name, f in functions.items()} == pins


def make_config(pcp_world_size: int) -> Any:
    parallel = SimpleNamespace(
        prefill_context_parallel_size=pcp_world_size,
        decode_context_parallel_size=1,
        dcp_comm_backend="ag_rs",
        distributed_executor_backend="mp",
    )
    return SimpleNamespace(parallel_config=parallel)


def test_with_p_1_a_wrapper_is_the_original() -> None:
    """Nothing is changed, and the result is the original's own."""
    result, seen = object(), []

    def original(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return result

    config, args = make_config(1), SimpleNamespace(prefill_context_parallel_size=1)
    post_init: Any = wrap_vllm_config_post_init(original)
    assert post_init(config) is result
    assert wrap_create_engine_config(original)(args, "context", headless=True) is result
    assert seen == [((config,), {}), ((args, "context"), {"headless": True})]
    assert vars(config.parallel_config) == vars(make_config(1).parallel_config)


def test_p_is_restored_when_vllm_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def original(config: Any) -> None:
        assert config.parallel_config.prefill_context_parallel_size == 1
        raise ValueError("refused")

    monkeypatch.setattr("vllm.plugins.pcp.admission.validate_config", lambda config: None)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    config = make_config(2)
    with pytest.raises(ValueError, match="refused"):
        wrap_vllm_config_post_init(original)(config)
    assert config.parallel_config.prefill_context_parallel_size == 2


def test_the_page_of_seams_is_current() -> None:
    page = (REPO / "docs/design/seams.md").read_text()
    assert seams.seams_page() == page, "python -m vllm.plugins.pcp.seams > docs/design/seams.md"


def test_each_seam_says_why_and_until_when() -> None:
    assert all(s.why.endswith(".") and s.retire_when.endswith(".") for s in (*SEAMS, *EXPERT_SEAMS))

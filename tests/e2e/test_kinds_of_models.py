# SPDX-License-Identifier: Apache-2.0
"""Models that embed, and models whose attention looks back through a window only."""

from __future__ import annotations

import pytest

from tests.checkpoints import SLIDING_WINDOW
from tests.e2e.compare import Pair
from tests.e2e.conftest import PREFILL_SCENARIOS, WINDOW_SCENARIOS, Engines

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", PREFILL_SCENARIOS)
def test_embeddings(engines: Engines, name: str) -> None:
    engines.pair("embedding", 3).require_same(name)


@pytest.mark.parametrize("name", WINDOW_SCENARIOS)
def test_sliding_window_in_every_layer(engines: Engines, name: str) -> None:
    pair = engines.pair("mistral", 2)
    assert_window_matters(pair)
    assert pair.several.num_kv_cache_groups == 1
    pair.require_same(name)


@pytest.mark.parametrize("name", WINDOW_SCENARIOS)
def test_sliding_window_in_some_layers(engines: Engines, name: str) -> None:
    pair = engines.pair("gemma3", 3)
    assert_window_matters(pair)
    assert pair.several.num_kv_cache_groups > 1
    pair.require_same(name)


def assert_window_matters(pair: Pair) -> None:
    longest = max(len(request.prompt) for request in pair.requests("chunked_prefill"))
    assert longest > 10 * SLIDING_WINDOW

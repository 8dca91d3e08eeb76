# SPDX-License-Identifier: Apache-2.0
"""When a worker prepares for what ranks that share experts exchange."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.v1.worker.pcp import mixin


class Stock:
    device = torch.device("cpu")
    model_runner = "stock runner"

    def init_device(self) -> None:
        self.did = ["device"]


class Worker(mixin.PCPWorkerMixin, Stock):  # type: ignore[misc]  # over a stand-in
    def __init__(self, *, is_moe: bool, experts: str) -> None:
        self.model_config: Any = SimpleNamespace(is_moe=is_moe)
        self.vllm_config: Any = SimpleNamespace(additional_config={"pcp_experts": experts})


@pytest.mark.parametrize("is_moe", [True, False])
@pytest.mark.parametrize("experts", ["sharded", "replicated"])
def test_ranks_that_share_experts_open_each_others_memory(
    monkeypatch: pytest.MonkeyPatch, is_moe: bool, experts: str
) -> None:
    worker = Worker(is_moe=is_moe, experts=experts)
    for name in ("init_dcp_group", "init_direct_all_reduce"):
        monkeypatch.setattr(mixin, name, lambda *_, name=name: worker.did.append(name))
    monkeypatch.setattr(mixin, "make_pcp_runner", lambda runner: (runner, "with PCP"))
    worker.init_device()
    shares = is_moe and experts == "sharded"
    assert worker.did == ["device", "init_dcp_group", *["init_direct_all_reduce"] * shares]
    runner: Any = worker.pcp_runner
    assert runner == ("stock runner", "with PCP")

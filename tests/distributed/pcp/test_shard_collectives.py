# SPDX-License-Identifier: Apache-2.0
"""What reaches NCCL, with a stand-in for it; real ranks are those of ``test_groups``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.distributed.pcp import shard_collectives


class Nccl:
    """Writes down its calls: what, to or from whom, and the first element."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def group_start(self) -> None:
        self.calls.append(("start",))

    def group_end(self) -> None:
        self.calls.append(("end",))

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        self._record("send", peer, tensor)

    def recv(self, tensor: torch.Tensor, peer: int) -> None:
        self._record("recv", peer, tensor)

    def _record(self, name: str, peer: int, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous()
        self.calls.append((name, peer, float(tensor.flatten()[0])))


def test_exchanges_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = Nccl()
    group: Any = SimpleNamespace(world_size=4)
    monkeypatch.setattr(shard_collectives, "get_dcp_group", lambda: group)
    monkeypatch.setattr(shard_collectives, "pynccl_communicator", lambda _: nccl)
    two, four = torch.tensor([[5.0], [6.0]]), torch.arange(4.0)[:, None]
    shard_collectives.exchange_blocks((two, 10 + four), (four, 20 + four))
    assert (nccl.calls[0], nccl.calls[-1]) == (("start",), ("end",))
    assert [call for call in nccl.calls if call[0] == "send"] == [
        ("send", peer, value)
        for values in ([5.0, 6.0, 5.0, 6.0], [0.0, 1.0, 2.0, 3.0])
        for peer, value in enumerate(values)
    ]
    assert [call for call in nccl.calls if call[0] == "recv"] == [
        ("recv", peer, first + peer) for first in (10.0, 20.0) for peer in range(4)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_query_heads_of_all_tp_ranks_stand_side_by_side(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    def all_gather(rows: torch.Tensor, dim: int) -> torch.Tensor:
        assert rows.dtype in (torch.bfloat16, torch.uint8), "NCCL knows no FP8"
        assert rows.is_contiguous()
        return torch.cat([rows, rows], dim=dim)

    group: Any = SimpleNamespace(all_gather=all_gather)
    monkeypatch.setattr(shard_collectives, "get_tp_group", lambda: group)
    query = torch.randn(5, 3, 16).to(dtype)[..., :8]
    heads = shard_collectives.gather_heads(query)
    assert heads.dtype == dtype
    assert torch.equal(heads.float(), torch.cat([query, query], dim=1).float())

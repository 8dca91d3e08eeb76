# SPDX-License-Identifier: Apache-2.0
"""The indexer's keys of all ranks are written before a rank selects, and never inside a graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.distributed.pcp import kv_gather
from vllm.plugins.pcp import routing

PCP_WORLD_SIZE, NUM_TOKENS, HEAD_DIM = 3, 5, 8


class Gather:
    """Hands out what all ranks put in, as if they had."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.own = torch.empty(0)

    def begin(self, num_tokens: int, row_bytes: int) -> torch.Tensor:
        self.own = torch.empty(num_tokens, row_bytes, dtype=torch.uint8)
        return self.own

    def finish(self) -> torch.Tensor:
        return self.rows.view(torch.uint8)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and slots of each write."""
    from vllm.model_executor.layers.pcp import sparse_attn_indexer as module

    writes: list[tuple[torch.Tensor, torch.Tensor]] = []
    monkeypatch.setattr(
        module,
        "ops",
        SimpleNamespace(
            indexer_k_quant_and_cache=lambda k, cache, slots, *_: writes.append((k, slots))
        ),
    )
    group = SimpleNamespace(world_size=PCP_WORLD_SIZE)
    monkeypatch.setattr(module, "get_pcp_group", lambda: group)
    return writes


def test_keys_of_all_ranks_are_written(
    written: list[tuple[torch.Tensor, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.pcp.sparse_attn_indexer import write_keys

    everybody = torch.randn(PCP_WORLD_SIZE * NUM_TOKENS, HEAD_DIM).bfloat16()
    gather: Any = Gather(everybody)
    monkeypatch.setattr(kv_gather, "_kv_gather", gather)
    own = everybody[NUM_TOKENS : 2 * NUM_TOKENS]
    slots = torch.arange(PCP_WORLD_SIZE * NUM_TOKENS)
    write_keys(own, torch.empty(0), slots, 128, "ue8m0")
    ((keys, to),) = written
    assert torch.equal(keys, everybody)
    assert to is slots
    assert torch.equal(gather.own.view(torch.bfloat16), own)


def test_other_steps_write_their_own_keys_without_padding(
    written: list[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    from vllm.model_executor.layers.pcp.sparse_attn_indexer import write_keys

    keys = torch.randn(NUM_TOKENS, HEAD_DIM).bfloat16()
    write_keys(keys, torch.empty(0), torch.arange(NUM_TOKENS - 2), 128, "ue8m0")
    ((written_keys, _),) = written
    assert torch.equal(written_keys, keys[: NUM_TOKENS - 2])


@pytest.mark.parametrize("is_shared", [False, True])
def test_memory_is_reserved_for_one_way_to_select(
    monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    """While memory is profiled: what the stock operator reserves is not used where ranks share."""
    from vllm.model_executor.layers.pcp import sparse_attn_indexer as module

    reserved: list[Any] = []
    indexer: Any = object.__new__(module.PCPSparseAttnIndexer)
    torch.nn.Module.__init__(indexer)
    names = ("quant_block_size", "scale_fmt", "topk_tokens", "head_dim", "max_model_len")
    vars(indexer).update(dict.fromkeys(names))
    indexer.max_total_seq_len, indexer.k_cache = 1000, SimpleNamespace(kv_cache=None)
    indexer.shared_selection = (
        SimpleNamespace(reserve=lambda: reserved.append("shared")) if is_shared else None
    )
    context = SimpleNamespace(attn_metadata=None)
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    stock: Any = lambda **given: reserved.append(given["total_seq_lens"])
    monkeypatch.setattr(module, "sparse_attn_indexer", stock)
    indexer.write_and_select(*[torch.empty(0)] * 5, "indexer")
    assert reserved == (["shared", 0] if is_shared else [1000])


def test_graphs_are_split_at_the_operator() -> None:
    """Captured, it would write to the slots of the captured step, and select from stale keys."""
    import vllm.model_executor.layers.pcp.sparse_attn_indexer  # noqa: F401

    namespace, _, name = routing.INDEXER_OP.partition("::")
    assert hasattr(getattr(torch.ops, namespace), name)
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(
            worker_cls="vllm.v1.worker.gpu_worker.Worker",
            distributed_executor_backend="mp",
            world_size=1,
        ),
        compilation_config=SimpleNamespace(
            pass_config=SimpleNamespace(),
            splitting_ops=["vllm::unified_attention", "vllm::sparse_attn_indexer"],
        ),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "bind_cpu_ranks", lambda world_size: None)
        routing.route(config)
        routing.route(config)
    assert config.compilation_config.splitting_ops.count(routing.INDEXER_OP) == 1


@pytest.mark.parametrize("setting", ["skip_k_cache_insert", "use_fp4_cache"])
def test_indexers_whose_keys_are_written_elsewhere_are_refused(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.pcp.sparse_attn_indexer import PCPSparseAttnIndexer
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

    def stock_init(self: Any, **settings: bool) -> None:
        torch.nn.Module.__init__(self)
        vars(self).update({"skip_k_cache_insert": False, "use_fp4_cache": False} | settings)

    monkeypatch.setattr(SparseAttnIndexer, "__init__", stock_init)
    with pytest.raises(NotImplementedError, match=f"{setting}=True"):
        PCPSparseAttnIndexer(**{setting: True})

# SPDX-License-Identifier: Apache-2.0
"""FLASH_ATTN with a cache that ranks share: each row of each rank is dense causal attention.

On CPUs FlashAttention is the CPU trial's, which insists on its contract; on GPUs it is the
real one, with the ranks' collectives played on the one GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tests.v1.attention.backends.pcp.dcp_ranks import (
    GRAPH_SPLITS,
    MAX_NUM_SEQS,
    MAX_NUM_TOKENS,
    Ranks,
    Setting,
    Step,
    batches,
    make_config,
)
from tests.v1.worker.gpu.pcp.oracle import Batch, Request
from vllm.config import set_current_vllm_config
from vllm.distributed.pcp.kv_shards import KVShards
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn as stock
from vllm.v1.attention.backends.pcp import context_plan, flash_attn, flash_attn_metadata
from vllm.v1.attention.backends.pcp.cpu_attn import PCPCPUAttentionBackend
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu.pcp.layout import plan_partition

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the twin is for CPU builds of vLLM")
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

# D = P, and D = TP x P, which takes a model of one KV head.
GROUPS = {"P2": (2, 1), "P3": (3, 1), "P4": (4, 1), "TP2P2": (2, 2), "TP2P3": (3, 2)}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads are waited for longer than tensors as small as these take."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def setting_of(groups: str, **changes: Any) -> Setting:
    pcp_world_size, tp_world_size = GROUPS[groups]
    heads = {} if tp_world_size == 1 else {"num_heads": 3, "num_kv_heads": 1}
    return Setting(pcp_world_size, tp_world_size, **(heads | changes))


def require_dense_attention(step: Step) -> None:
    for rank, actual in enumerate(step.ranks.play(step.run)):
        expected = step.expected(rank)
        error = (actual - expected).abs().flatten(1).max(dim=1)[0]
        worst = step.local_tokens(rank)[int(error.argmax())]
        assert error.max() < 1e-5, f"rank {rank}, request and token {worst}: {error.max()}"


@on_cpu
@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("fa_version", [2, 3])
@pytest.mark.parametrize("groups", GROUPS)
def test_random_steps(
    monkeypatch: pytest.MonkeyPatch, groups: str, fa_version: int, interleave: int
) -> None:
    setting = setting_of(groups, fa_version=fa_version, interleave=interleave)
    ranks = Ranks(setting, monkeypatch)
    for seed, batch in enumerate(batches(setting.pcp_world_size, 18)):
        try:
            require_dense_attention(Step(batch, ranks, seed))
        except AssertionError as error:
            error.add_note(repr(batch))
            raise


@on_cpu
@pytest.mark.parametrize("groups", ["P2", "TP2P2"])
@pytest.mark.parametrize(("interleave", "block_size"), [(1, 1), (4, 16), (32, 32)])
def test_any_interleave(
    monkeypatch: pytest.MonkeyPatch, groups: str, interleave: int, block_size: int
) -> None:
    setting = setting_of(groups, interleave=interleave, block_size=block_size)
    ranks = Ranks(setting, monkeypatch)
    for seed, batch in enumerate(batches(setting.pcp_world_size, 12, max_cached=300, seed=1)):
        require_dense_attention(Step(batch, ranks, seed))


@on_cpu
@pytest.mark.parametrize("groups", ["P2", "TP2P2"])
def test_quantized_cache(monkeypatch: pytest.MonkeyPatch, groups: str) -> None:
    """What a row sees of its own step is quantised too, whether gathered or not."""
    setting = setting_of(groups, kv_cache_dtype="fp8", head_size=16)
    ranks = Ranks(setting, monkeypatch)
    for seed, batch in enumerate(batches(setting.pcp_world_size, 12, seed=4)):
        require_dense_attention(Step(batch, ranks, seed))
    drafted = Batch(2, (decode(30, 3), decode(5, 3)))
    require_dense_attention(Step(drafted, ranks))


def prefill(num_scheduled: int, num_computed: int = 0) -> Request:
    return Request(num_scheduled, num_computed)


def decode(num_computed: int, num_scheduled: int = 1) -> Request:
    return Request(num_scheduled, num_computed, is_prefilling=False)


NO_CONTEXT = ["gather of KV"]
REPLICATED = ["gather of KV", "exchange"]
GATHERED = ["gather of KV", "gather of queries", "exchange"]
# Requests, and the collectives of the step for D = P.
STEPS: dict[str, tuple[list[Request], list[str]]] = {
    "fresh": ([prefill(41)], NO_CONTEXT),
    "fresh, and a short one": ([prefill(3), prefill(41), prefill(17)], NO_CONTEXT),
    "prefix hit": ([prefill(41, 64)], GATHERED),
    "one cached token": ([prefill(8, 1)], GATHERED),
    "rows of one token": ([prefill(4, 9), prefill(8, 30)], GATHERED),
    "fewer cached tokens than an interleave": ([prefill(20, 3), prefill(50)], GATHERED),
    "fresh beside a prefix hit": ([prefill(30), prefill(41, 64), prefill(9)], GATHERED),
    "decodes beside a fresh prefill": ([decode(5), prefill(33), decode(70)], REPLICATED),
    "short prefix hit beside a fresh one": ([prefill(2, 30), prefill(33)], REPLICATED),
    "everything": (
        [prefill(33), decode(5), prefill(2, 9), prefill(40, 21), decode(40, 3), prefill(1)],
        GATHERED,
    ),
    "decodes": ([decode(5), decode(1), decode(300)], ["exchange"]),
    "drafted decodes": ([decode(5, 3), decode(64, 3)], ["exchange"]),
    "decodes and a short prefill": ([decode(5), prefill(3), prefill(2, 33)], ["exchange"]),
    "fresh short ones": ([prefill(3), prefill(2), prefill(1)], []),
    "first tokens": ([prefill(1), prefill(1)], ["exchange"]),
}


@on_cpu
@pytest.mark.parametrize("row_step", [1, 32], ids=["no graphs", "graphs"])
@pytest.mark.parametrize("groups", ["P2", "P4", "TP2P2"])
@pytest.mark.parametrize("name", STEPS)
def test_steps_of_each_kind(
    monkeypatch: pytest.MonkeyPatch, name: str, groups: str, row_step: int
) -> None:
    """Right, and with no more collectives than rows with cached tokens ask for."""
    requests, collectives = STEPS[name]
    setting = setting_of(groups, interleave=16, row_step=row_step)
    ranks = Ranks(setting, monkeypatch)
    step = Step(Batch(setting.pcp_world_size, tuple(requests)), ranks)
    require_dense_attention(step)
    if setting.tp_world_size > 1:
        # Replicated rows, and only those, gather their heads over TP.
        plan = step.plan
        if "exchange" in collectives and (plan is None or plan.num_replicated_cached_rows > 0):
            collectives = [*collectives]
            collectives.insert(1 if collectives[0] == "gather of KV" else 0, "gather of heads")
    for rank in ranks.ranks:
        assert [name for name, _, _ in rank.entered] == collectives


@on_cpu
@pytest.mark.parametrize("groups", GROUPS)
def test_ranks_enter_the_same_collectives(monkeypatch: pytest.MonkeyPatch, groups: str) -> None:
    setting = setting_of(groups, num_heads=1, num_kv_heads=1)
    ranks = Ranks(setting, monkeypatch)
    ranks.computes = False
    num_batches = {"P2": 2000, "P3": 1000, "P4": 1000, "TP2P2": 1000, "TP2P3": 500}[groups]
    kinds = set()
    for batch in batches(setting.pcp_world_size, num_batches, max_cached=5000, seed=2):
        ranks.play(Step(batch, ranks).enter_collectives)
        first, *others = (rank.entered for rank in ranks.ranks)
        assert all(entered == first for entered in others), batch
        kinds.add(tuple(name for name, _, _ in first))
    assert len(kinds) >= 4


@on_cpu
def test_a_wrong_owner_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle's idea of who holds a token is not the code's: with another one, all is wrong."""
    ranks = Ranks(setting_of("P2"), monkeypatch)
    step = Step(Batch(2, (prefill(20, 30),)), ranks)
    for rank in ranks.ranks:
        rank.builder._shards = dataclasses.replace(rank.builder._shards, interleave=16)
    with pytest.raises(AssertionError):
        require_dense_attention(step)


@on_cpu
@pytest.mark.parametrize(
    ("kind", "num_launches"),
    [
        ("decodes", 1),
        ("drafted decodes", 2),
        ("fresh short ones", 1),
        ("fresh", 1),
        ("prefix hit", 2),
        ("everything", 3),
    ],
)
def test_launches_of_attention(
    monkeypatch: pytest.MonkeyPatch, kind: str, num_launches: int
) -> None:
    ranks = Ranks(setting_of("P2"), monkeypatch)
    ranks.play(Step(Batch(2, tuple(STEPS[kind][0])), ranks).run)
    assert len(ranks.launches) == num_launches


@on_cpu
@pytest.mark.parametrize("kind", STEPS)
def test_steps_that_are_in_no_graph_leave_splits_to_the_kernel(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """FlashAttention 3 allocates the results of each split."""
    ranks = Ranks(setting_of("P2", fa_version=3, has_graphs=True), monkeypatch)
    step = Step(Batch(2, tuple(STEPS[kind][0])), ranks)
    ranks.play(step.run)
    fits_graph = all(request.num_scheduled == 1 for request in step.batch.requests)
    assert set(ranks.launches) == {GRAPH_SPLITS if fits_graph else 0}


@on_cpu
@pytest.mark.parametrize("kind", ["decodes", "everything"])
def test_results_of_replicated_rows_are_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """They are merged from the same parts in the same order on every rank."""
    ranks = Ranks(setting_of("P4"), monkeypatch)
    step = Step(Batch(4, tuple(STEPS[kind][0])), ranks)
    num_tokens = sum(request.num_scheduled for request in step.batch.requests)
    if step.plan is not None:
        num_tokens = int(step.plan.row_len[0, : step.plan.num_replicated_cached_rows].sum())
    first, *others = ranks.play(step.run)
    assert all(torch.equal(first[:num_tokens], other[:num_tokens]) for other in others)


@on_cpu
@pytest.mark.parametrize("groups", GROUPS)
def test_the_workspace_that_is_reserved_suffices(
    monkeypatch: pytest.MonkeyPatch, groups: str
) -> None:
    """It must not grow: CUDA graphs remember where it is."""
    setting = setting_of(groups, num_heads=1, num_kv_heads=1)
    ranks = Ranks(setting, monkeypatch)
    ranks.computes = False
    workspace.lock_workspace()
    size, rng = setting.pcp_world_size, np.random.default_rng(0)
    short = 2 * size - 1
    extremes = [
        [prefill(MAX_NUM_TOKENS, 7)],
        [prefill(2 * size, 1)] * MAX_NUM_SEQS,
        [prefill(MAX_NUM_TOKENS // MAX_NUM_SEQS, 1)] * MAX_NUM_SEQS,
        [prefill(short, 1)] * MAX_NUM_SEQS,
        [decode(0, MAX_NUM_TOKENS // MAX_NUM_SEQS)] * MAX_NUM_SEQS,  # a dummy run
        [prefill(short, 1)] * (MAX_NUM_SEQS - 1) + [prefill(MAX_NUM_TOKENS // 2, 1)],
    ]
    for _ in range(30):
        lengths = rng.multinomial(MAX_NUM_TOKENS, rng.dirichlet(np.full(MAX_NUM_SEQS, 0.3)))
        extremes.append([prefill(int(length), 1) for length in lengths if length])
    for requests in extremes:
        ranks.play(Step(Batch(size, tuple(requests)), ranks).enter_collectives)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_bounds_on_tokens_and_keys_of_a_rank(size: int) -> None:
    for batch in batches(size, 300, seed=3):
        scheduled = np.array([q.num_scheduled for q in batch.requests], dtype=np.int32)
        computed = np.ones_like(scheduled)
        plan = plan_partition(
            scheduled, computed, np.ones(len(scheduled), dtype=np.bool_), pcp_world_size=size
        )
        if plan is None:
            continue
        num_tokens = int(scheduled.sum())
        rows = context_plan.plan_gathered_rows(plan, 0, KVShards(size))
        assert rows is not None
        num_partitioned = int(scheduled[scheduled >= 2 * size].sum())
        num_reqs = len(scheduled)
        assert rows.num_tokens <= context_plan.max_gathered_tokens(num_partitioned, num_reqs, size)
        for rank in range(size):
            keys = context_plan.plan_step_keys(plan, rank)
            num_keys = keys.key_idx.shape[0]
            assert num_keys <= context_plan.max_step_keys(num_tokens, num_reqs, size)


@on_cpu
@pytest.mark.parametrize(
    ("name", "position", "value"),
    [
        ("alibi_slopes", 4, [1.0, 1.0]),
        ("sliding_window", 5, 128),
        ("kv_sharing_target_layer_name", 9, "model.layers.0"),
        ("sinks", 10, torch.zeros(2)),
    ],
)
def test_attention_that_depends_on_more_than_keys_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, position: int, value: Any
) -> None:
    setting = setting_of("P2")
    Ranks(setting, monkeypatch)
    # What a CPU build does not import.
    monkeypatch.setattr(stock, "flash_attn_supports_sinks", lambda: True, raising=False)
    arguments: list[Any] = [2, 8, 1.0, 2, None, None, "auto", None, "decoder", None, None]
    arguments[position] = value
    with pytest.raises(NotImplementedError, match=f"got {name}"):
        flash_attn.PCPFlashAttentionImpl(*arguments)


@on_cpu
def test_other_backends_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever vLLM chose: what it chooses by itself admission cannot know."""
    setting = setting_of("P2")
    Ranks(setting, monkeypatch)
    with (
        set_current_vllm_config(make_config(setting)),
        pytest.raises(NotImplementedError, match="got PCPCPUAttentionImpl"),
    ):
        PCPCPUAttentionBackend.get_impl_cls()(2, 32, 1.0, 2, None, None, "auto")


@on_cpu
def test_graphs_hold_rows_of_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of single tokens leaves out what longer rows see of the step."""
    builder = flash_attn_metadata.PCPFlashAttentionMetadataBuilder
    monkeypatch.setattr(builder, "_cudagraph_support", AttentionCGSupport.ALWAYS)
    spec: Any = None
    one, two = (make_config(setting) for setting in (Setting(1), Setting(2)))
    assert builder.get_cudagraph_support(one, spec) == AttentionCGSupport.ALWAYS
    assert builder.get_cudagraph_support(two, spec) == AttentionCGSupport.UNIFORM_BATCH


GPU_STEPS: dict[str, list[Request]] = {
    "fresh": [prefill(700)],
    "prefix hit": [prefill(600, 1000)],
    "one cached token": [prefill(100, 1), prefill(300)],
    "rows of one token": [prefill(4, 300), prefill(8, 40)],
    "everything": [
        *(decode(n) for n in (1, 3, 500, 2000)),
        prefill(2, 90),
        prefill(400, 210),
        prefill(700),
        prefill(1),
        prefill(257, 16),
    ],
    "decodes": [decode(n) for n in (1, 15, 16, 17, 1000, 3000)],
    "drafted decodes": [decode(n, 3) for n in (1, 15, 16, 1000)],
    "decodes and a short prefill": [decode(50), prefill(3), prefill(2, 333)],
}


def require_no_worse_than_twice_one_call(step: Step) -> None:
    """Compare the errors of all ranks together, and of one call for a whole request."""
    ours = plain = 0.0
    for rank, actual in enumerate(step.ranks.play(step.run)):
        expected = step.expected(rank)
        ours = max(ours, float((actual - expected).abs().max()))
        plain = max(plain, float((plain_attention(step, rank) - expected).abs().max()))
    print(f"ours {ours:.1e}, one call {plain:.1e}")  # noqa: T201
    assert ours <= 2 * plain + 1e-3


def plain_attention(step: Step, rank: int) -> torch.Tensor:
    """Return what FlashAttention computes for a rank's rows from all their keys at once."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    setting, results = step.setting, []
    heads = slice(rank // setting.pcp_world_size * setting.num_heads, None)
    for r, start, length in step.rows(rank):
        query = step.queries[r][start : start + length, heads][:, : setting.num_heads]
        dtype = torch.float8_e4m3fn if setting.is_quantized else setting.dtype
        bounds = torch.tensor([[0, length], [0, start + length]], dtype=torch.int32).cuda()
        results.append(
            flash_attn_varlen_func(
                query.contiguous().to(dtype),
                step.keys[r][: start + length].to(dtype),
                step.values[r][: start + length].to(dtype),
                length,
                bounds[0],
                start + length,
                cu_seqlens_k=bounds[1],
                softmax_scale=setting.head_size**-0.5,
                causal=True,
                fa_version=setting.fa_version,
            )
        )
    return torch.cat(results)


GPU_GROUPS = {
    "P2": Setting(2, num_heads=8, num_kv_heads=2),
    "P4": Setting(4, num_heads=8, num_kv_heads=2),
    "P4-one-KV-head": Setting(4, num_heads=8, num_kv_heads=1),
    "TP2P2": Setting(2, 2, num_heads=4, num_kv_heads=1),
}


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("interleave", [1, 16])
    @pytest.mark.parametrize("fa_version", [2, 3])
    @pytest.mark.parametrize("groups", GPU_GROUPS)
    @pytest.mark.parametrize("name", GPU_STEPS)
    def test_no_worse_than_twice_one_call(
        self,
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        groups: str,
        fa_version: Literal[2, 3],
        interleave: int,
    ) -> None:
        from vllm.vllm_flash_attn import fa_version_unsupported_reason

        unsupported = fa_version_unsupported_reason(fa_version)
        if unsupported:
            pytest.skip(f"FlashAttention {fa_version}: {unsupported}")
        setting = dataclasses.replace(
            GPU_GROUPS[groups],
            fa_version=fa_version,
            interleave=interleave,
            head_size=128,
            device="cuda",
        )
        batch = Batch(setting.pcp_world_size, tuple(GPU_STEPS[name]))
        require_no_worse_than_twice_one_call(Step(batch, Ranks(setting, monkeypatch)))

    @pytest.mark.parametrize("groups", ["P2", "TP2P2"])
    @pytest.mark.parametrize("name", GPU_STEPS)
    def test_quantized_cache(self, monkeypatch: pytest.MonkeyPatch, name: str, groups: str) -> None:
        setting = dataclasses.replace(
            GPU_GROUPS[groups], fa_version=3, head_size=128, device="cuda", kv_cache_dtype="fp8"
        )
        batch = Batch(setting.pcp_world_size, tuple(GPU_STEPS[name]))
        require_no_worse_than_twice_one_call(Step(batch, Ranks(setting, monkeypatch)))

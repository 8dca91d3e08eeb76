# SPDX-License-Identifier: Apache-2.0
"""Latents in the cache, and attention by plan, on tensors.

On a GPU the kernels are those of vLLM; on CPUs those of the CPU trial, in a process of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from vllm.distributed.pcp.kv_shards import KVShards

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
PCP_WORLD_SIZE, NUM_TOKENS = 3, 37
LATENT, ROPE, NOPE, V_DIM, NUM_HEADS = 512, 64, 128, 128, 4
BLOCK_SIZE, NUM_BLOCKS = 16, 64
SCALE = (NOPE + ROPE) ** -0.5

pytestmark: list[pytest.MarkDecorator] = [pytest.mark.gpu] if HAS_GPU else []


def random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DTYPE).to(DEVICE)


def make_impl() -> Any:
    """Return an implementation without its engine: what it was given stands in attributes."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl
    from vllm.v1.attention.backends.pcp.mla.latent import PlannedPrefillMixin

    class Impl(PlannedPrefillMixin, MLACommonImpl[Any]):
        def __init__(self) -> None:
            self.pcp_world_size = PCP_WORLD_SIZE
            self.head_size, self.kv_lora_rank = LATENT + ROPE, LATENT
            self.num_heads, self.qk_nope_head_dim, self.v_head_dim = NUM_HEADS, NOPE, V_DIM
            self.kv_cache_dtype = "auto"
            self._use_flashinfer_concat_mla_k = False

        def forward_mqa(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    return Impl()


def cache_of_ranks_and_of_stock(
    kv_dtype: str, is_copied: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes that a step of all ranks, and stock vLLM, leave in the cache.

    If ranks copy to each other, one cache stands for all of theirs: what each hands on is in it.
    """
    from tests.v1.attention.backends.pcp.test_kv_gather import RecordedGather
    from vllm.distributed.pcp import kv_gather, peer_caches
    from vllm.v1.attention.backend import MLAAttentionImpl

    impl = make_impl()
    total = PCP_WORLD_SIZE * NUM_TOKENS
    # As models hand them over: parts of one projection, strided.
    wide = random(total, LATENT + ROPE + 8, seed=0)
    kv_c, k_pe = wide[:, :LATENT], wide[:, None, LATENT : LATENT + ROPE]
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(1))
    slots = slots[:total].to(DEVICE)
    slots[[3, NUM_TOKENS, total - 1]] = -1
    scale = torch.tensor(0.5, device=DEVICE)
    cache_dtype = torch.uint8 if kv_dtype.startswith("fp8") else DTYPE
    # Of sparse models, a row of 512 bytes, 4 scales and the rope key in 16 bits.
    width = 656 if kv_dtype == "fp8_ds_mla" else LATENT + ROPE
    shape = (NUM_BLOCKS, BLOCK_SIZE, width)
    ours, stock = (torch.zeros(shape, dtype=cache_dtype, device=DEVICE) for _ in range(2))
    MLAAttentionImpl.do_kv_cache_update(impl, kv_c, k_pe, stock, slots, kv_dtype, scale)
    gather = RecordedGather(DEVICE)
    peers: Any = object.__new__(peer_caches.PeerCaches)
    peers.pcp_world_size, handed_on = PCP_WORLD_SIZE, []
    peers.copy = lambda cache, own_slots: handed_on.append((cache is ours, own_slots))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_gather, "_kv_gather", gather)
        patch.setattr(peer_caches, "_peer_caches", peers if is_copied else None)
        for rank in range(PCP_WORLD_SIZE):
            rows = slice(rank * NUM_TOKENS, (rank + 1) * NUM_TOKENS)
            gather.pcp_rank = peers.pcp_rank = rank
            if not is_copied:
                ours.zero_()
            impl.do_kv_cache_update(kv_c[rows], k_pe[rows], ours, slots, kv_dtype, scale)
    assert gather.gathers == (0 if is_copied else PCP_WORLD_SIZE)
    if is_copied:
        assert all(is_ours for is_ours, _ in handed_on)
        assert torch.equal(torch.cat([own_slots for _, own_slots in handed_on]), slots)
    return ours.view(torch.uint8).cpu(), stock.view(torch.uint8).cpu()


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "fp8_ds_mla"])
def test_cache_equals_the_stock_write_of_all_ranks_tokens(
    call: Callable[..., Any], kv_dtype: str, is_copied: bool
) -> None:
    ours, stock = call(cache_of_ranks_and_of_stock, kv_dtype, is_copied)
    assert stock.any()
    assert torch.equal(ours, stock)


# Of each row: request, first token, tokens.
STEPS = {
    "one row": [(0, 0, 9)],
    "head and tail, nothing cached": [(0, 30, 10), (0, 0, 10)],
    "head and tail that touch, on a cached prefix": [(0, 21, 7), (0, 28, 7)],
    "rows without context first": [(0, 0, 3), (1, 40, 5), (2, 0, 8), (3, 17, 6)],
    "several requests": [
        (0, 12, 4),
        (1, 40, 10),
        (2, 0, 7),
        (0, 16, 4),
        (1, 70, 11),
        (2, 21, 8),
        (3, 0, 1),
    ],
}


Rows = list[tuple[int, int, int]]


class Scene:
    """A model's layer, and latents of some requests; the same at every call.

    Attributes:
        latents: ``[num_reqs, num_tokens, LATENT + ROPE]``.
        weight: ``[NUM_HEADS * (NOPE + V_DIM), LATENT]``, of the up-projection.
        impl: Our implementation.
        prefill_backend: What it attends with.
    """

    def __init__(self, num_reqs: int, num_tokens: int) -> None:
        from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
        from vllm.v1.attention.backends.pcp.mla.prefill_backend import register_prefill_backend

        register_prefill_backend()
        backend: Any = MLAPrefillBackendEnum.FLASH_ATTN.get_class()
        config: Any = SimpleNamespace(model_config=SimpleNamespace(dtype=DTYPE))
        self.prefill_backend = backend(NUM_HEADS, SCALE, LATENT, NOPE, ROPE, V_DIM, config)
        self.weight = random(NUM_HEADS * (NOPE + V_DIM), LATENT, seed=2) * 0.05
        self.impl = make_impl()
        self.impl.kv_b_proj = lambda x: (x @ self.weight.T, None)
        self.latents = random(num_reqs, num_tokens, LATENT + ROPE, seed=3)

    def cache(self, shards: KVShards) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a rank keeps, ``[NUM_BLOCKS, BLOCK_SIZE, ...]``, and block tables."""
        num_reqs, num_tokens, width = self.latents.shape
        blocks_each = -(-num_tokens // (BLOCK_SIZE * shards.world_size))
        cache = torch.full((NUM_BLOCKS, BLOCK_SIZE, width), 1e4, dtype=DTYPE, device=DEVICE)
        order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(4)).to(DEVICE)
        tables = order[: num_reqs * blocks_each].view(num_reqs, blocks_each).int()
        kept = [
            token
            for token in range(num_tokens)
            if token // shards.interleave % shards.world_size == shards.rank
        ]
        for latents, table in zip(self.latents, tables, strict=True):
            for place, token in enumerate(kept):
                cache[table[place // BLOCK_SIZE], place % BLOCK_SIZE] = latents[token]
        return cache, tables

    def queries(self, rows: Rows) -> torch.Tensor:
        """Return ``[T, NUM_HEADS, NOPE + ROPE]``."""
        return random(sum(length for _, _, length in rows), NUM_HEADS, NOPE + ROPE, seed=5)

    def planned(
        self,
        rows: Rows,
        max_tokens: int,
        shards: KVShards,
        ends: list[int] | None = None,
        sampled: list[int] | None = None,
    ) -> tuple[torch.Tensor, bool]:
        """Return the output by plan, and whether it was merged.

        With ``sampled``, tokens behind ``NUM_DECODES``, of those rows alone.
        """
        from vllm.distributed.pcp.step import REPLICATED, StepState, set_step_state
        from vllm.v1.attention.backends.pcp.mla import latent
        from vllm.v1.attention.backends.pcp.mla.prefill_plan import plan_prefill
        from vllm.v1.worker.gpu.pcp import copies

        req, start, length = (
            np.array(column, dtype=np.int32) for column in zip(*rows, strict=True)
        )
        cache, tables = self.cache(shards)
        row_tables = tables[torch.from_numpy(req).to(DEVICE).long()]
        plans = []

        def make_plan(*rows: Any) -> Any:
            plans.append(
                plan_prefill(
                    *rows,
                    page_size=BLOCK_SIZE,
                    max_tokens=max_tokens,
                    shards=shards,
                    req_end=None if ends is None else np.array(ends),
                )
            )
            return plans[-1]

        nothing = torch.empty(0)
        workspace, gathered = (
            torch.empty(max_tokens, LATENT + ROPE, dtype=DTYPE, device=DEVICE) for _ in range(2)
        )
        prefill = latent.PCPPrefillMetadata(
            block_table=row_tables,
            query_start_loc=nothing,
            max_query_len=0,
            prefill_backend=self.prefill_backend,
            rows=(start, length, req),
            make_plan=make_plan,
            workspace=workspace,
            shards=shards,
            gathered=gathered,
        )
        q = self.queries(rows)
        # Whatever is in the output at first.
        out = torch.full((len(q), NUM_HEADS * V_DIM), float("nan"), dtype=DTYPE, device=DEVICE)
        scale = torch.ones(1, device=DEVICE)
        metadata = SimpleNamespace(prefill=prefill, num_decode_tokens=NUM_DECODES)
        tokens = np.array(sampled or [], dtype=np.int32)
        step: Any = SimpleNamespace(tokens=tokens, is_partial=False)
        self.impl.attends_sampled_rows = sampled is not None
        set_step_state(StepState(is_partitioned=True, sampled=step))
        with pytest.MonkeyPatch.context() as patch:
            if not HAS_GPU:
                patch.setattr(copies, "async_copy_to_gpu", lambda x, device: torch.from_numpy(x))
            self.impl.forward_mha(q, nothing, nothing, cache, metadata, scale, out)
        set_step_state(REPLICATED)
        assert step.is_partial == (sampled is not None)
        is_merged = any(plan.has_partial_results for plan in plans)
        return out.view(-1, NUM_HEADS, V_DIM).double().cpu(), is_merged

    def expected(self, rows: Rows) -> torch.Tensor:
        """Return the output of a loop over queries in fp64."""
        q = self.queries(rows).double().cpu()
        expected = torch.zeros(len(q), NUM_HEADS, V_DIM, dtype=torch.float64)
        query = 0
        for index, first, count in rows:
            context = self.latents[index].double().cpu()
            kv = context[:, :LATENT] @ self.weight.double().cpu().T
            kv = kv.view(-1, NUM_HEADS, NOPE + V_DIM)
            rope = context[:, None, LATENT:].expand(-1, NUM_HEADS, -1)
            k, v = torch.cat([kv[..., :NOPE], rope], dim=-1), kv[..., NOPE:]
            for position in range(first, first + count):
                scores = torch.einsum("hd,nhd->hn", q[query], k[: position + 1]) * SCALE
                expected[query] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v[: position + 1])
                query += 1
        return expected


def planned_and_expected(rows: Rows, max_tokens: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return the output by plan, by a loop over queries, and whether ours was merged."""
    from vllm.distributed.pcp.kv_shards import UNSHARED

    scene = Scene(
        max(req for req, _, _ in rows) + 1, max(start + count for _, start, count in rows)
    )
    planned, is_merged = scene.planned(rows, max_tokens, UNSHARED)
    return planned, scene.expected(rows), is_merged


@pytest.mark.parametrize("max_tokens", [64, 10_000], ids=["pieces", "whole"])
@pytest.mark.parametrize("name", STEPS)
def test_attention_by_plan(call: Callable[..., Any], name: str, max_tokens: int) -> None:
    ours, expected, is_merged = call(planned_and_expected, STEPS[name], max_tokens)
    assert is_merged == (max_tokens == 64 and name == "several requests")
    assert torch.isfinite(ours).all()
    tolerance = 2e-2 if HAS_GPU else 1e-5
    assert (ours - expected).abs().max() < tolerance * expected.abs().max()


# Of each step: what is sampled from, of each request its last token, or one that is repeated where
# a rank has fewer than others. The first tokens are decodes.
SAMPLED = {
    "one row": [11],
    "head and tail, nothing cached": [12],
    "head and tail that touch, on a cached prefix": [0, 16, 0, 0],
    "rows without context first": [24, 5, 10, 2, 18],
    "several requests": [26, 46, 23, 34],
}
NUM_DECODES = 3


def sampled_and_expected(
    rows: Rows, max_tokens: int, sampled: list[int]
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return the output for some tokens, by a loop over all queries, and whether ours was merged.

    Args:
        rows: The step's.
        max_tokens: Of a batch.
        sampled: The tokens, counted from the first decode.
    """
    from vllm.distributed.pcp.kv_shards import UNSHARED

    scene = Scene(
        max(req for req, _, _ in rows) + 1, max(start + count for _, start, count in rows)
    )
    ours, is_merged = scene.planned(rows, max_tokens, UNSHARED, sampled=sampled)
    return ours, scene.expected(rows), is_merged


@pytest.mark.parametrize("max_tokens", [64, 10_000], ids=["pieces", "whole"])
@pytest.mark.parametrize("name", SAMPLED)
def test_attention_of_sampled_rows(call: Callable[..., Any], name: str, max_tokens: int) -> None:
    sampled = SAMPLED[name]
    ours, expected, is_merged = call(sampled_and_expected, STEPS[name], max_tokens, sampled)
    assert is_merged == (max_tokens == 64 and name == "several requests")
    is_sampled = torch.zeros(len(ours), dtype=torch.bool)
    is_sampled[[token - NUM_DECODES for token in sampled if token >= NUM_DECODES]] = True
    tolerance = 2e-2 if HAS_GPU else 1e-5
    assert (ours - expected)[is_sampled].abs().max() < tolerance * expected.abs().max()
    # That is all.
    assert ours[~is_sampled].isnan().all()


def test_a_rank_that_samples_from_decodes_alone(call: Callable[..., Any]) -> None:
    ours, _, _ = call(sampled_and_expected, STEPS["one row"], 10_000, [2, 0, 2])
    assert ours.isnan().all()


# Of each request: tokens before the step, tokens of the step; whether ranks split these.
GLOBAL_STEP = [(0, 61, True), (40, 3, False), (33, 24, True), (70, 30, True), (0, 2, False)]


def rows_of_rank(rank: int, num_ranks: int) -> Rows:
    """Return the rows of one rank in a step that all of them share."""
    rows = []
    for req, (computed, scheduled, is_split) in enumerate(GLOBAL_STEP):
        if not is_split:
            rows.append((req, computed, scheduled))
            continue
        bounds = [computed + scheduled * i // (2 * num_ranks) for i in range(2 * num_ranks + 1)]
        for chunk in (rank, 2 * num_ranks - 1 - rank):
            rows.append((req, bounds[chunk], bounds[chunk + 1] - bounds[chunk]))
    # Rows without context last.
    return sorted(rows, key=lambda row: row[1] == 0)


def planned_over_shards(
    num_ranks: int, interleave: int, max_tokens: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each rank's output by plan, and by a loop over queries."""
    from vllm.distributed.pcp.kv_shards import KVShards
    from vllm.v1.attention.backends.pcp.mla import latent

    ends = [computed + scheduled for computed, scheduled, _ in GLOBAL_STEP]
    scene = Scene(len(ends), max(ends))
    order = tuple(np.roll(np.arange(num_ranks), 1).tolist())
    ranks = [KVShards(num_ranks, rank, interleave, order) for rank in range(num_ranks)]
    sent: list[list[torch.Tensor]] = [[] for _ in ranks]
    results = []
    with pytest.MonkeyPatch.context() as patch:
        # Ranks play one after the other: all put in, then each gets everything.
        for shards in ranks:
            own = sent[shards.rank]
            patch.setattr(
                latent, "gather_shards", lambda _, rows, own=own: own.append(rows.clone())
            )
            scene.planned(rows_of_rank(shards.rank, num_ranks), max_tokens, shards, ends)
        assert len({tuple(rows.shape for rows in own) for own in sent}) == 1, "ranks would hang"
        for shards in ranks:
            gathers = iter(zip(*sent, strict=True))

            def gather(gathered: torch.Tensor, _: torch.Tensor, gathers: Any = gathers) -> None:
                parts = next(gathers)
                gathered.copy_(torch.cat([parts[order.index(place)] for place in range(num_ranks)]))

            patch.setattr(latent, "gather_shards", gather)
            rows = rows_of_rank(shards.rank, num_ranks)
            planned, _ = scene.planned(rows, max_tokens, shards, ends)
            results.append((planned, scene.expected(rows)))
    return results


@pytest.mark.parametrize("max_tokens", [192, 10_000], ids=["pieces", "whole"])
@pytest.mark.parametrize(("num_ranks", "interleave"), [(2, 1), (3, 1), (4, 1), (2, 16), (3, 4)])
def test_attention_by_plan_over_a_shared_cache(
    call: Callable[..., Any], num_ranks: int, interleave: int, max_tokens: int
) -> None:
    for ours, expected in call(planned_over_shards, num_ranks, interleave, max_tokens):
        assert torch.isfinite(ours).all()
        tolerance = 2e-2 if HAS_GPU else 1e-5
        assert (ours - expected).abs().max() < tolerance * expected.abs().max()


def context_of_rows_out_of_order() -> tuple[list[float], list[float], Any]:
    """Return output and lse of tokens on the stock path, for kernels that return NaN for no
    keys."""
    from vllm.model_executor.layers.attention.mla_attention import (
        MLACommonImpl,
        MLACommonPrefillMetadata,
    )
    from vllm.v1.attention.backends.pcp.mla import latent
    from vllm.v1.worker.gpu.pcp import copies

    context: Any = SimpleNamespace(prefill_tokens_with_context=3)
    tables = torch.empty(0, device=DEVICE)
    prefill = MLACommonPrefillMetadata(tables, tables, 0, chunked_context=context)
    start, length = (np.array(column, dtype=np.int32) for column in ([0, 5, 0], [1, 3, 2]))
    nan = float("nan")
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_GPU:
            patch.setattr(copies, "async_copy_to_gpu", lambda x, device: torch.from_numpy(x))
        prefill = latent.tell_unordered(prefill, start, length)
        kernel_output = torch.tensor([nan, 1, 2, 3, nan, nan], device=DEVICE)
        patch.setattr(
            MLACommonImpl,
            "_compute_prefill_context",
            lambda *_: (kernel_output[:, None, None].clone(), kernel_output[None].clone()),
        )
        args = (torch.empty(0), torch.empty(0), SimpleNamespace(prefill=prefill), torch.empty(0))
        out, lse = make_impl()._compute_prefill_context(*args)
    return out.flatten().tolist(), lse.flatten().tolist(), context.prefill_tokens_with_context


def test_rows_out_of_order_on_the_stock_path(call: Callable[..., Any]) -> None:
    out, lse, merged_tokens = call(context_of_rows_out_of_order)
    assert out == [0, 1, 2, 3, 0, 0]
    assert lse[1:4] == [1, 2, 3]
    assert max(lse[0], *lse[4:]) < -1e29
    assert merged_tokens is None


def test_rows_in_order_are_left_to_the_stock_path() -> None:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonPrefillMetadata
    from vllm.v1.attention.backends.pcp.mla import latent

    context: Any = SimpleNamespace(prefill_tokens_with_context=3)
    tables = torch.empty(0)
    prefill = MLACommonPrefillMetadata(tables, tables, 0, chunked_context=context)
    start, length = (np.array(column, dtype=np.int32) for column in ([5, 7, 0], [1, 2, 2]))
    assert latent.tell_unordered(prefill, start, length) is prefill
    assert context.prefill_tokens_with_context == 3

# SPDX-License-Identifier: Apache-2.0
"""Ranks that share latents attend to what their rows selected, decodes and prefills of one step.

All ranks run in one process, one after the other and three times over: what a rank puts into an
exchange is there for the others the next time. Kernels are those of the CPU trial, and for
FLASH_ATTN_MLA_SPARSE, which has none, a loop over queries.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.conftest import Interpreter
from vllm.distributed.pcp.kv_shards import KVShards

LATENT, ROPE, NUM_HEADS, NUM_SELECTED, BLOCK_SIZE = 512, 64, 3, 6, 4
SCALE = 0.05
# Tokens of each request after the step, and of the step: decodes first. Of the second one all is
# kept by rank 0.
LENGTHS, QUERY_LENS, NUM_DECODES = (23, 1, 40, 33), (1, 1, 5, 9), 2
ORDER, INTERLEAVE = (1, 0), 2
NUM_SHARDS = len(ORDER)
# Stands in block tables behind the blocks of a request: reading it fails.
NO_BLOCK = 1 << 20
# What a kernel for quantised rows is given at a time.
MAX_QUERIES = 4


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def latents_of(req: int, *, is_quantized: bool) -> torch.Tensor:
    """Return ``[length, 576]``, or their bytes in the layout "fp8_ds_mla"."""
    from vllm import _custom_ops as ops

    rows = random(LENGTHS[req], LATENT + ROPE, seed=req)
    if not is_quantized:
        return rows
    packed = torch.zeros(1, LENGTHS[req], 656, dtype=torch.uint8)
    latent, rotary = rows.bfloat16().split([LATENT, ROPE], dim=1)
    slots = torch.arange(LENGTHS[req])
    ops.concat_and_cache_mla(latent, rotary, packed, slots, "fp8_ds_mla", torch.ones(()))
    return packed[0]


def selections() -> torch.Tensor:
    """Return ``[T, NUM_SELECTED]`` int32, for each row of a step some of the tokens it sees."""
    generator = torch.Generator().manual_seed(9)
    rows = []
    for length, query_len in zip(LENGTHS, QUERY_LENS, strict=True):
        for position in range(length - query_len, length):
            chosen = torch.randperm(position + 1, generator=generator)[:NUM_SELECTED]
            rows.append(torch.nn.functional.pad(chosen, (0, NUM_SELECTED - len(chosen)), value=-1))
    return torch.stack(rows).int()


def flash_attention(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to pages of one token, as FlashAttention 3."""
    assert given["causal"]
    assert given["return_softmax_lse"]
    assert given["cu_seqlens_q"].tolist() == list(range(len(given["q"]) + 1))
    outs, lses = [], []
    for query, slots in enumerate(given["block_table"]):
        pages = slots[: given["seqused_k"][query]]
        k, v = (given[name][pages, 0, 0] for name in "kv")
        scores = (given["q"][query] @ k.T + given["q_v"][query] @ v.T) * given["softmax_scale"]
        outs.append(scores.softmax(dim=-1) @ v)
        lses.append(scores.logsumexp(dim=-1))
    return torch.stack(outs), torch.stack(lses, dim=1)


def stand_in_for_flash_attention(patch: pytest.MonkeyPatch) -> None:
    """Let modules that no CPU build has be imported."""
    for name in ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"):
        module: Any = ModuleType(name)
        module.flash_attn_varlen_func = flash_attention
        patch.setitem(sys.modules, name, module)


class Exchanges:
    """What ranks have put into exchanges, by rank and turn."""

    def __init__(self) -> None:
        self.rank = self.turn = 0
        self.sent: dict[tuple[int, int], torch.Tensor] = {}

    def start(self, rank: int) -> None:
        self.rank, self.turn = rank, 0

    def _send(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return what all ranks have sent in this turn; who has not yet, has sent the same."""
        self.sent[self.rank, self.turn] = tensor.clone()
        sent = [self.sent.get((rank, self.turn), tensor) for rank in range(NUM_SHARDS)]
        self.turn += 1
        return sent

    def gather_shards(self, gathered: torch.Tensor, own_rows: torch.Tensor) -> None:
        sent = self._send(own_rows)
        gathered.copy_(torch.cat([sent[ORDER.index(place)] for place in range(NUM_SHARDS)]))

    def gather_lse(self, lse: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._send(lse))

    def sum_over_shards(self, partial: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._send(partial)).sum(dim=0)


def make_impl(backend: str, shards: KVShards, max_rows: int, *, is_quantized: bool) -> Any:
    """Return an implementation without its engine: what it was given stands in attributes."""
    from vllm.v1.attention.backends.pcp import BACKENDS
    from vllm.v1.worker.workspace import current_workspace_manager

    module, _, name = BACKENDS[backend].rpartition(".")
    impl: Any = object.__new__(getattr(import_module(module), name).get_impl_cls())
    impl.num_shards, impl.num_head_shards, impl.shards = NUM_SHARDS, 1, shards
    impl.max_rows, impl.num_heads, impl.head_size = max_rows, NUM_HEADS, LATENT + ROPE
    impl.kv_lora_rank, impl.qk_rope_head_dim = LATENT, ROPE
    impl.scale = impl.softmax_scale = SCALE
    impl.prefill_padding, impl.topk_indices_buffer = 8, selections()
    # As stock code has it: what else is in the workspace must not lie over it.
    shape = (sum(QUERY_LENS), NUM_HEADS, LATENT + ROPE)
    (impl.q_concat_buffer,) = current_workspace_manager().get_simultaneous((shape, torch.float32))
    impl._row = (656, torch.uint8) if is_quantized else (LATENT + ROPE, torch.float32)
    return impl


def common_metadata(shards: KVShards, table: torch.Tensor) -> Any:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    starts = torch.tensor([0, *torch.tensor(QUERY_LENS).cumsum(0).tolist()], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=len(LENGTHS),
        num_actual_tokens=sum(QUERY_LENS),
        max_query_len=max(QUERY_LENS),
        max_seq_len=max(LENGTHS),
        block_table_tensor=table,
        slot_mapping=starts,
        seq_lens_cpu_upper_bound=lengths,
        dcp_local_seq_lens=shards.num_kept(lengths, shards.rank),
    )


def make_builder(shards: KVShards, max_rows: int, *, is_quantized: bool) -> Any:
    """Return a builder of ours, without an engine."""
    from types import SimpleNamespace

    from vllm.v1.attention.backends.pcp.mla.shared_sparse import SharedSparseBuilderMixin

    class Builder(SharedSparseBuilderMixin):
        def max_queries(self) -> int | None:
            return MAX_QUERIES if is_quantized else None

        def schedule(self, common: Any) -> Any:
            if not is_quantized:
                return None
            assert common.num_actual_tokens <= MAX_QUERIES
            names = ("dummy_block_table", "cache_lens", "scheduler_metadata")
            return SimpleNamespace(num_queries=common.num_actual_tokens, **dict.fromkeys(names))

    builder: Any = object.__new__(Builder)
    builder.kv_cache_spec = SimpleNamespace(block_size=BLOCK_SIZE)
    builder.shards, builder.max_rows = shards, max_rows
    return builder


def as_scheduled(attend: Any) -> Any:
    """Return the same, which holds schedules against queries."""

    def checked(q: Any, cache: Any, slots: torch.Tensor, num_slots: Any, schedule: Any) -> Any:
        assert schedule is None or schedule.num_queries == len(slots)
        return attend(q, cache, slots, num_slots, schedule)

    return checked


def attend(backend: str, max_rows: int, is_quantized: bool) -> list[torch.Tensor]:
    """Return what each rank gets."""
    from vllm.v1.attention.backends.pcp.mla import shared_decode, shared_sparse
    from vllm.v1.worker import workspace
    from vllm.v1.worker.gpu.pcp import copies

    exchanges = Exchanges()
    latents = [latents_of(req, is_quantized=is_quantized) for req in range(len(LENGTHS))]
    q = random(sum(QUERY_LENS), NUM_HEADS, LATENT + ROPE, seed=5)
    outs = [torch.empty(0)] * NUM_SHARDS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "async_copy_to_gpu", lambda a, device: torch.from_numpy(a))
        patch.setattr(workspace, "_manager", None)
        patch.setattr(shared_sparse, "gather_shards", exchanges.gather_shards)
        patch.setattr(shared_decode, "gather_lse", exchanges.gather_lse)
        patch.setattr(shared_decode, "sum_over_shards", exchanges.sum_over_shards)
        if backend == "FLASH_ATTN_MLA_SPARSE":
            stand_in_for_flash_attention(patch)
        workspace.init_workspace_manager(torch.device("cpu"))
        for rank in list(range(NUM_SHARDS)) * 3:
            exchanges.start(rank)
            shards = KVShards(NUM_SHARDS, rank, INTERLEAVE, ORDER)
            # Blocks lie backwards; what is in them beside the rank's tokens must not matter.
            num_blocks = -(-max(LENGTHS) // BLOCK_SIZE)
            table = torch.arange(len(LENGTHS) * num_blocks, dtype=torch.int32).flip(0)
            table = table.view(len(LENGTHS), num_blocks)
            for req, length in enumerate(LENGTHS):
                most_kept = int(shards.num_kept(torch.tensor(length), rank=0))
                table[req, -(-most_kept // BLOCK_SIZE) :] = NO_BLOCK
            width, dtype = latents[0].shape[1], latents[0].dtype
            fill = 0 if is_quantized else 1e4
            cache = torch.full((len(LENGTHS) * num_blocks, BLOCK_SIZE, width), fill, dtype=dtype)
            for req, rows in enumerate(latents):
                places = torch.arange(len(rows)) // INTERLEAVE % NUM_SHARDS == rank
                for local, row in enumerate(rows[places]):
                    cache[table[req, local // BLOCK_SIZE], local % BLOCK_SIZE] = row
            builder = make_builder(shards, max_rows, is_quantized=is_quantized)
            metadata = builder.build(0, common_metadata(shards, table))
            assert metadata.num_decodes == NUM_DECODES
            impl = make_impl(backend, shards, max_rows, is_quantized=is_quantized)
            impl.attend = as_scheduled(impl.attend)
            parts = q.split([LATENT, ROPE], dim=-1)
            outs[rank], _ = impl.forward_mqa(tuple(parts), cache, metadata, None)
    return outs


def expected(*, is_quantized: bool) -> torch.Tensor:
    """Return attention of each row to the tokens it selected."""
    from vllm_cpu_trial.mla_cache import unpacked

    q = random(sum(QUERY_LENS), NUM_HEADS, LATENT + ROPE, seed=5)
    outs: list[torch.Tensor] = []
    for req, query_len in enumerate(QUERY_LENS):
        rows = latents_of(req, is_quantized=is_quantized)
        keys = (unpacked(rows) if is_quantized else rows).float()
        for _ in range(query_len):
            chosen = selections()[len(outs)]
            seen = keys[chosen[chosen >= 0].long()]
            weights = (q[len(outs)] @ seen.T * SCALE).softmax(dim=-1)
            outs.append(weights @ seen[:, :LATENT])
    return torch.stack(outs)


@pytest.mark.parametrize("max_rows", [64, 128], ids=["a chunk a request", "one chunk"])
@pytest.mark.parametrize(
    ("backend", "is_quantized"),
    [("FLASHMLA_SPARSE", False), ("FLASHMLA_SPARSE", True), ("FLASH_ATTN_MLA_SPARSE", False)],
)
def test_rows_attend_to_what_they_selected(
    interpreter: Interpreter, backend: str, is_quantized: bool, max_rows: int
) -> None:
    outs = interpreter(attend, backend, max_rows, is_quantized)
    wanted = interpreter(expected, is_quantized=is_quantized)
    for out in outs:
        assert (out - wanted).abs().max() < 1e-4


def bounds_of_queries() -> list[int | None]:
    """Return how many queries FLASHMLA_SPARSE is given at a time, of 16 bits and quantised."""
    from vllm.v1.attention.backends.pcp.mla.flashmla_sparse import PCPFlashMLASparseMetadataBuilder

    bounds = []
    for is_quantized in (False, True):
        builder: Any = object.__new__(PCPFlashMLASparseMetadataBuilder)
        builder.use_fp8_kv_cache = is_quantized
        bounds.append(builder.max_queries())
    return bounds


def test_the_kernel_for_quantised_rows_is_given_few_queries(interpreter: Interpreter) -> None:
    """Its sums have less than 2^31 elements then, of 128 heads, and twice."""
    unbounded, bound = interpreter(bounds_of_queries)
    assert unbounded is None
    assert 0 < 2 * bound * 128 * LATENT < 2**31


def test_rows_of_the_cache_are_of_the_models_type_or_quantised() -> None:
    from vllm.v1.attention.backends.pcp.mla.shared_sparse import cached_row

    for kv_cache_dtype in ("auto", "bfloat16"):
        assert cached_row(kv_cache_dtype, torch.bfloat16, 576) == (576, torch.bfloat16)
    assert cached_row("fp8_ds_mla", torch.bfloat16, 576) == (656, torch.uint8)
    with pytest.raises(ValueError, match=r"kv_cache_dtype=float16, dtype=torch.bfloat16\)\. Set"):
        cached_row("float16", torch.bfloat16, 576)


def refusals(num_shards: int) -> list[Any]:
    """Return what vLLM's FLASH_ATTN_MLA_SPARSE, and ours, say of a model."""
    from types import SimpleNamespace

    from vllm.config import set_current_vllm_config

    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(decode_context_parallel_size=num_shards),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(index_topk=8)),
    )
    arguments: Any = (576, torch.bfloat16, "auto", 64, True, False, True, False, None)
    with pytest.MonkeyPatch.context() as patch:
        stand_in_for_flash_attention(patch)
        from vllm.v1.attention.backends.mla import flashattn_mla_sparse
        from vllm.v1.attention.backends.pcp.mla.flashattn_mla_sparse import (
            PCPFlashAttnMLASparseBackend,
        )

        patch.setattr(flashattn_mla_sparse, "flash_attn_supports_mla", lambda: True)
        with set_current_vllm_config(config):
            return [
                backend.supports_combination(*arguments)
                for backend in (
                    flashattn_mla_sparse.FlashAttnMLASparseBackend,
                    PCPFlashAttnMLASparseBackend,
                )
            ]


def test_shared_caches_are_no_reason_to_refuse_a_model(interpreter: Interpreter) -> None:
    assert interpreter(refusals, 1) == [None, None]
    stock, ours = interpreter(refusals, 2)
    assert "DCP" in stock
    assert ours is None

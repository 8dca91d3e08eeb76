# SPDX-License-Identifier: Apache-2.0
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import Interpreter, interpreting_process

vllm_cpu_trial = pytest.importorskip("vllm_cpu_trial", reason="the CPU trial is not installed")


def sample(vocab_size: int, *, with_narrow_blocks: bool) -> list[int]:
    """Sample rows at several temperatures, whole rows at a time or with vLLM's own blocks."""
    from vllm.v1.worker.gpu.sample import gumbel

    num_rows = 4
    kernel: Any = gumbel._gumbel_sample_kernel
    with pytest.MonkeyPatch.context() as patch:
        if with_narrow_blocks:
            patch.setattr(gumbel, "_gumbel_sample_kernel", kernel.kernel)
        sampled = gumbel.gumbel_sample(
            torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)),
            torch.arange(num_rows, dtype=torch.int32),
            torch.tensor([0.0, 0.5, 1.0, 1.0]),
            torch.arange(num_rows) + 7,
            torch.arange(num_rows) * 3,
            apply_temperature=True,
        )
    return [int(token) for token in sampled]


def logprobs_and_ranks() -> tuple[torch.Tensor, ...]:
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_logprobs

    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([5, 0, 4999])
    result = compute_topk_logprobs(logits, 2, tokens)
    return logits, tokens, result.logprobs, result.selected_token_ranks


def most_likely_tokens(top_k: int) -> torch.Tensor:
    """Return which logits are left after top-k in one row and top-p in the other."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    vocab_size = 1000
    logits = torch.arange(vocab_size, dtype=torch.float32).repeat(2, 1)
    return apply_top_k_top_p(
        logits, torch.tensor([top_k, vocab_size]), torch.tensor([1.0, 0.5])
    ).isfinite()


def allowed_by_grammar(rows: list[list[bool]]) -> torch.Tensor:
    """Return which logits are left for the requests "b" and "d" of "a", "b", "c", "d"."""
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    vocab_size = len(rows[0])
    packed = np.packbits(np.array(rows), axis=1, bitorder="little").view(np.int32)
    worker = StructuredOutputsWorker(8, vocab_size, torch.device("cpu"))
    batch = SimpleNamespace(req_ids=["a", "b", "c", "d"], cu_num_logits_np=np.arange(5))
    logits = torch.zeros(4, vocab_size)
    worker.apply_grammar_bitmask(logits, batch, ["d", "b"], packed)  # type: ignore[arg-type]
    return logits.isfinite()


def sums_of_two_engines_of_one_port(port: str, rank: int, store: Path) -> list[float]:
    """Add in two groups of one name, the first left as a killed engine leaves it."""
    import torch.distributed as dist

    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_DIST_IDENT", port)
            group = dist.group.WORLD
            assert group is not None
            engines = [
                CpuCommunicator(group, device_group=group, unique_name="tp:0") for _ in range(2)
            ]
        assert all(engine.supports_tensor_dict for engine in engines), "shared memory is off"
        return [float(engine.all_reduce(torch.tensor([3.0 + rank]))) for engine in engines]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("vocab_size", [100, 1024, 3000])
def test_whole_rows_give_the_samples_of_narrow_blocks(
    vocab_size: int, interpreter: Interpreter
) -> None:
    narrow, whole = (interpreter(sample, vocab_size, with_narrow_blocks=n) for n in (True, False))
    assert whole == narrow
    assert len(set(whole)) > 1


def test_logprobs_and_ranks_are_those_of_torch(interpreter: Interpreter) -> None:
    logits, tokens, logprobs, ranks = interpreter(logprobs_and_ranks)
    expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs[:, 0], expected, atol=1e-5, rtol=0)
    assert ranks.tolist() == [
        int((row >= row[token]).sum()) for row, token in zip(logits, tokens, strict=True)
    ]


def test_top_k_and_top_p_keep_the_most_likely(interpreter: Interpreter) -> None:
    kept = interpreter(most_likely_tokens, 3)
    assert kept[0].nonzero().flatten().tolist() == [997, 998, 999]
    # The likeliest of exponentially falling tokens holds 1 - 1/e of the mass.
    assert kept[1].nonzero().flatten().tolist() == [999]


def test_grammar_bitmask_leaves_what_it_allows(interpreter: Interpreter) -> None:
    generator = np.random.default_rng(0)
    rows = (generator.random((2, 96)) < 0.5).tolist()
    everything = [True] * 96
    allowed = interpreter(allowed_by_grammar, rows)
    assert allowed.tolist() == [everything, rows[1], everything, rows[0]]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory has no folder here")
def test_shared_memory_outlives_no_engine(interpreter: Interpreter, tmp_path: Path) -> None:
    port = f"test-{os.getpid()}"
    older = Path("/dev/shm") / f"{port}-tp:0-[0-1]-cpushm_1"
    older.write_bytes(b"of an engine without this package")
    store = tmp_path / "store"
    try:
        with interpreting_process() as other, ThreadPoolExecutor() as threads:
            ranks = [
                threads.submit(run, sums_of_two_engines_of_one_port, port, rank, store)
                for rank, run in enumerate((interpreter, other))
            ]
            assert [rank.result() for rank in ranks] == [[7.0, 7.0]] * 2
        assert not list(Path("/dev/shm").glob(f"{port}-*"))
    finally:
        for segment in Path("/dev/shm").glob(f"{port}-*"):
            segment.unlink()


def test_nothing_is_replaced_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.language.extra import libdevice

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    before = libdevice.log1p
    vllm_cpu_trial.register()
    assert libdevice.log1p is before


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_backend_is_active_under_the_interpreter_alone(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends import backends

    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert backends["cpu"].driver.is_active() == (value == "1")


def test_a_process_that_interprets_keeps_its_environment_to_itself(
    interpreter: Interpreter,
) -> None:
    """Engines that later tests start would otherwise run in another way than users' do."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    assert interpreter(os.getenv, name) == "0"
    assert os.getenv(name) is None

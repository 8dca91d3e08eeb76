# SPDX-License-Identifier: Apache-2.0
"""vLLM with one rank on a CPU: what it makes of a model, and what the model then says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.chosen_tokens import Choice
from tests.conftest import Checkpoints, Interpreter

vllm_cpu_trial = pytest.importorskip("vllm_cpu_trial", reason="the CPU trial is not installed")

BLOCK_SIZE = 32
MAX_NUM_BATCHED_TOKENS = 128


def platform() -> tuple[str, bool, bool]:
    from vllm.platforms import current_platform

    return type(current_platform).__name__, current_platform.is_cpu(), current_platform.is_cuda()


def attention_backend(
    over: str = "TRITON_MLA",
    registered: str | None = None,
    *,
    selected: str | None = None,
    use_mla: bool = False,
    use_sparse: bool = False,
) -> str:
    """Return the path of the backend for a kind of attention, with one registered over another."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.attention.selector import AttentionSelectorConfig

    if registered is not None:
        register_backend(AttentionBackendEnum[over], registered)
    config = AttentionSelectorConfig(320, torch.float32, "auto", 32, use_mla, False, use_sparse)
    try:
        backend = None if selected is None else AttentionBackendEnum[selected]
        return current_platform.get_attn_backend_cls(cast(Any, backend), config)
    finally:
        AttentionBackendEnum[over].clear_override()


def scheduling(checkpoint: Path, max_num_batched_tokens: int) -> tuple[bool, int, list[str]]:
    """Return what the configuration of an engine says of chunks, and of operators."""
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        str(checkpoint),
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=1024,
        enforce_eager=True,
    ).create_engine_config()
    scheduler = config.scheduler_config
    return (
        scheduler.enable_chunked_prefill,
        scheduler.max_num_batched_tokens,
        config.compilation_config.custom_ops,
    )


def is_compiled(checkpoint: Path) -> bool:
    """Say whether an engine would compile the model, as it does by default."""
    from vllm.config import CompilationMode
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(str(checkpoint), max_model_len=1024).create_engine_config()
    return config.compilation_config.mode != CompilationMode.NONE


def test_the_platform_is_the_trials_and_a_cpu(interpreter: Interpreter) -> None:
    assert interpreter(platform) == ("TrialPlatform", True, False)


@pytest.mark.parametrize("value", ["0", None])
def test_there_is_no_platform_without_the_interpreter(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert vllm_cpu_trial.platform_class() is None


def test_dense_mla_takes_the_triton_backend(interpreter: Interpreter) -> None:
    assert interpreter(attention_backend, use_mla=True).endswith(".triton_mla.TritonMLABackend")


def test_sparse_mla_takes_the_flashmla_backend(interpreter: Interpreter) -> None:
    path = interpreter(attention_backend, use_mla=True, use_sparse=True)
    assert path.endswith(".flashmla_sparse.FlashMLASparseBackend")


@pytest.mark.parametrize(("over", "use_sparse"), [("TRITON_MLA", False), ("FLASHMLA_SPARSE", True)])
def test_a_registered_mla_backend_is_found(
    interpreter: Interpreter, over: str, use_sparse: bool
) -> None:
    found = interpreter(attention_backend, over, "ours.Mla", use_mla=True, use_sparse=use_sparse)
    assert found == "ours.Mla"


def test_other_attention_is_as_on_any_cpu(interpreter: Interpreter) -> None:
    assert interpreter(attention_backend).endswith(".cpu_attn.CPUAttentionBackend")
    with pytest.raises(NotImplementedError):
        interpreter(attention_backend, use_sparse=True)


def test_mla_keeps_the_users_scheduling(interpreter: Interpreter, checkpoints: Checkpoints) -> None:
    is_chunked, num_tokens, custom_ops = interpreter(scheduling, checkpoints("deepseek_v2"), 96)
    assert is_chunked
    assert num_tokens == 96
    assert custom_ops.count("-rotary_embedding") == 1


def test_sparse_models_are_not_compiled(interpreter: Interpreter, checkpoints: Checkpoints) -> None:
    assert not interpreter(is_compiled, checkpoints("deepseek_v32"))
    assert interpreter(is_compiled, checkpoints("deepseek_v2"))


def test_other_models_keep_their_rotary_kernel(
    interpreter: Interpreter, checkpoints: Checkpoints
) -> None:
    is_chunked, num_tokens, custom_ops = interpreter(scheduling, checkpoints("qwen3"), 96)
    assert is_chunked
    assert num_tokens == 96
    assert "-rotary_embedding" not in custom_ops


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine says to a prompt.

    Attributes:
        tokens: The most likely ones, one after the other.
        logprobs: Of each.
        num_cached_tokens: Tokens of the prompt that were in the cache already.
        choices: Of an indexer's layer and a position the tokens attended to.
    """

    tokens: list[int]
    logprobs: list[float]
    num_cached_tokens: int
    choices: Mapping[tuple[str, int], list[int]]


def generate(
    checkpoint: Path,
    batches: Sequence[Sequence[list[int]]],
    block_size: int,
    **arguments: Any,
) -> list[list[Answer]]:
    """Ask an engine one batch of prompts after the other."""
    from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt

    engine = LLM(
        str(checkpoint),
        dtype="float32",
        enforce_eager=True,
        block_size=block_size,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=512,
        max_num_seqs=8,
        num_gpu_blocks_override=64,
        kv_cache_memory_bytes=64 << 20,
        gpu_memory_utilization=0.1,
        worker_extension_cls="tests.chosen_tokens.ChosenTokens",
        **arguments,
    )
    engine.collective_rpc("record_choices")
    params = SamplingParams(
        temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0, detokenize=False
    )

    def answer(output: RequestOutput, choices: Sequence[Choice]) -> Answer:
        (sample,) = output.outputs
        entries = zip(cast(Any, sample.logprobs), sample.token_ids, strict=True)
        return Answer(
            list(sample.token_ids),
            [entry[token].logprob for entry, token in entries],
            output.num_cached_tokens or 0,
            {
                (layer, position): chosen
                for layer, req_id, position, chosen in choices
                if req_id.partition("-")[0] == output.request_id
            },
        )

    def ask(prompts: Sequence[list[int]]) -> list[Answer]:
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = engine.generate(inputs, params, use_tqdm=False)
        (choices,) = engine.collective_rpc("take_choices")
        return [answer(output, choices) for output in outputs]

    return [ask(prompts) for prompts in batches]


@pytest.mark.slow
def test_dense_mla_says_what_transformers_says(
    interpreter: Interpreter, checkpoints: Checkpoints
) -> None:
    """A prompt is taken in three chunks, and others start beside the last, which is longer."""
    lengths = (2 * MAX_NUM_BATCHED_TOKENS + 50, 3, 17, 1, BLOCK_SIZE, 2, 100, BLOCK_SIZE + 1, 64)
    tokens = iter(Random(0).choices(range(94), k=1000))
    prompts = [[next(tokens) for _ in range(length)] for length in lengths]
    # One token, two and some more are left to compute.
    cached = [prompts[0][:n] + [next(tokens)] * m for n, m in ((256, 1), (96, 2), (32, 40))]
    answers = interpreter(
        generate, checkpoints("deepseek_v2"), [prompts, [*cached, prompts[6]]], BLOCK_SIZE
    )
    assert [answer.num_cached_tokens for answer in answers[1]] == [256, 96, 32, 96]

    require_answers_of_transformers(
        checkpoints("deepseek_v2"),
        [*prompts, *cached, prompts[6]],
        [*answers[0], *answers[1]],
    )


def require_answers_of_transformers(
    checkpoint: Path, prompts: Sequence[list[int]], answers: Sequence[Answer]
) -> None:
    """Assert that answers are those of the Transformers library, nearly to the same logprobs."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer.tokens])).logits[0]
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        assert answer.tokens == expected.argmax(-1).tolist()
        torch.testing.assert_close(
            torch.tensor(answer.logprobs), expected.max(-1).values, atol=1e-4, rtol=0
        )

# SPDX-License-Identifier: Apache-2.0
"""The last pieces of real models, as vLLM cuts and compiles them, run on sampled rows.

On CPUs vLLM compiles models whole; here they are cut as on GPUs, and the pieces, which graphs are
not captured of, run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import Checkpoints, interpreting_process
from vllm.compilation import backends
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CompilationMode, VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.pcp.step import REPLICATED, StepState, set_step_state
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.pcp.last_piece import LastPiece

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("cpu" not in version("vllm"), reason="runs on CPUs"),
]

# One has as many rows as a matrix of the models has.
SIZES = (256, 64)
NUM_ROWS, SAMPLED = 70, (5, 69, 0)
ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "block_size": 32,
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 64,
    "kv_cache_memory_bytes": 64 << 20,
    "gpu_memory_utilization": 0.1,
}


def wrapper_without_graphs(piece: object, *_: object) -> Any:
    """Return the stock wrapper of a piece, where there is no memory for graphs."""
    wrapper: Any = object.__new__(CUDAGraphWrapper)
    wrapper.runnable, wrapper.runtime_mode = piece, CUDAGraphMode.PIECEWISE
    CUDAGraphWrapper._all_instances.add(wrapper)
    return wrapper


def cut(adapt: Callable[[type, VllmConfig], None]) -> Any:
    """Return what adapts a configuration to CPUs, but for the way models are compiled."""

    def check_and_update_config(platform: type, config: VllmConfig) -> None:
        adapt(platform, config)
        compilation = config.compilation_config
        compilation.mode, compilation.backend = CompilationMode.VLLM_COMPILE, "eager"
        compilation.splitting_ops = list(compilation._attention_ops)
        compilation.cudagraph_mode, compilation.compile_sizes = CUDAGraphMode.NONE, []

    return classmethod(check_and_update_config)


def hidden_states(checkpoint: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return those of a prompt, of all rows and of sampled ones."""
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.platforms import current_platform

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
        patch.setattr(backends, "wrap_with_cudagraph_if_needed", wrapper_without_graphs)
        platform: Any = type(current_platform)
        adapt = platform.check_and_update_config.__func__
        patch.setattr(platform, "check_and_update_config", cut(adapt))
        llm: Any = LLM(checkpoint, **ENGINE)
        core = llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner

        for_graphs: dict[str, Any] = {"attn_metadata": None, "vllm_config": runner.vllm_config}
        piece = LastPiece.take_over()
        assert piece is not None
        for size in SIZES:
            with torch.inference_mode(), set_forward_context(num_tokens=size, **for_graphs):
                ids = torch.zeros(size, dtype=torch.int32)
                runner.model(input_ids=ids, positions=torch.arange(size))
        assert piece.settle(list(SIZES))

        outputs: list[torch.Tensor] = []

        def note(_: Any, __: Any, hidden_states: torch.Tensor) -> torch.Tensor:
            outputs.append(hidden_states.clone())
            # This engine samples from all rows.
            return outputs[0]

        runner.model.register_forward_hook(note)
        sampled: Any = SimpleNamespace(send_idx=torch.tensor(SAMPLED), is_applied=False)
        prompt = TokensPrompt(prompt_token_ids=[7 * i % 300 for i in range(NUM_ROWS)])
        params = SamplingParams(max_tokens=1, detokenize=False)
        for step in (REPLICATED, StepState(is_partitioned=False, sampled=sampled)):
            set_step_state(step)
            llm.generate([prompt], params, use_tqdm=False)
            llm.reset_prefix_cache()
        set_step_state(REPLICATED)
        assert sampled.is_applied
        core.shutdown()
    whole, rows = outputs
    return whole, rows


# Grouped queries, with norms in several places; latents and experts.
@pytest.mark.parametrize("name", ["gemma3", "deepseek_v2"])
def test_sampled_rows_are_those_of_the_whole(name: str, checkpoints: Checkpoints) -> None:
    # One model a process: what is compiled stays.
    with interpreting_process() as run:
        whole, sampled = run(hidden_states, str(checkpoints(name)))
    assert whole.unique(dim=0).shape[0] == whole.shape[0] == NUM_ROWS
    torch.testing.assert_close(sampled, whole[list(SAMPLED)], atol=1e-5, rtol=0)

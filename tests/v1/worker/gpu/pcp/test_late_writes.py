# SPDX-License-Identifier: Apache-2.0
"""The sampler sees what the stock one sees, and none of it is written before it is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import Interpreter
from vllm.sampling_params import SamplingParams

Seen = dict[str, list[Any]]
NUM_REQS, VOCAB_SIZE = 4, 32
# Of each step the requests that it adds: row, tokens, of them of the prompt, parameters.
STEPS: list[list[tuple[int, int, int, dict[str, Any]]]] = [
    [(2, 5, 5, {"temperature": 0.5, "logit_bias": {3: 1.5}})],
    [],
    [
        (0, 7, 4, {"repetition_penalty": 1.5, "top_k": 3}),
        (2, 3, 3, {"temperature": 0.25, "min_tokens": 2, "logit_bias": {4: 2.5}}),
    ],
]


def run_steps(is_late: bool) -> list[tuple[Seen, Seen]]:
    """Return of each step what is on the device ahead of the forward pass, and for the sampler."""
    from vllm.v1.worker.gpu.pcp.late_writes import LateSampler
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    device = torch.device("cpu")
    states = RequestState(NUM_REQS, 64, 64, 0, VOCAB_SIZE, device)
    sampler = Sampler(NUM_REQS, VOCAB_SIZE, device, states)
    if is_late:
        LateSampler.take_over(sampler)

    def on_device(*_: Any) -> Any:
        tensors = {
            "temperature": sampler.sampling_states.temperature.gpu,
            "top_k": sampler.sampling_states.top_k.gpu,
            "repetition_penalty": sampler.penalties_state.repetition_penalty.gpu,
            "prompt_bin_mask": sampler.penalties_state.prompt_bin_mask,
            "output_bin_counts": sampler.penalties_state.output_bin_counts,
            "logit_bias_token_ids": sampler.logit_bias_state.logit_bias_token_ids.gpu,
            "logit_bias": sampler.logit_bias_state.logit_bias.gpu,
            "min_lens": sampler.logit_bias_state.min_lens.gpu,
            "total_len": states.total_len.gpu,
        }
        return {name: tensor.tolist() for name, tensor in tensors.items()}

    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "__call__", on_device)
        for step in STEPS:
            for row, num_tokens, prompt_len, params in step:
                if (name := f"request in row {row}") in states.req_id_to_index:
                    states.remove_request(name)
                states.free_indices.remove(row)
                states.free_indices.append(row)
                states.add_request(name, prompt_len, list(range(num_tokens)), 0, 9)
                sampler.add_request(row, prompt_len, SamplingParams(**params))
            if step:
                states.apply_staged_writes()
            sampler.apply_staged_writes()
            ahead = on_device()
            logits: Any = None
            batch: Any = None
            called: Any = sampler(logits, batch)
            seen.append((ahead, called))
    return seen


def test_the_sampler_sees_what_the_stock_one_sees(interpreter: Interpreter) -> None:
    late, stock = (interpreter(run_steps, is_late) for is_late in (True, False))
    assert [called for _, called in late] == [called for _, called in stock]
    # Each request has left its mark.
    assert stock[0][1] != stock[2][1]
    assert stock[2][1]["total_len"] == [7, 0, 3, 0]


def test_nothing_is_written_ahead_of_the_forward_pass(interpreter: Interpreter) -> None:
    late = interpreter(run_steps, True)
    assert [ahead for ahead, _ in late[1:]] == [called for _, called in late[:-1]]

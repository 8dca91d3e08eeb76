# SPDX-License-Identifier: Apache-2.0
"""Tokens arrive on the device as the stock tensor writes them, lists and arrays alike."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.conftest import Interpreter
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.pcp import PCPMultiprocExecutor, with_packed_tokens

NUM_REQS, MAX_TOKENS = 5, 70
TOKENS = list(range(100, 160))
PACK: dict[str, Callable[[list[int]], Sequence[int]]] = {
    "list": list,
    "array": lambda tokens: array("i", tokens),
    "unsigned array": lambda tokens: array("I", tokens),
}


def written(pack: str) -> list[list[list[int]]]:
    """Return what the stock tensor and ours hold after some writes."""
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
    from vllm.v1.worker.gpu.pcp.token_ids import PackedTokenIds

    shape, device = (NUM_REQS, MAX_TOKENS), torch.device("cpu")
    stock, ours = (
        StagedWriteTensor(shape, torch.int32, device, uva_instead_of_gpu=True) for _ in range(2)
    )
    PackedTokenIds.take_over(ours)
    for tensor, convert in ((stock, list), (ours, PACK[pack])):
        for tokens in (TOKENS, TOKENS[::-1]):
            tensor.stage_write(3, 0, convert(tokens))
            tensor.stage_write(1, 0, convert([]))
            tensor.stage_write(0, 7, convert(tokens[:5]))
            tensor.stage_write_elem(4, tokens[0])
            tensor.apply_write()
            tensor.apply_write()  # Nothing is left to be written.
    return [stock.gpu.tolist(), ours.gpu.tolist()]


@pytest.mark.parametrize("pack", PACK)
def test_tokens_are_written_as_by_the_stock_tensor(interpreter: Interpreter, pack: str) -> None:
    stock, ours = interpreter(written, pack)
    assert ours == stock
    assert ours[3][: len(TOKENS)] == TOKENS[::-1]


def new_request(prompt: list[int] | None, prefill: list[int]) -> NewRequestData:
    return NewRequestData(
        req_id="a",
        prompt_token_ids=prompt,
        mm_features=[],
        sampling_params=SamplingParams(),
        pooling_params=None,
        block_ids=([1, 2],),
        num_computed_tokens=0,
        lora_request=None,
        prefill_token_ids=prefill,
    )


@pytest.mark.parametrize(
    ("prompt", "prefill"),
    [
        (TOKENS, list(TOKENS)),
        (TOKENS, [*TOKENS, 7]),
        (None, TOKENS),
        ([2**31 - 1], [0]),
        ([3, -1], [-1]),
    ],
)
def test_workers_get_the_tokens_that_were_scheduled(
    prompt: list[int] | None, prefill: list[int]
) -> None:
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [new_request(prompt, prefill)]
    (sent,) = pickle.loads(pickle.dumps(with_packed_tokens(output))).scheduled_new_reqs
    assert sent.prompt_token_ids == (None if prompt is None else array("i", prompt))
    assert sent.prefill_token_ids == array("i", prefill)
    assert sent.block_ids == ([1, 2],)
    # The engine core goes on with its own.
    assert output.scheduled_new_reqs[0].prefill_token_ids is prefill


def test_the_executor_sends_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[SchedulerOutput] = []
    monkeypatch.setattr(MultiprocExecutor, "execute_model", lambda *args: sent.append(args[1]))
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [new_request(TOKENS, TOKENS)]
    PCPMultiprocExecutor.execute_model(object.__new__(PCPMultiprocExecutor), output)
    assert isinstance(sent[0].scheduled_new_reqs[0].prefill_token_ids, array)

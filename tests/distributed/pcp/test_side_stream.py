# SPDX-License-Identifier: Apache-2.0
"""What runs beside the current stream sees its input, and is waited for."""

from __future__ import annotations

import pytest
import torch

from vllm.distributed.pcp.side_stream import SideStream

NUM_ELEMENTS = 1 << 24
# Long enough for a wrong order to show.
NUM_CYCLES = 50_000_000


def double_beside(side: SideStream, output: torch.Tensor) -> None:
    """Write twice a temporary tensor's values on the side, then use its memory for another one."""
    values = torch.full_like(output, 3.0)
    side.fork(values)
    with torch.cuda.stream(side.stream):
        torch.cuda._sleep(NUM_CYCLES)
        torch.mul(values, 2, out=output)
    del values
    torch.full_like(output, -1.0)
    side.join()
    output.add_(1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("is_captured", [False, True])
def test_inputs_are_kept_and_output_is_waited_for(is_captured: bool) -> None:
    side = SideStream(torch.device("cuda"))
    output = torch.zeros(NUM_ELEMENTS, device="cuda")
    if is_captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            double_beside(side, output)
        graph.replay()
    else:
        double_beside(side, output)
    assert output.unique().tolist() == [7.0]


def test_there_is_nothing_beside_on_cpus() -> None:
    side = SideStream(torch.device("cpu"))
    assert side.stream is None
    side.fork(torch.zeros(1))
    side.join()

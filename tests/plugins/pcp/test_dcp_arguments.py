# SPDX-License-Identifier: Apache-2.0
"""D on the command line: vLLM's own validation, all of it, with a D that it would refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Interpreter
from tests.plugins.pcp.test_admission import DEEPSEEK, LLAMA

pytestmark = pytest.mark.slow


def create(model: Path, flags: list[str]) -> tuple[int, int, int] | str:
    """Return P, D and the number of ranks of a configuration, or what it is refused with."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    load_general_plugins()
    common = ["--skip-tokenizer-init", "--load-format", "dummy", "--enforce-eager"]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", str(model), "--dtype", "float32", *common, *flags])
    try:
        config = EngineArgs.from_cli_args(args).create_engine_config()
    except (ValueError, NotImplementedError) as refusal:
        return str(refusal)
    parallel = config.parallel_config
    return (
        parallel.prefill_context_parallel_size,
        parallel.decode_context_parallel_size,
        parallel.world_size,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model without weights."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **DEEPSEEK}))
    return tmp_path


@pytest.mark.parametrize(
    ("pcp", "tp", "dcp"),
    [(2, 1, 2), (3, 1, 3), (2, 2, 2), (2, 2, 4), (2, 2, 1), (1, 2, 2)],
)
def test_legal_sizes(
    interpreter: Interpreter,
    model: Path,
    pcp: int,
    tp: int,
    dcp: int,
) -> None:
    flags = [f"-pcp={pcp}", f"-tp={tp}", f"-dcp={dcp}"]
    assert interpreter(create, model, flags) == (pcp, dcp, pcp * tp)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-pcp=2", "-dcp=4"], "(got decode_context_parallel_size=4, not 1 or 2). "),
        (["-pcp=2", "-tp=4", "-dcp=4"], "(got decode_context_parallel_size=4, not 1, 2 or 8). "),
        (["-pcp=2", "-dcp=2", "--dcp-comm-backend=a2a"], "(got dcp_comm_backend=a2a). "),
        (["-pcp=2", "--dcp-comm-backend=a2a"], "(got dcp_comm_backend=a2a). "),
        # As vLLM has it.
        (["-dcp=2"], "tp_size=1 must be divisible bydcp_size=2"),
    ],
)
def test_refusals(
    interpreter: Interpreter,
    model: Path,
    flags: list[str],
    message: str,
) -> None:
    refusal: Any = interpreter(create, model, flags)
    assert message in refusal

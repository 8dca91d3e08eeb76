# SPDX-License-Identifier: Apache-2.0
"""GSM8K with each of the configurations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evals.gsm8k.gsm8k_eval import load
from tests.evals.gsm8k.run_configs import Configuration, Files, require_gpus, run

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
CONFIGS = sorted(Path(__file__).with_name("configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_model_is_accurate(path: Path, tmp_path: Path) -> None:
    configuration = Configuration.read(path)
    try:
        require_gpus(configuration)
        load(configuration.settings(0, Files()))
    except ValueError as error:
        pytest.skip(str(error))
    assert run(configuration, tmp_path).shortcomings == []

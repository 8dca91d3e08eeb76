# SPDX-License-Identifier: Apache-2.0
"""An offline engine, the normal way, of which a rank is killed in the middle of a step.

python -m tests.e2e.killed_rank SPEC OUTCOME
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from tests.e2e.engine import engine_args
from tests.e2e.processes import session
from tests.e2e.results import Spec
from tests.e2e.scenarios import random_tokens
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.v1.engine.exceptions import EngineDeadError


def main(spec: str, outcome: str) -> None:
    """Write which error ended the engine, after how long, and which processes it had."""
    llm = LLM(**engine_args(Spec.load(Path(spec))))
    tokens = random_tokens()
    params = SamplingParams(temperature=0.0, max_tokens=2)
    llm.generate(TokensPrompt(prompt_token_ids=tokens[:100]), params)
    llm.collective_rpc("die_in_next_gather", args=(1,))
    pids = [pid for pid in session(os.getsid(0)) if pid != os.getpid()]
    error = None
    begin = time.monotonic()
    try:
        # Not the same prompt again, of which little would be left to prefill.
        llm.generate(TokensPrompt(prompt_token_ids=tokens[100:200]), params)
    except EngineDeadError as dead:
        error = str(dead)
    seconds = time.monotonic() - begin
    Path(outcome).write_text(json.dumps({"error": error, "seconds": seconds, "pids": pids}))


if __name__ == "__main__":
    main(*sys.argv[1:])

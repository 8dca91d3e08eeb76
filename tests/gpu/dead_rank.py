# SPDX-License-Identifier: Apache-2.0
"""An engine of which a rank dies in a partitioned prefill; see ``test_dead_rank.py``.

    python tests/gpu/dead_rank.py peer|gather

Exit status 0: the engine said so, and ended.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from checkpoints import checkpoint_folder


class MortalRank:
    """A method for ``collective_rpc``, of an engine that is given this class by name."""

    def die_of_next_exchange(self: Any) -> None:
        """End this process, if it is PCP rank 1, as if it had been killed, ahead of a copy."""
        import torch

        from vllm.distributed.pcp.kv_gather import KVGather
        from vllm.distributed.pcp.peer_caches import PeerCaches

        def die(*_: Any) -> None:
            torch.cuda.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)

        if self.model_runner.pcp.pcp_rank == 1:
            for kind, name in ((PeerCaches, "copy"), (KVGather, "finish")):
                setattr(kind, name, die)


def generate(exchange: str) -> None:
    """Prefill once, then once more with a rank that dies of it."""
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.v1.engine.exceptions import EngineDeadError

    llm = LLM(
        checkpoint_folder("gqa"),
        skip_tokenizer_init=True,
        max_model_len=4096,
        gpu_memory_utilization=0.04,
        kv_cache_memory_bytes=2**28,
        enforce_eager=True,
        prefill_context_parallel_size=2,
        worker_cls="vllm.v1.worker.pcp.gpu_worker.OneGpuPCPWorker",
        worker_extension_cls="dead_rank.MortalRank",
        distributed_executor_backend="mp",
        disable_custom_all_reduce=True,
        additional_config={"pcp_kv_exchange": exchange},
    )
    sampling = SamplingParams(max_tokens=1, detokenize=False)
    llm.generate(TokensPrompt(prompt_token_ids=[*range(1000)]), sampling, use_tqdm=False)
    llm.collective_rpc("die_of_next_exchange")
    try:
        llm.generate(TokensPrompt(prompt_token_ids=[*range(1000, 2000)]), sampling, use_tqdm=False)
    except EngineDeadError:
        sys.exit(0)
    sys.exit("nobody died")


if __name__ == "__main__":
    generate(sys.argv[1])

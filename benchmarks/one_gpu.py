# SPDX-License-Identifier: Apache-2.0
"""Several ranks of stock vLLM on GPU 0, to try a benchmark out where there is one GPU."""

from __future__ import annotations

import os
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.worker.gpu_worker import Worker


class OneGpuWorker(Worker):
    """What ``OneGpuPCPWorker`` is for PCP: right tokens, no speed."""

    def __init__(
        self, vllm_config: VllmConfig, local_rank: int, rank: int, *args: Any, **kwargs: Any
    ) -> None:
        # To NCCL each rank is on a host of its own, since it refuses two on one device.
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
        super().__init__(vllm_config, 0, rank, *args, **kwargs)

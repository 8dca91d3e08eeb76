# SPDX-License-Identifier: Apache-2.0
"""GPU workers for prefill context parallelism."""

from __future__ import annotations

import os
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.pcp.mixin import PCPWorkerMixin


class PCPWorker(PCPWorkerMixin, Worker):
    """One rank on one GPU."""


class OneGpuPCPWorker(PCPWorker):
    """All ranks on GPU 0, to try things out where there is one GPU: right tokens, no speed.

    Use it with ``--worker-cls vllm.v1.worker.pcp.gpu_worker.OneGpuPCPWorker
    --distributed-executor-backend mp --disable-custom-all-reduce``, and divide
    ``--gpu-memory-utilization`` by the number of ranks.
    """

    def __init__(
        self, vllm_config: VllmConfig, local_rank: int, rank: int, *args: Any, **kwargs: Any
    ) -> None:
        # NCCL refuses two ranks of one host on one device: each claims a host of its own.
        os.environ["NCCL_HOSTID"] = f"pcp-rank-{rank}"
        super().__init__(vllm_config, 0, rank, *args, **kwargs)

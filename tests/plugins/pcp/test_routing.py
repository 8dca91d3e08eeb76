# SPDX-License-Identifier: Apache-2.0
"""Which worker and which cores a configuration with P > 1 gets."""

from __future__ import annotations

import os

import pytest

from vllm.plugins.pcp import routing


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """One NUMA node with six cores, and no binding chosen."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 4, 5, 8, 9})
    monkeypatch.setattr("vllm.utils.cpu_resource_utils.get_visible_memory_node", lambda: [0])
    monkeypatch.setenv(routing.OMP_BIND_ENV, "auto")
    monkeypatch.setattr(routing, "_chosen_binding", "auto")


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(
    ("world_size", "binding"),
    [
        (2, "2,3,4|5,8,9"),
        (4, "2|3|4|5"),
        (6, "2|3|4|5|8|9"),
        (7, "nobind"),
        (1, "auto"),
    ],
)
def test_cores_are_shared_out_evenly(world_size: int, binding: str) -> None:
    routing.bind_cpu_ranks(world_size)
    assert os.environ[routing.OMP_BIND_ENV] == binding


@pytest.mark.usefixtures("cores")
def test_a_second_engine_of_a_process_gets_its_own_binding() -> None:
    routing.bind_cpu_ranks(2)
    routing.bind_cpu_ranks(3)
    assert os.environ[routing.OMP_BIND_ENV] == "2,3|4,5|8,9"


@pytest.mark.usefixtures("cores")
def test_the_users_binding_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(routing.OMP_BIND_ENV, "4|5")
    routing.bind_cpu_ranks(2)
    assert os.environ[routing.OMP_BIND_ENV] == "4|5"


@pytest.mark.parametrize(("stock", "ours"), routing.WORKERS.items())
def test_stock_workers_become_ours(stock: str, ours: str) -> None:
    assert routing.pcp_worker(stock) == ours


def test_a_worker_derived_from_ours_stays() -> None:
    derived = "vllm.v1.worker.pcp.gpu_worker.OneGpuPCPWorker"
    assert routing.pcp_worker(derived) == derived


def test_a_worker_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"worker_cls=vllm.v1.worker.worker_base.WorkerBase"):
        routing.pcp_worker("vllm.v1.worker.worker_base.WorkerBase")

# SPDX-License-Identifier: Apache-2.0
"""Which worker and which cores a configuration with P > 1 gets."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.plugins.pcp import routing
from vllm.utils.cpu_resource_utils import LogicalCPUInfo


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing chosen by the user, nothing left by an engine."""
    monkeypatch.setattr(routing, "_environment", {})
    monkeypatch.delenv(routing.OMP_BIND_ENV, raising=False)


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """One NUMA node, six cores of two threads; the second threads are numbered behind the first."""
    threads = [
        LogicalCPUInfo(id=core + 6 * thread, physical_core=core, numa_node=0)
        for thread in range(2)
        for core in range(6)
    ]
    monkeypatch.setattr("vllm.utils.cpu_resource_utils.get_allowed_cpu_list", lambda: threads)
    monkeypatch.setattr("vllm.utils.cpu_resource_utils.get_visible_memory_node", lambda: [0])


def cores(binding: str) -> list[list[int]]:
    """Return the cores of each rank."""
    return [[int(cpu) % 6 for cpu in rank.split(",")] for rank in binding.split("|")]


@pytest.mark.usefixtures("cpus")
@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_ranks_share_no_core(world_size: int) -> None:
    routing.bind_cpu_ranks(world_size)
    shared_out = cores(os.environ[routing.OMP_BIND_ENV])
    assert {len(rank) for rank in shared_out} == {6 // world_size}
    assert sorted(core for rank in shared_out for core in rank) == list(range(6))


@pytest.mark.usefixtures("cpus")
def test_more_ranks_than_cores_share_threads_and_more_than_threads_are_not_bound() -> None:
    routing.bind_cpu_ranks(12)
    assert sorted(os.environ[routing.OMP_BIND_ENV].split("|"), key=int) == list(map(str, range(12)))
    routing.undo_environment()
    routing.bind_cpu_ranks(13)
    assert os.environ[routing.OMP_BIND_ENV] == "nobind"


@pytest.mark.usefixtures("cpus")
def test_a_numa_node_for_each_rank_is_left_to_vllm() -> None:
    routing.bind_cpu_ranks(1)
    assert routing.OMP_BIND_ENV not in os.environ


@pytest.mark.usefixtures("cpus")
def test_the_users_binding_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(routing.OMP_BIND_ENV, "4|5")
    routing.bind_cpu_ranks(2)
    assert os.environ[routing.OMP_BIND_ENV] == "4|5"


def make_config(pcp_world_size: int, backend: str = "mp", dcp_world_size: int = 1) -> Any:
    parallel = SimpleNamespace(
        prefill_context_parallel_size=pcp_world_size,
        decode_context_parallel_size=dcp_world_size,
        dcp_comm_backend="ag_rs",
        distributed_executor_backend=backend,
    )
    return SimpleNamespace(parallel_config=parallel, model_config=object())


@pytest.fixture
def seen_by_vllm() -> list[tuple[int, int]]:
    """P and D of the configurations that vLLM has validated."""
    return []


@pytest.fixture
def post_init(
    monkeypatch: pytest.MonkeyPatch, seen_by_vllm: list[tuple[int, int]]
) -> Callable[[Any], None]:
    """The wrapper over a validation that only looks, and a route that sets the binding."""
    monkeypatch.setattr("vllm.plugins.pcp.admission.validate_config", lambda config: None)
    monkeypatch.setattr(
        routing, "route", lambda config: routing.set_environment(routing.OMP_BIND_ENV, "0|1")
    )

    def validate(config: Any) -> None:
        parallel = config.parallel_config
        seen_by_vllm.append(
            (parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size)
        )

    return routing.wrap_vllm_config_post_init(validate)


@pytest.mark.parametrize(
    ("config", "is_shown"),
    [
        (make_config(2, dcp_world_size=4), (1, 1)),
        # An engine core, which P has been taken from: vLLM would compare D with TP all the same.
        (make_config(1, backend=routing.EXECUTOR, dcp_world_size=4), (1, 1)),
        # P = 1 is none of our business.
        (make_config(1, dcp_world_size=4), (1, 4)),
    ],
    ids=["P > 1", "engine core", "P = 1"],
)
def test_vllm_validates_as_if_p_and_d_were_1(
    post_init: Callable[[Any], None],
    seen_by_vllm: list[tuple[int, int]],
    config: Any,
    is_shown: tuple[int, int],
) -> None:
    pcp_world_size = config.parallel_config.prefill_context_parallel_size
    post_init(config)
    assert seen_by_vllm == [is_shown]
    assert config.parallel_config.prefill_context_parallel_size == pcp_world_size
    assert config.parallel_config.decode_context_parallel_size == 4


@pytest.mark.parametrize("fails", [False, True])
def test_d_is_kept_from_the_arguments_and_stands_in_the_configuration(
    post_init: Callable[[Any], None], fails: bool
) -> None:
    def create(args: Any) -> Any:
        assert (args.decode_context_parallel_size, args.dcp_comm_backend) == (1, "ag_rs")
        if fails:
            raise ValueError("refused")
        config = make_config(args.prefill_context_parallel_size)
        post_init(config)
        return config

    args = SimpleNamespace(
        prefill_context_parallel_size=2, decode_context_parallel_size=4, dcp_comm_backend="a2a"
    )
    if fails:
        with pytest.raises(ValueError, match="refused"):
            routing.wrap_create_engine_config(create)(args)
    else:
        parallel = routing.wrap_create_engine_config(create)(args).parallel_config
        assert (parallel.decode_context_parallel_size, parallel.dcp_comm_backend) == (4, "a2a")
    assert (args.decode_context_parallel_size, args.dcp_comm_backend) == (4, "a2a")
    # Nothing is left for a configuration that is not made from arguments.
    config = make_config(2)
    post_init(config)
    assert config.parallel_config.decode_context_parallel_size == 1


def test_what_an_engine_needs_is_gone_for_the_next_one(
    post_init: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    post_init(make_config(2))
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    post_init(make_config(1, backend=routing.EXECUTOR))
    assert os.environ[routing.OMP_BIND_ENV] == "0|1", "an engine core lost its environment"
    post_init(make_config(1))
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
    assert routing.OMP_BIND_ENV not in os.environ


def test_what_the_user_sets_in_between_stays(
    post_init: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    post_init(make_config(2))
    monkeypatch.setenv(routing.OMP_BIND_ENV, "3")
    post_init(make_config(1))
    assert os.environ[routing.OMP_BIND_ENV] == "3"


@pytest.mark.parametrize(("stock", "ours"), routing.WORKERS.items())
def test_stock_workers_become_ours(stock: str, ours: str) -> None:
    assert routing.pcp_worker(stock) == ours


def test_a_worker_derived_from_ours_stays() -> None:
    derived = "vllm.v1.worker.pcp.gpu_worker.OneGpuPCPWorker"
    assert routing.pcp_worker(derived) == derived


def test_a_worker_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"worker_cls=vllm.v1.worker.worker_base.WorkerBase"):
        routing.pcp_worker("vllm.v1.worker.worker_base.WorkerBase")

# SPDX-License-Identifier: Apache-2.0
"""What the mixin asks of the stock runner below it."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.hooks import RemovableHandle

from tests.v1.worker.gpu.pcp.test_last_piece import Piece, arguments, wrap
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.counter import compilation_counter
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.distributed.pcp.step import REPLICATED, get_step_state, set_step_state
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.v1.attention.backends.pcp.flash_attn import PCPFlashAttentionImpl
from vllm.v1.attention.backends.pcp.mla.latent import PlannedPrefillMixin
from vllm.v1.attention.backends.pcp.mla.prefill_backend import AttendingPrefillBackend
from vllm.v1.kv_cache_interface import KVQuantMode, MLAAttentionSpec
from vllm.v1.worker.gpu.pcp import model_runner
from vllm.v1.worker.gpu.pcp.graphs import PartitionGraphs
from vllm.v1.worker.gpu.pcp.last_piece import LastPiece
from vllm.v1.worker.gpu.pcp.model_runner import PCPRunnerMixin, with_quant_mode

P = 2
MAX_LOCAL_TOKENS = 10


class Stock:
    """Remembers what it was asked."""

    pooling_runner = None
    sampler = None

    def __init__(self) -> None:
        self.eager: list[bool] = []
        self.dummy_tokens: list[int] = []
        self.captured: list[str] = []
        self.model_memory_usage = 0
        prefill_len = SimpleNamespace(np=np.array([50, 60]))
        self.req_states = SimpleNamespace(prefill_len=prefill_len, req_id_to_index={"a": 1, "b": 0})

    def load_model(self) -> None:
        self.model_memory_usage = 100

    def _dummy_run(self, num_tokens: int) -> tuple[None, None]:
        self.dummy_tokens.append(num_tokens)
        return None, None

    def initialize_kv_cache(self, kernel_block_sizes: list[int]) -> None:
        self.kernel_block_sizes = kernel_block_sizes

    def capture_model(self) -> int:
        self.captured.append("graphs")
        return 1

    def profile_run(self) -> None:
        self.is_profiled = True

    def execute_model(self, *args: Any, is_profile: bool) -> None:
        self.eager.append(is_profile)

    def shutdown(self) -> None:
        self.is_shut_down = True


class Runner(PCPRunnerMixin, Stock):  # type: ignore[misc]  # over a stand-in for the stock runner
    def _max_kv_row_bytes(self) -> int:
        return 16


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    kind: Any = Runner
    runner = kind()
    runner.device, runner.use_dcp = torch.device("cpu"), False
    runner.vllm_config = SimpleNamespace(additional_config={"pcp_kv_exchange": "gather"})
    monkeypatch.setattr(model_runner, "peer_obstacles", lambda _: [])
    runner.pcp = SimpleNamespace(
        pcp_world_size=P,
        max_local_tokens=MAX_LOCAL_TOKENS,
        init_kv_gather=lambda row_bytes: SimpleNamespace(num_buffer_bytes=7 * row_bytes),
    )
    return runner


def step(scheduled: dict[str, int], computed: dict[str, int]) -> Any:
    """Return what the scheduler sends; requests without computed tokens are new."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_new_reqs=[SimpleNamespace(req_id=r) for r in scheduled if r not in computed],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(computed), num_computed_tokens=list(computed.values())
        ),
    )


@pytest.mark.parametrize(
    ("scheduled", "computed", "is_partitioned"),
    [
        ({"a": 2 * P}, {}, True),
        ({"a": 2 * P - 1}, {}, False),
        ({"a": 1, "b": 1}, {"a": 70, "b": 70}, False),
        # Request a has a prompt of 60 tokens, request b one of 50.
        ({"a": 2 * P, "b": 1}, {"a": 55, "b": 70}, True),
        ({"a": 2 * P, "b": 1}, {"a": 60, "b": 70}, False),
    ],
)
def test_a_partitioned_step_gets_no_cuda_graph_and_any_other_its_own(
    runner: Any, scheduled: dict[str, int], computed: dict[str, int], is_partitioned: bool
) -> None:
    """A graph picked by the number of scheduled tokens would replay another step's shapes."""
    runner.execute_model(step(scheduled, computed))
    assert runner.eager == [is_partitioned]


def test_the_host_is_at_most_one_step_ahead_of_its_gpu(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step reads is overwritten two steps later, and rank 0 alone is waited for."""
    happened: list[str] = []

    class Event:
        def record(self) -> None:
            happened.append("record")

        def synchronize(self) -> None:
            happened.append("wait")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    runner.execute_model(step({"a": 1}, {"a": 70}))
    assert not happened
    runner.device = torch.device("cuda")
    for _ in range(3):
        runner.execute_model(step({"a": 1}, {"a": 70}))
        happened.append("step")
    # A step waits for what was recorded ahead of the last one.
    assert happened == ["record", "step", *("wait", "record", "step") * 2]


def test_dummy_runs_are_of_one_ranks_share(runner: Any) -> None:
    runner._dummy_run(8192)
    runner._dummy_run(3)
    assert runner.dummy_tokens == [MAX_LOCAL_TOKENS, 3]


def test_the_gather_buffer_is_counted_before_the_kv_cache_is_sized(runner: Any) -> None:
    runner.load_model()
    assert runner.model_memory_usage == 100 + 7 * 16


@pytest.mark.parametrize("wanted", [None, "auto", "peer", "gather"])
@pytest.mark.parametrize("obstacle", [None, "a setting", "no link", "another group"])
def test_ranks_copy_to_each_other_where_they_can(
    runner: Any, monkeypatch: pytest.MonkeyPatch, wanted: str | None, obstacle: str | None
) -> None:
    """Then nothing is gathered, and no buffer is counted; a setting is refused ahead of workers."""
    asked: list[str] = []
    monkeypatch.setattr(
        model_runner, "do_all_ranks", lambda can: can and obstacle != "another group"
    )

    def check_reach(device: torch.device) -> None:
        asked.append(device.type)
        if obstacle == "no link":
            raise RuntimeError("GPUs [0, 3] are not all connected by NVLink")

    monkeypatch.setattr(model_runner, "check_reach", check_reach)
    if obstacle == "a setting":
        monkeypatch.setattr(model_runner, "peer_obstacles", lambda _: ["kv_transfer_config"])
    runner.vllm_config.additional_config = {} if wanted is None else {"pcp_kv_exchange": wanted}
    if wanted == "peer" and obstacle in ("no link", "another group"):
        reason = r"GPUs \[0, 3\]" if obstacle == "no link" else "ranks of another PCP group"
        message = rf"pcp_kv_exchange=peer: {reason} .* Set pcp_kv_exchange to gather in"
        with pytest.raises(ValueError, match=message):
            runner.load_model()
        return
    runner.load_model()
    copies = wanted != "gather" and obstacle is None
    assert runner._copies_to_peers == copies
    assert runner.model_memory_usage == 100 + (0 if copies else 7 * 16)
    # A probe takes all ranks.
    assert len(asked) == (wanted != "gather" and obstacle != "a setting")


def test_runs_of_tokens_lie_in_a_kernels_block(runner: Any) -> None:
    """Slots are counted in these, whatever the scheduler's are: 128 with FLASHMLA's 64, say."""
    runner.use_dcp, runner.cp_interleave = True, 64
    runner.initialize_kv_cache([64, 128])
    for runner.cp_interleave in (48, 128):
        wanted = rf"interleave-size {runner.cp_interleave}, .*\[64.* divisor of 64"
        with pytest.raises(ValueError, match=wanted):
            runner.initialize_kv_cache([64, 128])
    runner.use_dcp = False
    runner.initialize_kv_cache([64])


def test_ranks_that_cannot_write_to_each_other_say_so_at_the_start(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def layers_of_kind(_: Any, kind: type) -> dict[str, Any]:
        cache = torch.full((2,), len(kind.__name__))
        return {"layer": SimpleNamespace(kv_cache=cache), "none": SimpleNamespace(kv_cache=empty)}

    monkeypatch.setattr(model_runner, "get_layers_from_vllm_config", layers_of_kind)
    empty = torch.tensor([])
    opened: list[int] = []

    def open_caches(caches: list[torch.Tensor]) -> None:
        opened.extend(int(cache[0]) for cache in caches)

    runner.use_dcp, runner.pcp.init_peer_caches = False, open_caches
    runner.initialize_kv_cache([64])
    assert not opened
    runner._copies_to_peers = True
    runner.vllm_config.additional_config = {}
    runner.initialize_kv_cache([64])
    assert opened == [len("Attention"), len("MLAAttention")]

    def fail(caches: list[torch.Tensor]) -> None:
        raise RuntimeError("GPUs [0, 3] are not all connected by NVLink")

    runner.pcp.init_peer_caches = fail
    with pytest.raises(ValueError, match=r"pcp_kv_exchange=auto: GPUs \[0, 3\] .* to gather in"):
        runner.initialize_kv_cache([64])


def prepare_profile_run(runner: Any, kind: type, impl: object, dcp_size: int = 1) -> None:
    """Give a runner two layers of a kind."""
    layers: list[Any] = [object.__new__(kind), object.__new__(kind)]
    for layer in layers:
        layer.__dict__["impl"] = impl
    context = SimpleNamespace(static_forward_context=dict(enumerate(layers)))
    runner.vllm_config = SimpleNamespace(compilation_config=context)
    runner.dcp_size, runner.use_dcp, runner.device = dcp_size, dcp_size > 1, "cpu"
    runner.model_config = SimpleNamespace(dtype=torch.float32, get_hidden_size=lambda: 4)
    runner.max_num_tokens = 8


def test_prefills_of_mla_are_compiled_before_they_are_watched(runner: Any) -> None:
    """Of vLLM's warm-ups none is long enough."""
    compiled: list[Any] = []

    class Impl(PlannedPrefillMixin):
        def __init__(self) -> None:
            pass

        def warm_up(self, dtype: torch.dtype, device: torch.device) -> None:
            compiled.append(dtype)

    kind: Any = Impl
    prepare_profile_run(runner, MLAAttention, kind())
    runner.profile_run()
    assert compiled == [torch.float32]


class Captured:
    """A model for CUDA graphs to be made of: notes what runs, and counts as vLLM does."""

    last_piece: Any
    arguments: Callable[[int], list[Any]]
    # What is done with all rows, and those that came out of the pieces.
    finish: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = staticmethod(
        lambda rows, output: output
    )

    def __init__(self, graphs: PartitionGraphs, *, is_compiled: bool) -> None:
        self.graphs, self.is_compiled = graphs, is_compiled
        self.runs: list[tuple[int, int | None, bool]] = []
        self.hooks: OrderedDict[int, Any] = OrderedDict()

    def register_forward_pre_hook(self, hook: Any) -> RemovableHandle:
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        return handle

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert input_ids.shape == positions.shape
        replayed_rows = self.graphs.replayed_rows
        self.runs.append((len(input_ids), replayed_rows, get_step_state().is_partitioned))
        args = self.arguments(len(input_ids))
        output = self.last_piece(*args)
        if replayed_rows and self.is_compiled:
            compilation_counter.num_cudagraph_captured += 3
        return self.finish(args[0], output[0])


def scatter(rows: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return as many rows as ever."""
    return torch.cat([output, rows])[: len(rows)]


def turn(rows: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return another row in the place of each, where there are two."""
    return output.flip(0) if len(output) == 2 else output


FINISHES = {
    "all": None,
    "other rows": None,
    "nothing": None,
    "adds": torch.add,
    "fills": scatter,
    "turns": turn,
}
WHYS = {
    "other rows": "does not show which",
    "adds": "a trial failed: ",
    "fills": r"a trial came back with \(64, 16\)",
    "turns": "a trial came back with other rows",
}


@pytest.mark.parametrize("has_pieces", [True, False])
def test_experts_sums_are_captured_with_all_graphs(
    runner: Any, monkeypatch: pytest.MonkeyPatch, has_pieces: bool
) -> None:
    @contextmanager
    def captured_all_reduces() -> Iterator[None]:
        runner.captured.append("begin")
        yield
        runner.captured.append("end")

    def capture_partition_graphs() -> int:
        runner.captured.append("partition graphs")
        return 2

    runner.cudagraph_manager = object()
    runner._capture_partition_graphs = capture_partition_graphs
    monkeypatch.setattr(model_runner, "captured_all_reduces", captured_all_reduces)
    monkeypatch.setattr(PartitionGraphs, "are_wanted", lambda _: has_pieces)
    assert runner.capture_model() == (3 if has_pieces else 1)
    middle = ["graphs", *["partition graphs"] * has_pieces]
    assert runner.captured == ["begin", *middle, "end"]


# What the last layer computes or shows, or what the model does behind it, to rows that are there.
@pytest.mark.parametrize("wanted", FINISHES)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_graphs_of_partitioned_steps_are_captured_if_the_model_has_pieces(
    runner: Any,
    monkeypatch: pytest.MonkeyPatch,
    is_compiled: bool,
    wanted: str,
) -> None:
    """Rows that are padded for a graph that does not exist are computed for nothing."""
    graphs = runner.pcp.graphs = PartitionGraphs()
    runner.pcp.max_local_tokens = 150
    if wanted == "all":
        runner.vllm_config.additional_config["pcp_last_layer"] = "all"
    runner.model_config = SimpleNamespace(get_vocab_size=lambda: 30)
    monkeypatch.setattr(model_runner, "do_all_ranks", lambda is_so: is_so)
    monkeypatch.setattr(model_runner, "get_layers_from_vllm_config", lambda *_: {})
    runner.model = model = Captured(graphs, is_compiled=is_compiled)
    model.last_piece = wrapper = wrap(Piece(lambda *args: args), monkeypatch)
    model.arguments = arguments if wanted != "other rows" else lambda n: [*arguments(n), n + 1]
    model.finish = FINISHES[wanted] or model.finish
    runner.device, runner.max_num_reqs = torch.device("cpu"), 4
    runner.model_state = SimpleNamespace(prepare_dummy_inputs=lambda *_: {})
    for name in ("graph_capture", "set_forward_context"):
        monkeypatch.setattr(model_runner, name, lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (1000, 2000))
    assert runner._capture_partition_graphs() == 0
    # Each as it is, then to be captured; the largest first.
    sizes = [150, 128, 64] if is_compiled else [150]
    runs = [(size, replayed, True) for size in sizes for replayed in (None, size)]
    # Two more, to see what a model does without some rows.
    is_tried = is_compiled and wanted not in ("all", "other rows")
    assert model.runs == runs + is_tried * 2 * [(64, None, True)]
    assert graphs.num_rows.tolist() == (sizes[::-1] if is_compiled else [])
    assert len(model.hooks) == is_compiled
    assert graphs.pad(7) == (64 if is_compiled else 7)
    obstacle = runner._last_layer_obstacle
    assert (obstacle is None) == (is_compiled and wanted == "nothing")
    if is_compiled and wanted in WHYS:
        assert re.search(WHYS[wanted], obstacle)
    assert not graphs.input_ids.any()
    assert type(wrapper) is (LastPiece if is_tried else CUDAGraphWrapper)
    assert not get_step_state().is_partitioned
    assert graphs.replayed_rows is None


def flash_attention(**changes: Any) -> Any:
    """Return an implementation of a layer that has no more than what is asked of it."""
    impl: Any = object.__new__(PCPFlashAttentionImpl)
    vars(impl).update({"dcp_world_size": 1, "kv_cache_dtype": "auto"} | changes)
    return impl


def mla() -> Any:
    """Return an implementation of a layer of dense MLA."""

    class Impl(PlannedPrefillMixin):
        def forward_mqa(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

    return object.__new__(Impl)


# Implementations of the layers, whether all ranks can, whether ranks share the KV cache of MLA, and
# whether attention leaves out rows.
LAST_LAYERS: dict[str, tuple[list[Any], bool, bool, bool]] = {
    "all alike": ([flash_attention(), flash_attention()], True, False, True),
    "another rank cannot": ([flash_attention(), flash_attention()], False, False, False),
    "a shared cache": (
        [flash_attention(), flash_attention(dcp_world_size=2)],
        True,
        False,
        False,
    ),
    "a quantised cache": (
        [flash_attention(), flash_attention(kv_cache_dtype="fp8")],
        True,
        False,
        True,
    ),
    "another backend": ([object(), flash_attention()], True, False, False),
    "MLA": ([mla(), mla()], True, False, True),
    "MLA on a shared cache": ([mla(), mla()], True, True, False),
    "MLA without a plan": ([mla(), mla()], True, False, False),
    "MLA, some of it sparse": ([object(), mla()], True, False, False),
}


@pytest.mark.parametrize("name", [*LAST_LAYERS, "of another model"])
def test_attention_leaves_rows_out_where_that_is_safe(
    runner: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    impls, all_can, runner.use_dcp, attends = LAST_LAYERS.get(
        name, ([flash_attention()], True, False, False)
    )
    last = impls[-1] if name in LAST_LAYERS else flash_attention()
    kind = MLAAttention if "MLA" in name else Attention
    # They do not run in the order in which they stand there.
    backend: Any = object if name.endswith("without a plan") else AttendingPrefillBackend
    layers = {
        str(impl): SimpleNamespace(
            impl=impl, forward_impl=lambda: None, prefill_backend=object.__new__(backend)
        )
        for impl in impls[::-1]
    }
    monkeypatch.setattr(
        model_runner,
        "get_layers_from_vllm_config",
        lambda _, asked: layers if asked is kind else {},
    )
    monkeypatch.setattr(PCPFlashAttentionImpl, "ran_last", None if kind is MLAAttention else last)
    monkeypatch.setattr(model_runner, "do_all_ranks", lambda is_so: is_so and all_can)

    def run(num_rows: int) -> str | None:
        if kind is MLAAttention:
            for impl in impls:
                layers[str(impl)].forward_impl()
        return None if num_rows == 1 else "too many"

    runner._try_sampled_rows = run
    runner._leave_rows_out(SimpleNamespace(settle=lambda _: True), [2, 2, 1, 1])
    assert (runner._last_layer_obstacle is None) == all_can
    assert last.attends_sampled_rows == attends
    assert not any(getattr(impl, "attends_sampled_rows", False) for impl in impls[:-1])


@pytest.mark.parametrize("can", [False, True])
@pytest.mark.parametrize("reads_all", [False, True])
def test_rows_are_left_out_of_the_last_layer_if_nobody_reads_them(
    runner: Any, monkeypatch: pytest.MonkeyPatch, can: bool, reads_all: bool
) -> None:
    sampled = object()
    batch = SimpleNamespace(idx_mapping_np=np.array([1, 0]))
    runner._pcp_step = SimpleNamespace(plan="plan", global_batch=batch, sampled=sampled)
    runner._last_layer_obstacle = None if can else "some reason"
    uses_prompt_logprobs = np.array([False, reads_all])
    runner.prompt_logprobs_worker = SimpleNamespace(uses_prompt_logprobs=uses_prompt_logprobs)
    runner.pcp.begin_exchange = lambda: None
    runner.pcp.prepare_attn = lambda *_: "prepared"
    monkeypatch.setattr(Stock, "prepare_attn", lambda *_: ((), None), raising=False)
    try:
        assert runner.prepare_attn(None) == "prepared"
        assert get_step_state().sampled is (sampled if can and not reads_all else None)
    finally:
        set_step_state(REPLICATED)


@pytest.mark.parametrize("has_manager", [True, False])
def test_no_graph_outlives_the_runner(runner: Any, has_manager: bool) -> None:
    """Of a communicator that a graph sends with, NCCL waits for the graph when it is destroyed."""
    entries: list[dict[str, object]] = [{"rows": object()}, {"rows": object()}]
    for kind, name, kept in (
        (CUDAGraphWrapper, "concrete_cudagraph_entries", entries[0]),
        (BreakableCUDAGraphWrapper, "entries", entries[1]),
    ):
        wrapper: Any = object.__new__(kind)
        vars(wrapper)[name] = kept
        vars(runner)[name] = wrapper
        kind._all_instances.add(wrapper)
    graphs = {"decode": object()}
    runner.cudagraph_manager = SimpleNamespace(graphs=graphs) if has_manager else None
    runner.pcp.log_stats = lambda: None
    runner.shutdown()
    assert runner.is_shut_down
    assert not any(entries)
    assert bool(graphs) != has_manager


@pytest.mark.parametrize(
    ("dcp_size", "kind", "num_exchanges"),
    [(2, Attention, 1), (2, MLAAttention, 0), (1, Attention, 0)],
)
def test_what_an_exchange_allocates_is_counted_before_the_kv_cache_is_sized(
    runner: Any, monkeypatch: pytest.MonkeyPatch, dcp_size: int, kind: type, num_exchanges: int
) -> None:
    """A profiling run leaves attention out, and with it the first exchange of two ranks."""
    exchanged: list[torch.Size] = []
    monkeypatch.setattr(
        model_runner, "exchange_blocks", lambda pair: exchanged.append(pair[0].shape)
    )
    prepare_profile_run(runner, kind, object(), dcp_size)
    runner.profile_run()
    assert runner.is_profiled
    assert exchanged == [(dcp_size, 16)] * num_exchanges


@pytest.mark.parametrize("cache_dtype", ["fp8_ds_mla", "fp8", "auto"])
def test_a_latent_cache_with_scales_in_its_rows_is_said_to_be_quantised(cache_dtype: str) -> None:
    """One that is not said to be is laid out without room for them."""
    spec = MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.uint8,
        cache_dtype_str=cache_dtype,
    )
    assert spec.kv_quant_mode == KVQuantMode.NONE
    completed = with_quant_mode(spec)
    assert isinstance(completed, MLAAttentionSpec)
    assert (completed.kv_quant_mode != KVQuantMode.NONE) == (cache_dtype == "fp8_ds_mla")


def test_ranks_go_on_together_or_not_at_all(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a failed rank has not sent would be paired with what comes next."""
    for others_failed in (False, True):
        answers: list[bool] = []

        def do_all_ranks(is_so: bool, failed: bool = others_failed, to: Any = answers) -> bool:
            to.append(is_so)
            # The others are asked whether they have not failed, then whether they have.
            return is_so and (failed if len(to) == 2 else not failed)

        monkeypatch.setattr(model_runner, "do_all_ranks", do_all_ranks)
        runner.pcp.graphs = SimpleNamespace(input_ids=torch.zeros(8, dtype=torch.int32))
        runner.model_config = SimpleNamespace(get_vocab_size=lambda: 30)

        def fail(num_rows: int) -> Any:
            raise ValueError("of so few rows")

        runner._run_rows = fail
        if others_failed:
            assert runner._try_sampled_rows(4) == "a trial failed: of so few rows"
        else:
            with pytest.raises(RuntimeError, match="a trial failed: of so few rows"):
                runner._try_sampled_rows(4)
        assert answers[:2] == [False, True]


def test_refuses_attention_that_nobody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {
        Attention: {"layers.0": SimpleNamespace(impl=SimpleNamespace(supports_pcp=True))},
        MLAAttention: {"layers.1": SimpleNamespace(impl=SimpleNamespace(supports_pcp=False))},
    }
    monkeypatch.setattr(model_runner, "get_layers_from_vllm_config", lambda _, kind: layers[kind])
    runner: Any = SimpleNamespace(vllm_config=None)
    with pytest.raises(NotImplementedError, match=r"got \{'SimpleNamespace': 'layers.1'\}"):
        PCPRunnerMixin._max_kv_row_bytes(runner)

# SPDX-License-Identifier: Apache-2.0
"""One rank of prefill context parallelism, alone: its own work, without the time on a link.

The engine has one rank, and its worker is told which rank of how many it plays. All of our code and
all kernels run as on that rank of P: the same rows, the same slots, the same gathered bytes written
to the cache. Only the collectives send nothing, and the KV rows of other ranks are random numbers.
So the tokens are wrong, and the time is a rank's critical path less communication. Experts are
replicated: shared ones would take part in collectives of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from harness import cuda_event

from vllm.config import get_layers_from_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import GroupCoordinator, get_pcp_group
from vllm.distributed.pcp import kv_gather
from vllm.distributed.pcp.kv_gather import KVGather
from vllm.distributed.pcp.step import REPLICATED, set_step_state
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.models.deepseek_v2 import Indexer
from vllm.platforms import current_platform
from vllm.v1.attention.backends.pcp.mla.latent import PlanPrefillMixin
from vllm.v1.worker.gpu.pcp.manager import PCPManager

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.pcp.gpu_worker import PCPWorker as _Worker
elif current_platform.is_cpu():
    from vllm.v1.worker.pcp.cpu_worker import PCPCPUWorker as _Worker
else:
    from vllm.v1.worker.pcp.gpu_worker import PCPWorker as _Worker

# What dummy weights make of keys and values, about.
OTHER_RANKS_STD = 1e-3
Events = tuple[torch.cuda.Event, torch.cuda.Event]


class SoloGroup(GroupCoordinator):
    """In place of the PCP group: ``world_size`` ranks of which one is here; nothing is sent.

    Attributes:
        num_collectives: Collectives so far.
    """

    def __init__(self, world_size: int, rank_in_group: int) -> None:
        # Not the stock initialiser, which would wait for the other ranks.
        self.world_size = world_size
        self.rank_in_group = rank_in_group
        self.device_communicator = None
        self.mq_broadcaster = None
        self.num_collectives = 0

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return this rank's rows P times over."""
        assert dim == 0
        self.num_collectives += 1
        return input_.repeat(self.world_size, *[1] * (input_.dim() - 1))

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Leave the tensor alone."""
        self.num_collectives += 1
        return input_


class SoloKVGather(KVGather):
    """A buffer of the real size in which other ranks' rows are never filled in."""

    def __init__(
        self,
        group: SoloGroup,
        max_num_tokens: int,
        max_row_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(group, max_num_tokens, device)
        num_elements = group.world_size * max_num_tokens * max_row_bytes // dtype.itemsize
        rows = torch.empty(num_elements, dtype=dtype, device=device).normal_(0, OTHER_RANKS_STD)
        self._all_rows = rows.view(torch.uint8)
        self.num_buffer_bytes = self._all_rows.numel()
        self._group = group

    def _buffer(self) -> torch.Tensor:
        return self._all_rows

    def _exchange(self, rows: torch.Tensor, own_rows: torch.Tensor) -> None:
        self._group.num_collectives += 1


class SoloPCPManager(PCPManager):
    """The manager, with a gather that sends nothing."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._dtype: torch.dtype = args[0].model_config.dtype

    def init_kv_gather(self, max_row_bytes: int) -> KVGather:
        """Create the gather, and put it where attention layers look for it."""
        group = get_pcp_group()
        assert isinstance(group, SoloGroup)
        gather = SoloKVGather(group, self.max_local_tokens, max_row_bytes, self._dtype, self.device)
        self.kv_gather = kv_gather._kv_gather = gather
        return gather


class SoloRankWorker(_Worker):
    """Worker of a one-rank engine that plays rank 0 of ``additional_config["pcp_world_size"]``."""

    model_runner: Any  # a PCP runner, or a stock one
    device: torch.device
    _is_stock = False

    def init_device(self) -> None:
        """Build the device and a PCP runner as usual, then put the solo group below them."""
        super().init_device()
        self._step_events: list[Events] = []
        self._indexer_events: list[Events] = []
        additional_config = self.vllm_config.additional_config
        assert isinstance(additional_config, dict)
        self.play_rank(additional_config["pcp_world_size"], 0)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and time its indexers from now on if it is not compiled."""
        super().load_model(*args, **kwargs)
        # Hooks would be compiled with their modules, and with the events of that one time.
        if self.device.type == "cuda" and self.model_config.enforce_eager:
            for module in self.get_model().modules():
                if isinstance(module, Indexer):
                    module.register_forward_pre_hook(self._begin_indexer)
                    module.register_forward_hook(self._end_indexer)

    def _begin_indexer(self, *_: Any) -> None:
        self._indexer_events.append((cuda_event(), cuda_event()))
        self._indexer_events[-1][0].record()

    def _end_indexer(self, *_: Any) -> None:
        self._indexer_events[-1][1].record()

    def play_rank(self, pcp_world_size: int, pcp_rank: int) -> None:
        """Go on as rank ``pcp_rank`` of ``pcp_world_size``; one of one runs vLLM's own classes.

        (Metadata builders keep the buffers of PCP, which are larger.)
        """
        parallel_state._PCP = SoloGroup(pcp_world_size, pcp_rank)
        is_stock = pcp_world_size == 1
        if is_stock != self._is_stock:
            self._swap_classes(is_stock)
            self.prefill_as_stock(is_stock)
            set_step_state(REPLICATED)
        runner = self.model_runner
        runner.pcp = SoloPCPManager(self.vllm_config, self.device)
        layers = self._attention_layers()
        for layer in layers:
            layer.impl.pcp_world_size, layer.impl.pcp_rank = pcp_world_size, pcp_rank
        if layers and not is_stock:
            runner.pcp.init_kv_gather(runner._max_kv_row_bytes())
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _swap_classes(self, is_stock: bool) -> None:
        """Put vLLM's own runner and attention classes in place of ours, or ours back."""
        runner, layers = self.model_runner, self._attention_layers()
        modules = self.get_model().modules() if layers else ()
        indexers: list[Any] = [each for each in modules if isinstance(each, SparseAttnIndexer)]
        if indexers and not self.model_config.enforce_eager:
            raise ValueError(
                "P = 1 beside P > 1 of a compiled model with sparse attention: its indexers are "
                "compiled as those of P > 1. Run it eagerly (--modes eager)."
            )
        if is_stock:
            self._pcp_runner_class = type(runner)
            self._pcp_impls = [layer.impl for layer in layers]
            runner.__class__ = _stock_class(runner)
            impls = [_stock_copy(impl) for impl in self._pcp_impls]
        else:
            runner.__class__ = self._pcp_runner_class
            impls = self._pcp_impls
        for layer, impl in zip(layers, impls, strict=True):
            layer.impl = impl
        for indexer in indexers:
            _rebind(indexer, SparseAttnIndexer if is_stock else type(indexer))
        self._is_stock = is_stock

    def prefill_as_stock(self, is_stock: bool) -> None:
        """Let vLLM's own builders plan MLA prefills, a row at a time, or ours again."""
        for groups in self.model_runner.attn_groups:
            for group in groups:
                builder = group.get_metadata_builder(0)
                if isinstance(builder, PlanPrefillMixin):
                    vars(builder).pop("build", None)
                    if is_stock:
                        vars(builder)["build"] = _stock_class(builder).build.__get__(builder)

    def _attention_layers(self) -> list[Any]:
        """Return the model's attention layers, none before it is loaded."""
        layers: dict[str, Any] = {}
        for layer_type in (Attention, MLAAttention):
            layers |= get_layers_from_vllm_config(self.vllm_config, layer_type)
        return list(layers.values())

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run a step between two events, on a GPU."""
        if self.device.type != "cuda" or scheduler_output.total_num_scheduled_tokens == 0:
            return super().execute_model(scheduler_output)
        begin, end = cuda_event(), cuda_event()
        begin.record()
        output = super().execute_model(scheduler_output)
        end.record()
        self._step_events.append((begin, end))
        return output

    def take_step_seconds(self) -> list[float]:
        """Return how long each step since the last call was on the GPU, sampling apart."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        events, self._step_events = self._step_events, []
        return _seconds(events)

    def take_indexer_seconds(self) -> list[float]:
        """Return how long each indexer since the last call was on the GPU; a prefill has many."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        events, self._indexer_events = self._indexer_events, []
        return _seconds(events)

    def num_collectives(self) -> int:
        """Return how many collectives this rank has taken part in since it plays it."""
        group = get_pcp_group()
        assert isinstance(group, SoloGroup)
        return group.num_collectives


def _seconds(events: list[Events]) -> list[float]:
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def _rebind(indexer: Any, owner: type[Any]) -> None:
    """Let an indexer run what a class of its own runs; it has chosen a method when it was built."""
    name = indexer._forward_method.__name__
    indexer._forward_method = getattr(owner, name).__get__(indexer)


def _stock_class(instance: object) -> type[Any]:
    """Return vLLM's class, over which a class of ours is a mixin."""
    return type(instance).__bases__[-1]


def _stock_copy(impl: object) -> object:
    """Return an instance of the stock class in the same state."""
    copy: object = object.__new__(_stock_class(impl))
    copy.__dict__.update(impl.__dict__)
    return copy

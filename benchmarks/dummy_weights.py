# SPDX-License-Identifier: Apache-2.0
"""Dummy weights with which tokens go to all experts: a load format of its own.

vLLM draws dummy weights between -0.001 and 0.001, so that the logits of a router differ by some
1e-5. Where vLLM takes their softmax in bf16 (grouped top-k, DeepSeek-V2-Lite) all experts then come
out equal, and every token goes to the same ones: one rank of an expert-parallel group does all of
the work. Here the routers alone are drawn wider, each layer's from its own seed and the same on
every rank. Hidden states are what embeddings make of random tokens, so that no expert is preferred.

Shape "tiny-mla" on a CPU, 2048 random tokens, softmax in bf16: with vLLM's dummy weights all tokens
go to the same 6 of 16 experts, in every layer; with these the busiest one gets 1.16 times the mean.
In fp32 the figures are 1.11 and 1.15.

``worker_extension_cls="dummy_weights.ExpertProbe"`` makes workers know the format.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from vllm.config import ModelConfig
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

    _Base = Worker
else:
    _Base = object

LOAD_FORMAT = "dummy_routed"
# Logits of a standard deviation of about 1 at a width of 2048: rows that are normed with dummy
# weights have elements of 3e-4. Which experts are chosen depends on the order of the logits alone.
ROUTER_STD = 64.0


@register_model_loader(LOAD_FORMAT)
class RoutedDummyLoader(DummyModelLoader):
    """The stock loader, and routers that route."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Draw all weights."""
        super().load_weights(model, model_config)
        for seed, weight in enumerate(router_weights(model)):
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randn(weight.shape, generator=generator)
            weight.data.copy_(ROUTER_STD * drawn)


def router_weights(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return ``[num_experts, hidden_size]`` of each layer that routes."""
    return [weight for name, weight in model.named_parameters() if name.endswith("mlp.gate.weight")]


class ExpertProbe(_Base):
    """Methods for ``LLM.collective_rpc``, on GPUs; all ranks run them together."""

    def watch_experts(self) -> None:
        """From now on, count the tokens that each expert gets, in layers run outside of graphs."""
        self._expert_counts: dict[str, torch.Tensor] = {}
        for layer in self.get_model().modules():
            if isinstance(layer, MoERunner):
                counts = torch.zeros(
                    layer.moe_config.num_experts, dtype=torch.int64, device=self.device
                )
                self._expert_counts[layer.layer_name] = counts
                layer.router.set_capture_fn(functools.partial(_count, counts))

    def busiest_experts(self) -> list[float]:
        """Return the load of the busiest expert of each layer, by the mean; stop counting."""
        for layer in self.get_model().modules():
            if isinstance(layer, MoERunner):
                layer.router.set_capture_fn(None)
        loads = [counts.tolist() for counts in self._expert_counts.values()]
        return [max(load) * len(load) / sum(load) for load in loads]


def _count(counts: torch.Tensor, expert_ids: torch.Tensor) -> None:
    ids = expert_ids.flatten().long()
    counts.index_add_(0, ids, torch.ones_like(ids))

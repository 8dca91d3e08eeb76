# SPDX-License-Identifier: Apache-2.0
"""The CPU platform of vLLM, with MLA, async scheduling, and FLASH_ATTN where it is asked for.

Symptom: a DeepSeek model ends with "MLA is not supported on CPU". Let in, it loses chunked prefill
and the user's budget of tokens, and where the rotary embedding is the plain one its logprobs are
wrong: for queries with a dimension of heads, and for keys cut out of a wider tensor, the rotary
kernel of vLLM 0.25.1 takes the wrong strides.
Cause: ``CpuPlatform``. The backend is named by its place in vLLM's registry, so one that is
registered over it is found. It can go when ``CpuPlatform`` runs MLA itself.

Compiled sparse models. Symptom: "index 8421504 is out of bounds", or wrong tokens. Cause: CPUs run
a compiled model as one graph. It writes the tokens that an indexer chooses to a copy of the buffer
in which attention looks for them; GPUs split their graphs between the two. It can go when CPUs do.

Async scheduling. Symptom: "Asynchronous scheduling is disabled", even where it was asked for.
Cause: ``CpuPlatform``, which has no need of it. It stays as it is on GPUs, to be tested.
"""

from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

_TORCH_ROTARY_EMBEDDING = "-rotary_embedding"


class TrialPlatform(CpuPlatform):
    """Runs MLA and FLASH_ATTN too; everything else as ``CpuPlatform`` does."""

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum,
        attn_selector_config: "AttentionSelectorConfig",
        num_heads: int | None = None,
    ) -> str:
        """Return the path of the attention backend's class.

        Raises:
            NotImplementedError: The model's attention is sparse, and not MLA.
        """
        if attn_selector_config.use_mla:
            if attn_selector_config.use_sparse:
                return AttentionBackendEnum.FLASHMLA_SPARSE.get_path()
            return AttentionBackendEnum.TRITON_MLA.get_path()
        if (
            selected_backend is AttentionBackendEnum.FLASH_ATTN
            and not attn_selector_config.use_sparse
        ):
            return AttentionBackendEnum.FLASH_ATTN.get_path()
        return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Adapt a configuration to CPUs, in place.

        What stays is whether scheduling is asynchronous and, of MLA models, all of scheduling.
        """
        # Imports platforms itself.
        from vllm.config import CompilationMode

        scheduler_config = vllm_config.scheduler_config
        enable_chunked_prefill = scheduler_config.enable_chunked_prefill
        max_num_batched_tokens = scheduler_config.max_num_batched_tokens
        async_scheduling = scheduler_config.async_scheduling
        super().check_and_update_config(vllm_config)
        scheduler_config.async_scheduling = async_scheduling
        model_config: ModelConfig | None = vllm_config.model_config
        if model_config is None or not model_config.use_mla:
            return
        scheduler_config.enable_chunked_prefill = enable_chunked_prefill
        scheduler_config.max_num_batched_tokens = max_num_batched_tokens
        custom_ops = vllm_config.compilation_config.custom_ops
        if _TORCH_ROTARY_EMBEDDING not in custom_ops:
            custom_ops.append(_TORCH_ROTARY_EMBEDDING)
        if hasattr(model_config.hf_text_config, "index_topk"):
            vllm_config.compilation_config.mode = CompilationMode.NONE

# SPDX-License-Identifier: Apache-2.0
"""Engines, each run once a session through all of its scenarios."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conftest import Checkpoints
from tests.e2e.compare import Pair
from tests.e2e.processes import REPO_ROOT, Forks
from tests.e2e.results import EngineResults, Experts, Spec
from tests.e2e.scenarios import OFFLOADED, Sizes

RANDOM_SIZES = Sizes(block_size=32, num_blocks=64, max_num_batched_tokens=256, max_model_len=1024)
# Where all layers have a window, vLLM takes blocks of 16; CPU workers would go by --block-size.
WINDOW_SIZES = Sizes(block_size=16, num_blocks=128, max_num_batched_tokens=256, max_model_len=1024)
# The indexer's cache knows blocks of 64 only.
SPARSE_SIZES = Sizes(block_size=64, num_blocks=32, max_num_batched_tokens=128, max_model_len=512)
# A block of each of two or four ranks is 128 or 64 tokens.
SHARED_SPARSE_SIZES = Sizes(
    block_size=256, num_blocks=8, max_num_batched_tokens=128, max_model_len=2048
)
SPARSE = ("deepseek_v32", "deepseek_v32_2048", "glm_moe_dsa")
SMOLLM2_SIZES = Sizes(block_size=16, num_blocks=48, max_num_batched_tokens=128, max_model_len=512)
# A block of each of two or four ranks is 32 or 16 tokens.
SHARED_SIZES = Sizes(block_size=64, num_blocks=32, max_num_batched_tokens=256, max_model_len=1024)
STORY = REPO_ROOT / "examples" / "demo" / "story.txt"

PREFILL_SCENARIOS = (
    "short_prompts_alone",
    "chunked_prefill",
    "mixed_batches",
    "prefix_hits",
    "concurrent_prefills",
)
WINDOW_SCENARIOS = (*PREFILL_SCENARIOS, "preemption")
LATENT_SCENARIOS = (
    *PREFILL_SCENARIOS,
    "short_prefix_hits_beside_short_prompts",
    "preemption",
    "seeds",
)
# The shorter ones: four ranks on two cores take their time.
SHARED_SCENARIOS = (
    "short_prompts_alone",
    "chunked_prefill",
    "mixed_batches",
    "prefix_hits",
    "short_prefix_hits_beside_short_prompts",
)
SHARED_SPARSE_SCENARIOS = (
    "chunked_prefill",
    "mixed_batches",
    "short_prefix_hits_beside_short_prompts",
)
OFFLOADED_SCENARIOS = (*OFFLOADED, "preemption")
EXPERT_SCENARIOS = (*PREFILL_SCENARIOS, "seeds")
SPARSE_SCENARIOS = (
    "short_prompts_alone",
    "chunked_prefill",
    "mixed_batches",
    "prefix_hits",
    "short_prefix_hits_beside_short_prompts",
)
SIZES = {"smollm2": SMOLLM2_SIZES, "mistral": WINDOW_SIZES} | dict.fromkeys(SPARSE, SPARSE_SIZES)
# Of engines that do not run all of them.
SCENARIOS = {
    "embedding": PREFILL_SCENARIOS,
    "mistral": WINDOW_SCENARIOS,
    "gemma3": WINDOW_SCENARIOS,
    "deepseek_v2": LATENT_SCENARIOS,
    "deepseek_v3": LATENT_SCENARIOS,
    "qwen3_moe": EXPERT_SCENARIOS,
    "mixtral": EXPERT_SCENARIOS,
    "glm4_moe": EXPERT_SCENARIOS,
    "gpt_oss": EXPERT_SCENARIOS,
} | dict.fromkeys(SPARSE, SPARSE_SCENARIOS)


@dataclass(frozen=True, slots=True)
class Sharing:
    """How an engine treats the KV cache, one rank or several.

    Attributes:
        dcp: Ranks that share it.
        interleave: Tokens that one of them keeps in a row.
        caches_prefixes: Whether prompts are looked up.
        flash_attn_version: Of FLASH_ATTN, on ranks that share; None for another backend.
        forks: Whether ranks are forked.
        experts: What a rank has of them.
    """

    dcp: int = 1
    interleave: int = 1
    caches_prefixes: bool = True
    flash_attn_version: int | None = None
    forks: bool = True
    experts: Experts = "width"


class Engines:
    """Results of engines, each run at the first time that somebody asks for them."""

    def __init__(self, checkpoints: Checkpoints, forks: Forks, folder: Path) -> None:
        self.checkpoints = checkpoints
        self.forks = forks
        self.folder = folder
        self._results: dict[Spec, EngineResults | Exception] = {}

    def pair(self, name: str, pcp: int, tp: int = 1, experts: Experts = "width") -> Pair:
        """Return what one rank gives, and what P and TP give, with experts placed in some way."""
        sizes = self.spec(name, pcp, tp).sizes
        return Pair(self.results(name, 1, 1), self.results(name, pcp, tp, experts), pcp, sizes)

    def sharing_pair(self, name: str, pcp: int, tp: int, sharing: Sharing) -> Pair:
        """Return what one rank gives, and what ranks give that share the KV cache."""
        sizes = SHARED_SPARSE_SIZES if name in SPARSE else SHARED_SIZES
        one = dataclasses.replace(
            self.spec(name, 1, 1),
            sizes=sizes,
            scenarios=SHARED_SPARSE_SCENARIOS if name in SPARSE else SHARED_SCENARIOS,
            caches_prefixes=sharing.caches_prefixes,
            forks=True,
        )
        several = dataclasses.replace(one, pcp=pcp, tp=tp, **dataclasses.asdict(sharing))
        return Pair(self.results_of(one), self.results_of(several), pcp, sizes)

    def offloading_results(
        self, name: str, pcp: int, tp: int, dcp: int, connector: str
    ) -> tuple[EngineResults, EngineResults]:
        """Return what one rank gives, and what ranks give that offload their KV cache."""
        one = dataclasses.replace(
            self.spec(name, 1, 1), sizes=SHARED_SIZES, scenarios=OFFLOADED_SCENARIOS
        )
        several = dataclasses.replace(one, pcp=pcp, tp=tp, dcp=dcp, offloading=connector)
        if name == "qwen3" and dcp > 1:
            several = dataclasses.replace(several, flash_attn_version=3)
        return self.results_of(one), self.results_of(several)

    def results(self, name: str, pcp: int, tp: int, experts: Experts = "width") -> EngineResults:
        """Return what an engine gives."""
        return self.results_of(self.spec(name, pcp, tp, experts))

    def spec(self, name: str, pcp: int, tp: int, experts: Experts = "width") -> Spec:
        """Return the engine of a checkpoint; "embedding" is the one of "qwen3"."""
        is_pooling = name == "embedding"
        return Spec(
            str(self.checkpoints("qwen3" if is_pooling else name)),
            SIZES.get(name, RANDOM_SIZES),
            pcp,
            tp,
            PREFILL_SCENARIOS if pcp > 4 else SCENARIOS.get(name, ()),
            str(STORY) if name == "smollm2" else None,
            is_pooling,
            name in SPARSE,
            experts,
            forks=name != "qwen3" or pcp > 4,
        )

    def results_of(self, spec: Spec) -> EngineResults:
        """Return what an engine gives; it runs at the first call."""
        if spec not in self._results:
            try:
                self._results[spec] = self._run(spec)
            except (RuntimeError, OSError) as error:
                self._results[spec] = error
        results = self._results[spec]
        if isinstance(results, Exception):
            raise results
        return results

    def _run(self, spec: Spec) -> EngineResults:
        checkpoint = Path(spec.checkpoint).name
        name = f"{len(self._results)}-{checkpoint}-pcp{spec.pcp}-tp{spec.tp}-dcp{spec.dcp}"
        files = [self.folder / f"{name}.{suffix}" for suffix in ("spec", "results", "log")]
        spec.save(files[0])
        self.forks.run("tests.e2e.engine:run_scenarios", *files[:2], log=files[2])
        return EngineResults.load(files[1])


@pytest.fixture(scope="session", autouse=True)
def _cpu_build() -> None:
    if "cpu" not in version("vllm"):
        pytest.skip("the ranks are CPU processes, and this is a GPU build of vLLM")


@pytest.fixture(scope="session")
def forks() -> Forks:
    """Return what starts processes that use vLLM."""
    return Forks()


@pytest.fixture(scope="session")
def engines(
    checkpoints: Checkpoints, forks: Forks, tmp_path_factory: pytest.TempPathFactory
) -> Engines:
    """Return the engines of this session."""
    return Engines(checkpoints, forks, tmp_path_factory.mktemp("engines"))

# SPDX-License-Identifier: Apache-2.0
"""The vLLM functions that this package wraps, and the guard that installs the wrappers.

Nothing else in the package assigns to an attribute of vLLM, but for one process group
(``vllm.distributed.pcp.groups``). A seam names the exact source it was written for; on any
difference nothing is installed and the error lists all of them.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.plugins.pcp.routing import wrap_create_engine_config, wrap_vllm_config_post_init

PINNED_VLLM = "0.25.1"


class UpstreamMismatchError(RuntimeError):
    """The installed vLLM is not the one that this package extends."""


@dataclass(frozen=True, slots=True)
class Seam:
    """One wrapped function.

    Attributes:
        module: Module whose attribute is read at call time.
        qualname: ``function`` or ``Class.function`` in it.
        digest: First 12 hex digits of the SHA-256 of the dedented source in the pinned vLLM.
        build: Original -> replacement.
        why: Why there is no other way.
        retire_when: What makes it superfluous.
    """

    module: str
    qualname: str
    digest: str
    build: Callable[[Callable[..., Any]], Callable[..., Any]]
    why: str
    retire_when: str

    @property
    def name(self) -> str:
        """``module:qualname``."""
        return f"{self.module}:{self.qualname}"

    def owner(self) -> Any:
        """Return the module or class that holds the function.

        Raises:
            ImportError, AttributeError: it does not exist.
        """
        owner = importlib.import_module(self.module)
        for part in self.qualname.split(".")[:-1]:
            owner = getattr(owner, part)
        return owner

    @property
    def attribute(self) -> str:
        """Name of the function in its owner."""
        return self.qualname.rpartition(".")[2]


def _replicate_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.model_executor.layers.pcp.replicated_experts import wrap_make_parallel_config

    return wrap_make_parallel_config(original)


SEAMS = (
    Seam(
        module="vllm.engine.arg_utils",
        qualname="EngineArgs.create_engine_config",
        digest="214bc7647825",
        build=wrap_create_engine_config,
        why="vLLM refuses a D that does not divide TP while it turns arguments into a "
        "configuration; with P > 1 ranks share the KV cache along the PCP axis first.",
        retire_when="vLLM compares D with P and TP.",
    ),
    Seam(
        module="vllm.config",
        qualname="VllmConfig.__post_init__",
        digest="7915a4845f79",
        build=wrap_vllm_config_post_init,
        why="vLLM refuses prefill context parallelism while it validates a configuration, ahead of "
        "every extension point that could admit it.",
        retire_when="vLLM admits P > 1 for Model Runner V2 and lets a platform or plugin name its "
        "worker and executor.",
    ),
)

# Of workers in which each PCP rank has all experts, and of no other process: to look for it takes
# an import of vLLM's layers.
EXPERT_SEAMS = (
    Seam(
        module="vllm.model_executor.layers.fused_moe.layer",
        qualname="make_parallel_config",
        digest="d84a4e34d2f5",
        build=_replicate_experts,
        why="vLLM shards experts over all ranks that there are; with "
        '`{"pcp_experts": "replicated"}` over TP ranks alone. `FusedMoE` takes the number of PCP '
        "ranks as an argument, which no model passes; the pluggable layers inside it are given "
        "what has been cut already.",
        retire_when="Whether PCP ranks share experts is in vLLM's configuration.",
    ),
)

_installed: dict[str, Callable[..., Any]] = {}


def source_digest(function: Callable[..., Any]) -> str:
    """Return the first 12 hex digits of the SHA-256 of a function's dedented source."""
    source = textwrap.dedent(inspect.getsource(function))
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def installed_vllm() -> str:
    """Return the version of vLLM's distribution, without a local part such as ``+cpu``."""
    return importlib.metadata.version("vllm").partition("+")[0]


def install(seams: Sequence[Seam]) -> None:
    """Wrap every seam, or none of them. Seams of this process that are in place already stay.

    Raises:
        UpstreamMismatchError: listing every difference and the remedy.
    """
    problems = []
    if installed_vllm() != PINNED_VLLM:
        problems.append(f"vllm=={installed_vllm()}, expected vllm=={PINNED_VLLM}")
    targets = []
    for seam in seams:
        try:
            owner = seam.owner()
            original = owner.__dict__[seam.attribute]
        except (ImportError, AttributeError, KeyError):
            problems.append(f"{seam.name}: not found")
            continue
        if _installed.get(seam.name) is original:
            continue
        problem = _difference(seam, original)
        if problem is None:
            targets.append((seam, owner, original))
        else:
            problems.append(problem)
    if problems:
        raise UpstreamMismatchError(
            "Prefill context parallelism cannot be installed:\n"
            + "".join(f"  {problem}\n" for problem in problems)
            + f"Install vllm=={PINNED_VLLM}, or uninstall vllm-prefill-context-parallel."
        )
    replacements = [(seam, owner, seam.build(original)) for seam, owner, original in targets]
    for seam, owner, replacement in replacements:
        setattr(owner, seam.attribute, replacement)
        _installed[seam.name] = replacement


def _difference(seam: Seam, original: Callable[..., Any]) -> str | None:
    """Say how a function differs from the one that the seam was written for, or return None."""
    # inspect.getsource looks through wrappers: a foreign one would have the pinned source.
    if hasattr(original, "__wrapped__"):
        return f"{seam.name}: wrapped by something else already"
    try:
        digest = source_digest(original)
    except (OSError, TypeError):
        return f"{seam.name}: has no source"
    if digest != seam.digest:
        return f"{seam.name}: source is {digest}, pinned {seam.digest}"
    return None


def seams_page() -> str:
    """Return ``docs/design/seams.md``: the table of seams."""
    lines = [
        "# Seams",
        "",
        "What this package wraps in vLLM. `python -m vllm.plugins.pcp.seams` prints this page.",
        "",
        f"Pinned to vllm=={PINNED_VLLM}. With another version, or another source of one of them,",
        "nothing is installed, and start-up stops with one error that lists every difference. (The",
        "last one is wrapped, and compared, in workers whose experts are replicated.)",
        "",
        "| Function | Source | Why | Until |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| `{seam.name}` | `{seam.digest}` | {seam.why} | {seam.retire_when} |"
        for seam in (*SEAMS, *EXPERT_SEAMS)
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(seams_page(), end="")  # noqa: T201  (the page is the output)

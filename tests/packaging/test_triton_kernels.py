# SPDX-License-Identifier: Apache-2.0
"""Every Triton kernel of the package compiles for a GPU, and once; no GPU is needed for that.

Interpreted kernels, which is what other tests run on CPUs, may say what no compiler takes.
"""

from __future__ import annotations

import ast
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm.triton_utils import tl, triton

ROOT = Path(__file__).parents[2]

# How kernels are launched: a type for what is passed, a value for what is compiled in.
Launch = dict[str, str | int]

PCP = "vllm.v1.attention.backends.pcp"
PEERS = "vllm.distributed.pcp.peer_kernels"
MERGE: Launch = {
    "output_ptr": "*bf16",
    "output_lse_ptr": "*fp32",
    "partial_ptr": "*bf16",
    "partial_lse_ptr": "*fp32",
    "output_stride_token": "i32",
    "output_stride_head": "i32",
    "output_lse_stride_head": "i32",
    "num_partial_tokens": "i32",
    "num_heads": "i32",
    "NUM_PARTIALS": 3,
    "HEAD_SIZE": 80,
    "HEAD_BLOCK": 128,
}
LAUNCHES: dict[str, list[Launch]] = {
    f"{PCP}.merge_partials._merge_partials_kernel": [
        MERGE | {"HAS_OWN": True},
        MERGE | {"HAS_OWN": False},
    ],
    f"{PCP}.mla.concat_keys._concat_keys_kernel": [
        {
            "keys_ptr": "*bf16",
            "nope_ptr": "*bf16",
            "rope_ptr": "*bf16",
            "nope_stride_token": "i32",
            "nope_stride_head": "i32",
            "rope_stride_token": "i32",
            "num_heads": "i32",
            "NOPE": 128,
            "ROPE": 64,
            "NOPE_BLOCK": 128,
            "ROPE_BLOCK": 64,
            "HEAD_BLOCK": 16,
        }
    ],
    f"{PCP}.mla.selected_slots._gathered_slots_kernel": [
        {
            "slots_ptr": "*i32",
            "num_slots_ptr": "*i32",
            "positions_ptr": "*i32",
            "first_key_ptr": "*i32",
            "gathered_rows_ptr": "*i32",
            "positions_stride": "i32",
            "NUM_SELECTED": 2048,
            "WIDTH": 2048,
        }
    ],
    f"{PCP}.mla.selected_slots._kept_slots_kernel": [
        {
            "slots_ptr": "*i32",
            "num_slots_ptr": "*i32",
            "positions_ptr": "*i32",
            "table_ptr": "*i32",
            "positions_stride": "i32",
            "table_stride": "i32",
            "RANK": 1,
            "WORLD_SIZE": 3,
            "INTERLEAVE": 16,
            "BLOCK_SIZE": 64,
            "NUM_SELECTED": 2048,
            "WIDTH": 2048,
        }
    ],
    f"{PEERS}._copy_slots_kernel": [
        {
            "slots_ptr": "*i64",
            "bases_ptr": "*i64",
            "num_tokens": "i32",
            "rank": "i32",
            "num_heads": "i32",
            "block_stride": "i32",
            "half_stride": "i32",
            "slot_stride": "i32",
            "head_stride": "i32",
            "BLOCK_SIZE": 16,
            "NUM_WORDS": 96,
            "NUM_RANKS": 3,
            "TOKENS": 32,
            "WORDS": 128,
        }
    ],
    f"{PEERS}._meet_kernel": [{"pads_ptr": "*i64", "rank": "i32", "NUM_RANKS": 3}],
    f"{PCP}.partial_results._weigh_kernel": [
        {
            "out_ptr": "*bf16",
            "lse_ptr": "*fp32",
            "lses_ptr": "*fp32",
            "num_rows": "i32",
            "scale": "fp32",
            "NUM_RANKS": 3,
            "WIDTH": 512,
            "BLOCK_RANKS": 4,
            "BLOCK_WIDTH": 512,
        }
    ],
}
# What differs between launches of one engine; all else depends on its model and configuration.
VARYING: dict[str, list[str]] = {
    f"{PCP}.merge_partials._merge_partials_kernel": [
        "output_lse_ptr",
        "output_lse_stride_head",
        "num_partial_tokens",
    ],
    f"{PCP}.mla.selected_slots._gathered_slots_kernel": ["first_key_ptr"],
    f"{PEERS}._copy_slots_kernel": ["slots_ptr", "num_tokens"],
    f"{PCP}.partial_results._weigh_kernel": ["num_rows"],
}


def kernels() -> Iterator[str]:
    """Yield the full names of our functions that Triton compiles, without importing any."""
    for path in sorted((ROOT / "vllm").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                if any(name.partition("(")[0].endswith("jit") for name in decorators):
                    yield f"{module}.{node.name}"


@triton.jit
def refused_kernel(output_ptr: Any) -> None:
    tl.store(output_ptr, 0)


def compiled_size(kernel: str, launch: Launch) -> int:
    """Compile a kernel for Hopper GPUs; return the bytes of what came out."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, name = kernel.rpartition(".")
    function: Any = getattr(import_module(module), name)
    constants = {name: value for name, value in launch.items() if not isinstance(value, str)}
    types = {name: launch[name] if name not in constants else "constexpr" for name in launch}
    # In the order of the parameters, which Triton takes for granted.
    signature = {name: types[name] for name in function.arg_names}
    source = ASTSource(function, signature, constexprs=constants)
    return len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"])


def variants(kernel: str, launch: Launch, varying: list[str]) -> list[Any]:
    """Return what Triton compiles a kernel for, anew where it differs, one argument varied."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    module, _, name = kernel.rpartition(".")
    function: Any = getattr(import_module(module), name)
    specialize = create_function_from_signature(
        function.signature, function.params, make_backend(GPUTarget("cuda", 90, 32))
    )
    memory = torch.zeros(64)

    def argument(name: str) -> Any:
        value = launch[name]
        return value if not isinstance(value, str) else memory if value[0] == "*" else 16

    usual = {name: argument(name) for name in function.arg_names}
    launches = [usual]
    for name in varying:
        values = [memory[1:], memory[4:]] if usual[name] is memory else [1, 3, 32]
        launches += [usual | {name: value} for value in values]
    return [specialize(**arguments, debug=False)[1] for arguments in launches]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    """A process in which Triton interprets nothing and remembers nothing: it decides on import."""
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("TRITON_INTERPRET", raising=False)
        environment.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        # To vLLM this says that GPUs may come later: it leaves Triton on.
        environment.setenv("CUDA_VISIBLE_DEVICES", "")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            yield pool


@pytest.mark.parametrize("kernel", list(kernels()))
def test_every_kernel_compiles(compiler: ProcessPoolExecutor, kernel: str) -> None:
    assert kernel in LAUNCHES, "say in LAUNCHES how it is launched"
    for launch in LAUNCHES[kernel]:
        assert compiler.submit(compiled_size, kernel, launch).result() > 0


@pytest.mark.parametrize("kernel", VARYING)
def test_no_kernel_is_compiled_again_while_serving(
    compiler: ProcessPoolExecutor, kernel: str
) -> None:
    """It takes a second: with pointers to other addresses, or numbers 1 and multiples of 16."""
    for launch in LAUNCHES[kernel]:
        first, *others = compiler.submit(variants, kernel, launch, VARYING[kernel]).result()
        assert all(other == first for other in others)


def test_no_launch_is_of_a_kernel_that_is_gone() -> None:
    assert set(VARYING) <= set(LAUNCHES) <= set(kernels())


def test_what_interpreters_alone_take_is_refused(compiler: ProcessPoolExecutor) -> None:
    refused = compiler.submit(compiled_size, f"{__name__}.refused_kernel", {"output_ptr": "*fp32"})
    with pytest.raises(Exception, match="Cannot access global variable Any"):
        refused.result()

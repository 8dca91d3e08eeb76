# SPDX-License-Identifier: Apache-2.0
import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOST_VLLM = Path(sysconfig.get_path("purelib")) / "vllm"
# The places that may rebind a name of vLLM: of functions, and of a process group.
REBINDING = (ROOT / "vllm/plugins/pcp/seams.py", ROOT / "vllm/distributed/pcp/groups.py")
PASSAGE_LINES = 3
PASSAGE_CHARACTERS = 80
# Imports, headers of functions, parameters and keyword arguments, brackets.
PRESCRIBED = re.compile(
    r"(from|import|def|class|# SPDX-).*"
    r"|\*?[\w.]+,?|\w+: [^=]*,|\w+(: .*)? ?= ?[\w.\"()]+,|\W*|\).*:"
)


def source_files() -> list[Path]:
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."]
    return [
        path
        for folder in (*folders, ROOT / ".buildkite")
        for path in folder.rglob("*")
        if path.suffix in {".py", ".sh", ".toml", ".yaml"} and "build" not in path.parts
    ]


def package_files() -> list[Path]:
    return sorted(ROOT.glob("vllm/**/*.py"))


def passages(text: str) -> Iterator[str]:
    """Yield each run of ``PASSAGE_LINES`` lines, less those that an interface prescribes."""
    lines = [line for line in map(str.strip, text.splitlines()) if not PRESCRIBED.fullmatch(line)]
    for start in range(len(lines) - PASSAGE_LINES + 1):
        passage = "\n".join(lines[start : start + PASSAGE_LINES])
        if len(passage) >= PASSAGE_CHARACTERS:
            yield passage


@pytest.fixture(scope="module")
def passages_of_vllm() -> set[int]:
    return {
        hash(passage)
        for path in HOST_VLLM.rglob("*.py")
        for passage in passages(path.read_text(encoding="utf-8"))
    }


def names_from_vllm(tree: ast.AST) -> set[str]:
    """Return the names in ``tree`` that stand for something of vLLM itself."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            if "pcp" not in (node.module or "").split("."):
                names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {
                (alias.asname or alias.name).split(".")[0]
                for alias in node.names
                if alias.name.startswith("vllm")
            }
    return names


def rebindings(source: str) -> list[int]:
    """Return the lines that assign to an attribute of something imported from vLLM."""
    tree = ast.parse(source)
    theirs = names_from_vllm(tree)
    lines = []
    for node in ast.walk(tree):
        target = node
        if isinstance(node, ast.Call):
            if not (isinstance(node.func, ast.Name) and node.func.id in {"setattr", "delattr"}):
                continue
            target = node.args[0]
        elif not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)):
            continue
        while isinstance(target, ast.Attribute | ast.Subscript | ast.Call):
            target = target.func if isinstance(target, ast.Call) else target.value
        if isinstance(target, ast.Name) and target.id in theirs:
            lines.append(node.lineno)
    return lines


def test_every_source_file_names_its_licence() -> None:
    files = source_files()
    assert len(files) > 10
    for path in (ROOT / ".ci" / "run", ROOT / "Makefile", ROOT / "pyproject.toml", *files):
        lines = path.read_text(encoding="utf-8").splitlines()
        first = lines[1] if lines[0].startswith("#!") else lines[0]
        assert first == "# SPDX-License-Identifier: Apache-2.0", path.relative_to(ROOT)


def test_sources_are_ascii() -> None:
    for path in source_files():
        assert path.read_bytes().isascii(), path.relative_to(ROOT)


def test_no_passage_is_one_of_vllm(passages_of_vllm: set[int]) -> None:
    copied = [
        f"{path.relative_to(ROOT)}:\n{passage}"
        for path in source_files()
        for passage in passages(path.read_text(encoding="utf-8"))
        if hash(passage) in passages_of_vllm
    ]
    assert not copied, "\n\n".join(copied)


def test_a_passage_of_vllm_is_recognised(passages_of_vllm: set[int]) -> None:
    theirs = (HOST_VLLM / "plugins" / "__init__.py").read_text(encoding="utf-8")
    assert all(hash(passage) in passages_of_vllm for passage in passages(theirs))


def test_vllm_is_rebound_in_two_places_alone() -> None:
    stray = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in package_files()
        if path not in REBINDING
        for line in rebindings(path.read_text(encoding="utf-8"))
    ]
    assert not stray


@pytest.mark.parametrize(
    "statement",
    [
        "import vllm.config; vllm.config.VllmConfig.x = 1",
        "import vllm.config as config; config.x = 1",
        "from vllm.config import VllmConfig; VllmConfig.x = 1",
        "from vllm.config import VllmConfig; setattr(VllmConfig, 'x', 1)",
        "from vllm.v1.worker.gpu import model_runner; del model_runner.BlockTables",
    ],
)
def test_a_rebinding_is_recognised(statement: str) -> None:
    assert rebindings(statement) == [1]

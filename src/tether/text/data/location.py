"""The location of rows: a file, a procedural task, an environment or a dataset on the hub.

This module reads no data and imports no torch.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from glob import glob
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, urlencode

from tether.integrations import integration
from tether.runtime.install import pip_install
from tether.runtime.user_files import missing_file
from tether.spelling import did_you_mean

PROCEDURAL, ENVIRONMENT = "reasoning_gym:", "verifiers:"
SUFFIXES = (".parquet", ".json", ".jsonl")
DELIMITERS = {".csv": ",", ".tsv": "\\t"}
ROW_OPTIONS = ("question", "answer", "data_source", "system", "suffix")
"""Options after the ``?`` of a file or hub dataset: columns, reward, and text around prompts."""
OPTIONS = {"file": ROW_OPTIONS, "hub": ("split", "name", "revision", *ROW_OPTIONS)}
_SPLIT = re.compile(r"(?<![a-z])(train|test|val|valid|validation|dev|eval)(?![a-z])", re.IGNORECASE)
_REMOTE = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
PACKAGES = {
    "task": ("reasoning_gym", "quickstart"),
    "environment": ("verifiers", "verifiers"),
    "hub": ("datasets", None),
}
"""Kind of source -> the package that it requires, and the extra that installs it; None: no extra does."""


@dataclass(frozen=True)
class Location:
    """The location of rows."""

    kind: Literal["file", "task", "environment", "hub"]
    name: str
    """Path, task, environment, or ``owner/name``."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options after the ``?``."""


def expand(spec: str) -> list[str]:
    """Return the sorted files of a pattern (``dir/*.parquet``) or folder; otherwise `spec` itself.

    Options after a ``?`` apply to each file.

    Raises:
        ValueError: nothing matches, or a folder has files of several splits or formats.
    """
    if spec.startswith((PROCEDURAL, ENVIRONMENT)) or _REMOTE.match(spec) or Path(spec).expanduser().is_file():
        return [spec]
    name, query, options = spec.partition("?")
    path = Path(name).expanduser()
    if path.is_dir():
        files = _files_of(spec, path)
    elif ("*" in name or "[" in name) and not path.exists():
        files = [Path(file) for file in sorted(glob(str(path), recursive=True)) if Path(file).is_file()]
        files = [file for file in files if file.suffix in SUFFIXES] or files
        if not files:
            raise ValueError(f"{spec}: no file matches this pattern, looked for from {Path.cwd()}. Correct it.")
    else:
        return [spec]
    return [f"{file}{query}{options}" for file in files]


def _files_of(spec: str, folder: Path) -> list[Path]:
    """Return the sorted files of a folder, which must have one split and format."""
    files = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES and not file.name.startswith("."))
    if not files:
        inner = sorted(child.name for child in folder.iterdir() if child.is_dir())
        below = f" Name one of its folders ({', '.join(inner[:5])}), or {spec}/**/*.parquet." if inner else ""
        raise ValueError(f"{spec}: a folder without {', '.join(SUFFIXES)} files.{below}")
    splits = sorted({split[1].lower() for file in files if (split := _SPLIT.search(file.stem))})
    endings = sorted({file.suffix for file in files})
    for kind, several in (("splits", splits), ("formats", endings)):
        if len(several) > 1:
            pattern = f"{folder / splits[-1]}*" if kind == "splits" else f"{folder}/*{endings[0]}"
            raise ValueError(
                f"{spec}: a folder with files of several {kind} ({', '.join(several)}): "
                f"{', '.join(file.name for file in files[:10])}. Name those that you mean, for example {pattern}."
            )
    return files


def locate(spec: str) -> Location:
    """Return the location that `spec` describes. `expand` must have resolved patterns and folders.

    Raises:
        ValueError: the file or a required package is missing, or options are malformed or unknown.
    """
    path = Path(spec).expanduser()
    if spec.startswith(PROCEDURAL):
        task, options = _split(spec, spec.removeprefix(PROCEDURAL))
        return _installed(Location("task", task, options))
    if spec.startswith(ENVIRONMENT):
        name, options = _split(spec, spec.removeprefix(ENVIRONMENT))
        return _installed(Location("environment", name, options))
    if _REMOTE.match(spec):
        raise ValueError(f"{spec}: an address. Copy the file here, and name its path.")
    name, options = (spec, {}) if path.is_file() else _split(spec, spec)
    file = Path(name).expanduser()
    if file.suffix in SUFFIXES:
        if not file.exists():
            raise ValueError(f"{missing_file(file)}{_pull_command(file)}")
        if not file.is_file():  # reading a pipe would block
            raise ValueError(f"{spec}: no regular file. Write its rows to one.")
        return _known_options(Location("file", str(file), options), spec)
    if path.exists() or name.count("/") != 1 or name.startswith("/"):
        hint = _conversion(path) if path.exists() else f" {missing_file(path)}"
        raise ValueError(f"{spec}: not a {', '.join(SUFFIXES)} file, nor `owner/name` on the hub.{hint}")
    return _installed(_known_options(Location("hub", name, options), spec))


def _pull_command(file: Path) -> str:
    """Return a sentence with the command that downloads a file of a published dataset; empty for other files."""
    datasets = integration("hubs", "catalogue").DATASETS
    for out in file.parents:
        if out.name in datasets and str(file.relative_to(out)) in datasets[out.name].files:
            return f" `{shlex.join(['tether', 'data', 'pull', out.name, '--out', str(out)])}` writes it."
    return ""


def _conversion(path: Path) -> str:
    """Return the command that converts a text table to a supported file."""
    if path.suffix not in DELIMITERS:
        return ""
    parse = f"c.ParseOptions(delimiter={DELIMITERS[path.suffix]!r})"
    table, made = f"c.read_csv({str(path)!r}, parse_options={parse})", path.with_suffix(".parquet")
    command = f'python -c "import pyarrow.csv as c, pyarrow.parquet as p; p.write_table({table}, {str(made)!r})"'
    return f" Convert it: {command}, and name its columns: {made}?question=COLUMN&answer=COLUMN&data_source=REWARD"


def split_query(spec: str) -> tuple[str, dict[str, str]]:
    """Split ``a?b=1&c=x%20y`` into ``("a", {"b": "1", "c": "x y"})``.

    Raises:
        ValueError: an option is not key=value, or a key occurs twice.
    """
    name, _, query = spec.partition("?")
    pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    options = dict(pairs)
    if len(options) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)} stands twice")
    return name, options


def environment_named_by(spec: str) -> str:
    """Return the name of the environment that replies to a source's rows, without the options that select rows.

    Raises:
        ValueError: the options are malformed.
    """
    name, options = _split(spec, spec.removeprefix(ENVIRONMENT))
    arguments = urlencode({key: value for key, value in options.items() if key not in ("part", "size")})
    return f"{ENVIRONMENT}{name}?{arguments}" if arguments else f"{ENVIRONMENT}{name}"


def has_tasksets() -> bool:
    """Return whether environments of the installed verifiers are tasksets of `verifiers.v1`, as from version 0.4 on."""
    try:
        return tuple(map(int, version("verifiers").split(".")[:2])) >= (0, 4)
    except PackageNotFoundError:
        return False


def _split(spec: str, query: str) -> tuple[str, dict[str, str]]:
    try:
        return split_query(query)
    except ValueError as error:
        raise ValueError(f"{spec}: what follows the ? must read key=value&key=value ({error}).") from error


def _known_options(location: Location, spec: str) -> Location:
    names = OPTIONS[location.kind]
    for key in location.options:
        if key not in names:
            raise ValueError(f"{spec}: unknown option `{key}`; there are {', '.join(names)}.{did_you_mean(key, names)}")
    return location


def _installed(location: Location) -> Location:
    package, extra = PACKAGES[location.kind]
    if find_spec(package) is None:
        command = pip_install(extra) if extra else f"pip install {package}"
        raise ValueError(f"this data source needs the package {package}: {command}")
    return location

"""Where rows come from: a file, a procedural task, an environment, a dataset on the hub.

Reads nothing and imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, urlencode

from tether.runtime.user_files import missing_file
from tether.spelling import did_you_mean

PROCEDURAL, ENVIRONMENT = "reasoning_gym:", "verifiers:"
SUFFIXES = (".parquet", ".json", ".jsonl")
DELIMITERS = {".csv": ",", ".tsv": "\\t"}
ROW_OPTIONS = ("question", "answer", "data_source", "system", "suffix")
"""Options after the ``?`` of a file or hub dataset: its columns, its reward, and text around its prompts."""
OPTIONS = {"file": ROW_OPTIONS, "hub": ("split", "name", "revision", *ROW_OPTIONS)}
_SPLIT = re.compile(r"(?<![a-z])(train|test|val|valid|validation|dev|eval)(?![a-z])", re.IGNORECASE)
_REMOTE = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
PACKAGES = {
    "task": ("reasoning_gym", "tether[quickstart]"),
    "environment": ("verifiers", "tether[verifiers]"),
    "hub": ("datasets", "datasets"),
}
"""Kind of source -> the package that it needs, and what pip installs it."""


@dataclass(frozen=True)
class Location:
    """Where rows come from."""

    kind: Literal["file", "task", "environment", "hub"]
    name: str
    """Path, task, environment, or ``owner/name``."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The options after the ``?``."""


def expand(spec: str) -> list[str]:
    """Return the files that a pattern (``dir/*.parquet``) or a folder stands for, sorted; else `spec` itself.

    Options after a ``?`` are those of each file.

    Raises:
        ValueError: nothing matches, or a folder has files of several splits or formats.
    """
    if spec.startswith((PROCEDURAL, ENVIRONMENT)) or _REMOTE.match(spec) or Path(spec).expanduser().is_file():
        return [spec]
    name, query, options = spec.partition("?")
    path = Path(name).expanduser()
    if path.is_dir():
        found = _files_of(spec, path)
    elif ("*" in name or "[" in name) and not path.exists():
        found = [Path(file) for file in sorted(glob(str(path), recursive=True)) if Path(file).is_file()]
        found = [file for file in found if file.suffix in SUFFIXES] or found
        if not found:
            raise ValueError(f"{spec}: no file matches this pattern, looked for from {Path.cwd()}. Correct it.")
    else:
        return [spec]
    return [f"{file}{query}{options}" for file in found]


def _files_of(spec: str, folder: Path) -> list[Path]:
    """Return the files of a folder that belong together, sorted."""
    found = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES and not file.name.startswith("."))
    if not found:
        inner = sorted(child.name for child in folder.iterdir() if child.is_dir())
        below = f" Name one of its folders ({', '.join(inner[:5])}), or {spec}/**/*.parquet." if inner else ""
        raise ValueError(f"{spec}: a folder without {', '.join(SUFFIXES)} files.{below}")
    splits = sorted({split[1].lower() for file in found if (split := _SPLIT.search(file.stem))})
    endings = sorted({file.suffix for file in found})
    for kind, several in (("splits", splits), ("formats", endings)):
        if len(several) > 1:
            pattern = f"{folder / splits[-1]}*" if kind == "splits" else f"{folder}/*{endings[0]}"
            raise ValueError(
                f"{spec}: a folder with files of several {kind} ({', '.join(several)}): "
                f"{', '.join(file.name for file in found[:10])}. Name those that you mean, for example {pattern}."
            )
    return found


def locate(spec: str) -> Location:
    """Find out what kind of source `spec` names; patterns and folders are for `expand`.

    Raises:
        ValueError: a file that does not exist, options that cannot be read or are unknown, or a package that
            is missing.
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
            raise ValueError(missing_file(file))
        if not file.is_file():  # a pipe would be waited for
            raise ValueError(f"{spec}: no regular file. Write its rows to one.")
        return _known_options(Location("file", str(file), options), spec)
    if path.exists() or name.count("/") != 1 or name.startswith("/"):
        hint = _conversion(path) if path.exists() else f" {missing_file(path)}"
        raise ValueError(f"{spec}: not a {', '.join(SUFFIXES)} file, nor `owner/name` on the hub.{hint}")
    return _installed(_known_options(Location("hub", name, options), spec))


def _conversion(path: Path) -> str:
    """The command that makes a file which can be read of a table in text."""
    if path.suffix not in DELIMITERS:
        return ""
    parse = f"c.ParseOptions(delimiter={DELIMITERS[path.suffix]!r})"
    table, made = f"c.read_csv({str(path)!r}, parse_options={parse})", path.with_suffix(".parquet")
    command = f'python -c "import pyarrow.csv as c, pyarrow.parquet as p; p.write_table({table}, {str(made)!r})"'
    return f" Convert it: {command}, and name its columns: {made}?question=COLUMN&answer=COLUMN&data_source=REWARD"


def split_query(spec: str) -> tuple[str, dict[str, str]]:
    """``a?b=1&c=x%20y`` -> ``("a", {"b": "1", "c": "x y"})``.

    Raises:
        ValueError: a part is not key=value, or a key stands twice.
    """
    name, _, query = spec.partition("?")
    pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    options = dict(pairs)
    if len(options) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)} stands twice")
    return name, options


def environment_named_by(spec: str) -> str:
    """The name of the environment that answers the rows of a source: without what only chooses rows.

    Raises:
        ValueError: options that cannot be read.
    """
    name, options = _split(spec, spec.removeprefix(ENVIRONMENT))
    arguments = urlencode({key: value for key, value in options.items() if key not in ("part", "size")})
    return f"{ENVIRONMENT}{name}?{arguments}" if arguments else f"{ENVIRONMENT}{name}"


def _split(spec: str, rest: str) -> tuple[str, dict[str, str]]:
    try:
        return split_query(rest)
    except ValueError as error:
        raise ValueError(f"{spec}: what follows the ? must read key=value&key=value ({error}).") from error


def _known_options(location: Location, spec: str) -> Location:
    known = OPTIONS[location.kind]
    for key in location.options:
        if key not in known:
            raise ValueError(f"{spec}: unknown option `{key}`; there are {', '.join(known)}.{did_you_mean(key, known)}")
    return location


def _installed(location: Location) -> Location:
    package, install = PACKAGES[location.kind]
    if find_spec(package) is None:
        raise ValueError(f"this data source needs the package {package}: pip install '{install}'")
    return location

"""Where rows come from: a file, a procedural task, an environment, a dataset on the hub.

Reads nothing and imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, urlencode

from tether.runtime.install import pip_install
from tether.runtime.user_files import missing_file
from tether.spelling import did_you_mean

PROCEDURAL, ENVIRONMENT = "reasoning_gym:", "verifiers:"
SUFFIXES = (".parquet", ".json", ".jsonl")
DELIMITERS = {".csv": ",", ".tsv": "\\t"}
ROW_OPTIONS = ("question", "answer", "data_source", "system", "suffix")
"""Options after the ``?`` of a file or hub dataset: its columns, its reward, and text around its prompts."""
OPTIONS = {"file": ROW_OPTIONS, "hub": ("split", "name", "revision", *ROW_OPTIONS)}
_REMOTE = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
PACKAGES = {
    "task": ("reasoning_gym", "quickstart"),
    "environment": ("verifiers", "verifiers"),
    "hub": ("datasets", None),
}
"""Kind of source -> the package that it needs, and the extra that installs it; None: it is no extra."""


@dataclass(frozen=True)
class Location:
    """Where rows come from."""

    kind: Literal["file", "task", "environment", "hub"]
    name: str
    """Path, task, environment, or ``owner/name``."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The options after the ``?``."""


def locate(spec: str) -> Location:
    """Find out what kind of source `spec` names.

    Raises:
        ValueError: a file that does not exist, a folder, options that cannot be read or are unknown, or a package that
            is missing.
    """
    path = Path(spec).expanduser()
    if spec.startswith(PROCEDURAL):
        task, options = _split(spec, spec.removeprefix(PROCEDURAL))
        return _installed(Location("task", task, options))
    if spec.startswith(ENVIRONMENT):
        name, options = _split(spec, spec.removeprefix(ENVIRONMENT))
        return _installed(Location("environment", name, options))
    if path.is_dir():
        found = sorted(child.name for child in path.iterdir() if child.suffix in SUFFIXES)
        raise ValueError(f"{spec}: a folder. Name its files one by one: {', '.join(found) or 'it has none to read'}.")
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
    package, extra = PACKAGES[location.kind]
    if find_spec(package) is None:
        command = pip_install(extra) if extra else f"pip install {package}"
        raise ValueError(f"this data source needs the package {package}: {command}")
    return location

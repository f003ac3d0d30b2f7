"""A config as text: to save, and to show."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import yaml

from tether.config import control_defaults
from tether.config.support.live_keys import live_keys, why_idle

Line = Callable[[str, str], str]
"""(dotted key, "name: value") -> the line to print."""


class Dumper(yaml.SafeDumper):
    """Quotes the strings that OmegaConf would read as numbers, and PyYAML would not, and those with odd line breaks."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """A string; in double quotes, and so escaped, where YAML takes a letter of it for the end of a line."""
        style = '"' if re.search("[\x85\u2028\u2029]", data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


Dumper.add_representer(str, Dumper.represent_str)

Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def to_yaml(values: Mapping[str, object], sources: Mapping[str, str]) -> str:
    """YAML that loads to the same config: inherited values as comments, untouched keys that do nothing left out."""

    def line(path: str, text: str) -> str:
        return f"# {text}  ({sources[path]})" if sources[path].startswith("inherits ") else text

    return _tree(values, _shown_keys(values, sources), line)


def format_tree(values: Mapping[str, object], sources: Mapping[str, str]) -> str:
    """Every key that acts or was given, with its value and where that comes from; then how many were left out."""
    shown = _shown_keys(values, sources)
    width = max(len(_text(path, values[path])) + 2 * path.count(".") for path in shown if len(str(values[path])) < 40)

    def line(path: str, text: str) -> str:
        return f"{text:<{width - 2 * path.count('.')}}  # {sources[path]}"

    rest = len(values) - len(shown)
    return _tree(values, shown, line) + f"# and {rest} keys at their default that do nothing in this run\n"


def annotated(values: Mapping[str, object], comments: Mapping[str, str]) -> str:
    """YAML of these keys, in their order, each with a comment."""
    return _tree(values, list(values), lambda path, text: f"{text}  # {comments[path]}")


def _shown_keys(values: Mapping[str, object], sources: Mapping[str, str]) -> list[str]:
    acting = {path for path in live_keys() if why_idle(path, values) is None}
    return [path for path in values if path in acting or not _is_untouched(sources[path])]


def _is_untouched(source: str) -> bool:
    return source in ("default", control_defaults.SOURCE) or source.startswith("inherits ")


def _tree(values: Mapping[str, object], paths: list[str], line: Line) -> str:
    """Lay keys out as nested YAML, a section's name once above its keys."""
    lines: list[str] = []
    open_sections: list[str] = []
    for path in paths:
        *parents, _ = path.split(".")
        shared = _common(open_sections, parents)
        lines += [f"{'  ' * depth}{parents[depth]}:" for depth in range(shared, len(parents))]
        lines.append("  " * len(parents) + line(path, _text(path, values[path])))
        open_sections = parents
    return "\n".join(lines) + "\n"


def _common(left: list[str], right: list[str]) -> int:
    pairs = zip(left, right, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _text(path: str, value: object) -> str:
    plain = _plain(value)
    # Line breaks and the like are escaped, so that every key stays on one line, also as a comment.
    one_line = all(text.isprintable() for text in _strings(plain))
    style = None if one_line else '"'
    dumped = yaml.dump(
        plain,
        Dumper=Dumper,
        default_flow_style=True,
        default_style=style,
        width=10**6,
        allow_unicode=one_line,
        sort_keys=False,
    )
    return f"{path.rsplit('.', 1)[-1]}: {dumped.removesuffix('...' + chr(10)).strip()}"


def _strings(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.items() for part in item for text in _strings(part)]
    if isinstance(value, list):
        return [text for part in value for text in _strings(part)]
    return [value] if isinstance(value, str) else []


def _plain(value: object) -> object:
    """Lists for tuples, and characters that must not be taken for an interpolation on reading."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value

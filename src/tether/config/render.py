"""A configuration as text, for files and for display."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

import yaml

from tether.config import control_defaults, sft
from tether.config.support.live_keys import live_keys, why_idle

Line = Callable[[str, str], str]
"""(dotted key, "name: value") -> the line to print."""


class Dumper(yaml.SafeDumper):
    """YAML dumper that quotes strings with unusual line breaks, or that OmegaConf but not PyYAML reads as numbers."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Return the node of a string, in double quotes if it has a character that YAML reads as a line break."""
        style = '"' if re.search("[\x85\u2028\u2029]", data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


Dumper.add_representer(str, Dumper.represent_str)

Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def to_yaml(values: Mapping[str, object], sources: Mapping[str, str]) -> str:
    """Return YAML that loads to the same config, with inherited values as comments and without unused defaults."""

    def line(path: str, text: str) -> str:
        return f"# {text}  ({sources[path]})" if sources[path].startswith("inherits ") else text

    return _tree(values, _shown_keys(values, sources), line)


def format_tree(values: Mapping[str, object], sources: Mapping[str, str]) -> str:
    """Return every key that has an effect or was set, with its value and source, and the number of all other keys."""
    shown = _shown_keys(values, sources)
    width = max(len(_text(path, values[path])) + 2 * path.count(".") for path in shown if len(str(values[path])) < 40)

    def line(path: str, text: str) -> str:
        return f"{text:<{width - 2 * path.count('.')}}  # {sources[path]}"

    num_hidden = len(values) - len(shown)
    return _tree(values, shown, line) + f"# and {num_hidden} keys at their default that do nothing in this run\n"


def annotated(values: Mapping[str, object], comments: Mapping[str, str]) -> str:
    """Return YAML of these keys in their order, each with a comment."""
    return _tree(values, list(values), lambda path, text: f"{text}  # {comments[path]}")


def _shown_keys(values: Mapping[str, object], sources: Mapping[str, str]) -> list[str]:
    acting = {path for path in live_keys() if why_idle(path, values) is None}
    return [path for path in values if path in acting or not _is_untouched(sources[path])]


def _is_untouched(source: str) -> bool:
    return source in ("default", control_defaults.SOURCE, sft.SOURCE) or source.startswith("inherits ")


def _tree(values: Mapping[str, object], paths: list[str], line: Line) -> str:
    """Return keys as nested YAML in which each section name appears once, above its keys."""
    lines: list[str] = []
    open_sections: list[str] = []
    for path in paths:
        *parents, _ = path.split(".")
        shared = _common(open_sections, parents)
        lines += [f"{'  ' * depth}{parents[depth]}:" for depth in range(shared, len(parents))]
        lines.append("  " * len(parents) + line(path, _text(path, values[path])))
        open_sections = parents
    return "\n".join(lines) + "\n"


def _common(first: list[str], second: list[str]) -> int:
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _text(path: str, value: object) -> str:
    name = path.rsplit(".", 1)[-1]
    if value is None or isinstance(value, int):  # the most common case; yaml.dump takes a hundred times as long
        return f"{name}: {json.dumps(value)}"
    plain = _plain(value)
    # Line breaks and similar characters are escaped, so that every key takes one line, also in a comment.
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
    return f"{name}: {dumped.removesuffix('...' + chr(10)).strip()}"


def _strings(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in _strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return [value] if isinstance(value, str) else []


def _plain(value: object) -> object:
    """Return plain containers, with `${` escaped so that it is not read as an interpolation."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value

"""What `tether config explain` and `tether config show` print."""

from __future__ import annotations

from tether.config import render
from tether.config.elsewhere import ELSEWHERE
from tether.config.keys import Key, keys, sections, show, values_of
from tether.config.load import LoadedConfig
from tether.config.patterns import look_up
from tether.config.problems import ConfigError
from tether.config.refused import REFUSED
from tether.config.suggest import unknown_key
from tether.config.switches import SWITCHED
from tether.config.type_errors import expected


def explain(key: str) -> str:
    """Say what a key means, what it takes, its default, and whether it acts here; of a section, list its keys.

    Raises:
        ConfigError: there is no such key; names the nearest.
    """
    if key in keys():
        return _explain_key(keys()[key])
    if key in sections():
        return _explain_section(key)
    raise ConfigError([unknown_key(key)])


def format_tree(loaded: LoadedConfig) -> str:
    """The resolved config, each value with where it comes from, then the notes."""
    text = render.format_tree(values_of(loaded.config), loaded.sources)
    return text + "".join(f"# note: {note}\n" for note in loaded.notes)


def format_inheritance() -> str:
    """Every key that takes another key's value while it is unset, one a line."""
    inheriting = [key for key in keys().values() if key.inherits]
    width = max(len(key.path) for key in inheriting)
    return "".join(f"{key.path:<{width}}  <- {_source(key)}\n" for key in inheriting)


def _explain_key(key: Key) -> str:
    lines = [key.path, f"  {key.doc}", f"  takes: {expected(key)}", f"  default: {_default(key)}"]
    return "\n".join(lines + [f"  {line}" for line in _status(key)]) + "\n"


def _explain_section(path: str) -> str:
    own = [key for key in keys().values() if key.path.startswith(path + ".")]
    width = max(len(key.path) for key in own)
    return "".join([f"{path}\n  {sections()[path]}\n", *(f"  {key.path:<{width}}  {key.doc}\n" for key in own)])


def _default(key: Key) -> str:
    if key.inherits:
        return f"inherits {_source(key)}"
    return f"none, it must be given (for example {key.example})" if key.required else show(key.default)


def _source(key: Key) -> str:
    assert key.inherits is not None
    return key.inherits.key + (f" == {key.inherits.equals}" if key.inherits.equals is not None else "")


def _status(key: Key) -> list[str]:
    refused, switch, elsewhere = look_up(REFUSED, key.path), look_up(SWITCHED, key.path), look_up(ELSEWHERE, key.path)
    lines = [f"second name of: {key.alias_of}"] if key.alias_of else []
    if refused is not None:
        what = "any value but the default" if refused.values is None else ", ".join(map(str, refused.values))
        lines.append(f"refused: {what} ({refused.why})")
    if switch is not None:
        lines.append(f"acts only while {switch.condition()}")
    if elsewhere is not None:
        lines.append(f"no effect here: {elsewhere}")
    return lines

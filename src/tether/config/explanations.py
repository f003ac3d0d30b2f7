"""The output of `tether config explain` and `tether config show`."""

from __future__ import annotations

from tether.config import render
from tether.config.keys import Key, keys, mapping_key, sections, show, values_of
from tether.config.loading.load import LoadedConfig
from tether.config.loading.type_errors import expected
from tether.config.loading.typos import unknown_key
from tether.config.problems import ConfigError
from tether.config.secrets import masked
from tether.config.support.live_keys import condition, live_keys, why_idle
from tether.config.support.verl_keys import Unread, renamed, unread, unread_keys


def explain(key: str, loaded: LoadedConfig | None = None) -> str:
    """Return the description of a key (meaning, type, default, conditions), or the keys of a section.

    Args:
        key: the key or section.
        loaded: configuration of a run; its values and their sources are added.

    Raises:
        ConfigError: the key is unknown; the message suggests the nearest one.
    """
    path = mapping_key(renamed(key)) or renamed(key)
    if path in keys():
        return _explain_key(keys()[path]) + (_in_this_run(path, loaded) if loaded else "")
    if key in sections():
        paths = [path for path in keys() if path.startswith(f"{key}.")]
        return _explain_section(key) + "".join(f"\n{path}\n{_in_this_run(path, loaded)}" for path in paths if loaded)
    if (row := unread(renamed(key))) is not None:
        return f"{key}\n  A key of verl's that nothing reads here.\n  {_unread_status(row)}\n"
    if inner := {path: row for path, row in unread_keys().items() if path.startswith(f"{renamed(key)}.")}:
        listed = "".join(f"  {path}  {_unread_status(row)}\n" for path, row in inner.items())
        return f"{key}\n  A section of verl's whose keys nothing reads here.\n{listed}"
    raise ConfigError([unknown_key(key)])


def list_sections() -> str:
    """Return a list of all sections, with their docs and their numbers of keys."""
    counts = {section: sum(path.startswith(f"{section}.") for path in keys()) for section in sections()}
    width = max(map(len, counts))
    return "".join(f"{section:<{width}}  {count:>3} keys  {sections()[section]}\n" for section, count in counts.items())


def search(word: str) -> str:
    """Return a list of the keys whose name or description contains `word`, ignoring case.

    Raises:
        ValueError: no key matches.
    """
    matches = [key for key in keys().values() if word.lower() in f"{key.path} {key.doc}".lower()]
    if not matches:
        raise ValueError(f"--search {word}: no key or description has it; `tether config explain` lists sections")
    width = max(len(key.path) for key in matches)
    return "".join(f"{key.path:<{width}}  {key.doc}\n" for key in matches)


def format_tree(loaded: LoadedConfig) -> str:
    """Return the resolved config as text, each value with its source, followed by the notes."""
    text = render.format_tree(masked(values_of(loaded.config)), loaded.sources)
    return text + "".join(f"# note: {note}\n" for note in loaded.notes)


def format_inheritance() -> str:
    """Return a list of the keys that inherit another key's value while they are unset."""
    inheriting = [key for key in keys().values() if key.inherits]
    width = max(len(key.path) for key in inheriting)
    return "".join(f"{key.path:<{width}}  <- {_source(key)}\n" for key in inheriting)


def _explain_key(key: Key) -> str:
    lines = [key.path, f"  {key.doc}", f"  takes: {expected(key)}", f"  default: {default(key)}"]
    return "\n".join(lines + [f"  {line}" for line in _status(key)]) + "\n"


def _in_this_run(path: str, loaded: LoadedConfig) -> str:
    values = values_of(loaded.config)
    idle = why_idle(path, values)
    lines = [f"in this run: {show(values[path])} ({loaded.sources[path]})"]
    lines += [f"does nothing in this run: {idle}"] if idle and path in live_keys() else []
    return "".join(f"  {line}\n" for line in lines)


def _unread_status(row: Unread) -> str:
    if not row.refused:
        return row.why if row.is_translated else f"no effect here: {row.why}"
    return f"refused: any value but {show(row.fine[0] if row.fine else None)} ({row.why})"


def _explain_section(path: str) -> str:
    section_keys = [key for key in keys().values() if key.path.startswith(path + ".")]
    width = max(len(key.path) for key in section_keys)
    return "".join(
        [f"{path}\n  {sections()[path]}\n", *(f"  {key.path:<{width}}  {key.doc}\n" for key in section_keys)]
    )


def default(key: Key) -> str:
    """Return the default of a key as text: its value, the key from which it inherits, or that the key is required."""
    if key.inherits:
        return f"inherits {_source(key)}"
    return f"none, it must be given (for example {key.example})" if key.required else show(key.default)


def _source(key: Key) -> str:
    assert key.inherits is not None
    return key.inherits.key + (f" == {key.inherits.equals}" if key.inherits.equals is not None else "")


def _status(key: Key) -> list[str]:
    lines = [f"second name of: {key.alias_of}"] if key.alias_of else []
    if key.refuses is not None:
        lines.append(f"refused: {', '.join(key.refuses.choices)} ({key.refuses.why})")
    if key.acts_if is not None:
        lines.append(f"acts only while {condition(key.acts_if)}")
    return lines

"""`tether config import-rlinf`: translates an RLinf file to a native one, and lists the outcome for each key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tether.config.loading.load import load_config
from tether.config.loading.overrides import parse_overrides
from tether.config.loading.rlinf_marks import is_rlinf
from tether.config.loading.yaml_file import read_yaml
from tether.config.problems import ConfigError, Problem
from tether.integrations.rlinf.importer import Imported, import_file
from tether.integrations.rlinf.other_simulator import names_own_simulator
from tether.integrations.rlinf.report import report, to_native_yaml


def translate(arguments: Sequence[str]) -> tuple[str, str]:
    """Translate a file.

    Args:
        arguments: the file, then overrides in RLinf's keys.

    Returns:
        The native YAML, and the listing of all keys with further problems that prevent running the file. Unsupported
        keys are in a separate section of the YAML, so that it is refused until the user removes them; the first line of
        both texts counts these keys.

    Raises:
        ConfigError: the file is not RLinf's, or has unknown, contradicting or unreadable keys.
    """
    if not arguments or not arguments[0].endswith((".yaml", ".yml")):
        raise ConfigError([Problem("import-rlinf", "names no YAML file", "write tether config import-rlinf FILE.yaml")])
    path = Path(arguments[0])
    if not is_rlinf(read_yaml(path)):
        what = "is not a file of RLinf's: it has none of its sections"
        raise ConfigError([Problem(str(path), what, "run it as it is")])
    overrides, problems = parse_overrides(arguments[1:])
    imported = import_file(path, overrides)
    problems += [*imported.refusals(), *imported.problems]
    own = {override.path: override.value for override in imported.other_overrides if names_own_simulator(override)}
    imported = replace(imported, native={**imported.native, **own})
    problems += [
        Problem(override.path, "is no key of RLinf's", "set it in the native file")
        for override in imported.other_overrides
        if override.path not in own
    ]
    if len(problems) > len(imported.refusals()):
        raise ConfigError(problems)
    native, listing = to_native_yaml(imported), report(imported) + _obstacles(imported, arguments)
    refused = len(imported.refusals())
    if not refused:
        return native, listing
    keys, they_are = ("1 key is", "it is") if refused == 1 else (f"{refused} keys are", "they are")
    summary = f"{keys} not supported, listed at the end: training is refused until {they_are} removed"
    return f"# {summary}\n{native}", f"{summary}\n\n{listing}"


def _obstacles(imported: Imported, arguments: Sequence[str]) -> str:
    """Return the problems that prevent running the file, apart from unsupported keys."""
    try:
        load_config(Path(arguments[0]), arguments[1:])
    except ConfigError as error:
        listed = {problem.path for problem in imported.refusals()}
        obstacles = [str(problem) for problem in error.problems if problem.path not in listed]
        return (
            "\n".join(["\nstill to be set before it runs", *(f"  {text}" for text in obstacles), ""])
            if obstacles
            else ""
        )
    return ""

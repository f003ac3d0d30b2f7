"""`tether config import-verl`: a script that starts verl's trainer as a file, and what keeps that from being run."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tether.config.importers.verl.shell import UNKNOWN, Command, Script, read_script
from tether.config.loading.interpolation import nest
from tether.config.loading.load import load_config
from tether.config.loading.overrides import Override, parse_overrides
from tether.config.problems import ConfigError, Problem
from tether.config.render import Dumper

_TRAINER = re.compile(r"(\w+\.)*main_\w+|(\S*/)?main_\w+\.py")
_PREDEFINED = ("ppo_trainer", "ppo_megatron_trainer")
_CONFIG_NAME, _CONFIG_PATH = ("--config-name", "-cn"), ("--config-path", "-cp")


@dataclass(frozen=True)
class _Launch:
    """The words after the trainer's name."""

    line: int
    trainer: str
    settings: tuple[str, ...]
    config_name: str | None
    options: tuple[str, ...]
    """Of Hydra, that no configuration has."""


def translate(script: Path, more: Sequence[str]) -> tuple[str, str]:
    """Translate a script.

    Args:
        script: a shell script that starts verl once.
        more: overrides that go over its own.

    Returns:
        The YAML, and a listing of what was noticed and of what keeps it from being run as it is.

    Raises:
        ConfigError: the script cannot be read, starts verl not once, or gives settings that cannot be read.
    """
    try:
        text = script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(script), f"cannot be read ({error})", "give a shell script")]) from None
    read = read_script(text, os.environ)
    launch = _launch(script, read)
    unknown = [word for word in launch.settings if UNKNOWN in word]
    replaced = {word.split("=")[0].lstrip("+") for word in more}
    problems = [_unknown(word) for word in unknown if word.split("=")[0].lstrip("+") not in replaced]
    overrides, unreadable = parse_overrides([*(w for w in launch.settings if UNKNOWN not in w), *more])
    if problems or unreadable:
        broken = [Problem(script.name, note.text, note.fix) for note in read.notes]
        raise ConfigError([*broken, *problems, *unreadable])
    heading = [
        f"# The settings of {script.name}, line {launch.line} ({launch.trainer}).",
        *(f"# Exported there: {name}={value}" for name, value in read.exported.items() if UNKNOWN not in value),
    ]
    body = _settings(overrides)
    if launch.config_name:
        body = {"defaults": [launch.config_name, "_self_"], **body}
    dumped = yaml.dump(body, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=10**6)
    listing = [
        *(note.text for note in read.notes),
        *(f"{option} is no setting and was left out" for option in launch.options),
    ]
    return "\n".join(heading) + "\n" + dumped, "\n".join([*listing, *_obstacles(launch, overrides)])


def _launch(script: Path, read: Script) -> _Launch:
    """The one command that starts a trainer of verl's.

    Raises:
        ConfigError: there is none, or there are several.
    """
    found = [(command, place) for command in read.commands if (place := _place_of_trainer(command)) is not None]
    if len(found) != 1:
        lines = ", ".join(str(command.line) for command, _ in found)
        what = f"starts verl {len(found)} times, in lines {lines}" if found else "starts no trainer of verl's"
        raise ConfigError(
            [Problem(str(script), what, "give a script with one python -m verl.trainer.main_ppo KEY=VALUE ...")]
        )
    (command, place), name = found[0], None
    settings, options = [], []
    words = list(command.words[place + 1 :])
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if option in (*_CONFIG_NAME, *_CONFIG_PATH):
            value = value if equals else words.pop(0) if words else ""
            name = value.removesuffix(".yaml") if option in _CONFIG_NAME else name
        elif word.startswith("-"):
            options.append(word)
        elif word.strip():
            settings.append(word)
    if name and name not in _PREDEFINED:
        fix = f"give {name}.yaml itself to tether train, with the settings of the script"
        raise ConfigError([Problem(f"--config-name={name}", "is a file of the script's own", fix)])
    return _Launch(command.line, command.words[place], tuple(settings), name, tuple(options))


def _place_of_trainer(command: Command) -> int | None:
    """Where among the words the trainer's name stands; before it may be python, ray job submit, nsys, env, ..."""
    for place, word in enumerate(command.words):
        before = command.words[place - 1] if place else ""
        if _TRAINER.fullmatch(word) and (before == "-m" or word.endswith(".py")):
            return place
    return None


def _unknown(word: str) -> Problem:
    key, _, value = word.replace(UNKNOWN, "").partition("=")
    parts = ", ".join(word.split(UNKNOWN)[1::2])
    fix = f"export what it needs, or add {key}=VALUE to this command"
    return Problem(key, f"is {value} in the script, and {parts} is known only when it is run", fix)


def _settings(overrides: Sequence[Override]) -> dict[str, object]:
    """The last value of each key, nested."""
    values: dict[str, object] = {}
    for override in overrides:
        values.pop(override.path, None)
        if not override.delete:
            values[override.path] = override.value
    return nest(values)


def _obstacles(launch: _Launch, overrides: Sequence[Override]) -> list[str]:
    """Reasons why the file cannot be run as it is."""
    try:
        load_config(Path(f"{launch.config_name}.yaml") if launch.config_name else None, overrides)
    except ConfigError as error:
        return ["to be changed before it runs:", *(f"  {problem}" for problem in error.problems)]
    return []

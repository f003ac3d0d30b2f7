"""`tether config import-verl`: a script that starts verl's trainer as a file, and what keeps that from being run."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tether.config.importers.verl.shell import Command, Script, read_script
from tether.config.importers.verl.words import UNKNOWN, TooLong
from tether.config.keys import keys
from tether.config.loading.given import put
from tether.config.loading.load import load_config
from tether.config.loading.overrides import Override, parse_overrides
from tether.config.problems import ConfigError, Problem
from tether.config.render import Dumper
from tether.config.secrets import has_secrets, is_secret
from tether.config.support.verl_keys import renamed
from tether.runtime.hubs import OFF, USE_MODELSCOPE

_STARTED = re.compile(
    r"(?:\w+\.)*(?:main_\w+|\w+_main|\w*sft_trainer)|(?:\S*/)?(?:main_\w+|\w+_main|\w*sft_trainer)\.py"
)
_PPO = re.compile(r"verl\.trainer\.main_ppo|(?:\S*/)?trainer/main_ppo\.py|main_ppo\.py|(?:\S*[./])?main_dapo(?:\.py)?")
"""The trainers whose algorithm is the one here: main_ppo, and DAPO's, which adds `algorithm.filter_groups`."""
_PREDEFINED = ("ppo_trainer", "ppo_megatron_trainer")
_MENTIONING = ("echo", "printf", "grep", "pgrep", "pkill", "kill", "ls", "cat", "cp", "sed", "awk", "test", "[", "[[")
"""Commands that name a trainer and do not start it."""
_SETTING = re.compile(r"[+~]{0,2}\w+(?:\.\w+)+=.*", re.DOTALL)
_WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--experimental-rerun")
_RESULTS = "write the values that result into it"
_MOST_SHOWN = 80  # characters of an expression, in a message
_CONFIG_NAME, _CONFIG_PATH = ("--config-name", "-cn"), ("--config-path", "-cp", "--config-dir", "-cd")


@dataclass(frozen=True)
class _Launch:
    """The command that starts the trainer."""

    line: int
    trainer: str
    settings: tuple[str, ...]
    config_name: str | None
    config_path: str | None
    options: tuple[str, ...]
    """Of Hydra, that no configuration has."""
    environment: Mapping[str, str]
    """Of the command alone."""


def translate(script: Path, more: Sequence[str]) -> tuple[str, str]:
    """Translate a script.

    Args:
        script: a shell script that starts verl once.
        more: its arguments, and overrides (with = or ~) that go over its own.

    Returns:
        The YAML, and a listing of what was noticed and of what keeps it from being run as it is.

    Raises:
        ConfigError: the script cannot be read, starts verl not once, or gives settings that cannot be read.
    """
    try:
        text = script.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(script), f"cannot be read ({error})", "give a shell script")]) from None
    arguments = [word for word in more if "=" not in word and not word.startswith("~")]
    more = [word for word in more if word not in arguments]
    try:
        read = read_script(text, _environment_of_the_caller(), arguments)
    except RecursionError:
        what = "it nests expansions or functions too deeply to be read"
        raise ConfigError([Problem(str(script), what, _RESULTS)]) from None
    except TooLong as error:
        raise ConfigError([Problem(str(script), str(error), _RESULTS)]) from None
    launch = _launch(script, text, read)
    unknown = [word for word in launch.settings if UNKNOWN in word]
    replaced = {word.split("=")[0].lstrip("+") for word in more}
    problems = [_unknown(word) for word in unknown if word.split("=")[0].lstrip("+") not in replaced]
    overrides, unreadable = parse_overrides([*(w for w in launch.settings if UNKNOWN not in w), *more])
    body = _settings(overrides)
    if problems or unreadable:
        broken = [Problem(script.name, note.text, note.fix) for note in read.notes]
        unknown_keys = [one for one in _refusals(_dumped(body), script) if one.what.startswith("unknown key")]
        raise ConfigError([*broken, *problems, *unreadable, *unknown_keys])
    own = {**read.exported, **launch.environment}
    environment = {name: value for name, value in own.items() if UNKNOWN not in name}
    heading = [f"# The settings of {script.name}, line {launch.line} ({launch.trainer.replace(UNKNOWN, '')})."]
    if environment:  # their names alone: values may be secrets
        heading.append(f"# Environment variables that it sets, which are no settings: {', '.join(environment)}.")
    tree = {"defaults": [launch.config_name, "_self_"], **body} if launch.config_name else body
    written = "\n".join(heading) + "\n" + _dumped(tree)
    listing = [
        *(note.text for note in read.notes),
        *_left_behind(read),
        *(f"{option} is no setting and was left out" for option in launch.options),
        *_remarks(launch, environment, body),
        *_obstacles(written, script),
    ]
    return written, "\n".join(listing)


def _dumped(tree: Mapping[str, object]) -> str:
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=10**6)


def _environment_of_the_caller() -> dict[str, str]:
    """The variables that a script finds set; in place of a secret what reads it when the file is run."""
    return {name: f"${{oc.env:{name}}}" if _may_be_secret(name) else value for name, value in os.environ.items()}


def _may_be_secret(variable: str) -> bool:
    """Wider than for a key, of which many are harmless, such as ``eos_token``."""
    is_folder = variable in ("PWD", "OLDPWD")  # which end like the names of passwords
    return not is_folder and (is_secret(variable) or variable.endswith(("TOKEN", "_KEY", "_PASS")))


def _launch(script: Path, text: str, read: Script) -> _Launch:
    """The one command that starts a trainer of verl's.

    Raises:
        ConfigError: there is none, there are several, or it is another than PPO's.
    """
    started = [(command, place) for command in read.commands if (place := _place_of_trainer(command)) is not None]
    found = [(command, place) for command, place in started if _PPO.fullmatch(command.words[place])]
    if started and not found:
        command, place = started[0]
        what = f"line {command.line} starts {command.words[place]}, which is not verl.trainer.main_ppo"
        fix = (
            "give a script of PPO; where its algorithm is PPO's all the same, with verl.trainer.main_ppo in that place"
        )
        raise ConfigError([Problem(str(script), what, fix)])
    if len(found) != 1:
        lines = ", ".join(str(command.line) for command, _ in found)
        what = f"starts verl {len(found)} times, in lines {lines}" if found else "starts no trainer of verl's"
        named = [number for number, line in enumerate(text.splitlines(), 1) if "main_ppo" in line]
        if named and not found:
            what += f"; line {named[0]} names one, in text, $(...), a comment or a function that is never called"
        raise ConfigError(
            [Problem(str(script), what, "give a script with one python -m verl.trainer.main_ppo KEY=VALUE ...")]
        )
    (command, place), name, folder = found[0], None, None
    settings, options = [], []
    words = list(command.words[place + 1 :])
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if option in (*_CONFIG_NAME, *_CONFIG_PATH):
            value = (value if equals else words.pop(0) if words else "").replace(UNKNOWN, "")
            if option in _CONFIG_NAME:
                name = value.removesuffix(".yaml")
            else:
                folder = value
        elif word.startswith("-"):
            value = f" {words.pop(0)}" if word in _WITH_VALUE and words else ""
            options.append((word + value).replace(UNKNOWN, ""))
        elif word.strip():
            settings.append(word)
    if name and name not in _PREDEFINED:
        fix = f"give {name}.yaml itself to tether train, with the settings of the script"
        raise ConfigError([Problem(f"--config-name={name}", "is a file of the script's own", fix)])
    environment = {**command.environment, **_environment(command.words[:place])}
    trainer = command.words[place]
    return _Launch(command.line, trainer, tuple(settings), name, folder, tuple(options), environment)


def _left_behind(read: Script) -> list[str]:
    """Settings that bash takes for commands, as an empty line has ended the one that they belong to."""
    if any("not passed" in note.text for note in read.notes):
        return []  # it is said already where that command ended
    return [
        f"line {command.line}: {command.words[0].replace(UNKNOWN, '')} and what follows stands apart from the command, "
        "so it is not passed: take the empty line away, or end the line above with a backslash"
        for command in read.commands
        if _SETTING.fullmatch(command.words[0])
    ]


def _place_of_trainer(command: Command) -> int | None:
    """Where among the words the trainer's name stands; before it may be python, ray job submit, nsys, env, ..."""
    if command.words[0].rpartition("/")[2] in _MENTIONING:
        return None
    for place, word in enumerate(command.words):
        before = command.words[place - 1] if place else ""
        if _STARTED.fullmatch(word) and (before == "-m" or word.endswith(".py")):
            return place
    return None


def _environment(before: Sequence[str]) -> dict[str, str]:
    """Variables that the words before the trainer set: of ``env NAME=VALUE``, and of Ray's ``--runtime-env-json``."""
    pairs = (word.partition("=") for word in before)
    found = {name: value for name, equals, value in pairs if equals and name.isidentifier()}
    for place, word in enumerate(before):
        option, equals, value = word.partition("=")
        if option == "--runtime-env-json":
            try:
                tree = json.loads(value if equals else before[place + 1])
            except (ValueError, IndexError):
                continue
            inner = tree.get("env_vars") if isinstance(tree, dict) else None
            found |= {str(name): str(one) for name, one in inner.items()} if isinstance(inner, dict) else {}
    return found


def _unknown(word: str) -> Problem:
    key, equals, value = word.replace(UNKNOWN, "").partition("=")
    unknown = [_shortened(part, _MOST_SHOWN) for part in word.split(UNKNOWN)[1::2]]
    value = _shortened(value, 2 * _MOST_SHOWN)
    parts = ", ".join(unknown)
    if any(part.startswith("{") for part in unknown):
        what = f"{parts} is not in quotes, so that bash makes several words of it"
        return Problem(key, what, f"write {_in_quotes(f'{key}={value}')}")
    if not equals:
        return Problem(key, "stands in the script, and is known only when it is run", "write what it stands for there")
    is_argument = any(re.match(r"\$\{?[1-9@*#]", part) for part in unknown)
    needed = "give it behind the script" if is_argument else "export what it needs"
    fix = f"{needed}, or add {key}=VALUE to this command"
    return Problem(key, f"is {value} in the script, and {parts} is known only when it is run", fix)


def _in_quotes(word: str) -> str:
    """A word in quotes within which bash fills in what it is to fill in."""
    is_filled_in = "$" in word or "`" in word
    if "'" not in word and not is_filled_in:
        return f"'{word}'"
    if '"' not in word and "\\" not in word and not ("'" in word and is_filled_in):
        return f'"{word}"'
    return "all of it in quotes"


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}.."


def _settings(overrides: Sequence[Override]) -> dict[str, object]:
    """The settings that result from the overrides, nested; later ones win, and mappings are merged, as in Hydra."""
    tree: dict[str, object] = {}
    for override in overrides:
        path = override.path.split(".")
        if override.delete:
            _take_out(tree, path)
            continue
        for key in _leaves(override.path, override.value):  # the same quantity by another name: the last one counts
            for other in [one for one in _leaves("", tree) if one != key and _quantity(one) == _quantity(key)]:
                _take_out(tree, other.split("."))
        tree = put(tree, path, override.value)
    return tree


def _quantity(key: str) -> str:
    name = renamed(key)
    return (keys()[name].alias_of or name) if name in keys() else name


def _leaves(path: str, value: object) -> list[str]:
    if not isinstance(value, dict):
        return [path]
    return [leaf for name, inner in value.items() for leaf in _leaves(f"{path}.{name}" if path else str(name), inner)]


def _take_out(tree: dict[str, object], path: Sequence[str]) -> None:
    """Take out a key, and the sections that it leaves empty."""
    first, *rest = path
    inner = tree.get(first)
    if rest and isinstance(inner, dict):
        _take_out(inner, rest)
    if not rest or inner == {}:
        tree.pop(first, None)


def _remarks(launch: _Launch, environment: Mapping[str, str], body: Mapping[str, object]) -> list[str]:
    """Warnings about what the file lacks, and about secrets in it."""
    remarks = []
    folder = launch.config_path
    path = Path(folder or "config")
    if not (path.match("trainer/config") if path.is_absolute() else path.name == "config"):
        name = launch.config_name or _PREDEFINED[0]
        remarks.append(
            f"--config-path={folder} was taken for verl's own; if it has a {name}.yaml, give that to tether train"
        )
    if environment.get(USE_MODELSCOPE, "").lower() not in OFF:
        remarks.append(
            f"{USE_MODELSCOPE}={environment[USE_MODELSCOPE]} is set there and no setting: set it for tether train too, "
            "or write modelscope: before the names of models"
        )
    if has_secrets(_without_references(body)):
        remarks.append("the file has passwords or keys of the script in it: keep it to yourself")
    return remarks


def _without_references(value: object) -> object:
    """Without texts that are read from the environment when the file is run."""
    if isinstance(value, dict):
        return {key: _without_references(inner) for key, inner in value.items()}
    return "" if isinstance(value, str) and re.fullmatch(r"\$\{oc\.env:\w+\}", value) else value


def _obstacles(written: str, script: Path) -> list[str]:
    """Reasons why the file cannot be run as it is."""
    problems = _refusals(written, script)
    return ["to be changed before it runs:", *(f"  {problem}" for problem in problems)] if problems else []


def _refusals(written: str, script: Path) -> Sequence[Problem]:
    """Problems for which the file would be refused."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{script.stem}.yaml"
        file.write_text(written, encoding="utf-8")
        try:
            load_config(file, [])
        except ConfigError as error:
            return error.problems
    return []

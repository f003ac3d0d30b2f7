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
from tether.config.loading.load import load_config
from tether.config.loading.overrides import Override, parse_overrides
from tether.config.loading.settings import put
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
_MAX_SHOWN = 80  # characters of an expression, in a message
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
    """Options of Hydra that have no key in a configuration."""
    environment: Mapping[str, str]
    """Environment variables of the command itself."""


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
    variables = {**read.exported, **launch.environment}
    environment = {name: value for name, value in variables.items() if UNKNOWN not in name}
    heading = [f"# The settings of {script.name}, line {launch.line} ({launch.trainer.replace(UNKNOWN, '')})."]
    if environment:  # their names alone: values may be secrets
        heading.append(f"# Environment variables that it sets, which are no settings: {', '.join(environment)}.")
    tree = {"defaults": [launch.config_name, "_self_"], **body} if launch.config_name else body
    written = "\n".join(heading) + "\n" + _dumped(tree)
    listing = [
        *(note.text for note in read.notes),
        *_detached_settings(read),
        *(f"{option} is no setting and was left out" for option in launch.options),
        *_remarks(launch, environment, body),
        *_obstacles(written, script),
    ]
    return written, "\n".join(listing)


def _dumped(tree: Mapping[str, object]) -> str:
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=10**6)


def _environment_of_the_caller() -> dict[str, str]:
    """Return the environment of a script, with references to secrets instead of their values."""
    return {name: f"${{oc.env:{name}}}" if _may_be_secret(name) else value for name, value in os.environ.items()}


def _may_be_secret(variable: str) -> bool:
    """Whether a variable may be a secret; a wider test than for keys, many of which are harmless (``eos_token``)."""
    is_folder = variable in ("PWD", "OLDPWD")  # which end like the names of passwords
    return not is_folder and (is_secret(variable) or variable.endswith(("TOKEN", "_KEY", "_PASS")))


def _launch(script: Path, text: str, read: Script) -> _Launch:
    """Return the command that starts verl's trainer.

    Raises:
        ConfigError: no or several such commands, or another trainer than PPO's.
    """
    started = [(command, index) for command in read.commands if (index := _trainer_index(command)) is not None]
    ppo_commands = [(command, index) for command, index in started if _PPO.fullmatch(command.words[index])]
    if started and not ppo_commands:
        command, index = started[0]
        what = f"line {command.line} starts {command.words[index]}, which is not verl.trainer.main_ppo"
        fix = (
            "give a script of PPO; where its algorithm is PPO's all the same, with verl.trainer.main_ppo in that place"
        )
        raise ConfigError([Problem(str(script), what, fix)])
    if len(ppo_commands) != 1:
        lines = ", ".join(str(command.line) for command, _ in ppo_commands)
        what = (
            f"starts verl {len(ppo_commands)} times, in lines {lines}"
            if ppo_commands
            else "starts no trainer of verl's"
        )
        named = [line_number for line_number, line in enumerate(text.splitlines(), 1) if "main_ppo" in line]
        if named and not ppo_commands:
            what += f"; line {named[0]} names one, in text, $(...), a comment or a function that is never called"
        raise ConfigError(
            [Problem(str(script), what, "give a script with one python -m verl.trainer.main_ppo KEY=VALUE ...")]
        )
    (command, index), name, folder = ppo_commands[0], None, None
    settings, options = [], []
    words = list(command.words[index + 1 :])
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
    environment = {**command.environment, **_environment(command.words[:index])}
    trainer = command.words[index]
    return _Launch(command.line, trainer, tuple(settings), name, folder, tuple(options), environment)


def _detached_settings(read: Script) -> list[str]:
    """Return remarks on settings that bash takes for commands, since an empty line ended their command."""
    if any("not passed" in note.text for note in read.notes):
        return []  # it is said already where that command ended
    return [
        f"line {command.line}: {command.words[0].replace(UNKNOWN, '')} and what follows stands apart from the command, "
        "so it is not passed: take the empty line away, or end the line above with a backslash"
        for command in read.commands
        if _SETTING.fullmatch(command.words[0])
    ]


def _trainer_index(command: Command) -> int | None:
    """Return the index of the trainer's name, which may follow python, nsys, env, ...; None without one."""
    if command.words[0].rpartition("/")[2] in _MENTIONING:
        return None
    for index, word in enumerate(command.words):
        before = command.words[index - 1] if index else ""
        if _STARTED.fullmatch(word) and (before == "-m" or word.endswith(".py")):
            return index
    return None


def _environment(before: Sequence[str]) -> dict[str, str]:
    """Return variables set by the words before the trainer: ``env NAME=VALUE`` and Ray's ``--runtime-env-json``."""
    pairs = (word.partition("=") for word in before)
    variables = {name: value for name, equals, value in pairs if equals and name.isidentifier()}
    for index, word in enumerate(before):
        option, equals, value = word.partition("=")
        if option == "--runtime-env-json":
            try:
                tree = json.loads(value if equals else before[index + 1])
            except (ValueError, IndexError):
                continue
            inner = tree.get("env_vars") if isinstance(tree, dict) else None
            variables |= {str(name): str(one) for name, one in inner.items()} if isinstance(inner, dict) else {}
    return variables


def _unknown(word: str) -> Problem:
    key, equals, value = word.replace(UNKNOWN, "").partition("=")
    unknown = [_shortened(expression, _MAX_SHOWN) for expression in word.split(UNKNOWN)[1::2]]
    value = _shortened(value, 2 * _MAX_SHOWN)
    shown = ", ".join(unknown)
    if any(expression.startswith("{") for expression in unknown):
        what = f"{shown} is not in quotes, so that bash makes several words of it"
        return Problem(key, what, f"write {_in_quotes(f'{key}={value}')}")
    if not equals:
        return Problem(key, "stands in the script, and is known only when it is run", "write what it stands for there")
    is_argument = any(re.match(r"\$\{?[1-9@*#]", expression) for expression in unknown)
    needed = "give it behind the script" if is_argument else "export what it needs"
    fix = f"{needed}, or add {key}=VALUE to this command"
    return Problem(key, f"is {value} in the script, and {shown} is known only when it is run", fix)


def _in_quotes(word: str) -> str:
    """Return a word in quotes that keep its expansions."""
    is_filled_in = "$" in word or "`" in word
    if "'" not in word and not is_filled_in:
        return f"'{word}'"
    if '"' not in word and "\\" not in word and not ("'" in word and is_filled_in):
        return f'"{word}"'
    return "all of it in quotes"


def _shortened(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else f"{text[:max_length]}.."


def _settings(overrides: Sequence[Override]) -> dict[str, object]:
    """Return the nested settings of the overrides; later ones win, and mappings are merged, as in Hydra."""
    tree: dict[str, object] = {}
    for override in overrides:
        path = override.path.split(".")
        if override.delete:
            _remove(tree, path)
            continue
        for key in _leaves(override.path, override.value):  # the same quantity by another name: the last one counts
            for other in [one for one in _leaves("", tree) if one != key and _quantity(one) == _quantity(key)]:
                _remove(tree, other.split("."))
        tree = put(tree, path, override.value)
    return tree


def _quantity(key: str) -> str:
    name = renamed(key)
    return (keys()[name].alias_of or name) if name in keys() else name


def _leaves(path: str, value: object) -> list[str]:
    if not isinstance(value, dict):
        return [path]
    return [leaf for name, inner in value.items() for leaf in _leaves(f"{path}.{name}" if path else str(name), inner)]


def _remove(tree: dict[str, object], path: Sequence[str]) -> None:
    """Remove a key and the sections that become empty."""
    first, *below = path
    inner = tree.get(first)
    if below and isinstance(inner, dict):
        _remove(inner, below)
    if not below or inner == {}:
        tree.pop(first, None)


def _remarks(launch: _Launch, environment: Mapping[str, str], body: Mapping[str, object]) -> list[str]:
    """Return warnings about what the file lacks and about its secrets."""
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
    """Return the value with references to environment variables blanked."""
    if isinstance(value, dict):
        return {key: _without_references(inner) for key, inner in value.items()}
    return "" if isinstance(value, str) and re.fullmatch(r"\$\{oc\.env:\w+\}", value) else value


def _obstacles(written: str, script: Path) -> list[str]:
    """Return reasons why the file cannot be run unchanged."""
    problems = _refusals(written, script)
    return ["to be changed before it runs:", *(f"  {problem}" for problem in problems)] if problems else []


def _refusals(written: str, script: Path) -> Sequence[Problem]:
    """Return the problems for which the file would be refused."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{script.stem}.yaml"
        file.write_text(written, encoding="utf-8")
        try:
            load_config(file, [])
        except ConfigError as error:
            return error.problems
    return []

"""`tether config import-verl`: converts a script that starts verl's trainer to YAML, and lists obstacles to its use."""

from __future__ import annotations

import itertools
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from tether.config.keys import keys
from tether.config.loading.load import load_config
from tether.config.loading.overrides import Override, parse_overrides
from tether.config.loading.settings import put
from tether.config.problems import ConfigError, Problem
from tether.config.render import Dumper
from tether.config.secrets import has_secrets, is_secret
from tether.config.support.verl_keys import renamed
from tether.integrations.verl.recorder import RecordedCommand, Recorder, Recording
from tether.runtime.hubs import OFF, USE_MODELSCOPE
from tether.text.rewards.sandbox import bubblewrap

_STARTED = re.compile(
    r"(?:\w+\.)*(?:main_\w+|\w+_main|\w*sft_trainer)|(?:\S*/)?(?:main_\w+|\w+_main|\w*sft_trainer)\.py"
)
_PPO = re.compile(r"verl\.trainer\.main_ppo|(?:\S*/)?trainer/main_ppo\.py|main_ppo\.py|(?:\S*[./])?main_dapo(?:\.py)?")
"""The trainers that tether implements: main_ppo, and DAPO's, which adds `algorithm.filter_groups`."""
_PREDEFINED = ("ppo_trainer", "ppo_megatron_trainer")
_MENTIONING = ("pgrep", "pkill", "killall", "git", "vim")
"""Recorded commands that may name a trainer without starting it."""
_SETTING = re.compile(r"[+~]{0,2}\w+(?:\.\w+)+=.*", re.DOTALL)
_WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--experimental-rerun")
_REFERENCE = re.compile(r"\$\{?([A-Za-z_]\w*|[1-9])")
_WITH_DEFAULT = re.compile(r"\$\{(\w+):?[-+=?]")
_SET_BY_BASH = re.compile(
    r"BASH\w*|E?UID|PPID|GROUPS|HOSTTYPE|IFS|LINENO|MACHTYPE|OPT\w+|OSTYPE|PATH|(OLD)?PWD|S?RANDOM|SECONDS|SHELLOPTS|"
    r"SHLVL|FUNCNAME|PIPESTATUS|REPLY|EPOCH\w+"
)
_UNSET, _SECRET = "\x1e", "\x1f"
"""Delimiters of the name of an unset variable, and of the placeholder of a secret."""
_REPLIES = ("", "2\n")
"""Output of recorded programs in further runs. A setting that changes with it depends on the output of programs."""
_MAX_SHOWN = 80  # characters of a value, in a message
_CONFIG_NAME, _CONFIG_PATH = ("--config-name", "-cn"), ("--config-path", "-cp", "--config-dir", "-cd")


@dataclass(frozen=True)
class _Arguments:
    """The arguments of the trainer."""

    settings: tuple[str, ...]
    config_name: str | None
    config_path: str | None
    options: tuple[str, ...]
    """Hydra's options, which are not keys of a configuration."""


@dataclass(frozen=True)
class _Launch:
    """The command that starts the trainer."""

    line: int
    trainer: str
    arguments: _Arguments
    environment: Mapping[str, str]
    """Environment variables that the script sets for the trainer."""


def translate(script: Path, more: Sequence[str]) -> tuple[str, str]:
    """Translate a script.

    Args:
        script: a shell script that starts verl once.
        more: arguments of the script, and overrides (with = or ~), which take precedence over the script's.

    Returns:
        The YAML, and a listing of remarks and of problems that prevent running it unchanged.

    Raises:
        ConfigError: the script cannot be read, does not start verl exactly once, or has settings that cannot be read.
    """
    try:
        text = script.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(script), f"cannot be read ({error})", "give a shell script")]) from None
    if problem := bubblewrap.confinement_problem():
        what = f"is run in a sandbox, which this machine cannot make: {problem}"
        raise ConfigError([Problem(str(script), what, "install bubblewrap, or write the settings into a YAML file")])
    arguments = [word for word in more if "=" not in word and not word.startswith("~")]
    more = [word for word in more if word not in arguments]
    recorder, recording = Recorder(script, text, _environment_of_the_caller(), arguments).run_until_complete()
    launch = _launch(recorder, recording)
    notes = _notes(text, recording)
    replaced = set(map(_key, more))
    unknown = _unknown_settings(recorder, launch)
    problems = list(dict.fromkeys(problem for word, problem in unknown.items() if _key(word) not in replaced))
    overrides, unreadable = parse_overrides([*(w for w in launch.arguments.settings if w not in unknown), *more])
    body = _settings(overrides)
    if problems or unreadable:
        broken = [Problem(script.name, note, fix) for note, fix in notes.items()]
        unknown_keys = [one for one in _refusals(_dumped(body), script) if one.what.startswith("unknown key")]
        raise ConfigError([*broken, *problems, *unreadable, *unknown_keys])
    environment = launch.environment
    heading = [f"# The settings of {script.name}, line {launch.line} ({launch.trainer})."]
    if environment:  # only their names, because values may be secrets
        names = sorted(environment, key=lambda name: (text.find(name), name))
        heading.append(f"# Environment variables that it sets, which are no settings: {', '.join(names)}.")
    tree = {"defaults": [launch.arguments.config_name, "_self_"], **body} if launch.arguments.config_name else body
    written = "\n".join(heading) + "\n" + _dumped(tree)
    listing = [
        *notes,
        *(f"{option} is no setting and was left out" for option in launch.arguments.options),
        *_remarks(launch, environment, body),
        *_obstacles(written, script),
    ]
    return written, "\n".join(listing)


def _key(word: str) -> str:
    return word.split("=")[0].lstrip("+")


def _dumped(tree: Mapping[str, object]) -> str:
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=10**6)


def _environment_of_the_caller(run: int = 0) -> dict[str, str]:
    """Return the environment of a script, with placeholders instead of secrets.

    Args:
        run: 0 or 1; the placeholders of both runs differ in length and in each of their parts, so that comparing runs
            shows which settings depend on a secret.
    """
    names = sorted(name for name in os.environ if _may_be_secret(name))
    one, many = "ab"[run], "ab"[run] * (1 + run)
    texts = {name: f"{_SECRET}{many}/{many}_{one}.{one}-{one * index}{_SECRET}" for index, name in enumerate(names)}
    return {**os.environ, **texts}


def _with_references(word: str, environment: Mapping[str, str]) -> str:
    """Return a word with the placeholders of `_environment_of_the_caller` replaced by references to the secrets."""
    for name, value in environment.items():
        if value.startswith(_SECRET):
            word = word.replace(value, f"${{oc.env:{name}}}")
    return word


def _may_be_secret(variable: str) -> bool:
    """Whether a variable may be a secret. Stricter than for keys, many of which are harmless (``eos_token``)."""
    is_folder = variable in ("PWD", "OLDPWD")  # these end like names of passwords
    return not is_folder and (is_secret(variable) or variable.endswith(("TOKEN", "_KEY", "_PASS")))


def _starts(recording: Recording) -> list[tuple[RecordedCommand, int]]:
    """Return the calls that start a trainer, each with the index of the word that names it."""
    return [(call, index) for call in recording.calls if (index := _trainer_index(call)) is not None]


def _launch(recorder: Recorder, recording: Recording) -> _Launch:
    """Return the command that starts verl's trainer.

    Raises:
        ConfigError: there are no or several such commands, or the trainer is not PPO's.
    """
    script, text = recorder.script, recorder.text
    started = _starts(recording)
    ppo_commands = [(command, index) for command, index in started if _PPO.fullmatch(command.words[index])]
    if started and not ppo_commands:
        command, index = started[0]
        what = f"line {command.line} starts {command.words[index]}, which is not verl.trainer.main_ppo"
        fix = (
            "give a script of PPO; where its algorithm is PPO's all the same, with verl.trainer.main_ppo in that place"
        )
        raise ConfigError([Problem(str(script), what, fix)])
    if not ppo_commands and not recording.result.succeeded:
        what = f"starts no trainer of verl's: it {recording.ending}"
        fix = "give its arguments behind the script, export what it needs, or take out what it checks"
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
            what += f"; line {named[0]} names one, in text, a comment or a part that is not reached"
        raise ConfigError(
            [Problem(str(script), what, "give a script with one python -m verl.trainer.main_ppo KEY=VALUE ...")]
        )
    command, index = ppo_commands[0]
    arguments = _arguments(command.words[index + 1 :], recorder.environment)
    name = arguments.config_name
    if name and name not in _PREDEFINED:
        fix = f"give {name}.yaml itself to tether train, with the settings of the script"
        raise ConfigError([Problem(f"--config-name={name}", "is a file of the script's own", fix)])
    environment = {**command.environment, **_environment(command.words[:index])}
    return _Launch(command.line, command.words[index], arguments, environment)


def _arguments(given: Sequence[str], environment: Mapping[str, str]) -> _Arguments:
    name, folder = None, None
    settings, options = [], []
    words = [_with_references(word, environment) for word in given]
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if option in (*_CONFIG_NAME, *_CONFIG_PATH):
            value = value if equals else words.pop(0) if words else ""
            if option in _CONFIG_NAME:
                name = value.removesuffix(".yaml")
            else:
                folder = value
        elif word.startswith("-"):
            value = f" {words.pop(0)}" if word in _WITH_VALUE and words else ""
            options.append(word + value)
        elif word.strip():
            settings.append(word)
    return _Arguments(tuple(settings), name, folder, tuple(options))


def _notes(text: str, recording: Recording) -> dict[str, str]:
    """Return remarks -> fixes, about files that are not read and settings that bash interprets as commands."""
    lines = text.splitlines()
    notes: dict[str, str] = {}
    for call in recording.calls:
        if call.words[0] == "source":
            note = f"line {call.line}: {' '.join(call.words[:2])} is not read: what it sets is unknown"
            notes[note] = "write what it sets into the script"
        elif _SETTING.fullmatch(call.words[0]):
            notes[_why_detached(call, lines)] = "move comments and empty lines out of the command"
    return notes


def _why_detached(call: RecordedCommand, lines: Sequence[str]) -> str:
    """Return why a setting is not part of the command above it, judging by the lines between them."""
    above = call.line - 1
    if match := re.search(r"\\[ \t]+(#.*)?$", lines[above - 1]):
        what = "a comment follows" if match[1] else "spaces follow"
        return f"line {above}: {what} the backslash, so the command ends here; what is below is not passed"
    comment = above
    while comment and lines[comment - 1].lstrip().startswith("#"):
        comment -= 1
    if comment < above and comment and lines[comment - 1].endswith("\\"):
        return f"line {comment + 1}: a comment between the lines of a command ends it; what is below is not passed"
    if re.search(r"\s#.*\\$", lines[above - 1]):
        what = "the backslash is part of a comment, so the command ends here; what is below is not passed"
        return f"line {above}: {what}"
    return (
        f"line {call.line}: {call.words[0]} and what follows stands apart from the command, so it is not passed: take "
        "the empty line away, or end the line above with a backslash"
    )


def _trainer_index(command: RecordedCommand) -> int | None:
    """Return the index of the word that names the trainer, which may follow python, nsys, env, ...; None without
    one."""
    if command.words[0].rpartition("/")[2] in _MENTIONING:
        return None
    for index, word in enumerate(command.words):
        before = command.words[index - 1] if index else ""
        if _STARTED.fullmatch(word) and (before == "-m" or word.endswith(".py")):
            return index
    return None


def _environment(before: Sequence[str]) -> dict[str, str]:
    """Return the variables that the words before the trainer set: ``env NAME=VALUE``, Ray's ``--runtime-env-json``."""
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


def _unknown_settings(recorder: Recorder, launch: _Launch) -> dict[str, Problem]:
    """Return setting -> problem, for settings that bash splits, or whose value is known only on the real machine."""
    settings = _numbered(launch.arguments.settings)
    unknown = _split_by_braces(recorder.text, launch.arguments.settings)
    for place, word in _settings_of(_with_unset_variables(recorder)).items():
        if _UNSET in word and settings.get(place) == re.sub(f"{_UNSET}.*?{_UNSET}", "", word):
            unknown.setdefault(settings[place], _unset(word))
    other = replace(recorder, environment=_environment_of_the_caller(1))
    for reply in _REPLIES:
        changed = _settings_of(other, reply)
        for place in (settings | changed) if changed else ():
            word = settings.get(place) or changed[place]
            if settings.get(place) != changed.get(place) or _SECRET in word:
                unknown.setdefault(word, _undetermined(word))
    return unknown


def _numbered(words: Sequence[str]) -> dict[tuple[str, int], str]:
    """Return (key, number of earlier words with this key) -> word."""
    numbered: dict[tuple[str, int], str] = {}
    for word in words:
        numbered[_key(word), sum(key == _key(word) for key, _ in numbered)] = word
    return numbered


def _settings_of(recorder: Recorder, reply: str = "1\n") -> dict[tuple[str, int], str]:
    """Return the settings of another run of the script; empty unless it starts the trainer exactly once."""
    started = _starts(recorder.run(reply))
    if len(started) != 1:
        return {}
    call, index = started[0]
    return _numbered(_arguments(call.words[index + 1 :], recorder.environment).settings)


def _with_unset_variables(recorder: Recorder) -> Recorder:
    """Return a recorder that sets variables and arguments without value and default to their own name."""
    names = set(_REFERENCE.findall(recorder.text)) - set(_WITH_DEFAULT.findall(recorder.text))
    names = {name for name in names if name not in recorder.environment and not _SET_BY_BASH.fullmatch(name)}
    last = max((int(name) for name in names if name.isdecimal()), default=0)
    arguments = [f"{_UNSET}{index}{_UNSET}" for index in range(len(recorder.arguments) + 1, last + 1)]
    variables = {name: f"{_UNSET}{name}{_UNSET}" for name in names if not name.isdecimal()}
    return replace(
        recorder, environment={**recorder.environment, **variables}, arguments=[*recorder.arguments, *arguments]
    )


def _unset(word: str) -> Problem:
    names = re.findall(f"{_UNSET}(.*?){_UNSET}", word)
    key, _, value = re.sub(f"{_UNSET}(.*?){_UNSET}", r"$\1", word).partition("=")
    needed = "give it behind the script" if any(name.isdecimal() for name in names) else "export what it needs"
    shown = ", ".join(f"${name}" for name in names)
    what = f"is {_shortened(value, 2 * _MAX_SHOWN)} in the script, and {shown} is known only when it is run"
    return Problem(key, what, f"{needed}, or add {key.lstrip('+')}=VALUE to this command")


def _undetermined(word: str) -> Problem:
    key, _, value = word.replace(_SECRET, "").partition("=")
    value = _shortened(value, 2 * _MAX_SHOWN)
    what = f"is {value} here, but depends on what programs print or on a secret, which is known only when it is run"
    return Problem(key, what, f"add {key.lstrip('+')}=VALUE to this command")


def _split_by_braces(text: str, words: Sequence[str]) -> dict[str, Problem]:
    """Return setting -> problem, for settings such as ``KEY={a,b}``, which bash expands to several words."""
    problems: dict[str, Problem] = {}
    keys = [_key(word) for word in words]
    for key in {key for key, following in itertools.pairwise(keys) if key == following}:
        written = re.search(rf"""(?<!['"\w.]){re.escape(key)}=(\{{(?:'[^']*'|"[^"]*"|[^\s'"])*)""", text)
        if written:
            what = f"{written[1]} is not in quotes, so that bash makes several words of it"
            problem = Problem(key, what, f"write {_in_quotes(written[0])}")
            problems |= {word: problem for word in words if _key(word) == key}
    return problems


def _in_quotes(word: str) -> str:
    """Return a word in quotes that preserve its expansions."""
    is_filled_in = "$" in word or "`" in word
    if "'" not in word and not is_filled_in:
        return f"'{word}'"
    if '"' not in word and "\\" not in word and not ("'" in word and is_filled_in):
        return f'"{word}"'
    return "all of it in quotes"


def _shortened(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else f"{text[:max_length]}.."


def _settings(overrides: Sequence[Override]) -> dict[str, object]:
    """Return the nested settings of the overrides; later ones take precedence, and mappings are merged, as in Hydra."""
    tree: dict[str, object] = {}
    for override in overrides:
        path = override.path.split(".")
        if override.delete:
            _remove(tree, path)
            continue
        for key in _leaves(override.path, override.value):  # another name of the same setting: the last one counts
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
    """Return warnings about settings that the file lacks, and about its secrets."""
    remarks = []
    folder = launch.arguments.config_path
    path = Path(folder or "config")
    if not (path.match("trainer/config") if path.is_absolute() else path.name == "config"):
        name = launch.arguments.config_name or _PREDEFINED[0]
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
    """Return the problems that prevent running the file unchanged."""
    problems = _refusals(written, script)
    return ["to be changed before it runs:", *(f"  {problem}" for problem in problems)] if problems else []


def _refusals(written: str, script: Path) -> Sequence[Problem]:
    """Return the problems because of which the file would be refused."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{script.stem}.yaml"
        file.write_text(written, encoding="utf-8")
        try:
            load_config(file, [])
        except ConfigError as error:
            return error.problems
    return []

"""`load_config`, which turns a YAML file and overrides into a checked config, or reports all problems at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError

from tether.config import sft
from tether.config.contradictions import contradictions
from tether.config.control_defaults import is_undecided, with_defaults
from tether.config.keys import keys, values_of, with_values
from tether.config.loading.interpolation import nest
from tether.config.loading.overrides import Override
from tether.config.loading.resolve import resolve
from tether.config.loading.settings import COMMAND_LINE, ENV_KEY, PLACEHOLDER, Setting, Settings, read_settings
from tether.config.loading.type_errors import type_problems
from tether.config.problems import ConfigError, Problem
from tether.config.render import to_yaml
from tether.config.schema.root import RunConfig
from tether.config.secrets import has_secrets, masked
from tether.config.support.notes import notes
from tether.config.support.refused import refusals
from tether.config.support.verl_keys import unread_notes, unread_problems

AdditionalCheck = Callable[[RunConfig], Sequence[Problem]]


@dataclass(frozen=True)
class LoadedConfig:
    """A checked config with the sources of its values."""

    config: RunConfig
    sources: dict[str, str]
    """Dotted key -> source of its value: default, the file's name, command line, or inherits KEY."""
    notes: tuple[str, ...]
    """Notes on keys that were set twice through aliases, and on keys without effect."""
    undecided: Settings | None = field(default=None, repr=False, compare=False)
    """The user's settings if some defaults depend on the environment; None if all defaults are known."""

    def tree(self) -> dict[str, object]:
        """Return the resolved config as plain nested data, which loads to an equal config from a YAML file."""
        return self.config.model_dump(mode="json")

    def shown(self) -> dict[str, object]:
        """Return the resolved config as plain nested data without secrets, for display and trackers."""
        return masked(self.tree())

    def with_values(self, values: Mapping[str, object], source: str) -> LoadedConfig:
        """Return a copy with new values of dotted keys; their source is `source`, or that they inherit."""
        inherited = {path: self.sources[path] for path in values if self.sources[path].startswith("inherits ")}
        sources = self.sources | dict.fromkeys(values, source) | inherited
        return replace(self, config=with_values(self.config, values), sources=sources)

    @property
    def has_secrets(self) -> bool:
        """Whether it has secrets, so that only the owner may read its file."""
        return has_secrets(self.tree())

    def to_yaml(self) -> str:
        """Return the config with its secrets as YAML, to be saved with the run and loaded again.

        Inherited values are written as comments, so that changing a key later still applies to keys that inherit from
        it.
        """
        return to_yaml(values_of(self.config), self.sources)


def load_config(
    path: Path | None, overrides: Sequence[str | Override], look: AdditionalCheck = lambda config: []
) -> LoadedConfig:
    """Load a run's config.

    Args:
        path: YAML file in verl's key names, or None.
        overrides: strings in Hydra's grammar, or parsed; they override the file, and later ones override earlier ones.
        look: additional check, for example for missing files; its problems are reported with the others.

    Raises:
        ConfigError: the config has problems; the error lists all of them.
    """
    return _load(*read_settings(path, overrides), look)


def for_environment(loaded: LoadedConfig, *, continuous: bool, pictures: bool) -> LoadedConfig:
    """Return the config with the defaults that depend on the environment, now that it exists.

    Raises:
        ConfigError: the user's settings contradict them.
    """
    assert loaded.undecided is not None
    earlier = list(loaded.notes)
    decided = _load(loaded.undecided, [], earlier, lambda config: [], continuous=continuous, pictures=pictures)
    return replace(decided, undecided=None)


def _load(
    settings: Settings,
    problems: list[Problem],
    notes_on_file: list[str],
    look: AdditionalCheck,
    *,
    continuous: bool = False,
    pictures: bool = False,
) -> LoadedConfig:
    resolved = resolve(sft.with_defaults(with_defaults(settings, continuous=continuous, pictures=pictures)))
    problems += [*resolved.problems, *unread_problems(_values(resolved.unread), resolved.values)]
    try:
        config = RunConfig.model_validate(nest(resolved.values))
        problems += _check(resolved.settings, config, look)
    except ValidationError as error:
        mistyped = type_problems(error, resolved)
        named = {problem.path for problem in resolved.problems}
        problems += [problem for problem in mistyped if problem.path not in named]
        problems += _check_other_keys(settings, _with_aliases(named | {problem.path for problem in mistyped}), look)
    if problems:
        raise ConfigError([_as_written(problem, settings) for problem in problems])
    config_notes = (
        *notes(resolved.settings, values_of(config)),
        *unread_notes(_values(resolved.unread), _on_command_line(resolved.unread), resolved.values),
    )
    all_notes = tuple(dict.fromkeys((*notes_on_file, *resolved.notes, *config_notes)))
    return LoadedConfig(config, resolved.sources, all_notes, settings if is_undecided(settings) else None)


def _values(settings: Settings) -> dict[str, object]:
    return {path: setting.value for path, setting in settings.items()}


def _on_command_line(settings: Settings) -> set[str]:
    return {path for path, setting in settings.items() if setting.source == COMMAND_LINE}


def _as_written(problem: Problem, settings: Settings) -> Problem:
    """Add the key as the user wrote it, if the problem is with a key translated from it."""
    written = settings[problem.path].written if problem.path in settings else None
    return problem if written is None else replace(problem, what=f"{problem.what} (it follows from {written})")


def _check(settings: Settings, config: RunConfig, look: AdditionalCheck) -> list[Problem]:
    return [*refusals(settings, values_of(config)), *contradictions(config), *look(config)]


def _with_aliases(paths: set[str]) -> set[str]:
    """Return these keys and all of their aliases."""
    originals = {key.alias_of or path for path in paths if (key := keys().get(path))}
    return paths | originals | {key.path for key in keys().values() if key.alias_of in originals}


def _check_other_keys(settings: Settings, bad: set[str], look: AdditionalCheck) -> list[Problem]:
    """Check the config with its bad keys reset to defaults; return the problems that mention none of them."""
    stand_ins = {key: Setting(PLACEHOLDER, COMMAND_LINE, 0) for key in bad if keys()[key].required or key == ENV_KEY}
    good = {key: setting for key, setting in settings.items() if key not in bad}
    resolved = resolve(sft.with_defaults(with_defaults(good | stand_ins)))
    config = RunConfig.model_validate(nest(resolved.values))
    problems = _check(resolved.settings, config, look)
    return [problem for problem in problems if not any(key in str(problem) for key in bad)]

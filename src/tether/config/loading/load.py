"""`load_config`: a YAML file and overrides in, a checked config out, or everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError

from tether.config.control_defaults import is_undecided, with_defaults
from tether.config.keys import keys, values_of, with_values
from tether.config.loading.given import COMMAND_LINE, ENV_KEY, STAND_IN, Given, Setting, read_given
from tether.config.loading.interpolation import nest
from tether.config.loading.overrides import Override
from tether.config.loading.resolve import resolve
from tether.config.loading.type_errors import type_problems
from tether.config.problems import ConfigError, Problem
from tether.config.render import to_yaml
from tether.config.rules.text import contradictions
from tether.config.schema.root import RunConfig
from tether.config.secrets import has_secrets, masked
from tether.config.support.notes import notes
from tether.config.support.refused import refusals
from tether.config.support.verl_keys import unread_notes, unread_problems

Look = Callable[[RunConfig], Sequence[Problem]]


@dataclass(frozen=True)
class LoadedConfig:
    """A checked config, and how it came about."""

    config: RunConfig
    sources: dict[str, str]
    """Dotted key -> where its value comes from: default, the file's name, command line, or inherits KEY."""
    notes: tuple[str, ...]
    """Notes: which of two names of one quantity was taken, and which keys have no effect here."""
    undecided: Given | None = field(default=None, repr=False, compare=False)
    """The user's values, where only the environment can tell which defaults fit; None: they fit."""

    def tree(self) -> dict[str, object]:
        """The resolved config as plain nested data; as a YAML file it loads to an equal config."""
        return self.config.model_dump(mode="json")

    def shown(self) -> dict[str, object]:
        """The resolved config as plain nested data, to be shown or given to a tracker: without its secrets."""
        return masked(self.tree())

    def with_values(self, values: Mapping[str, object], source: str) -> LoadedConfig:
        """With values for dotted keys that come from elsewhere; keys that inherit say so still."""
        kept = {path: self.sources[path] for path in values if self.sources[path].startswith("inherits ")}
        sources = self.sources | dict.fromkeys(values, source) | kept
        return replace(self, config=with_values(self.config, values), sources=sources)

    @property
    def has_secrets(self) -> bool:
        """Whether there is something that must not be shown, so that its file is for its owner alone."""
        return has_secrets(self.tree())

    def to_yaml(self) -> str:
        """The config, its secrets included, as a file to save beside the run and to load again.

        Inherited values stand in comments, so that a key changed later still reaches the keys that inherit it.
        """
        return to_yaml(values_of(self.config), self.sources)


def load_config(path: Path | None, overrides: Sequence[str | Override], look: Look = lambda config: []) -> LoadedConfig:
    """Load a run's config.

    Args:
        path: YAML file in verl's key names, or None.
        overrides: in Hydra's grammar, or parsed; they go over the file, and later ones over earlier ones.
        look: what else may be wrong with a config, such as files that are not there; told with all the rest.

    Raises:
        ConfigError: with every problem that there is.
    """
    return _load(*read_given(path, overrides), look)


def for_environment(loaded: LoadedConfig, *, continuous: bool, pictures: bool) -> LoadedConfig:
    """Return the config with the defaults that were undecided until an environment was made.

    Args:
        loaded: with undecided defaults.
        continuous: actions are numbers.
        pictures: all of an observation is pictures.

    Raises:
        ConfigError: what was given contradicts them.
    """
    assert loaded.undecided is not None
    decided = _load(loaded.undecided, [], list(loaded.notes), lambda config: [], continuous, pictures)
    return replace(decided, undecided=None)


def _load(
    given: Given,
    problems: list[Problem],
    notes_on_file: list[str],
    look: Look,
    continuous: bool = False,
    pictures: bool = False,
) -> LoadedConfig:
    resolved = resolve(with_defaults(given, continuous=continuous, pictures=pictures))
    problems += [*resolved.problems, *unread_problems(_values(resolved.unread), resolved.values)]
    try:
        config = RunConfig.model_validate(nest(resolved.values))
        problems += _check(resolved.given, config, look)
    except ValidationError as error:
        mistyped = type_problems(error, resolved)
        named = {problem.path for problem in resolved.problems}
        problems += [problem for problem in mistyped if problem.path not in named]
        problems += _check_the_rest(given, _every_name(named | {problem.path for problem in mistyped}), look)
    if problems:
        raise ConfigError([_as_written(problem, given) for problem in problems])
    idle = (
        *notes(resolved.given, values_of(config)),
        *unread_notes(_values(resolved.unread), _on_command_line(resolved.unread), resolved.values),
    )
    found = tuple(dict.fromkeys((*notes_on_file, *resolved.notes, *idle)))
    return LoadedConfig(config, resolved.sources, found, given if is_undecided(given) else None)


def _values(given: Given) -> dict[str, object]:
    return {path: setting.value for path, setting in given.items()}


def _on_command_line(given: Given) -> set[str]:
    return {path for path, setting in given.items() if setting.source == COMMAND_LINE}


def _as_written(problem: Problem, given: Given) -> Problem:
    """Name the key of RLinf's that the user wrote, where the problem is with what it was translated to."""
    written = given[problem.path].written if problem.path in given else None
    return problem if written is None else replace(problem, what=f"{problem.what} (it follows from {written})")


def _check(given: Given, config: RunConfig, look: Look) -> list[Problem]:
    return [*refusals(given, values_of(config)), *contradictions(config), *look(config)]


def _every_name(paths: set[str]) -> set[str]:
    """These keys with all of their second names."""
    first = {key.alias_of or path for path in paths if (key := keys().get(path))}
    return paths | first | {key.path for key in keys().values() if key.alias_of in first}


def _check_the_rest(given: Given, bad: set[str], look: Look) -> list[Problem]:
    """Check a config whose bad keys, by each of their names, give way to their defaults, without a word about them."""
    stand_ins = {key: Setting(STAND_IN, COMMAND_LINE, 0) for key in bad if keys()[key].required or key == ENV_KEY}
    good = {key: setting for key, setting in given.items() if key not in bad}
    resolved = resolve(with_defaults(good | stand_ins))
    config = RunConfig.model_validate(nest(resolved.values))
    found = _check(resolved.given, config, look)
    return [problem for problem in found if not any(key in str(problem) for key in bad)]

"""Records which keys of a configuration are read while a run is built and takes a step."""

import sys
from collections.abc import Iterator

import pytest

from tether.config import LoadedConfig
from tether.config.schema.root import RunConfig
from tether.config.schema.section import Section


class ConfigReads:
    """Notes the key when something asks a section for its value; what loads or prints a whole config does not count.

    Configs that are made of a watched one while it is used, and copies of their sections, are watched as well.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.keys: set[str] = set()
        self._prefixes: dict[int, str] = {}
        self._watched: list[Section] = []  # kept alive, or an id would come again
        get, validate, copy = Section.__getattribute__, RunConfig.model_validate, Section.model_copy

        def recorded(section: Section, name: str) -> object:
            prefix = self._prefixes.get(id(section))
            if prefix is not None and not _is_loading(sys._getframe(1).f_globals):
                self.keys.add(prefix + name)
            return get(section, name)

        def validated(values: object) -> RunConfig:
            config = validate(values)
            self._watch("", config)
            return config

        def copied(section: Section, **changes: object) -> Section:
            result = copy(section, **changes)
            if id(section) in self._prefixes:
                self._watch(self._prefixes[id(section)], result)
            return result

        patch.setattr(Section, "__getattribute__", recorded)
        patch.setattr(Section, "model_copy", copied)
        patch.setattr(RunConfig, "model_validate", validated)

    def of(self, loaded: LoadedConfig) -> LoadedConfig:
        """Return the same config, watched from now on."""
        self._watch("", loaded.config)
        return loaded

    def _watch(self, prefix: str, config: Section) -> None:
        for path, section in _sections(prefix, config):
            self._prefixes[id(section)] = path
            self._watched.append(section)


def _is_loading(module: dict[str, object]) -> bool:
    name = str(module["__name__"])
    if ".config_rules" in name:
        return True
    return name.startswith(("tether.config.", "pydantic.")) and not name.startswith("tether.config.schema.")


def _sections(prefix: str, section: Section) -> Iterator[tuple[str, Section]]:
    yield prefix, section
    for name, value in vars(section).items():
        if isinstance(value, Section):
            yield from _sections(f"{prefix}{name}.", value)

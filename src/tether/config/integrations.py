"""Sections of integrations in other packages. `integrations.NAME` has the keys of the class `Config` in the module
`config` of integration NAME, which may also define ``check(config) -> list[Problem]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from tether.config.problems import Problem
from tether.config.schema.section import Section
from tether.integrations import installed, integration
from tether.spelling import did_you_mean

KEY = "integrations"


def integration_config(options: Mapping[str, object], name: str) -> Section:
    """Return the section of an installed integration with its defaults, if it has no `integration_problems`."""
    section: Section = integration(name, "config").Config.model_validate(options.get(name) or {})
    return section


def integration_problems(options: Mapping[str, object], used: set[str]) -> list[Problem]:
    """Return the problems in the sections of integrations.

    Args:
        options: name of the integration -> its keys.
        used: names of the integrations that this run uses, with or without a section.
    """
    problems: list[Problem] = []
    for name in sorted({*options, *used}):
        path = f"{KEY}.{name}"
        if name not in installed():
            problems.append(Problem(path, "no installed package has this integration", _installed_names(name)))
        elif name not in used:
            what = "nothing in this run uses it"
            problems.append(Problem(path, what, f"add a part of kind {name} to reward_model.parts, or leave it out"))
        elif not isinstance(options.get(name) or {}, dict):
            problems.append(Problem(path, f"{options[name]!r} is not a section", "give {key: value}"))
        else:
            problems += _problems_of(path, options, name)
    return problems


def section_problem(path: str, section: type[Section], what: str, detail: Any) -> Problem:
    """Convert a validation error of pydantic in a free mapping to a problem.

    Args:
        path: key of the mapping.
        section: class of its fields.
        what: noun of the mapping, for the message.
        detail: an item of ``ValidationError.errors()``.
    """
    where = ".".join(str(step) for step in detail["loc"])
    if detail["type"] == "extra_forbidden":
        names = tuple(section.model_fields)
        fix = did_you_mean(where, names).strip() or f"there are {', '.join(names)}"
        return Problem(f"{path}.{where}", f"{what} has no such key", fix)
    if detail["type"] == "missing":
        return Problem(f"{path}.{where}", "missing", f"{what} needs it")
    message = detail["msg"].removeprefix("Value error, ")
    return Problem(f"{path}.{where}", f"{detail['input']!r}: {message}", "correct it")


def _problems_of(path: str, options: Mapping[str, object], name: str) -> list[Problem]:
    module = integration(name, "config")
    try:
        section = integration_config(options, name)
    except ValidationError as error:
        return [section_problem(path, module.Config, f"the integration {name}", detail) for detail in error.errors()]
    check = getattr(module, "check", None)
    return list(check(section)) if check else []


def _installed_names(name: str) -> str:
    names = sorted(installed())
    return f"install it, or choose one of {', '.join(names)}.{did_you_mean(name, names)}" if names else "install it"

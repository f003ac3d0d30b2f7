"""What is public is listed in a file: a name that goes is noticed here, and is named in the changelog.

`python -m tests.test_public_surface` writes the list again.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import tether
import tether.algorithms
from tether.commands.cli import app
from tether.config.keys import keys
from tether.metrics.keys import METRICS

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).parent / "public_surface.txt"
REMOVED = "removed "
"""Beginning of the line of a name that is gone since the last release."""
TYPERS = {"--install-completion", "--show-completion"}
"""Options that typer adds where it knows the shell."""


def surface() -> set[str]:
    """Return a line for each public name, command with its options, key and metric."""
    return {
        *(f"tether.{name}" for name in tether.__all__),
        *(f"tether.algorithms.{name}" for name in tether.algorithms.__all__),
        *commands("tether", typer.main.get_command(app)),
        *(f"key {path}" for path in keys()),
        *(f"metric {name}" for name in METRICS),
    }


def commands(name: str, command: Any) -> Iterator[str]:
    for word, inner in getattr(command, "commands", {}).items():
        yield from commands(f"{name} {word}", inner)
    yield f"command {name}"
    for parameter in command.params:
        if parameter.param_type_name == "option" and not parameter.hidden:
            options = {*parameter.opts, *parameter.secondary_opts} - TYPERS
            yield from (f"command {name} {option}" for option in options)


def updated(listed: set[str], current: set[str]) -> set[str]:
    """Return the list for the current surface: names that are gone stay in it until the release."""
    names = {line.removeprefix(REMOVED) for line in listed}
    return current | {f"{REMOVED}{name}" for name in names - current}


def unnamed(listed: set[str], changelog: str) -> list[str]:
    """Return the removed names that the newest section of the changelog does not have under Removed."""
    newest = re.split(r"^## ", changelog, flags=re.MULTILINE)[1]
    sections = re.split(r"^### ", newest, flags=re.MULTILINE)
    text = "".join(section for section in sections if section.startswith("Removed"))
    removed = (line.removeprefix(REMOVED) for line in sorted(listed) if line.startswith(REMOVED))
    return [name for name in removed if f"`{re.sub('^(key|metric|command) ', '', name)}`" not in text]


def read() -> set[str]:
    return set(LIST.read_text(encoding="utf-8").splitlines())


def test_the_list_is_what_the_code_has_and_the_changelog_names_what_is_gone() -> None:
    listed, current = read(), surface()
    assert sorted(listed ^ updated(listed, current)) == [], "python -m tests.test_public_surface writes the list again"
    assert unnamed(listed, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")) == []


def test_a_name_that_goes_is_noticed_until_the_changelog_has_it() -> None:
    current = surface()
    assert {"tether.load", "tether.algorithms.value_loss", "command tether eval --threads"} <= current
    assert {"key actor_rollout_ref.actor.ppo_epochs", "metric actor/ppo_kl"} <= current
    gone = "command tether play --frames"
    listed = updated({*current, gone}, current)
    assert listed - current == {f"{REMOVED}{gone}"}
    assert updated(listed, current) == listed
    assert updated(listed, {*current, gone}) == {*current, gone}  # it came back
    unreleased = "# Changelog\n\n## Unreleased\n\n### {}\n- `tether play --frames`: use `--episodes`.\n\n## 0.1.0\n"
    assert unnamed(listed, unreleased.format("Removed")) == []
    assert unnamed(listed, unreleased.format("Added")) == [gone]
    assert unnamed(listed, "## Unreleased\n\n## 0.1.0\n\n### Removed\n- `tether play --frames`\n") == [gone]


if __name__ == "__main__":
    LIST.write_text("\n".join(sorted(updated(read() if LIST.exists() else set(), surface()))) + "\n", encoding="utf-8")

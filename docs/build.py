"""Fills the generated blocks of the documentation from the code that they describe, and writes the pages of algorithms.

    python docs/build.py

A block stands between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``; `tests/test_docs.py` compares.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent / "src"), str(DOCS.parent), str(DOCS)]

import algorithm_pages  # noqa: E402
import typer  # noqa: E402

from tether.commands.cli import app  # noqa: E402
from tether.config import live_keys  # noqa: E402
from tether.config.explanations import default  # noqa: E402
from tether.config.keys import keys, sections, show  # noqa: E402
from tether.config.loading.type_errors import expected  # noqa: E402
from tether.config.support.verl_keys import unread_keys  # noqa: E402
from tether.metrics import keys as metrics  # noqa: E402

METRIC_GROUPS = {
    "Rewards and critic": metrics.REWARD_AND_CRITIC,
    "Actor": metrics.ACTOR,
    "Lengths": metrics.LENGTHS,
    "Sampler against trainer": metrics.MISMATCH,
    "Selection": metrics.SELECTION,
    "Progress": metrics.PROGRESS,
    "Embodied runs": metrics.EMBODIED,
    "Training of reward models": metrics.REWARD_MODELS,
    "Supervised fine-tuning": metrics.FINE_TUNING,
    "Time": metrics.TIMING,
    "Validation": metrics.VALIDATION,
}


def inheritance_table() -> str:
    """Return each key that acts here and takes another one's value while it is unset."""
    inheriting = [key for key in keys().values() if key.inherits and key.path in live_keys()]
    rows = ["| key | takes, while it is unset |", "|---|---|"]
    for key in inheriting:
        assert key.inherits is not None
        test = f" is `{key.inherits.equals}`" if key.inherits.equals is not None else ""
        rows.append(f"| `{key.path}` | `{key.inherits.key}`{test} |")
    return "\n".join(rows)


SHARED = (
    *(f"{model}.fsdp_config" for model in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic.model")),
    "actor_rollout_ref.model",
    "critic.model",
    "actor_rollout_ref.actor",
    "actor_rollout_ref.ref",
    "critic",
    "actor_rollout_ref.rollout",
)
"""Sections that have keys in common."""


def keys_tables() -> str:
    """Return every key of each section, with what it takes, its default and its meaning."""
    parts = []
    for section, what in (sections() | {"": "Keys without a section."}).items():
        own = [key for key in keys().values() if key.path.rpartition(".")[0] == section]
        cells = [(f"`{key.path.rpartition('.')[2]}`", expected(key), default(key), key.doc) for key in own]
        rows = ["| " + " | ".join(map(_cell, row)) + " |" for row in cells]
        if rows:
            title = f"`{section}`" if section else "Others"
            head = [f"## {title}", "", what, "", "| key | takes | default | meaning |", "|---|---|---|---|"]
            parts.append("\n".join([*head, *rows]))
    return "\n\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")


def refused_table() -> str:
    """Return every key or value of verl that is refused as long as tether lacks what it asks for."""
    rows = ["| key | refused | why |", "|---|---|---|"]
    for key in keys().values():
        if key.refuses is not None:
            rows.append(f"| `{key.path}` | {', '.join(key.refuses.choices)} | {key.refuses.why} |")
    groups: dict[tuple[str, str, str], list[str]] = {}
    for path, row in unread_keys().items():
        if row.refused:
            section = next((section for section in SHARED if path.startswith(f"{section}.")), "")
            fine = " and ".join(dict.fromkeys(map(show, row.fine or (None,))))
            taken = re.sub(r"\$\{(.*?)\}", r"that of `\1`", f"all but {fine}")
            groups.setdefault((row.why, taken, path.removeprefix(f"{section}.")), []).append(section)
    merged: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for (why, taken, leaf), places in groups.items():
        merged.setdefault((why, taken, tuple(places)), []).append(leaf)
    for (why, taken, places), leaves in merged.items():
        names = ", ".join(f"`{leaf}`" for leaf in leaves)
        where = f" in {', '.join(f'`{section}`' for section in places)}" if any(places) else ""
        rows.append(f"| {names}{where} | {taken} | {why} |")
    return "\n".join(rows)


def metrics_tables() -> str:
    """Return every metric with its meaning and healthy range; mean, max and min of one thing share a row."""
    return "\n\n".join(f"## {title}\n\n{_metrics_table(group)}" for title, group in METRIC_GROUPS.items())


def _metrics_table(group: Mapping[str, metrics.MetricInfo]) -> str:
    rows = ["| key | meaning | healthy |", "|---|---|---|"]
    for key, info in group.items():
        stem, _, last = key.rpartition("/")
        spread = [f"{stem}/{moment}" for moment in ("mean", "max", "min")]
        if last in ("max", "min") and spread[0] in group:
            continue
        together = spread if last == "mean" and set(spread) <= set(group) else [key]
        names = ", ".join(f"`{name}`" for name in together)
        where = f" Only {info.when}." if info.when else ""
        rows.append(f"| {names} | {info.meaning}{where} | {info.healthy or ''} |")
    return "\n".join(rows)


def commands_tables() -> str:
    """Return every command with its arguments and options."""
    return "\n\n".join(_command_sections("tether", typer.main.get_command(app)))


def _command_sections(name: str, command: Any) -> Iterator[str]:
    if hasattr(command, "commands"):
        for word, inner in command.commands.items():
            yield from _command_sections(f"{name} {word}", inner)
        return
    rows = [f"| {_flags(p)} | {_cell(getattr(p, 'help', None) or '')} |" for p in command.params if not p.hidden]
    # An example in a docstring names files and brackets, which Markdown would read otherwise.
    text = re.sub(r"\n ?", "\n", inspect.cleandoc(command.help)).replace("For example: ", "For example: `")
    text = re.sub(r"(?<=For example: )(`.*)", r"\1`", text)
    table = ["", "| argument or option | meaning |", "|---|---|", *rows] if rows else []
    yield "\n".join([f"## {name}", "", text, *table])


def _flags(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])


BLOCKS = {
    ("reference/commands.md", "commands"): commands_tables,
    ("reference/keys.md", "keys"): keys_tables,
    ("reference/configuration.md", "inheritance"): inheritance_table,
    ("guides/coming-from-verl.md", "refused"): refused_table,
    ("reference/metrics.md", "metrics"): metrics_tables,
}
"""(page, name of the block) -> what stands in it."""


def filled(text: str, name: str, content: str) -> str:
    """Put `content` into the block `name` of a page."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    pattern = re.compile(f"(?<={re.escape(begin)}).*?(?={re.escape(end)})", re.DOTALL)
    assert pattern.search(text), f"the page has no block {name}"
    return pattern.sub(lambda _: f"\n{content}\n", text)


def pages() -> dict[Path, str]:
    """Return every page that is generated, or has generated blocks, as it should read."""
    texts = algorithm_pages.files()
    for (page, name), content in BLOCKS.items():
        path = DOCS / page
        texts[path] = filled(texts.get(path) or path.read_text(encoding="utf-8"), name, content())
    return texts


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

"""Translates an RLinf file to native keys by tables, with a line about the outcome for each key."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tether.config.keys import keys, show
from tether.config.loading.compose import compose
from tether.config.loading.imported import Imported, Outcome
from tether.config.loading.overrides import Override
from tether.config.loading.rlinf_marks import ENV_KEY, MARKS, POLICY_KEY
from tether.config.loading.typos import nearest
from tether.config.loading.yaml_file import MISSING, read_yaml
from tether.config.problems import ConfigError, Problem
from tether.config.support.patterns import look_up
from tether.control.policies.config import FLOW_TYPES, VLA_TYPES
from tether.integrations.rlinf import robot_simulators
from tether.integrations.rlinf.embodied import EMBODIED, START, fixed
from tether.integrations.rlinf.older_names import TASK_KEY, VALUES, Older, Task, with_current_names
from tether.integrations.rlinf.openpi import OPENPI
from tether.integrations.rlinf.other_simulator import (
    names_own_simulator,
    names_task,
    without_old_policy,
    without_old_simulator,
)
from tether.integrations.rlinf.rows import (
    UNSET,
    Checked,
    Mapped,
    NoEffect,
    NotRead,
    Refused,
    Table,
    Unsupported,
    Values,
)
from tether.integrations.rlinf.text import TEXT
from tether.integrations.rlinf.values import section_at, values_of
from tether.types import JsonObject

TABLES: Mapping[Task, Table] = {"embodied": EMBODIED, "reasoning": TEXT}
OWNERS = {
    "env.train": "env.train.env_type",
    "env.eval": "env.eval.env_type",
    "actor.model": "actor.model.model_type",
    "rollout.model": "actor.model.model_type",
    "data": "data.type",
    "reward": "reward.reward_type",
}
"""Section -> the key that selects the simulator, policy, type of data or reward to which its other keys belong."""
REMARKS = {
    **robot_simulators.REMARKS,
    ("actor.model.model_type", OPENPI): (
        "RLinf holds pi0 and pi0.5 in bf16, whatever actor.model.precision says, and reads openpi's files; here they "
        "are fp32, and read in lerobot's format"
    ),
    ("actor.model.precision", "bf16"): (
        "RLinf's optimizer updates bf16 weights; here it updates float32 ones, from which those are rounded"
    ),
    ("env.eval.data_collection.enabled", "True"): (
        "tests write no episodes; `tether collect` records those of a checkpoint"
    ),
    ("env.train.data_collection.enabled", "True"): (
        "training writes no episodes; `tether collect` records those of a checkpoint"
    ),
    ("algorithm.loss_type", "decoupled_actor_critic"): (
        "RLinf samples for it while the policy learns, may learn from a rollout twice, and interpolates the proximal "
        "policy; here both take turns unless algorithm.staleness_threshold is set, a rollout is learned from once, and "
        "the proximal policy is computed"
    ),
}
"""(key, accepted value) -> how tether differs from RLinf."""
IRRELEVANT_GROUPS = ("hybrid_engines", "training_backend", "weight_syncer")
"""Groups whose presets may be missing: they configure sharding and weight transfer, which one process does not need."""


def _without_effect(preset: str) -> dict[object, object] | None:
    return {} if preset.split("/")[0] in IRRELEVANT_GROUPS else None


def import_file(path: Path, overrides: Sequence[Override]) -> Imported:
    """Import a file.

    Args:
        path: the file, whose folder has its presets.
        overrides: overrides in RLinf's keys apply to the file before interpolations are resolved; others are returned.

    Raises:
        ConfigError: the file or one of its presets cannot be read, or an override cannot be applied.
    """
    tree, problems = compose(path, read_yaml(path), _without_effect)
    tree.pop("hydra", None)  # Hydra's own folders and logging
    written, tree = tree, _override(tree, [override for override in overrides if _section(override) in MARKS])
    task = _task(tree)
    if isinstance(task, Problem):
        return Imported({}, {}, (), (*problems, task))
    shared = [override for override in overrides if _section(override) not in MARKS]
    file_overrides = [override for override in shared if _is_of(tree, override, TABLES[task])]
    left_out: list[str] = []
    if task == "embodied":
        left_out += without_old_simulator(tree, file_overrides, _is_known)
        left_out += without_old_policy(tree, written, _is_known)
        file_overrides = [override for override in file_overrides if not names_own_simulator(override)]
    values, unresolved = values_of(_override(tree, file_overrides), TABLES[task])
    values, older = with_current_names(values, task)
    imported = _with_original_names(
        apply(TABLES[task], values, fixed(values) if task == "embodied" else {}, _other(task)), older
    )
    all_problems = (*problems, *unresolved, *imported.problems)
    other_overrides = tuple(override for override in shared if override not in file_overrides)
    imported = replace(
        imported,
        problems=all_problems,
        other_overrides=other_overrides,
        left_out=tuple(left_out),
        older_names=older.named(values),
    )
    return imported if task == "reasoning" else _with_missing_keys(imported)


def apply(table: Table, values: Values, implied: Mapping[str, object], other: Table) -> Imported:
    """Translate values by a table.

    Args:
        table: the table of the kind of run.
        values: values by RLinf's keys.
        implied: native key -> value that RLinf uses without having a key for it.
        other: the table of the other kind of run, to distinguish its keys from unknown ones.
    """
    native: dict[str, object] = {}
    origins: dict[str, str] = {}
    lines: list[Outcome] = []
    problems: list[Problem] = []
    unknown: list[str] = []
    for key, value in values.items():
        line = _line(key, value, table, values)
        if line is None:
            unknown.append(key)
            continue
        lines.append(line)
        for name, new in line.native.items():
            if name in native and native[name] != new:
                what = f"{show(value)} asks for {name}={show(new)}, but {origins[name]} for {show(native[name])}"
                problems.append(Problem(key, what, "keep one of the two"))
            elif name not in native:
                native[name], origins[name] = new, key
    refused = [line.key for line in lines if line.status == "not supported"]
    left_open = {name: key for key in refused for name in _counterparts(table, key) if name not in native}
    for key in unknown:
        owner = next((owner for section, owner in OWNERS.items() if key.startswith(f"{section}.")), None)
        if owner in refused:
            why = f"belongs to {owner}={show(values[owner])}, which is not supported"
            lines.append(Outcome(key, values[key], "no effect", why=why))
        else:
            problems.append(_unknown(key, table, other))
    for line in (*_defaults(table, values), *_implied(implied)):
        if line.status == "not supported" and line.key not in refused:
            lines.append(line)
        added = {name: value for name, value in line.native.items() if name not in native and name not in left_open}
        if added:
            lines.append(Outcome(line.key, line.value, "defaulted", added, line.why))
            native |= added
            origins |= dict.fromkeys(added, line.key)
    return Imported(native, origins, tuple(lines), tuple(problems), left_open=left_open)


def _with_original_names(imported: Imported, older: Older) -> Imported:
    """Replace current names by those in the file."""
    names = older.keys
    lines = (replace(line, value=older.values.get(line.key, line.value)) for line in imported.lines)
    return replace(
        imported,
        origins={native: names.get(key, key) for native, key in imported.origins.items()},
        left_open={native: names.get(key, key) for native, key in imported.left_open.items()},
        lines=tuple(replace(line, key=names.get(line.key, line.key)) for line in lines),
        problems=tuple(replace(problem, path=names.get(problem.path, problem.path)) for problem in imported.problems),
    )


def _counterparts(table: Table, key: str) -> Collection[str]:
    """Return the native keys that a key of RLinf sets."""
    row = look_up(table, key)
    return row.to if isinstance(row, Mapped) else ()


def _line(key: str, value: object, table: Table, values: Values) -> Outcome | None:
    """Return the outcome for a key; None for an unknown key."""
    row = look_up(table, key)
    if row is None:
        return None
    if isinstance(row, NoEffect):
        return Outcome(key, value, "no effect", why=row.why)
    if isinstance(row, Checked):
        return Outcome(key, value, "mapped", why=row.why)
    if isinstance(row, Refused):
        fine = " or ".join(dict.fromkeys(show(other) for other in row.fine if other not in (None, "")))
        fix = f"leave it out, or set {fine}" if fine else "leave it out"
        return Outcome(key, value, "mapped" if value in row.fine else "not supported", why=row.why, fix=fix)
    try:
        remark = REMARKS.get((key, str(value)), "")
        return Outcome(key, value, "mapped", _converted(row, value, values), remark, is_remark=bool(remark))
    except NotRead as error:
        return Outcome(key, value, "no effect", why=str(error))
    except Unsupported as error:
        if error.key not in (None, key):  # the row of the other key refuses it
            return Outcome(key, value, "mapped")
        return Outcome(key, value, "not supported", why=str(error), fix=error.fix)
    except (TypeError, ValueError, AttributeError, ArithmeticError):  # the conversion does not support the value
        return Outcome(key, value, "not supported", why=f"{show(value)} is of the wrong type")


def _converted(row: Mapped, value: object, values: Values) -> dict[str, object]:
    converted = {name: convert(value, values) for name, convert in row.to.items()}
    return {name: _for_null(name) if new is None else new for name, new in converted.items() if new is not UNSET}


def _for_null(name: str) -> object:
    """Return the value of a native key for null: false for flags, as in RLinf's code, where None is falsy."""
    return False if name in keys() and keys()[name].type_text == "true or false" else None


def _defaults(table: Table, values: Values) -> Iterator[Outcome]:
    for key, row in table.items():
        if isinstance(row, Mapped) and row.default is not UNSET and key not in values:
            try:
                yield Outcome(key, row.default, "defaulted", _converted(row, row.default, values))
            except Unsupported as error:  # blame a key that is in the file; without a key, the message is complete
                if error.key is not None:
                    yield Outcome(error.key, values[error.key], "not supported", why=str(error))


def _implied(implied: Mapping[str, object]) -> Iterator[Outcome]:
    for name, value in implied.items():
        yield Outcome(name, value, "defaulted", {name: value}, "what RLinf does without a key for it")


def _section(override: Override) -> str:
    return override.path.split(".")[0]


def _is_of(tree: JsonObject, override: Override, table: Table) -> bool:
    """Whether an override is in RLinf's keys, for a section that native files also have."""
    section, _, name = override.path.rpartition(".")
    takes_out = override.delete and name in section_at(tree, section)
    return takes_out or look_up(table, override.path) is not None or names_task(override)


def _override(tree: JsonObject, overrides: Sequence[Override]) -> JsonObject:
    changed = OmegaConf.create(tree)
    for override in overrides:
        section, _, name = override.path.rpartition(".")
        try:
            if override.delete:
                parent = OmegaConf.select(changed, section) if section else changed
                if isinstance(parent, DictConfig):
                    parent.pop(name, None)
            else:
                over = isinstance(override.value, dict) and bool(override.value)  # merged with the file's, as in Hydra
                OmegaConf.update(changed, override.path, override.value, merge=over, force_add=True)
        except (OmegaConfBaseException, TypeError, ValueError) as error:  # the last two: a key inside a list
            what = f"does not fit what the file has there ({str(error).splitlines()[0]})"
            raise ConfigError([Problem(override.path, what, "write it in the file")]) from error
    plain = OmegaConf.to_container(changed, resolve=False)
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items()}


def _is_known(key: str) -> bool:
    """Whether a key of an embodied run, or of a section of one, has a row."""
    return look_up(EMBODIED, key) is not None or any(row.startswith(f"{key}.") for row in EMBODIED)


def _task(tree: JsonObject) -> Task | Problem:
    algorithm, named = section_at(tree, "algorithm"), section_at(tree, "runner").get("task_type")
    if named is None:
        embodied = "env" in tree or algorithm.get("loss_type") in ("actor_critic", "decoupled_actor_critic")
        return "embodied" if embodied else "reasoning"
    if named in ("embodied", "reasoning", *VALUES["reasoning"][TASK_KEY]):
        return "embodied" if named == "embodied" else "reasoning"
    fix = "test a checkpoint with `tether eval`" if str(named).endswith("_eval") else "use embodied or reasoning"
    if named == "sft":
        fix = "fine-tune a language model on text with `tether sft`, a control policy with `tether bc`"
    return Problem(TASK_KEY, f"{named} is refused: `tether train` has no such kind of run", fix)


def _other(task: Task) -> Table:
    return TABLES["reasoning" if task == "embodied" else "embodied"]


def _unknown(key: str, table: Table, other: Table) -> Problem:
    if _covers(other, key, table):
        what = "is a key of text runs only" if table is EMBODIED else "is a key of embodied runs only"
        return Problem(key, what, f"take it out (~{key}), or set {TASK_KEY}")
    meant = nearest(key, [name for name in table if "*" not in name])
    fix = f"did you mean {meant}? or take it out: ~{key}" if meant else f"take it out (~{key})"
    return Problem(key, "unknown key of RLinf", fix)


def _covers(other: Table, key: str, table: Table) -> bool:
    """Whether a key belongs only to the other kind of run; false if a pattern of `other` covers a section of both."""
    name = key if key in other else next((row for row in other if look_up({row: other[row]}, key)), None)
    if name is None or not name.endswith(".*"):
        return name is not None
    return not any(row.startswith(name.removesuffix("*")) for row in table)


def _with_missing_keys(imported: Imported) -> Imported:
    """Mark the keys that an embodied run must set as missing: task, policy, and the checkpoint of a published policy.

    Without a checkpoint, tether would start with a new, untrained policy of that type.
    """
    published = imported.native.get(POLICY_KEY) in (*VLA_TYPES, *FLOW_TYPES)
    needed = (ENV_KEY, POLICY_KEY, START) if published else (ENV_KEY, POLICY_KEY)
    missing = [key for key in needed if key not in imported.native and key not in imported.left_open]
    native = {**imported.native, **dict.fromkeys(missing, MISSING)}
    return replace(imported, native=native, origins={**imported.origins, **{key: key for key in missing}})

"""Translates RLinf's wrappers of LIBERO and MetaWorld for pi0 and pi0.5 to arguments of tether's environments.

RLinf hard-codes cameras, state, reward and idle steps at the start, without keys for them: `ARGUMENTS` has the same
settings. A file names a suite, whose tasks and start states are drawn for each episode.
"""

from __future__ import annotations

from collections.abc import Mapping

from tether.integrations.rlinf.openpi import MODEL, OPENPI
from tether.integrations.rlinf.rows import (
    UNSET,
    Convert,
    Mapped,
    NotRead,
    Refused,
    Row,
    Table,
    Unsupported,
    Values,
    positive_int,
    to,
)
from tether.types import JsonObject

SUITE_KEY = "task_suite_name"
LIBERO, METAWORLD = "libero", "metaworld"
SUITES: Mapping[str, Mapping[str, str]] = {
    LIBERO: {name: name for name in ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")},
    METAWORLD: {"metaworld_50": "MT50", "metaworld_45_ind": "ML45-train", "metaworld_45_ood": "ML45-test"},
}
"""Simulator -> suite in RLinf's files -> id in tether."""
WRAPPED = tuple(SUITES)
ARGUMENTS: Mapping[str, JsonObject] = {
    LIBERO: {
        "cameras": ["agentview", "robot0_eye_in_hand"], "mirrored": True, "state": "hand", "instruction": True,
        "settling_steps": 15,
    },
    METAWORLD: {
        "camera": "corner2", "camera_position": [0.75, 0.075, 0.7], "picture_size": 480, "rotated": True,
        "shadows": True, "instructions": "sentences", "settling_steps": 16, "reward": "success",
        "terminate_on_success": True,
    },
}  # fmt: skip
"""Simulator -> arguments that reproduce RLinf's `LiberoEnv` and `MetaWorldEnv`."""
OFF = (False, None)
OF_LIBERO = (
    "use_step_penalty", "reset_gripper_open", "specific_reset_id", "task_id_filter", "libero_variant",
    "perturbation_suffix",
)  # fmt: skip
"""Keys that only LIBERO reads."""
REMARKS: Mapping[tuple[str, str], str] = {
    ("env.eval.env_type", LIBERO): (
        "RLinf tests each start state of the suite once; here a test draws env.eval.num_episodes of them at random"
    ),
    ("env.train.env_type", METAWORLD): (
        "RLinf draws 50 goals of a task for each of its environments; here all have the same, those of "
        "env.train.init_params.seed"
    ),
    ("env.eval.env_type", METAWORLD): (
        "RLinf tests each task of the suite equally often; here a test draws the task of each episode at random"
    ),
}


def carried_over(values: Values, role: str) -> str | None:
    """Return the simulator of a section if it is LIBERO or MetaWorld with an openpi policy; otherwise None."""
    simulator = values.get(f"env.{role}.env_type")
    return simulator if simulator in WRAPPED and values.get(MODEL) == OPENPI else None


def check_policy(values: Values, role: str) -> None:
    """Check that the simulator of a section is supported with the policy.

    Raises:
        Unsupported: it is not.
    """
    simulator = values[f"env.{role}.env_type"]
    if carried_over(values, role) is None:
        raise Unsupported(
            f"{simulator} is carried over for pi0 and pi0.5 only (actor.model.model_type=openpi)",
            fix=f"give env.train.env_type={simulator} env.train.id=TASK with the file, whose section is left out then",
        )


def _not_read(values: Values, role: str) -> NotRead:
    simulator = values.get(f"env.{role}.env_type")
    if simulator in WRAPPED:
        return NotRead(f"belongs to env.{role}.env_type={simulator}, which is not supported")
    return NotRead("LIBERO and MetaWorld read it, and no others")


def suite_id(role: str, values: Values) -> str | None:
    """Return the id of the suite that a section names; None without one."""
    simulator, suite = carried_over(values, role), values.get(f"env.{role}.{SUITE_KEY}")
    if simulator is None or suite is None:
        return None
    if suite not in SUITES[simulator]:
        raise Unsupported(f"suites are {', '.join(SUITES[simulator])}", f"env.{role}.{SUITE_KEY}")
    return SUITES[simulator][suite]


def wrapped_arguments(role: str, values: Values) -> JsonObject:
    """Return the arguments of an environment of one of these simulators."""
    simulator = values[f"env.{role}.env_type"]
    written = values.get(f"env.{role}.init_params")
    # RLinf's MetaWorld wrapper reads no arguments.
    return {**ARGUMENTS[simulator], **(written if simulator == LIBERO and isinstance(written, dict) else {})}


def _of_suite(role: str, task: Convert) -> Mapped:
    def named(value: object, values: Values) -> object:
        if carried_over(values, role) is None:
            raise _not_read(values, role)
        return task(value, values)

    return Mapped(
        {f"env.{role}.id": named, f"env.{role}.init_params": lambda value, values: wrapped_arguments(role, values)}
    )


def fixed_starts(value: object, values: Values) -> object:
    """Convert the flag for fixed start states. With RLinf's LIBERO and MetaWorld, it makes the environments of a group
    share start states, which are drawn for each rollout."""
    simulator = carried_over(values, "train")
    if simulator is None:
        return value
    if not value and (positive_int(values, "env.train.group_size", 1) > 1):
        raise Unsupported("False begins the episodes of a group in different states", fix="set it to True")
    if value and simulator == METAWORLD and values.get("env.train.auto_reset"):
        raise Unsupported("with auto_reset it repeats start states within a rollout", fix="set it to False")
    return UNSET


def ordered_starts(value: object, values: Values) -> object:
    """Refuse ordered start states in LIBERO and MetaWorld; RLinf's other simulators do not read the key."""
    if value and carried_over(values, "train"):
        raise Unsupported("start states are drawn at random, by the seed of the section")
    return UNSET


def only_libero(role: str, why: str, *fine: object) -> Row:
    """Return the row of a key that only LIBERO reads, which is refused except for the values in `fine`."""

    def convert(value: object, values: Values) -> object:
        if carried_over(values, role) != LIBERO:
            raise _not_read(values, role)
        if value is not None and value not in fine:
            raise Unsupported(why)
        return UNSET

    return to(f"env.{role}.id", by=convert)


def rows(role: str, task: Convert) -> Table:
    """Return the rows of `env.train` or `env.eval`; `task` returns the id."""
    section = f"env.{role}"
    return {
        f"{section}.{SUITE_KEY}": _of_suite(role, task),
        f"{section}.use_step_penalty": only_libero(role, "a step costs nothing", False),
        f"{section}.reset_gripper_open": only_libero(role, "the gripper is open at the start of an episode", True),
        f"{section}.specific_reset_id": only_libero(role, "start states are drawn from those of all tasks"),
        f"{section}.task_id_filter": only_libero(role, "episodes are of all tasks of a suite, or of one: SUITE/NUMBER"),
        f"{section}.libero_variant": only_libero(role, "there is no LIBERO-Pro or LIBERO-Plus", "standard"),
        f"{section}.perturbation_suffix": only_libero(role, "there is no LIBERO-Pro or LIBERO-Plus"),
        **({"env.train.is_eval": Refused("training draws its start states at random", fine=OFF)} if role == "train"
           else {}),
    }  # fmt: skip

"""`cluster.component_placement`: which processes of which component run on which resources. Read and checked offline.

::

    component_placement:
      actor,rollout: 0-7          # one process on each of eight resources
      env: 0-1:0-3,2-3            # four processes share resources 0 and 1, then one process on each of 2 and 3
      reward:
        node_group: cpu, spare    # ranks run on through the groups, in this order
        placement: all

A map of ranks is a comma list of `RESOURCES[:PROCESSES]`, each `a` or `a-b`, or `all` for resources. Resources ascend
and occur once. Without `:PROCESSES` each resource gets one process, numbered on. Process ranks run from 0 without a
gap. Of the two numbers of a part one divides the other: processes share a resource in blocks, or each owns several in
a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass

from tether.config.problems import Problem
from tether.spelling import did_you_mean

PATH = "cluster.component_placement"
COMPONENTS = (
    "actor", "critic", "rollout", "env", "reward", "inference", "actor_inference", "critic_inference", "reward_server",
    "agent",
)  # fmt: skip
CLUSTER, NODES = "cluster", "node"
"""Labels that need no entry in `cluster.node_groups`: all accelerators, and all nodes without their accelerators."""
MOST_RANKS = 1_000_000
"""Each is one entry of a list, so that a slip of the finger would fill the memory."""
FORM = "a map of ranks is for example 0-7, or 0-1:0-3,2-3"

Processes = tuple[tuple[int, ...], ...]
"""Process rank -> the resources that it runs on."""


@dataclass(frozen=True)
class Placement:
    """Where the processes of one component run."""

    component: str
    node_groups: tuple[str, ...]
    """Labels of the node groups whose resources are counted, in order."""
    processes: Processes | None
    """None: `all` resources, whose number is known on the cluster only."""

    @property
    def resources(self) -> tuple[int, ...] | None:
        """Every resource that the component uses, ascending."""
        return None if self.processes is None else tuple(sorted({rank for own in self.processes for rank in own}))


def parse_node_groups(groups: object, num_nodes: int) -> tuple[dict[str, int | None], list[Problem]]:
    """Read `cluster.node_groups`.

    Args:
        groups: the list of the file, or None.
        num_nodes: nodes of the cluster.

    Returns:
        Label -> number of resources: hardware that the file lists, else accelerators, whose number only the cluster
        knows, else nodes; and what is wrong.
    """
    sizes: dict[str, int | None] = {NODES: num_nodes}
    fix = "a group is {label: a800, node_ranks: 0-3}"
    if groups is not None and not isinstance(groups, list):
        return sizes, [Problem("cluster.node_groups", f"{groups!r} is no list of groups", fix)]
    problems: list[Problem] = []
    for number, group in enumerate(groups or []):
        try:
            if not isinstance(group, Mapping) or not {"label", "node_ranks"} <= group.keys():
                raise ValueError(f"{group!r} has no label and node_ranks")
            label = str(group["label"])
            if label in sizes or label == CLUSTER:
                raise ValueError(f"the label {label} is taken")
            nodes = parse_rank_map(group["node_ranks"], num_nodes)
            assert nodes is not None
            hardware = group.get("hardware") or {}
            sizes[label] = len(nodes) if group.get("ignore_hardware") else _hardware(hardware)
        except ValueError as error:
            problems.append(Problem(f"cluster.node_groups[{number}]", str(error), fix))
    return sizes, problems


def _hardware(hardware: object) -> int | None:
    if not isinstance(hardware, Mapping):
        raise ValueError(f"hardware={hardware!r} is no section with type and configs")
    configs = hardware.get("configs")
    return len(configs) if isinstance(configs, Sized) and len(configs) else None


def parse_placements(
    placement: object, node_groups: Mapping[str, int | None], num_resources: int | None = None
) -> tuple[list[Placement], list[Problem]]:
    """Read the whole of `cluster.component_placement`.

    Args:
        placement: the mapping of the file: component names -> map of ranks, or `{node_group, placement}`.
        node_groups: label -> number of resources in that group; None where only the cluster knows.
        num_resources: accelerators of the cluster; None where only the cluster knows.
    """
    if not isinstance(placement, Mapping) or not placement:
        return [], [
            Problem(PATH, f"{placement!r} places nothing", "write component: ranks lines, as actor,rollout: all")
        ]
    sizes = {CLUSTER: num_resources, **node_groups}
    placements: list[Placement] = []
    problems: list[Problem] = []
    for names, value in placement.items():
        try:
            labels, ranks = _split_value(value, sizes)
            counts = [sizes[label] for label in labels]
            known = [count for count in counts if count is not None]
            processes = parse_rank_map(ranks, sum(known) if len(known) == len(counts) else None)
            if NODES in labels and processes is not None and any(len(own) > 1 for own in processes):
                raise ValueError("a process cannot run on several nodes")
            taken = {placed.component for placed in placements}
            placements += [Placement(name, labels, processes) for name in _component_names(str(names), taken)]
        except ValueError as error:
            problems.append(Problem(f"{PATH}.{names}", str(error), FORM))
    return placements, problems


def parse_rank_map(text: str | int, count: int | None) -> Processes | None:
    """Read one map of ranks.

    Args:
        text: for example `0-1:0-3,2-3`, `all`, or the number that YAML made of a single rank.
        count: number of resources; None if unknown.

    Returns:
        The resources of each process; None if they depend on an unknown count.

    Raises:
        ValueError: it breaks a rule of the grammar; says which.
    """
    parts = [part.strip() for part in str(text).split(",") if part.strip()]
    if not parts:
        raise ValueError(f"{text!r} names no rank")
    if count is None and any(part.split(":")[0].strip().lower() == "all" for part in parts):
        if len(parts) > 1:
            raise ValueError(f"{text!r} names resources beside all of them")
        _check_open(parts[0])
        return None
    processes: list[tuple[int, ...]] = []
    last = -1
    for part in parts:
        resources, own = _part(part, count, len(processes))
        if resources[0] <= last:
            raise ValueError(f"{part!r} does not ascend: resource {resources[0]} comes after {last}")
        if own[0] != len(processes):
            raise ValueError(f"{part!r} leaves a gap: the next process rank is {len(processes)}, not {own[0]}")
        last = resources[-1]
        processes += _deal(part, resources, len(own))
    return tuple(processes)


def check_embodied(placements: Sequence[Placement]) -> list[Problem]:
    """Requirements of an embodied run on its placement: any resources, for these three components."""
    return list(_missing(placements, ("actor", "env", "rollout"), "an embodied run"))


def check_reasoning(placements: Sequence[Placement], critic: bool, reward: bool = True) -> list[Problem]:
    """Requirements of a text run: runs of neighbouring resources, either shared by all or apart.

    Args:
        placements: of all components.
        critic: whether the critic is a model of its own.
        reward: whether responses are scored by a component of their own.
    """
    needed = ("actor", "rollout", *(("reward",) if reward else ()), *(("critic",) if critic else ()))
    problems = list(_missing(placements, needed, "a text run"))
    used = {placed.component: placed.resources for placed in placements if placed.node_groups == (CLUSTER,)}
    known = {name: set(ranks) for name, ranks in used.items() if ranks is not None}
    for name, ranks in known.items():
        if name in (*needed, "inference", "actor_inference", "critic_inference") and max(ranks) - min(ranks) >= len(
            ranks
        ):
            problems.append(Problem(f"{PATH}.{name}", f"leaves a gap in {sorted(ranks)}", "use neighbouring ranks"))
    if problems or "actor" not in used or "rollout" not in used:
        return problems
    if used["actor"] == used["rollout"]:
        inference = [name for name in used if name.endswith("inference")]
        what = "has nothing to do where actor and rollout share their resources"
        return [Problem(f"{PATH}.{name}", what, "leave it out") for name in inference]
    return list(_overlaps(known))


def _overlaps(known: Mapping[str, set[int]]) -> Iterator[Problem]:
    """Components that share resources although actor and rollout do not have the same ones."""
    apart = (
        ("actor", "rollout"), ("actor", "inference"), ("actor", "actor_inference"), ("rollout", "inference"),
        ("rollout", "actor_inference"), ("critic", "actor"), ("critic", "rollout"), ("critic", "critic_inference"),
        ("rollout", "critic_inference"),
    )  # fmt: skip
    for one, other in apart:
        shared = sorted(known.get(one, set()) & known.get(other, set()))
        if shared:
            what = f"shares {shared} with {other}, while actor and rollout do not have the same resources"
            yield Problem(f"{PATH}.{one}", what, "give all components the same ranks, or none in common")


def _missing(placements: Sequence[Placement], needed: Sequence[str], task: str) -> Iterator[Problem]:
    placed = {placement.component for placement in placements}
    for name in needed:
        if name not in placed:
            yield Problem(f"{PATH}.{name}", f"missing, and {task} needs it", f"add it, for example {name}: all")


def _split_value(value: object, sizes: Mapping[str, int | None]) -> tuple[tuple[str, ...], str]:
    """The node groups and the map of ranks of one entry."""
    if not isinstance(value, Mapping):
        return (CLUSTER,), str(value)
    if unknown := sorted(map(str, value.keys() - {"node_group", "placement"})):
        raise ValueError(f"has {', '.join(unknown)} beside node_group and placement")
    if "placement" not in value:
        raise ValueError("names no placement beside its node_group")
    group = value.get("node_group", CLUSTER)
    labels = [str(label).strip() for label in (group if isinstance(group, list) else str(group).split(","))]
    for label in labels:
        if label not in sizes:
            raise ValueError(f"node_group {label} is not in cluster.node_groups.{did_you_mean(label, sizes)}")
    return tuple(labels), str(value["placement"])


def _component_names(names: str, taken: set[str]) -> list[str]:
    found: list[str] = []
    for name in (part.strip() for part in names.split(",")):
        if name not in COMPONENTS:
            raise ValueError(f"{name!r} is no component.{did_you_mean(name, COMPONENTS)}")
        if name in taken or name in found:
            raise ValueError(f"{name} is placed twice")
        found.append(name)
    return found


def _part(part: str, count: int | None, next_process: int) -> tuple[range, range]:
    """The resources and the process ranks of one part."""
    resources_text, colon, processes_text = part.partition(":")
    resources = _resources(resources_text.strip(), count)
    if not colon:
        return resources, range(next_process, next_process + len(resources))
    return resources, _processes(processes_text.strip())


def _check_open(part: str) -> None:
    _, colon, processes = part.partition(":")
    if colon and (own := _processes(processes.strip())).start != 0:
        raise ValueError(f"{part!r} leaves a gap: the first process rank is 0, not {own.start}")


def _resources(text: str, count: int | None) -> range:
    if text.lower() == "all":
        assert count is not None
        return range(count)
    ranks = _span(text)
    if count is not None and ranks[-1] >= count:
        raise ValueError(f"resource {ranks[-1]} does not exist: there are {count}")
    return ranks


def _processes(text: str) -> range:
    if text.lower() == "all":
        raise ValueError("all is no process rank")
    return _span(text)


def _span(text: str) -> range:
    match = re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", text)
    if match is None:
        raise ValueError(f"{text!r} is no rank and no range of ranks")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"{text!r} ends before it begins")
    if last >= MOST_RANKS:
        raise ValueError(f"{text!r} is beyond {MOST_RANKS} ranks")
    return range(first, last + 1)


def _deal(part: str, resources: range, processes: int) -> list[tuple[int, ...]]:
    """Deal resources to processes in blocks, or processes to resources."""
    if processes % len(resources) == 0:
        return [(rank,) for rank in resources for _ in range(processes // len(resources))]
    if len(resources) % processes == 0:
        own = len(resources) // processes
        return [tuple(resources[start : start + own]) for start in range(0, len(resources), own)]
    raise ValueError(
        f"{part!r} deals {processes} processes to {len(resources)} resources, and neither divides the other"
    )

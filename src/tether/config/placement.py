"""Parser of `cluster.component_placement`: the resources of each component's processes, checked offline.

::

    component_placement:
      actor,rollout: 0-7          # one process on each of eight resources
      env: 0-1:0-3,2-3            # four processes share resources 0 and 1, then one process on each of 2 and 3
      reward:
        node_group: cpu, spare    # ranks are numbered through the groups, in this order
        placement: all

A map of ranks is a comma list of `RESOURCES[:PROCESSES]`, each `a` or `a-b`, or `all` for resources. Resources ascend
and occur once. Without `:PROCESSES` each resource gets one process with the next rank. Process ranks start at 0 and
have no gaps. In each entry, one of the two counts divides the other: blocks of processes share a resource, or each
process has several contiguous resources.
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
"""Predefined labels: all accelerators, and all nodes without their accelerators."""
MAX_RANKS = 1_000_000
"""Limit on ranks: each is an entry of a list, so that a typo could fill the memory."""
FORM = "a map of ranks is for example 0-7, or 0-1:0-3,2-3"

Processes = tuple[tuple[int, ...], ...]
"""Process rank -> its resources."""


@dataclass(frozen=True)
class Placement:
    """The resources of one component's processes."""

    component: str
    node_groups: tuple[str, ...]
    """Labels of the node groups whose resources are numbered, in order."""
    processes: Processes | None
    """Resources of each process; None for `all` resources, whose number depends on the cluster."""

    @property
    def resources(self) -> tuple[int, ...] | None:
        """Return all resources of the component, ascending."""
        return (
            None if self.processes is None else tuple(sorted({rank for process in self.processes for rank in process}))
        )


def parse_node_groups(groups: object, num_nodes: int) -> tuple[dict[str, int | None], list[Problem]]:
    """Read `cluster.node_groups`.

    Args:
        groups: the list of the file, or None.
        num_nodes: nodes of the cluster.

    Returns:
        Label -> number of resources (listed hardware, else accelerators, whose number depends on the cluster, else
        nodes), and problems.
    """
    sizes: dict[str, int | None] = {NODES: num_nodes}
    fix = "a group is {label: a800, node_ranks: 0-3}"
    if groups is not None and not isinstance(groups, list):
        return sizes, [Problem("cluster.node_groups", f"{groups!r} is not a list of groups", fix)]
    problems: list[Problem] = []
    for index, group in enumerate(groups or []):
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
            problems.append(Problem(f"cluster.node_groups[{index}]", str(error), fix))
    return sizes, problems


def _hardware(hardware: object) -> int | None:
    if not isinstance(hardware, Mapping):
        raise ValueError(f"hardware={hardware!r} is not a section with type and configs")
    configs = hardware.get("configs")
    return len(configs) if isinstance(configs, Sized) and len(configs) else None


def parse_placements(
    placement: object, node_groups: Mapping[str, int | None], num_resources: int | None = None
) -> tuple[list[Placement], list[Problem]]:
    """Read `cluster.component_placement`.

    Args:
        placement: mapping of component names to a map of ranks, or `{node_group, placement}`.
        node_groups: label -> number of resources in that group; None if it depends on the cluster.
        num_resources: accelerators of the cluster; None if unknown.
    """
    if not isinstance(placement, Mapping) or not placement:
        return [], [
            Problem(PATH, f"{placement!r} places nothing", "write component: ranks lines, such as actor,rollout: all")
        ]
    sizes = {CLUSTER: num_resources, **node_groups}
    placements: list[Placement] = []
    problems: list[Problem] = []
    for names, value in placement.items():
        try:
            labels, ranks = _split_value(value, sizes)
            counts = [sizes[label] for label in labels]
            known_counts = [count for count in counts if count is not None]
            processes = parse_rank_map(ranks, sum(known_counts) if len(known_counts) == len(counts) else None)
            if NODES in labels and processes is not None and any(len(process) > 1 for process in processes):
                raise ValueError("a process cannot run on several nodes")
            placed_components = {placed.component for placed in placements}
            placements += [
                Placement(name, labels, processes) for name in _component_names(str(names), placed_components)
            ]
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
        ValueError: invalid map; names the rule.
    """
    entries = [entry.strip() for entry in str(text).split(",") if entry.strip()]
    if not entries:
        raise ValueError(f"{text!r} names no rank")
    if count is None and any(entry.split(":")[0].strip().lower() == "all" for entry in entries):
        if len(entries) > 1:
            raise ValueError(f"{text!r} names resources in addition to all")
        _check_unknown_count(entries[0])
        return None
    processes: list[tuple[int, ...]] = []
    last = -1
    for entry in entries:
        resources, ranks = _parse_entry(entry, count, len(processes))
        if resources[0] <= last:
            raise ValueError(f"{entry!r} does not ascend: resource {resources[0]} comes after {last}")
        if ranks[0] != len(processes):
            raise ValueError(f"{entry!r} leaves a gap: the next process rank is {len(processes)}, not {ranks[0]}")
        last = resources[-1]
        processes += _assign(entry, resources, len(ranks))
    return tuple(processes)


def check_embodied(placements: Sequence[Placement]) -> list[Problem]:
    """Return problems of an embodied run's placement, which needs these three components on any resources."""
    return list(_missing(placements, ("actor", "env", "rollout"), "an embodied run"))


def check_reasoning(placements: Sequence[Placement], critic: bool, reward: bool = True) -> list[Problem]:
    """Return problems of a text run's placement, which needs contiguous resources, shared by all or separate.

    Args:
        placements: placements of all components.
        critic: whether the critic is a separate model.
        reward: whether a separate component scores responses.
    """
    needed = ("actor", "rollout", *(("reward",) if reward else ()), *(("critic",) if critic else ()))
    problems = list(_missing(placements, needed, "a text run"))
    used = {placed.component: placed.resources for placed in placements if placed.node_groups == (CLUSTER,)}
    known_resources = {name: set(ranks) for name, ranks in used.items() if ranks is not None}
    for name, ranks in known_resources.items():
        if name in (*needed, "inference", "actor_inference", "critic_inference") and max(ranks) - min(ranks) >= len(
            ranks
        ):
            problems.append(Problem(f"{PATH}.{name}", f"leaves a gap in {sorted(ranks)}", "use consecutive ranks"))
    if problems or "actor" not in used or "rollout" not in used:
        return problems
    if used["actor"] == used["rollout"]:
        inference = [name for name in used if name.endswith("inference")]
        what = "is not needed if actor and rollout share their resources"
        return [Problem(f"{PATH}.{name}", what, "leave it out") for name in inference]
    return list(_overlaps(known_resources))


def _overlaps(resources: Mapping[str, set[int]]) -> Iterator[Problem]:
    """Yield problems of components that share resources although actor and rollout have different ones."""
    disjoint = (
        ("actor", "rollout"), ("actor", "inference"), ("actor", "actor_inference"), ("rollout", "inference"),
        ("rollout", "actor_inference"), ("critic", "actor"), ("critic", "rollout"), ("critic", "critic_inference"),
        ("rollout", "critic_inference"),
    )  # fmt: skip
    for one, other in disjoint:
        shared = sorted(resources.get(one, set()) & resources.get(other, set()))
        if shared:
            what = f"shares {shared} with {other}, while actor and rollout do not have the same resources"
            yield Problem(f"{PATH}.{one}", what, "give all components the same ranks, or disjoint ones")


def _missing(placements: Sequence[Placement], needed: Sequence[str], task: str) -> Iterator[Problem]:
    placed = {placement.component for placement in placements}
    for name in needed:
        if name not in placed:
            yield Problem(f"{PATH}.{name}", f"missing, and {task} needs it", f"add it, for example {name}: all")


def _split_value(value: object, sizes: Mapping[str, int | None]) -> tuple[tuple[str, ...], str]:
    """Return the node groups and the map of ranks of one component."""
    if not isinstance(value, Mapping):
        return (CLUSTER,), str(value)
    if unknown := sorted(map(str, value.keys() - {"node_group", "placement"})):
        raise ValueError(f"has {', '.join(unknown)} in addition to node_group and placement")
    if "placement" not in value:
        raise ValueError("has a node_group without a placement")
    group = value.get("node_group", CLUSTER)
    labels = [str(label).strip() for label in (group if isinstance(group, list) else str(group).split(","))]
    for label in labels:
        if label not in sizes:
            raise ValueError(f"node_group {label} is not in cluster.node_groups.{did_you_mean(label, sizes)}")
    return tuple(labels), str(value["placement"])


def _component_names(names: str, placed: set[str]) -> list[str]:
    components: list[str] = []
    for name in (text.strip() for text in names.split(",")):
        if name not in COMPONENTS:
            raise ValueError(f"{name!r} is not a component.{did_you_mean(name, COMPONENTS)}")
        if name in placed or name in components:
            raise ValueError(f"{name} is placed twice")
        components.append(name)
    return components


def _parse_entry(entry: str, count: int | None, next_process: int) -> tuple[range, range]:
    """Return the resources and the process ranks of one entry of a map."""
    resources_text, colon, processes_text = entry.partition(":")
    resources = _resources(resources_text.strip(), count)
    if not colon:
        return resources, range(next_process, next_process + len(resources))
    return resources, _processes(processes_text.strip())


def _check_unknown_count(entry: str) -> None:
    _, colon, processes = entry.partition(":")
    if colon and (ranks := _processes(processes.strip())).start != 0:
        raise ValueError(f"{entry!r} leaves a gap: the first process rank is 0, not {ranks.start}")


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
        raise ValueError("all is not a process rank")
    return _span(text)


def _span(text: str) -> range:
    match = re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", text)
    if match is None:
        raise ValueError(f"{text!r} is neither a rank nor a range of ranks")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"{text!r} ends before it begins")
    if last >= MAX_RANKS:
        raise ValueError(f"{text!r} is beyond {MAX_RANKS} ranks")
    return range(first, last + 1)


def _assign(entry: str, resources: range, processes: int) -> list[tuple[int, ...]]:
    """Return the resources of each process: blocks of processes share one, or each has a block of resources."""
    if processes % len(resources) == 0:
        return [(rank,) for rank in resources for _ in range(processes // len(resources))]
    if len(resources) % processes == 0:
        per_process = len(resources) // processes
        return [tuple(resources[start : start + per_process]) for start in range(0, len(resources), per_process)]
    raise ValueError(
        f"{entry!r} assigns {processes} processes to {len(resources)} resources, and neither count divides the other"
    )

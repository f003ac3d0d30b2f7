"""The grammar of component placements: what each form means, and what breaks it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.config.placement import check_embodied, check_reasoning, parse_placements, parse_rank_map


@pytest.mark.parametrize(
    ("text", "count", "processes"),
    [
        (0, None, ((0,),)),
        ("0-3", None, ((0,), (1,), (2,), (3,))),
        ("0-0", 1, ((0,),)),
        ("all", 2, ((0,), (1,))),
        ("ALL", None, None),
        ("all:0-1", 4, ((0, 1), (2, 3))),
        ("all:0-1", None, None),
        ("0-1:0-3", None, ((0,), (0,), (1,), (1,))),
        ("0-3:0-1", None, ((0, 1), (2, 3))),
        (" 0 - 1 : 0 , 3", None, ((0, 1), (3,))),
        # four processes on two resources, one each on three, eight on four
        (
            "0-1:0-3,3-5,7-10:7-14",
            11,
            ((0,), (0,), (1,), (1,), (3,), (4,), (5,), (7,), (7,), (8,), (8,), (9,), (9,), (10,), (10,)),
        ),
    ],
)
def test_rank_maps(text, count, processes):
    assert parse_rank_map(text, count) == processes


@pytest.mark.parametrize(
    ("text", "count", "says"),
    [
        ("", None, "names no rank"),
        ("0-", None, "'0-' is neither a rank"),
        ("a", None, "'a' is neither a rank"),
        ("0-1-2", None, "is neither a rank"),
        ("-1", None, "is neither a rank"),
        ("3-1", None, "ends before it begins"),
        ("0-8", 8, "resource 8 does not exist: there are 8"),
        ("3,1", None, "does not ascend: resource 1 comes after 3"),
        ("0-3,3-5", None, "does not ascend: resource 3 comes after 3"),
        ("0-1:1-2", None, "leaves a gap: the next process rank is 0, not 1"),
        ("0:0,1:2", None, "leaves a gap: the next process rank is 1, not 2"),
        ("0-2:0-1", None, "assigns 2 processes to 3 resources, and neither count divides the other"),
        ("0-1:all", None, "all is not a process rank"),
        ("all:1-2", None, "the first process rank is 0, not 1"),
        ("all,8", None, "names resources in addition to all"),
        ("all,8", 8, "resource 8 does not exist"),
        ("0:1:2", None, "'1:2' is neither a rank"),
    ],
)
def test_what_breaks_a_rank_map(text, count, says):
    with pytest.raises(ValueError, match=says.replace("'", ".")):
        parse_rank_map(text, count)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 5))
def test_every_process_has_as_many_resources_and_every_resource_as_many_processes(resources, processes, first):
    text = f"{first}-{first + resources - 1}:0-{processes - 1}"
    if resources % processes and processes % resources:
        with pytest.raises(ValueError):
            parse_rank_map(text, None)
        return
    dealt = parse_rank_map(text, None)
    assert dealt is not None
    assert len(dealt) == processes
    assert {len(own) for own in dealt} == {max(1, resources // processes)}
    flat = [rank for own in dealt for rank in own]
    assert flat == sorted(flat)
    assert all(flat.count(rank) == max(1, processes // resources) for rank in range(first, first + resources))


@pytest.mark.parametrize(
    "placement",
    [
        {"env,rollout,actor": 0},
        {"actor,env,rollout": "all"},
        {"actor, env, rollout": "0-7"},
        {"actor": "0-7", "env": "0-3", "rollout": "4-7"},
        {"actor": "0-0", "env": "0-0", "rollout": "0-0", "reward": "0-1"},
    ],
)
def test_forms_that_embodied_files_use(placement):
    placements, problems = parse_placements(placement, {})
    assert problems == []
    assert {placed.component for placed in placements} >= {"actor", "env", "rollout"}
    assert check_embodied(placements) == []


@pytest.mark.parametrize(
    "placement",
    [
        {"actor,critic,rollout,reward": "all"},
        {"actor,critic,rollout,reward": "0-7"},
        {"rollout": "0-9", "inference": "10-11", "actor": "12-15", "reward": "0-9"},
        {"actor": "0-3", "critic": "4-5", "rollout": "6-7", "reward": "6-7"},
    ],
)
def test_forms_that_text_files_use(placement):
    placements, problems = parse_placements(placement, {})
    assert problems == []
    assert check_reasoning(placements, critic="critic" in {placed.component for placed in placements}) == []


def test_node_groups_count_their_own_resources():
    groups = {"a800": 8, "4090": 4, "node": 3}
    placement = {
        "actor": {"node_group": "a800, 4090", "placement": "all"},
        "rollout": {"node_group": ["4090"], "placement": "0-3:0-1"},
        "env": {"node_group": "node", "placement": "0-2:0-5"},
    }
    placements, problems = parse_placements(placement, groups)
    assert problems == []
    actor, rollout, env = placements
    assert actor.node_groups == ("a800", "4090")
    assert actor.resources == tuple(range(12))
    assert rollout.processes == ((0, 1), (2, 3))
    assert env.processes == ((0,), (0,), (1,), (1,), (2,), (2,))


@pytest.mark.parametrize(
    ("placement", "path", "says"),
    [
        ({}, "", "places nothing"),
        ("all", "", "places nothing"),
        ({"actro": 0}, ".actro", "'actro' is not a component. Did you mean actor? a map of ranks"),
        ({"actor,env": 0, "actor": 1}, ".actor", "actor is placed twice"),
        ({"actor,actor": 0}, ".actor,actor", "actor is placed twice"),
        ({"actor": {"placement": 0, "nodes": 1}}, ".actor", "has nodes in addition to node_group and placement"),
        ({"actor": {"node_group": "node"}}, ".actor", "has a node_group without a placement"),
        ({"actor": {"node_group": "nodes", "placement": 0}}, ".actor", "Did you mean node?"),
        ({"actor": {"node_group": "node", "placement": "0-1:0"}}, ".actor", "cannot run on several nodes"),
        ({"actor": {"node_group": "node", "placement": "0-2"}}, ".actor", "resource 2 does not exist: there are 2"),
    ],
)
def test_what_breaks_a_placement(placement, path, says):
    _, problems = parse_placements(placement, {"node": 2})
    assert [problem.path for problem in problems] == [f"cluster.component_placement{path}"]
    assert says in str(problems[0])


def test_all_that_is_wrong_at_once():
    _, problems = parse_placements({"actor": "3-1", "evn": 0, "rollout": "0:all"}, {})
    assert len(problems) == 3


@pytest.mark.parametrize(
    ("placement", "says"),
    [
        ({"actor,rollout": "all"}, "reward: missing, and a text run needs it"),
        ({"actor,rollout,reward": "0,2"}, "leaves a gap in [0, 2]"),
        ({"actor,rollout,reward": "0-3", "inference": "4"}, "inference: is not needed"),
        ({"actor": "0-3", "rollout": "2-5", "reward": "0"}, "actor: shares [2, 3] with rollout"),
        ({"actor": "0-1", "rollout": "2-3", "reward": "0", "critic": "3"}, "critic: shares [3] with rollout"),
    ],
)
def test_what_text_runs_cannot_use(placement, says):
    placements, problems = parse_placements(placement, {})
    assert problems == []
    assert any(says in str(problem) for problem in check_reasoning(placements, critic="critic" in placement))


def test_a_critic_of_its_own_needs_a_place():
    placements, _ = parse_placements({"actor,rollout,reward": "all"}, {})
    assert [problem.path for problem in check_reasoning(placements, critic=True)] == [
        "cluster.component_placement.critic"
    ]
    assert [problem.path for problem in check_embodied(placements)] == ["cluster.component_placement.env"]

"""`reward_model.parts`: what a part may say, and what is wrong with it, by its full name."""

import pytest

from tests.config.loading import load, problems_of
from tether.text.rewards.config_parts import read_parts

LEARNED = ["reward_model.enable=True", "reward_model.model.path=rm"]
JUDGE = "kind: judge, base_url: 'http://x/v1', model: m, prompt: '{response}'"


def parts(text: str) -> str:
    return f"reward_model.parts={{{text}}}"


def test_parts_are_typed() -> None:
    config = load(parts(f"r: {{kind: rules, weight: 2}}, j: {{{JUDGE}, range: [0, 10], scores: {{a: 1}}}}")).config
    read = read_parts(config.reward_model.parts)
    assert (read["r"].kind, read["r"].weight, read["r"].optional) == ("rules", 2.0, False)
    assert (read["j"].range, read["j"].scores, read["j"].max_concurrent) == ((0, 10), {"a": 1.0}, 32)


@pytest.mark.parametrize(
    ("overrides", "path", "says"),
    [
        ([parts("a: 1")], "a", "1 is not a part. give {kind: rules|function|model|judge"),
        ([parts("1a: {kind: rules}")], "1a", "is not a name"),
        ([parts("1: {kind: rules}")], "1", "is not a name. use letters"),
        ([parts("a: {weight: 1}")], "a.kind", "None is not a kind of reward"),
        ([parts("a: {kind: rules, weigth: 2}")], "a.weigth", "has no such key. Did you mean weight"),
        ([parts("a: {kind: rules, weight: two}")], "a.weight", "'two': Input should be a valid number"),
        ([parts("a: {kind: rules, weight: nan}")], "a.weight", "should be a finite number"),
        ([parts("a: {kind: rules, optional: maybe}")], "a.optional", "'maybe': Input should be a valid boolean"),
        ([parts(f"a: {{{JUDGE}, range: [1]}}")], "a.range", "[1]: a range is [least, greatest], such as [0, 10]"),
        ([parts(f"a: {{{JUDGE}, range: [10, 0]}}")], "a.range", "[10, 0]: a range is [least, greatest]"),
        ([parts(f"a: {{{JUDGE}, range: 3}}")], "a.range", "3: a range is [least, greatest]"),
        ([parts("a: {kind: function}")], "a.path", "missing. a part of kind function needs it"),
        ([parts("a: {kind: judge, prompt: x}")], "a", "an endpoint (base_url) or a model (path), and it has none"),
        ([parts(f"a: {{{JUDGE}, path: m}}")], "a", "and it has both. give one"),
        ([parts("a: {kind: judge, prompt: x, base_url: u}")], "a.model", "missing. give the model's name"),
        ([parts("a: {kind: judge, prompt: x, path: m, temperature: 1}")], "a.temperature", "1.0 samples answers"),
        ([parts(f"a: {{{JUDGE}, api_key: sk-1}}")], "a.api_key", "has no such key. Did you mean api_key_env?"),
    ],
)  # fmt: skip
def test_a_part_that_is_wrong_is_named(overrides: list[str], path: str, says: str) -> None:
    problems = problems_of(*overrides)
    assert list(problems) == [f"reward_model.parts.{path}"]
    assert says in problems[f"reward_model.parts.{path}"]


@pytest.mark.parametrize(
    ("overrides", "path", "says"),
    [
        ([parts("m: {kind: model}")], "reward_model.parts", "has a part of kind model, and reward_model.enable=False"),
        ([*LEARNED, parts("r: {kind: rules}")], "reward_model.parts", "has no part of kind model"),
        ([parts("a: {kind: rules}, b: {kind: rules}")], "reward_model.parts", "2 parts are of kind rules"),
        (
            [parts("a: {kind: judge, prompt: x, path: m}"), "trainer.n_gpus_per_node=2"],
            "reward_model.parts.a.path",
            "by the process that was started, and not on the 2 devices. serve it",
        ),
        ([parts("a: {kind: rules, weight: 0}")], "reward_model.parts", "every weight is 0"),
        (
            ["custom_reward_function.path=x.py", *LEARNED, parts("m: {kind: model}")],
            "custom_reward_function.path",
            "x.py is never called: reward_model.parts has no part of kind rules",
        ),
    ],
)
def test_parts_and_the_rest_agree(overrides: list[str], path: str, says: str) -> None:
    problems = problems_of(*overrides)
    assert list(problems) == [path]
    assert says in problems[path]

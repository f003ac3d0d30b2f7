import pytest

from tests.text.rewards.sandbox.machine import needs_prlimit
from tether.text.rewards import router
from tether.text.rewards.router import REWARDS, check_sources, check_truth, find_reward
from tether.text.rewards.rules import gsm8k, math, reasoning_gym, search
from tether.text.rewards.sandbox.options import ProgramOptions
from tether.text.rewards.sandbox.reward import ProgramReward

PROGRAMS = ProgramOptions(unconfined=True)


RULES = [
    ("openai/gsm8k", gsm8k.strict),
    ("DigitalLearningGmbH/MATH-lighteval", math.boxed),
    ("lighteval/MATH", math.boxed),
    ("HuggingFaceH4/MATH-500", math.boxed),
    ("math_dapo", math.dapo),
    ("aime2024", math.dapo),
    ("aime_2025", math.dapo),
    ("numina_cn_k12", math.numina),
    ("hiyouga/geometry3k", math.geo3k),
    ("searchR1_nq", search.exact_match),
    ("reasoning_gym/chain_sum", reasoning_gym.score),
]


def test_sources_find_their_rule():
    for source, rule in RULES:
        assert find_reward(source, PROGRAMS) is rule


def test_all_rules_exist():
    assert all(callable(find_reward(source, PROGRAMS)) for source in REWARDS)


@needs_prlimit
def test_all_sources_are_taken():
    check_sources(REWARDS, PROGRAMS)


def test_unknown_sources_are_refused_all_at_once():
    with pytest.raises(ValueError) as refused:
        check_sources({"openai/gsm8k", "openai/gsm8", "my/task"}, PROGRAMS)
    message = str(refused.value)
    assert "'my/task', 'openai/gsm8'" in message
    assert "Did you mean openai/gsm8k?" in message
    assert "reasoning_gym/*" in message
    assert "custom_reward_function.path" in message
    with pytest.raises(ValueError, match="'my/task'"):
        find_reward("my/task", PROGRAMS)


ANSWERS = {"numina_cn_k12": r"\boxed{72}", "math_dapo": "Answer: 72", "openai/gsm8k": "#### 72"}


@pytest.mark.parametrize("source", ANSWERS)
@pytest.mark.parametrize("truth", ["72", 72, 72.0, ["72"]])
def test_a_truth_in_any_form_is_taken(source, truth):
    check_truth(source, truth, {})
    scored = find_reward(source, PROGRAMS)(source, ANSWERS[source], truth, {})
    assert (scored["score"] if isinstance(scored, dict) else scored) == 1.0


@pytest.mark.parametrize(("source", "truth", "problem"), [
    ("openai/gsm8k", {"target": "72"}, r"is \{'target': '72'\}; this reward needs an answer"),
    ("math_dapo", ["72", "73"], r"is \['72', '73'\]; this reward needs an answer"),
    ("searchR1_nq", {"answers": ["x"]}, "is None; this reward needs an answer"),
    ("reasoning_gym/chain_sum", "72", r"A `reasoning_gym:TASK` in data.train_files"),
    ("codecontests", "72", "tests"),
])  # fmt: skip
def test_a_truth_that_gives_no_score_is_refused_before_the_run(source, truth, problem):
    """Each of these was scored 0, whatever the response was, or ended the run at its first step."""
    with pytest.raises(ValueError, match=problem):
        check_truth(source, truth, {})


def test_rows_of_published_sets_with_an_empty_answer_are_left_to_the_scoring():
    """MATH has two; they are errors of their rows."""
    check_truth("DigitalLearningGmbH/MATH-lighteval", "", {})
    with pytest.raises(ValueError, match="is ''; this reward needs an answer"):
        find_reward("DigitalLearningGmbH/MATH-lighteval", PROGRAMS)("", "", "", {})


def test_a_missing_optional_package_is_named(monkeypatch):
    monkeypatch.setattr(router.importlib.util, "find_spec", lambda _: None)
    check_sources(["openai/gsm8k"], PROGRAMS)
    with pytest.raises(ValueError, match=r"pip install .*\[quickstart\]'"):
        check_sources(["reasoning_gym/chain_sum"], PROGRAMS)


@pytest.mark.parametrize("source", ["codecontests", "apps", "codeforces", "taco", "livecodebench/code_generation_lite"])
def test_code_is_run(source):
    assert isinstance(find_reward(source, PROGRAMS), ProgramReward)

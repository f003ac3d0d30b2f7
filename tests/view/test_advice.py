"""Each rule fires on a run in which its cause is planted, and on no healthy one."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.runs import recorded_runs
from tests.runs.golden import Golden
from tests.view import recipe_runs
from tests.view.planted import Numbers, control_config, healthy, write_control, write_text
from tether.metrics.loggers.jsonl import JsonlLogger
from tether.metrics.loggers.protocol import RunInfo
from tether.view.advice import EXPLOITED, RULES, advise
from tether.view.run import RunFolder

ROOT = Path(__file__).parents[2]


def with_metrics(**values: float | Callable[[int], float]) -> Callable[[int, np.random.Generator], Numbers]:
    def metrics(step: int, rng: np.random.Generator) -> Numbers:
        changed = {key: value(step) if callable(value) else value for key, value in values.items()}
        return healthy(step, rng) | {key.replace("__", "/").replace("%", "@"): value for key, value in changed.items()}

    return metrics


def format_alone(step: int, prompt: int, rng: np.random.Generator) -> tuple[float, Numbers]:
    layout = min(1.0, 0.1 + 0.03 * step)
    return layout, {"format": layout, "acc": 0.1 * float(rng.random() < 0.1)}


def slow_beginning(step: int, prompt: int, rng: np.random.Generator) -> tuple[float, Numbers]:
    """The format is learned first, and the first right answers come after it: from 1 % to 5 %."""
    layout, acc = min(1.0, 0.1 + 0.03 * step), float(rng.random() < 0.01 + 0.0006 * step)
    return 0.1 * layout + 0.9 * acc, {"format": layout, "acc": acc}


def one_prompt(step: int, prompt: int, rng: np.random.Generator) -> tuple[float, Numbers]:
    return (float(rng.integers(0, 2)) if prompt == 5 else 0.6 + 0.02 * float(rng.normal())), {}


def too_hard(step: int, prompt: int, rng: np.random.Generator) -> tuple[float, Numbers]:
    return float(prompt < 3), {}


def too_long(step: int, rng: np.random.Generator) -> Numbers:
    return healthy(step, rng) | {"response_length/mean": 60.0, "critic/score/mean": 0.35}


PLANTED = {
    "responses are cut": {"metrics": too_long, "limit": 60},
    "groups without variance": {"reward": too_hard},
    "longer without reward": {
        "limit": 400,
        "metrics": with_metrics(
            response_length__mean=lambda step: 50.0 + 3 * step, critic__score__mean=lambda s: 0.4 + 0.02 * (s % 3)
        ),
    },
    "entropy collapsed": {"metrics": with_metrics(actor__entropy=lambda step: 1.0 if step < 50 else 0.001)},
    "first ratio is not 1": {"metrics": with_metrics(actor__first_update__ratio_max=1.3)},
    "few effective samples": {"metrics": with_metrics(rollout_corr__rollout_is_eff_sample_size=0.1)},
    "sampler and trainer differ": {"metrics": with_metrics(training__rollout_mismatch_alarm=1.0)},
    "much is clipped": {"metrics": with_metrics(actor__pg_clipfrac=0.6)},
    "rewards fail": {"metrics": with_metrics(reward__error_rate=0.1)},
    "responses are identical": {"metrics": with_metrics(response__identical_fraction=0.9)},
    "devices wait for one": {"metrics": with_metrics(global_seqlen__busiest_over_mean=2.0)},
    "updates are skipped": {"metrics": with_metrics(actor__skipped_updates=1.0)},
    "format without accuracy": {"reward": format_alone},
    "one prompt dominates": {"reward": one_prompt},
}


def rules(folder: Path) -> list[str]:
    return [one["rule"] for one in advise(RunFolder(folder))]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fell", {"score fell": ["at step 60", "actor/lr went from 1e-05 to 0.001 in step 58", "actor/ppo_kl"]}),
        ("hacked", {"validation falls": ["exploits the reward"], EXPLOITED: ["'politeness'", "'acc' falls"]}),
        ("critic", {"critic explains nothing": ["below 0 in 100 of 100 steps"]}),
        ("never", {"prompts never solved": ["2 of 8 prompts (index 3, 6)", "in 400 attempts each", "acc above 0.5"]}),
        (
            "robot",
            {
                "episodes end early": [
                    "40 of the 40 complete episodes of the last 10 recorded training steps",
                    "20 of 20 recorded",
                    "at step 37 of the episode. In episode 0 of training step 30 it drops most at step 37",
                ]
            },
        ),
    ],
)
def test_the_questions_have_their_answers(name: str, expected: dict[str, list[str]], planted: Path) -> None:
    found = {one["rule"]: one for one in advise(RunFolder(planted / name))}
    assert list(found) == list(expected)
    for rule, words in expected.items():
        assert all(one in found[rule]["text"] for one in words), found[rule]["text"]
        assert found[rule]["rows"] or name == "critic"
        assert found[rule]["remedy"].endswith(".")
        assert found[rule]["why_step"]
        file, _, section = found[rule]["guide"].partition("#")
        headings = re.findall(r"^## (.*)$", (ROOT / "docs/guides" / f"{file}.md").read_text(), re.MULTILINE)
        assert not section or section in [heading.lower().replace(" ", "-") for heading in headings]


def test_each_rule_fires_on_what_is_planted_and_no_other_does(tmp_path: Path, planted: Path) -> None:
    found = {rule: rules(write_text(tmp_path / rule, steps=60, **how)) for rule, how in PLANTED.items()}
    assert found == {rule: [rule] for rule in PLANTED}
    described = (ROOT / "docs/guides/view.md").read_text()
    assert [rule for rule in RULES if f"| {rule} |" not in described] == []
    falls = with_metrics(
        **{"val-core__math__acc__mean%1": lambda step: 0.6 if step < 40 else 0.6 - 0.006 * (step - 40)}
    )
    assert rules(write_text(tmp_path / "falls", metrics=lambda step, rng: falls(step, rng), validates=False)) == [
        "validation falls"
    ]


def test_an_evaluation_that_stays_near_its_best_does_not_fall(tmp_path: Path) -> None:
    """500 in nearly all evaluations of a solved task and then 494, while training still rises to them."""
    logger = JsonlLogger(RunInfo(tmp_path / "run", "planted", "run", control_config(), 60))
    for step in range(1, 61):
        logged = {"env/return": 300.0 + 3 * step}
        if step % 5 == 0:
            logged["eval/return"] = {5: 100.0, 10: 400.0, 55: 494.0, 60: 494.0}.get(step, 500.0)
        logger.log(step, logged)
    logger.close()
    assert rules(tmp_path / "run") == []


def test_no_rule_fires_on_a_healthy_run(golden: Golden, planted: Path, tmp_path: Path) -> None:
    assert rules(golden.folder) == []
    for name in ("compared/a_0", "compared/b_3"):
        assert rules(planted / name) == []
    assert rules(write_control(tmp_path / "walks", falls=False)) == []
    # All responses fill the limit, as answers of a fixed length do, and in the end nearly all of them are right.
    solved = with_metrics(critic__score__mean=lambda step: min(1.0, 0.2 + 0.02 * step), response_length__mean=4.0)
    fixed = write_text(tmp_path / "fixed", steps=60, metrics=solved, limit=3)
    assert RunFolder(fixed).metrics[60]["response_length/clip_ratio"] == 1
    assert RunFolder(fixed).metrics[60]["group/zero_std_fraction"] == 1
    assert rules(fixed) == []
    # Too early to say that it does not rise.
    early = with_metrics(critic__score__mean=0.3, response_length__mean=4.0)
    assert rules(write_text(tmp_path / "early", steps=12, metrics=early, limit=3)) == []
    assert rules(write_text(tmp_path / "slow", steps=60, reward=slow_beginning)) == []
    for seed in range(5):
        assert rules(write_text(tmp_path / str(seed), steps=60, seed=seed)) == []


def test_no_rule_fires_on_recorded_runs_that_learn(tmp_path: Path) -> None:
    """Recipes, and short runs of which those that go wrong have advice."""
    assert len(recipes := recipe_runs.recorded()) == 9
    assert {name: rules(recipe_runs.write(name, tmp_path / name)) for name in recipes} == {name: [] for name in recipes}
    short = recorded_runs.recorded()
    for name, steps in short.items():
        logger = JsonlLogger(RunInfo(tmp_path / name, "planted", name, {}, len(steps)))
        for step, metrics in enumerate(steps, start=1):
            logger.log(step, metrics)
        logger.close()
    assert {"healthy text", "healthy control", "a healthy pendulum"} < short.keys()
    assert {name: fired for name in short if (fired := rules(tmp_path / name))} == {
        "one letter": ["entropy collapsed", "responses are identical"],
        "paid for what is not meant": ["validation falls", "responses are identical"],
        "silence": ["responses are identical"],
        "a blind critic of control": ["critic explains nothing"],
    }

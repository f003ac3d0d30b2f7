"""Each rule fires on a run in which its cause is planted, and on no healthy one."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.golden import Golden
from tests.view.planted import Numbers, healthy, write_text
from tether.view.advice import advise
from tether.view.run import RunFolder


def with_metrics(**values: float | Callable[[int], float]) -> Callable[[int, np.random.Generator], Numbers]:
    def metrics(step: int, rng: np.random.Generator) -> Numbers:
        changed = {key: value(step) if callable(value) else value for key, value in values.items()}
        return healthy(step, rng) | {key.replace("__", "/").replace("%", "@"): value for key, value in changed.items()}

    return metrics


def format_alone(step: int, prompt: int, rng: np.random.Generator) -> tuple[float, Numbers]:
    layout = min(1.0, 0.1 + 0.03 * step)
    return layout, {"format": layout, "acc": 0.1 * float(rng.random() < 0.1)}


def one_prompt(step: int, prompt: int, rng: np.random.Generator) -> tuple[float, Numbers]:
    return (float(rng.integers(0, 2)) if prompt == 5 else 0.0), {}


PLANTED = {
    "responses are cut": {"metrics": with_metrics(response_length__clip_ratio=0.5)},
    "groups without variance": {"metrics": with_metrics(group__zero_std_fraction=0.95)},
    "longer without reward": {
        "metrics": with_metrics(
            response_length__mean=lambda step: 50.0 + 3 * step, critic__score__mean=lambda s: 0.4 + 0.02 * (s % 3)
        )
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
    ("name", "rule"),
    [("fell", "score fell"), ("hacked", "reward part is exploited"), ("critic", "critic explains nothing")],
)
def test_the_questions_have_their_answers(name: str, rule: str, planted: Path) -> None:
    found = {one["rule"]: one for one in advise(RunFolder(planted / name))}
    assert list(found) == [rule]
    expected = {
        "fell": ["at step 60", "actor/lr went from 1e-05 to 0.001 in step 58", "actor/ppo_kl"],
        "hacked": ["'politeness'", "'acc' falls"],
        "critic": ["below 0 in 100 of 100 steps"],
    }
    assert all(words in found[rule]["text"] for words in expected[name])
    if name != "critic":
        assert found[rule]["rows"]


def test_each_rule_fires_on_what_is_planted_and_no_other_does(tmp_path: Path, planted: Path) -> None:
    found = {rule: rules(write_text(tmp_path / rule, steps=60, **how)) for rule, how in PLANTED.items()}
    assert found == {rule: [rule] for rule in PLANTED}
    falls = with_metrics(
        **{"val-core__math__acc__mean%1": lambda step: 0.6 if step < 40 else 0.6 - 0.006 * (step - 40)}
    )
    assert rules(write_text(tmp_path / "falls", metrics=lambda step, rng: falls(step, rng), validates=False)) == [
        "validation falls"
    ]


def test_no_rule_fires_on_a_healthy_run(golden: Golden, planted: Path, tmp_path: Path) -> None:
    assert rules(golden.folder) == []
    for name in ("never", "compared/a_0", "compared/b_3", "robot"):
        assert rules(planted / name) == []
    for seed in range(5):
        assert rules(write_text(tmp_path / str(seed), steps=60, seed=seed)) == []

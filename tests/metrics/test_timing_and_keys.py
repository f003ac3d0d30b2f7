import subprocess
import sys
import time
from pathlib import Path

import pytest

from tether.metrics.keys import METRICS, describe
from tether.metrics.loggers.headline import HEADLINES
from tether.metrics.plot import PANELS
from tether.metrics.timing import Timer, timing_per_token_ms


def test_timer_adds_up_nested_and_repeated_phases() -> None:
    timer = Timer()
    with timer("step"):
        for _ in range(2):
            with timer("gen"):
                time.sleep(0.02)
        with timer("reward"):
            time.sleep(0.01)
    assert set(timer.metrics()) == {"timing_s/step", "timing_s/gen", "timing_s/reward"}
    assert 0.04 <= timer.seconds["gen"] < timer.seconds["step"]
    assert timer.seconds["gen"] + timer.seconds["reward"] <= timer.seconds["step"]


def test_timer_counts_a_phase_that_fails_and_names_the_current_phase() -> None:
    seen: list[str] = []
    timer = Timer(seen.append)
    with timer("step"):
        with pytest.raises(KeyError), timer("gen"):
            raise KeyError
        with timer("reward"):
            pass
    assert "gen" in timer.seconds
    assert seen == ["step", "gen", "step", "reward", "step"]


def test_seconds_move_from_phase_to_phase() -> None:
    timer = Timer()
    timer.seconds = {"gen": 5.0}
    timer.move(2.0, "gen", "reward")
    timer.move(0.5, "gen", "reward")
    assert timer.seconds == {"gen": 2.5, "reward": 2.5}


def test_timing_per_token() -> None:
    seconds = {"gen": 2.0, "update_actor": 3.0, "reward": 1.0}
    per_token = timing_per_token_ms(seconds, num_response_tokens=100, num_tokens=1000)
    assert per_token == {"timing_per_token_ms/gen": 20.0, "timing_per_token_ms/update_actor": 3.0}
    assert timing_per_token_ms(seconds, num_response_tokens=0, num_tokens=1000).keys() == {
        "timing_per_token_ms/update_actor"
    }
    assert all(describe(key) for key in per_token)


def test_keys_are_found_by_name_and_by_template() -> None:
    assert describe("actor/entropy") is METRICS["actor/entropy"]
    assert describe("timing_s/my_phase") is METRICS["timing_s/<phase>"]
    assert describe("val-core/openai/gsm8k/reward/mean@1") is METRICS["val-core/<source>/<variable>/<metric>"]
    assert describe("val-aux/openai/gsm8k/acc/best@4/std") is METRICS["val-aux/<source>/<variable>/best@<n>/<moment>"]
    assert describe("actor/entropy_") is None
    assert all(info.meaning.strip() and "\n" not in info.meaning for info in METRICS.values())


def test_what_is_shown_and_drawn_exists() -> None:
    shown = {key for part in (*HEADLINES, *PANELS) for key in part.keys}
    assert all(describe(key) for key in shown)


def test_importing_metrics_loads_no_logging_library() -> None:
    code = (
        "import sys, tether.metrics.keys, tether.metrics.loggers, tether.metrics.timing, tether.metrics.validation;"
        "heavy = {'torch', 'wandb', 'mlflow', 'tensorboard', 'matplotlib', 'rich'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

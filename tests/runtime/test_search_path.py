"""What files of the user's may import: modules beside them, and packages of the folder that a command starts in."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECK = """
from beside import one
from mine.package import two
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return (one + two) * (solution_str == ground_truth)
"""


def test_a_reward_imports_from_its_folder_and_from_that_of_the_run(tmp_path):
    """In the process of the reward too; neither folder hides what is installed."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "package.py").write_text("two = 2.0")
    (tmp_path / "json.py").write_text("raise AssertionError('in the place of the standard library')")
    rewards = tmp_path / "rewards"
    rewards.mkdir()
    (rewards / "beside.py").write_text("one = 1.0")
    (rewards / "reward.py").write_text(CHECK)
    (tmp_path / "rows.jsonl").write_text(
        '{"data_source": "s", "prompt": "2+2?", "reward_model": {"style": "rule", "ground_truth": "4"}}\n'
    )
    words = ["reward", "check", "data.train_files=rows.jsonl", "custom_reward_function.path=rewards/reward.py"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tether", *words, "actor_rollout_ref.model.path=none", "--samples", "0"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3" in done.stdout

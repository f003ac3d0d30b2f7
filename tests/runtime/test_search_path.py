"""What files of the user's may import: modules beside them, and packages of the folder that a command starts in."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REWARD = """
from beside import one
from mine.package import two
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return one + two
"""
COMMAND = """
import contextlib, sys
from tether.commands.cli import main
from tether.text.rewards.custom import CustomReward
from tether.text.rewards.outcome import RewardRequest
from tether.text.rewards.service.pool import RewardPool

sys.argv = ["tether", "--version"]
with contextlib.suppress(SystemExit):
    main()
with RewardPool(CustomReward("rewards/reward.py"), num_workers=1, timeout=20) as pool:
    print(pool.score([RewardRequest("s", "4", "4")]))
"""


def test_a_reward_imports_from_its_folder_and_from_that_of_the_run(tmp_path):
    """In the process of the reward too; neither folder hides what is installed."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "package.py").write_text("two = 2.0")
    (tmp_path / "json.py").write_text("raise AssertionError('in the place of the standard library')")
    rewards = tmp_path / "rewards"
    rewards.mkdir()
    (rewards / "beside.py").write_text("one = 1.0")
    (rewards / "reward.py").write_text(REWARD)
    paths = [f"{ROOT}/src", *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMAND],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Score(value=3.0" in done.stdout, done.stdout + done.stderr

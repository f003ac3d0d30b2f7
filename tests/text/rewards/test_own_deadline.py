"""A reward function that tries to put off the deadline of its own call."""

from tether.text.rewards.custom import CustomReward
from tether.text.rewards.outcome import RewardError, RewardRequest
from tether.text.rewards.service.pool import RewardPool

HANGS = """
import gc, time
from tether.runtime.channel import Channel

def compute_score(data_source, solution_str, ground_truth, extra_info):
    for channel in [item for item in gc.get_objects() if isinstance(item, Channel)]:
        channel.beat(86_000.0)  # "I am alive, wait a day"
    time.sleep(600)
"""


def test_a_function_cannot_put_off_its_deadline(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(HANGS)
    with RewardPool(CustomReward(str(file)), num_workers=1, timeout=0.5) as pool:
        (outcome,) = pool.score([RewardRequest("test", "text", "1")])
    assert isinstance(outcome, RewardError)
    assert "deadline" in outcome.message

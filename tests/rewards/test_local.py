"""Rewards that are objects of this process, called in the main thread and in that of a sampler ahead."""

import signal
import threading
import time

from tether.rewards.outcome import RewardError, RewardOutcome, RewardRequest, Score
from tether.rewards.service import LocalRewards


def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> float:
    if solution_str == "loops":
        while True:
            time.sleep(0.01)
    if solution_str == "asks for signals":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return 1.0


def outcomes() -> list[RewardOutcome]:
    texts = ("loops", "asks for signals", "is quick")
    with LocalRewards(reward, 0.2) as rewards:
        found = rewards.score([RewardRequest("test", text, "1") for text in texts])
        time.sleep(0.3)  # the deadlines of calls that ended pass by
        return found


def test_a_deadline_ends_calls_in_every_thread() -> None:
    by_thread = {"main": outcomes()}
    thread = threading.Thread(target=lambda: by_thread.update(sampler=outcomes()))
    thread.start()
    thread.join()
    for loops, _, quick in by_thread.values():
        assert isinstance(loops, RewardError)
        assert "not done after 0.2 seconds" in loops.message
        assert isinstance(quick, Score)
    assert isinstance(by_thread["main"][1], Score)
    refused = by_thread["sampler"][1]
    assert isinstance(refused, RewardError)
    assert "put the function into a file (custom_reward_function.path)" in refused.message

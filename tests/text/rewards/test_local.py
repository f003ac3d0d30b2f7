"""Rewards that are objects of this process, called in the main thread and in that of a sampler ahead."""

import random
import signal
import threading
import time

import math_verify

from tether.runtime.global_rng import rng_state
from tether.text.rewards.outcome import RewardError, RewardOutcome, RewardRequest, Score
from tether.text.rewards.service import LocalRewards


def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> float:
    if solution_str == "loops":
        while True:
            time.sleep(0.01)
    if solution_str == "asks for signals":
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    if solution_str == "$2$":
        return float(math_verify.verify(math_verify.parse("$2$"), math_verify.parse(solution_str)))
    return 1.0


def outcomes(*, in_thread: bool = False) -> list[RewardOutcome]:
    texts = ("loops", "asks for signals", "$2$", "is quick")
    with LocalRewards(reward, 0.2, in_thread=in_thread) as rewards:
        result = rewards.score([RewardRequest("test", text, "1") for text in texts])
        time.sleep(0.3)  # the deadlines of calls that ended pass by
        return result


def test_a_deadline_ends_calls_in_every_thread() -> None:
    by_thread = {"main": outcomes(), "own": outcomes(in_thread=True)}
    thread = threading.Thread(target=lambda: by_thread.update(sampler=outcomes()))
    thread.start()
    thread.join()
    for loops, *_, quick in by_thread.values():
        assert isinstance(loops, RewardError)
        assert "not done after 0.2 seconds" in loops.message
        assert isinstance(quick, Score)
    assert all(isinstance(outcome, Score) for outcome in by_thread["main"][1:3])
    for outcome in (*by_thread["own"][1:3], *by_thread["sampler"][1:3]):
        assert isinstance(outcome, RewardError)
        assert "put the function into a file (custom_reward_function.path)" in outcome.message


def test_a_checkpoint_does_not_catch_the_generator_that_a_reward_has_seeded() -> None:
    """A sampler ahead scores in a thread of its own while the run saves its state."""
    begun, state = threading.Event(), random.getstate()

    def slow(data_source: str, solution_str: str, ground_truth: object, extra_info: object) -> float:
        begun.set()
        time.sleep(0.2)
        return random.random()

    rewards = LocalRewards(slow, 10.0)
    sampler = threading.Thread(target=rewards.submit, args=(0, RewardRequest("", "4", "4", {})))
    sampler.start()
    begun.wait()
    assert rng_state()["python"] == state
    sampler.join()
    assert random.getstate() == state
    assert isinstance(rewards.collect()[0], Score)

"""The pool against functions that misbehave, and its promises of order, speed and leaving nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.processes import runs
from tether.text.rewards.custom import CustomReward
from tether.text.rewards.outcome import Abstention, RewardError, RewardFailure, RewardRequest, Score
from tether.text.rewards.service.pool import RewardPool

HOSTILE = Path(__file__).with_name("hostile.py")
ROOT = Path(__file__).resolve().parents[3]
DEADLINE = 1.0
PATIENT = 30.0
"""Where no call hangs: a busy machine may take a second for a good one."""


def ask(what, ground_truth="0.5", **extra_info):
    return RewardRequest("test", what, ground_truth, extra_info)


@pytest.fixture(scope="module")
def pool():
    with RewardPool(CustomReward(str(HOSTILE)), num_workers=2, timeout=PATIENT) as pool:
        yield pool


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


HANGING = {
    "hangs": "deadline of 1 s",
    "hangs_holding_the_interpreter": "deadline of 1 s",
    "ignores_sigterm": "deadline of 1 s",
    "stops_itself": "deadline of 1 s",
    "forks_and_hangs": "deadline of 1 s",
    "returns_what_is_slow_to_read": "deadline of 1 s",
    "leaves_a_thread_with_the_interpreter": "deadline of 1 s",
}
ENDING = {
    "exits_hard": "exit code 7",
    "segfaults": "SIGSEGV",
    "kills_its_group": "SIGKILL",
    "kills_its_guard": "its guard were killed",
    "closes_its_files": "ended with exit code 1",
    "writes_zeros_everywhere": "sent bytes that are no answer",
    "writes_one_byte_everywhere": "sent bytes that are no answer",
}
FAILING = {
    "raises": f"KeyError: 'no such answer' ({HOSTILE} line ",
    "raises_a_group": f"KeyError: 'in a task' ({HOSTILE} line ",
    "raises_unprintable": "Unprintable",
    "exits_politely": "SystemExit: 3",
    "returns_nan": "returned nan",
    "returns_text": "str '0.5'",
    "returns_list": "list [0.0, 1.0]",
    "returns_object": "function",
    "returns_beyond_float32": "1e+39; a score must be finite and fit into float32",
    "returns_beyond_float64": "an integer of 1329 bits; a score must be",
    "returns_too_much": "32 MiB; the limit is 16 MiB",
}


@pytest.mark.parametrize("calls", [HANGING, ENDING, FAILING], ids=["hanging", "ending", "failing"])
def test_a_bad_call_costs_only_its_own_row(pool, calls):
    """Each has a good one before and after it, which a process that it leaves in disorder would spoil."""
    requests = [request for what in calls for request in (ask("right"), ask(what), ask("right", "0.75"))]
    if calls is HANGING:
        with RewardPool(CustomReward(str(HOSTILE)), num_workers=2, timeout=DEADLINE) as pool:
            outcomes = pool.score(requests)
    else:
        outcomes = pool.score(requests)
    assert outcomes[0::3] == [Score(0.5)] * len(calls)
    assert outcomes[2::3] == [Score(0.75)] * len(calls)
    messages = {what: getattr(bad, "message", bad) for what, bad in zip(calls, outcomes[1::3], strict=True)}
    assert {what: message for what, message in messages.items() if calls[what] not in str(message)} == {}
    assert all(isinstance(bad, RewardError) for bad in outcomes[1::3])


def test_odd_calls_are_read_rightly(pool):
    calls = {
        "returns_none": Abstention(),
        "prints": Score(1.0),
        "reads_stdin": Score(0.0),
        "returns_twice": Score(1.0),
        "is_a_coroutine": Score(0.25),
        "forks_what_sigterm_ends": Score(-15.0),
        "huge_output": Score(1.0, {"log": "y" * 5_000_000}),
        "returns_enums": Score(3.0, {"colour": "red", "level": 3, "wide": 2.5, "red": [3]}),
        "returns_long_integer": Score(1.0, {"count": "an integer of 16610 bits"}),
        "returns_surrogate": Score(1.0, {"text": "\ud800"}),
        "returns_most": Score(3.4028234663852886e38),
    }
    outcomes = pool.score([request for what in calls for request in (ask(what), ask("right"), ask(what))])
    assert dict(zip(calls, outcomes[0::3], strict=True)) == calls
    assert outcomes[1::3] == [Score(0.5)] * len(calls)
    assert outcomes[2::3] == outcomes[0::3]


def test_what_a_function_prints_does_not_drive_the_terminal(capfd):
    with RewardPool(CustomReward(str(HOSTILE)), num_workers=1, timeout=PATIENT) as pool:
        assert pool.score([ask("prints_escapes")]) == [Score(1.0)]
    assert capfd.readouterr().err == " [2Jseen\n"  # where all that functions print goes


def test_extra_keys_arrive_as_plain_values():
    with RewardPool(CustomReward(str(HOSTILE)), num_workers=1, timeout=20) as pool:
        (outcome,) = pool.score([ask("returns_extra")])
    assert outcome.value == 0.5
    assert outcome.extra.pop("function").startswith("<function hangs")
    assert outcome.extra == {"acc": True, "pred": "12"}
    assert type(outcome.extra["acc"]) is bool


def test_what_a_call_returns_is_of_exact_types(pool):
    (outcome,) = pool.score([ask("returns_enums")])
    assert type(outcome.value) is float
    assert [type(value) for value in outcome.extra.values()] == [str, int, float, list]
    assert {type(key) for key in outcome.extra} == {str}


@pytest.mark.parametrize("what", ["returns_what_runs_code", "writes_a_pickle_everywhere"])
def test_nothing_that_a_call_returns_runs_in_the_trainer(pool, tmp_path, what):
    mark = tmp_path / "pid"
    (outcome,) = pool.score([ask(what, path=str(mark))])
    assert not mark.exists()
    if what == "returns_what_runs_code":
        assert outcome == Score(1.0, {"path": str(mark), "key": 1})
    else:
        assert "sent bytes that are no answer" in outcome.message


def test_a_result_that_contains_itself_is_cut(pool):
    (outcome,) = pool.score([ask("returns_itself")])
    assert outcome.value == 1.0
    assert outcome.extra["again"]["again"]["again"]["score"] == 1.0


def test_a_traceback_points_into_the_users_file(pool):
    (outcome,) = pool.score([ask("raises")])
    assert "hostile.py" in outcome.traceback
    assert outcome.traceback.rstrip().endswith("KeyError: 'no such answer'")


def test_many_bad_calls_at_once():
    requests = [ask("right", str(i)) for i in range(40)]
    bad = {3: "hangs", 4: "exits_hard", 17: "forks_and_hangs", 18: "ignores_sigterm", 39: "raises"}
    for index, what in bad.items():
        requests[index] = ask(what)
    with RewardPool(CustomReward(str(HOSTILE)), num_workers=2, timeout=3 * DEADLINE) as pool:
        outcomes = pool.score(requests)
    assert {index for index, o in enumerate(outcomes) if isinstance(o, RewardError)} == set(bad)
    assert all(o == Score(float(index)) for index, o in enumerate(outcomes) if index not in bad)


def test_nothing_is_left_of_a_killed_or_finished_call(tmp_path):
    pids = tmp_path / "pids"
    names = ["leaves_daemon", "leaves_daemon_and_hangs", "leaves_daemon_and_exits"]
    others = set(psutil.Process().children(recursive=True))
    with RewardPool(CustomReward(str(HOSTILE)), num_workers=2, timeout=3 * DEADLINE) as pool:
        outcomes = pool.score([ask(name, pids=str(pids)) for name in names])
        assert [type(o) for o in outcomes] == [Score, RewardError, RewardError]
        mine = set(psutil.Process().children(recursive=True)) - others
    assert len(mine) >= 4
    assert len(pids.read_text().split()) == 3
    assert not [pid for pid in map(int, pids.read_text().split()) if runs(pid)]
    assert not list(filter(runs, mine))


def test_children_that_a_call_leaves_behind_end_with_it(pool, tmp_path):
    pids = tmp_path / "pids"
    calls = [ask("leaves_children", pids=str(pids)), ask("counts_children"), ask("leaves_children", pids=str(pids))]
    assert [outcome.value for outcome in pool.score(calls)] == [1.0, 0.0, 1.0]
    assert len(pids.read_text().split()) == 4
    assert not [pid for pid in map(int, pids.read_text().split()) if runs(pid)]


def test_a_process_that_serves_all_calls_is_left_alone(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        "import subprocess\n"
        "server = subprocess.Popen(['sleep', '60'])\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    subprocess.Popen(['sleep', '60'])\n"
        "    return float(server.poll() is None)\n"
    )
    with RewardPool(CustomReward(str(path)), num_workers=1, timeout=5) as pool:
        assert pool.score([ask("one"), ask("two")]) == [Score(1.0), Score(1.0)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "is frozen"])
@pytest.mark.parametrize("which", ["worker", "guard"])
def test_an_idle_process_that_ends_costs_no_row(number, which):
    others = set(psutil.Process().children())
    requests = [ask("right", str(i)) for i in range(5)]
    with RewardPool(CustomReward(str(HOSTILE)), num_workers=1, timeout=3 * DEADLINE) as pool:
        for _ in range(2):
            (guard,) = set(psutil.Process().children()) - others
            (worker,) = guard.children()
            os.kill((worker if which == "worker" else guard).pid, number)
            if number == signal.SIGKILL:
                until(lambda worker=worker: not runs(worker))
            assert pool.score(requests) == [Score(float(i)) for i in range(5)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_every_process_of_the_run_costs_no_row(number):
    """As schedulers send it; the trainer, which it is for, finishes its step."""
    others = set(psutil.Process().children())
    with RewardPool(CustomReward(str(HOSTILE)), num_workers=1, timeout=10) as pool:
        (guard,) = set(psutil.Process().children()) - others
        pool.submit(0, ask("sleeps", "0.5"))
        time.sleep(0.2)
        for process in (guard, *guard.children()):
            process.send_signal(number)
        assert pool.collect() == [Score(1.0)]


def test_a_row_whose_process_always_ends_before_it_begins_is_an_error(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        "import os\n"
        "from tether.runtime.channel import Channel\n"
        "Channel.beat = lambda *_: os._exit(9)\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 1.0\n"
    )
    with RewardPool(CustomReward(str(path)), num_workers=1, timeout=5) as pool:
        (outcome,) = pool.score([ask("one")])
    assert "exit code 9" in outcome.message


@pytest.mark.parametrize("calls", [["right"], ["forks_and_hangs", "leaves_daemon_and_hangs"]])
def test_nothing_is_left_when_the_trainer_is_killed(tmp_path, calls):
    code = f"""
import time
from tether.text.rewards.custom import CustomReward
from tether.text.rewards.outcome import RewardRequest
from tether.text.rewards.service.pool import RewardPool
pool = RewardPool(CustomReward({str(HOSTILE)!r}), num_workers=2, timeout=60)
for index, what in enumerate({calls!r}):
    pool.submit(index, RewardRequest("test", what, "1", {{"pids": {str(tmp_path / "pids")!r}}}))
time.sleep(60)
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    expected = 4 if calls == ["right"] else 10  # two guards, two workers, five forks and a daemon
    try:
        until(lambda: len(psutil.Process(trainer.pid).children(recursive=True)) >= expected, 60)
        below = psutil.Process(trainer.pid).children(recursive=True)
    finally:
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
    until(lambda: not list(filter(runs, below)), 20)


def test_two_workers_score_at_once():
    with RewardPool(CustomReward(str(HOSTILE)), num_workers=2, timeout=20) as pool:
        outcomes = pool.score([ask("says_when", "0.1") for _ in range(8)])
        durations = pool.durations
    spans = [(outcome.extra["begun"], outcome.extra["ended"]) for outcome in outcomes]
    concurrent = [sum(other[0] <= begun < other[1] for other in spans) for begun, _ in spans]
    assert max(concurrent) == 2
    assert all(0.1 <= ended - begun <= seconds for (begun, ended), seconds in zip(spans, durations, strict=True))


def test_cheap_calls_are_cheap():
    """A call of a rule takes far less than a millisecond of processor time in all processes together."""
    requests = [RewardRequest("openai/gsm8k", f"so #### {i}", "7", {}) for i in range(500)]

    def spent() -> float:
        times = [one.cpu_times() for one in (this_process, *this_process.children(recursive=True)) if one not in others]
        return sum(one.user + one.system for one in times)

    this_process = psutil.Process()
    others = this_process.children(recursive=True)
    with RewardPool(num_workers=2, timeout=20) as pool:
        pool.score(requests)
        before = spent()
        outcomes = pool.score(requests)
        assert (spent() - before) / len(requests) < 1e-3
    assert [index for index, outcome in enumerate(outcomes) if outcome == Score(1.0)] == [7]


def test_scoring_overlaps_and_collect_orders_by_index(pool, tmp_path):
    pool.submit(5, ask("touches", path=str(tmp_path / "mark")))
    pool.submit(2, ask("right", "2"))
    pool.submit(9, ask("returns_none"))
    until((tmp_path / "mark").exists)  # while generation goes on
    assert pool.collect() == [Score(2.0), Score(1.0), Abstention()]
    assert pool.collect() == []


@pytest.mark.parametrize("what", ["draws", "orders_a_set"])
def test_results_do_not_depend_on_the_number_of_workers(what):
    requests = [ask(what, str(i)) for i in range(12)]
    results = []
    for num_workers in (1, 3):
        with RewardPool(CustomReward(str(HOSTILE)), num_workers=num_workers, timeout=5) as pool:
            results.append(pool.score(requests))
    assert results[0] == results[1]
    assert all(isinstance(outcome, Score) for outcome in results[0])


def test_reward_kwargs_reach_the_function():
    with RewardPool(CustomReward(str(HOSTILE), reward_kwargs={"bonus": 2}), num_workers=1, timeout=5) as pool:
        assert pool.score([ask("right")]) == [Score(2.5)]


def test_an_unknown_source_is_an_error_of_its_row():
    with RewardPool(num_workers=1, timeout=5) as pool:
        bad, good = pool.score([ask("right"), RewardRequest("openai/gsm8k", "#### 1", "1", {})])
    assert "data_source 'test'" in bad.message
    assert good == Score(1.0)


def test_a_function_that_cannot_be_loaded_stops_the_start(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def compute_score(:\n    pass\n")
    with pytest.raises(ValueError, match=r"reward.py, line 1: "):
        RewardPool(CustomReward(str(path)), num_workers=2, timeout=5)
    path.write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(ValueError, match=r"deadline of 0\.7 s"):
        RewardPool(CustomReward(str(path)), num_workers=1, timeout=5, startup_timeout=0.7)
    path.write_text("import os\nos._exit(4)\n")
    with pytest.raises(ValueError, match="exit code 4"):
        RewardPool(CustomReward(str(path)), num_workers=1, timeout=5)


def test_a_worker_that_cannot_start_again_ends_the_run(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        "import os\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n    os._exit(1)\n"
    )
    with RewardPool(CustomReward(str(path)), num_workers=1, timeout=5) as pool:
        path.write_text("nonsense nonsense")
        with pytest.raises(RewardFailure, match=r"reward.py, line 1"):
            pool.score([ask("anything")])


def test_close_ends_a_running_call_at_once():
    pool = RewardPool(CustomReward(str(HOSTILE)), num_workers=1, timeout=60)
    pool.submit(0, ask("hangs"))
    time.sleep(0.3)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 20  # of 60


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_for_a_call(number):
    code = f"""
from tether.runtime import interrupt
from tether.text.rewards.custom import CustomReward
from tether.text.rewards.outcome import RewardRequest
from tether.text.rewards.service.pool import RewardPool
interrupt.GRACE_SECONDS = 0.2
with interrupt.graceful_interrupt(), RewardPool(CustomReward({str(HOSTILE)!r}), num_workers=1, timeout=600) as pool:
    pool.submit(0, RewardRequest("test", "hangs", "1", {{}}))
    print("waits", flush=True)
    pool.collect()
print("resumes from here")
"""
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert trainer.stdout.readline() == "waits\n"
        below = psutil.Process(trainer.pid).children(recursive=True)
        trainer.send_signal(number)
        out, err = trainer.communicate(timeout=20)
    finally:
        trainer.kill()
        trainer.wait()
    assert trainer.returncode == 0
    assert out == "resumes from here\n"
    assert f"{number.name}: a process gave no answer" in err
    assert len(below) == 2
    until(lambda: not list(filter(runs, below)), 20)


def test_workers_load_no_torch():
    modules = "tether.text.rewards.service.worker, tether.text.rewards.service.pool, tether.text.rewards.outcome"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"

"""Promise 4 from the call to the update: reward functions that do all that they can, in a whole training step.

`test_rewards_never_silent` goes on from the scores; tests/text/rewards/test_pool.py has each bad call by itself.
"""

import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
import torch

from tests.runs.tiny_run import base_overrides, rows, write_inputs, write_jsonl
from tether.batch import TrainBatch, filled
from tether.config import load_config
from tether.text.build import build_run
from tether.text.rewards.custom import CustomReward
from tether.text.rewards.outcome import RewardFailure, RewardRequest, Score
from tether.text.rewards.service.pool import RewardPool

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 1.0  # enough for a call that does not hang, on a machine with other work too
N = 3
ERRORS = ("raises", "exits_hard", "ignores_sigterm", "leaves_daemon_and_hangs", "forks_and_hangs", "returns_nan")
ABSTAINS = ("returns_none",)
FINE = ("leaves_daemon",)  # a score, and a process that should not outlive the call
DOES = (*ERRORS, *ABSTAINS, *FINE, "")
REWARD = """
from tests.text.rewards import hostile

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["does"] and len(solution_str) % 4:  # in some groups there are responses that it scores all the same
        return getattr(hostile, extra_info["does"])(ground_truth, extra_info)
    return sum(c.isalpha() for c in solution_str) / 8
"""


# --- processes, by listing ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Marked:
    """A mark in the environment, which every process inherits, however it is started and whoever adopts it."""

    name: str
    value: str

    def processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_on(process)]

    def _is_on(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(self.name) == self.value
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # ended meanwhile, a zombie, or somebody else's
            return False


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Marked]:
    mark = Marked("TETHER_TEST_MARK", uuid4().hex)
    monkeypatch.setenv(mark.name, mark.value)
    yield mark
    for process in mark.processes():
        process.kill()


def test_a_process_that_terminate_does_not_reach_would_show(mark: Marked, tmp_path: Path) -> None:
    """The negative control: a pool that ends a late call by SIGTERM leaves its daemons (UniRL #462, verl #5839)."""
    code = f"""
import multiprocessing
from tests.text.rewards import hostile
call = multiprocessing.Process(target=hostile.leaves_daemon_and_hangs, args=(None, {{"pids": {str(tmp_path / "p")!r}}}))
call.start()
call.join({DEADLINE})
call.terminate()
call.join()
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=20)
    assert len(mark.processes()) == 1


# --- one step -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    (folder / "reward.py").write_text(REWARD)
    return folder


def overrides(inputs: Path, run: Path, does: Sequence[str], max_error_rate: float) -> list[str]:
    """One prompt for each thing that the reward function does."""
    records = rows(count=len(does))
    for record, what in zip(records, does, strict=True):
        record["extra_info"] |= {"does": what, "pids": str(run.parent / "pids")}
    return [
        *base_overrides(inputs, run),
        f"data.train_files={write_jsonl(run.parent / 'train.jsonl', records)}",
        f"data.train_batch_size={len(does)}",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.rollout.n={N}",
        f"reward_model.timeout={DEADLINE}",
        f"reward_model.max_error_rate={max_error_rate}",
        "reward_model.num_workers=2",
    ]


def test_a_step_goes_on_without_the_rows_that_failed(inputs: Path, tmp_path: Path, mark: Marked) -> None:
    run = build_run(load_config(None, overrides(inputs, tmp_path / "run", DOES, max_error_rate=1.0)))
    trainer, seen = run.trainer, []
    estimate = trainer.estimate_advantages
    trainer.estimate_advantages = lambda batch: (estimate(batch), seen.append(batch.clone()))[0]
    prompts = [trainer.source.dataset[row] for row in range(len(DOES))]
    assert mark.processes()
    begun = time.monotonic()
    metrics = trainer.step(prompts)
    assert time.monotonic() - begun < 60 * DEADLINE  # a call that hangs would take for ever
    run.close()
    assert mark.processes() == []

    (batch,) = seen
    responses = zip(batch.response_ids, batch.response_length.tolist(), strict=True)
    texts = [trainer.rollouts.tokenizer.decode(ids[:length], skip_special_tokens=True) for ids, length in responses]
    did = [DOES[row // N] if len(text) % 4 else "" for row, text in enumerate(texts)]
    assert set(did) == set(DOES)
    failed, abstained = sum(what in ERRORS for what in did), sum(what in ABSTAINS for what in did)
    assert metrics["reward/error_rate"] == failed / len(batch)
    assert metrics["reward/abstain_rate"] == abstained / len(batch)
    assert metrics["reward/excluded_rows"] == failed + abstained
    scores = torch.tensor([score_of(what, text) for what, text in zip(did, texts, strict=True)])
    assert batch.scored.equal(~scores.isnan())
    torch.testing.assert_close(filled(batch.advantages), grpo_by_hand(batch, scores), rtol=1e-4, atol=1e-5)
    without_errors = torch.where(scores.isnan(), 0.0, scores)
    silent = grpo_by_hand(batch, without_errors) * batch.scored[:, None]
    assert not torch.allclose(filled(batch.advantages), silent, atol=1e-2), "an error taken for a 0 would show"


def score_of(what: str, text: str) -> float:
    if what in (*ERRORS, *ABSTAINS):
        return math.nan
    return 1.0 if what in FINE else sum(c.isalpha() for c in text) / 8


def grpo_by_hand(batch: TrainBatch, scores: torch.Tensor) -> torch.Tensor:
    """Group by group, with the scores that there are."""
    advantages = torch.zeros_like(filled(batch.advantages))
    for group in batch.uid.unique():
        members = (batch.uid == group) & ~scores.isnan()
        found = scores[members]
        centred, scale = (found - found.mean(), found.std()) if len(found) > 1 else (found, torch.tensor(1.0))
        advantages[members] = (centred / (scale + 1e-6))[:, None] * batch.response_mask[members]
    return advantages


def test_above_the_set_rate_the_run_stops_and_shows_why(inputs: Path, tmp_path: Path, mark: Marked) -> None:
    run = build_run(load_config(None, overrides(inputs, tmp_path / "run", 2 * DOES[-4:], max_error_rate=0.1)))
    try:
        with pytest.raises(RewardFailure) as caught:
            run.trainer.fit()
    finally:
        run.close()
    message = str(caught.value)
    assert "rewards failed" in message
    assert "the limit is 10.0%" in message
    assert message.count("\nrow ") == 3
    assert message.count("  ground truth: ") == message.count("  response") == 3
    assert run.trainer.step_number == 0
    assert mark.processes() == []


# --- the bug of a peer --------------------------------------------------------------------------------------------


def scored_under_an_alarm(function: Callable[[], float]) -> float:
    """How verl ended calls that take too long (#5635)."""
    try:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(1)
        return function()
    except Exception:  # noqa: BLE001  this is the bug
        return 0.0


def in_a_thread(call: Callable[[], object]) -> object:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_an_alarm_beside_a_swallowed_exception_would_show() -> None:
    """The negative control: outside the main thread there are no signals, and the right answer gets 0."""
    assert in_a_thread(lambda: scored_under_an_alarm(lambda: 1.0)) == 0.0
    hostile = CustomReward(str(ROOT / "tests" / "text" / "rewards" / "hostile.py"))
    request = RewardRequest("test", "a right answer", "1.0")
    with RewardPool(hostile, num_workers=1, timeout=DEADLINE) as pool:
        assert in_a_thread(lambda: pool.score([request])) == [Score(1.0)]

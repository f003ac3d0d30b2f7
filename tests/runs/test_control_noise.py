"""Promise 7 for control: the noise of a step follows from seed and step alone, and no two steps share it."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("gymnasium")

from tests.runs.loops import Control
from tether.control.collecting.collector import EnvCollector


def noises(folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[torch.Tensor]:
    """The noise that each of three steps acts with."""
    seen, collect = [], EnvCollector.collect

    def watch(self, act, noise, seeds=()):
        seen.append(noise.clone())
        return collect(self, act, noise, seeds)

    with monkeypatch.context() as patch:
        patch.setattr(EnvCollector, "collect", watch)
        loop = Control()
        loop.train(loop.overrides(folder, "trainer.test_freq=-1", "trainer.save_freq=-1", *more), until=3)
    return seen


def test_noise_follows_from_seed_and_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other weights, from another learning rate, have the same noise."""
    first = noises(tmp_path / "a", monkeypatch)
    other_policy = noises(tmp_path / "b", monkeypatch, "actor_rollout_ref.actor.optim.lr=0.1")
    other_seed = noises(tmp_path / "c", monkeypatch, "trainer.seed=7")
    assert len(first) == 3
    assert all(map(torch.equal, first, other_policy))
    for noise, other in zip([*first, *first[1:], first[2]], [*other_seed, *first[:-1], first[0]], strict=True):
        assert (noise != other).float().mean() > 0.99

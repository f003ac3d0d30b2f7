"""A checkpoint of an earlier release resumes, and ends as that release ended it.

`earlier_release.tar.xz` has PPO with a critic on text, and CartPole, of November 28, 2026, before the source moved to
`src/`: checkpoints of step 2 of 4, and the weights of step 4. A release replaces it by one of the release before: run
both with `trainer.total_training_steps=4 trainer.save_freq=2`, and keep those files.
"""

import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tether.commands.build import build
from tether.config import load_config
from tether.metrics.loggers.jsonl import read_metrics


@pytest.mark.parametrize(("kind", "parts"), [("text", ("actor/model", "critic/model")), ("control", ("actor/policy",))])
def test_a_checkpoint_of_an_earlier_release_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, parts: tuple[str, ...]
) -> None:
    with tarfile.open(Path(__file__).with_name("earlier_release.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    start = Path(kind) / "global_step_2"
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={start}"]
    run = build(load_config(start / "run.yaml", [*resume, "trainer.default_local_dir=resumed"]))
    run.trainer.fit()
    run.close()
    assert min(read_metrics(tmp_path / "resumed")) > 2
    for part in parts:
        started, ended, expected = (
            load_file(folder / f"{part}.safetensors")
            for folder in (start, Path("resumed/global_step_4"), Path(f"{kind}-ended"))
        )
        for name, value in expected.items():
            # Another machine rounds otherwise; a lost state of an optimizer would move weights by a learning rate.
            torch.testing.assert_close(ended[name], value, rtol=0, atol=1e-5)
            assert not torch.equal(value, started[name])

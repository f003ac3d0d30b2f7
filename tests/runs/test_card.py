"""`tether card`: the README of a checkpoint says what a run did, and the checkpoint stays whole."""

import re
import shutil
from pathlib import Path

import pytest

from tests.runs.golden import STEPS, Golden


def test_the_readme_of_a_checkpoint(golden: Golden, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    from tether.checkpoints import find_checkpoint
    from tether.commands.card import write_card
    from tether.commands.result import read_result
    from tether.config import load_config
    from tether.config.keys import values_of
    from tether.loop.checkpoint import model_fingerprint

    run = Path(shutil.copytree(golden.folder, tmp_path / "run"))
    result = read_result(run, step=STEPS, total_steps=STEPS)
    before = model_fingerprint(run / f"global_step_{STEPS}" / "actor")
    readme = write_card(run)
    assert readme == run / f"global_step_{STEPS}" / "actor" / "README.md"
    assert (readme.parent / "curve.png").stat().st_size > 1000

    # The front matter is what the hub reads; the score is that of the last evaluation.
    card = ModelCard.load(readme)
    (measured,) = card.data.eval_results
    assert (measured.metric_name, measured.metric_value) == (result.score, pytest.approx(result.last_score, abs=1e-6))
    text = card.data.pipeline_tag == "text-generation"
    assert card.data.library_name == ("transformers" if text else "tether")
    assert f"| {STEPS} | {result.last_score:.4g} |" in card.text
    assert "](curve.png)" in card.text

    # Its settings give the run again.
    (settings,) = re.findall(r"```yaml\n(.*?)```", card.text, re.DOTALL)
    (file := tmp_path / "run.yaml").write_text(settings)
    saved, again = (values_of(load_config(path, []).config) for path in (readme.parents[1] / "run.yaml", file))
    machine = ("trainer.default_local_dir", "trainer.device", "trainer.resume")
    assert {key for key in saved if saved[key] != again[key] and not key.startswith(machine)} == set()

    # It is a page beside the checkpoint: that is whole, and the same model. Anything else that comes later is refused.
    assert find_checkpoint(run) == readme.parents[1]
    assert model_fingerprint(readme.parent) == before
    with pytest.raises(ValueError, match="exists already"):
        write_card(run)
    (readme.parent / "extra.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"extra.safetensors: not part of the checkpoint"):
        find_checkpoint(run)

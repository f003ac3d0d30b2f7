"""No causal class of transformers is sampled differently without being refused."""

import pytest

from benchmarks.model_classes import main


def test_a_class_that_fits_and_one_that_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "Qwen3ForCausal"]) == 0
    assert main(["--only", "GPTJ"]) == 0
    fits, _, refused, _ = capsys.readouterr().out.splitlines()
    assert "same tokens" in fits
    assert "refused" in refused
    assert "without its context" in refused


@pytest.mark.slow
def test_no_class_is_sampled_differently(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    *rows, counts = capsys.readouterr().out.splitlines()
    assert sum("same tokens" in row for row in rows) >= 60, counts

import sys
from pathlib import Path

import pytest

from tether.metrics.loggers import LOGGERS, build_loggers
from tether.metrics.loggers.jsonl import read_metrics
from tether.metrics.loggers.protocol import RunInfo


def run_in(folder: Path) -> RunInfo:
    return RunInfo(folder, "project", "experiment", {})


@pytest.mark.parametrize("names", ["console", ["console"], [], ["jsonl"], ["file", "console"]])
def test_jsonl_is_always_on_and_once(tmp_path: Path, names: str | list[str], capsys: pytest.CaptureFixture) -> None:
    loggers = build_loggers(names, run_in(tmp_path))
    loggers.phase("gen", 1, 2)
    loggers.log(1, {"critic/score/mean": 0.5})
    loggers.log_samples(1, [])
    loggers.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    assert read_metrics(tmp_path) == {1: {"critic/score/mean": 0.5}}
    assert ("step:1 - critic/score/mean:0.500" in capsys.readouterr().out) == ("console" in names)


def test_unknown_name_gives_the_nearest_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer\.logger: unknown logger 'wandbb'\. Did you mean wandb\?"):
        build_loggers(["console", "wandbb"], run_in(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"Choose among them\. Loggers: console, jsonl"):
        build_loggers("xyz", run_in(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_missing_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what Python does for a module that must not be found
    monkeypatch.delitem(sys.modules, "tether.metrics.loggers.wandb", raising=False)
    with pytest.raises(ValueError, match=r"pip install .*\[wandb\]'"):
        build_loggers(["wandb"], run_in(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_every_logger_has_a_module() -> None:
    package = Path(__file__).resolve().parents[3] / "src/tether/metrics" / "loggers"
    for name, target in LOGGERS.items():
        module, class_name = target.split(":")
        source = (package / f"{module.rpartition('.')[2]}.py").read_text()
        assert f"class {class_name}:" in source, name

"""``trainer.logger=FILE.py:NAME``: it gets every step, and what cannot work is refused at start."""

import json
from pathlib import Path

import pytest

from tests.runs.loops import Control
from tests.runs.tiny_run import base_overrides, write_inputs
from tether.config import ConfigError, load_config
from tether.metrics.loggers import build_loggers
from tether.metrics.loggers.jsonl import read_metrics
from tether.metrics.loggers.protocol import RunInfo, Sample
from tether.text.input_checks import missing_inputs

MINE = '''
import json


class Lines:
    """The returns of all steps, as one file."""

    def __init__(self, run):
        self.path, self.steps = run.directory / f"{run.experiment}.json", {}

    def log(self, step, metrics):
        self.steps.setdefault(step, {}).update(metrics)
        self.path.write_text(json.dumps(self.steps))


class Everything(Lines):
    def __init__(self, run):
        super().__init__(run)
        self.told = []

    def log_samples(self, step, samples):
        self.told.append([sample.response for sample in samples])

    def warn(self, message):
        self.told.append(message)

    def close(self):
        self.path.write_text(json.dumps(self.told))


class Silent:
    def __init__(self, run):
        pass


class NoRun:
    def log(self, step, metrics):
        pass


class OneArgument(Lines):
    def log(self, metrics):
        pass


class Samples(Lines):
    def log_samples(self, samples):
        pass


NUMBER = 3
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_a_run_logs_to_it(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    given = ["trainer.total_training_steps=2", f"trainer.logger=[file,'{file}:Lines']", "trainer.experiment_name=own"]
    folder = Control().train(Control().overrides(tmp_path / "run", *given)).directory
    found = {int(step): metrics for step, metrics in json.loads((folder / "own.json").read_text()).items()}
    assert found == read_metrics(folder)


def test_what_it_has_is_called_and_what_it_lacks_is_not_missed(file: Path, tmp_path: Path) -> None:
    run = RunInfo(tmp_path, "p", "everything", {})
    both = build_loggers([f"{file}:Everything", f"{file}:Lines"], run)
    both.warn("careful")
    both.phase("gen", 1, 2)
    both.log_samples(1, [Sample(0, "s", "1+1?", "2", 1.0)])
    both.log(1, {"actor/lr": 0.5})
    both.close()
    assert json.loads((tmp_path / "everything.json").read_text()) == ["careful", ["2"]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Line", r"defines no Line. Did you mean Lines\?"),
        ("NUMBER", r"is a int; expected a class with log\(step, metrics\)"),
        ("Silent", r"has no method log\(step, metrics\)"),
        ("NoRun", r"NoRun\(.*\) is called with \(run\)"),
        ("OneArgument", r"log\(self, metrics\) is called with \(step, metrics\)"),
        ("Samples", r"log_samples\(self, samples\) is called with \(step, samples\)"),
    ],
)
def test_one_that_does_not_work_is_refused_before_any_file_is_written(
    file: Path, name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"trainer.logger={file}:{name}: .*{message}"):
        build_loggers(["console", f"{file}:{name}"], RunInfo(tmp_path / "run", "p", "e", {}))
    assert not (tmp_path / "run").exists()


def test_a_misspelt_name_is_found_with_the_configuration(file: Path, tmp_path: Path) -> None:
    base = base_overrides(write_inputs(tmp_path), tmp_path / "run")
    config = load_config(None, [*base, f"trainer.logger='{file}:Line'"]).config
    assert ["Did you mean Lines?" in problem.what for problem in missing_inputs(config)] == [True]
    with pytest.raises(ConfigError, match=r"trainer\.logger: .*consol"):
        load_config(None, [*base, "trainer.logger=consol"])

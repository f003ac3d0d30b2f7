"""Recorded runs of recipes that learn what they should, in `recipe_runs.json`: no rule of the advice may fire on them.

`python -m tests.view.recipe_runs NAME=FOLDER ...` prints the rules that fire on runs, and records their metrics.
"""

import json
import sys
from functools import reduce
from pathlib import Path
from typing import Any

from tether.metrics.loggers.jsonl import JsonlLogger
from tether.metrics.loggers.protocol import RunInfo
from tether.view.advice import advise
from tether.view.run import RunFolder

FILE = Path(__file__).with_suffix(".json")


class Reading(RunFolder):
    """A run that notes which metrics and settings are read of it."""

    def __init__(self, folder: Path) -> None:
        self.read: set[str] = set()
        self.settings: dict[str, Any] = {}
        super().__init__(folder)

    def series(self, key: str) -> dict[int, float]:
        self.read.add(key)
        return super().series(key)

    def setting(self, path: str) -> Any:
        self.settings[path] = super().setting(path)
        return self.settings[path]


def recorded() -> dict[str, Any]:
    """Return the configuration and the metrics by step of each run."""
    return json.loads(FILE.read_text())  # type: ignore[no-any-return]


def write(name: str, folder: Path) -> Path:
    """Write a recorded run to a folder, as the run wrote it, without samples."""
    run, config = recorded()[name], dict[str, Any]()
    for path, value in run["settings"].items():
        *sections, last = path.split(".")
        reduce(lambda section, key: section.setdefault(key, {}), sections, config)[last] = value
    logger = JsonlLogger(RunInfo(folder, "recipes", name, config, len(run["steps"])))
    for at, step in enumerate(run["steps"]):
        values = {key: column[at] for key, column in run["metrics"].items()}
        logger.log(step, {key: value for key, value in values.items() if value is not None})
    logger.close()
    return folder


def of_run(folder: Path) -> dict[str, Any]:
    """Return what the rules read of the metrics of a run, to four digits, and of its settings."""
    run = Reading(folder)
    print(folder, [found["rule"] for found in advise(run)])
    steps = sorted(step for step in run.metrics if step)
    metrics = {key: [rounded(run.metrics[step].get(key)) for step in steps] for key in run.keys if key in run.read}
    return {"settings": run.settings, "steps": steps, "metrics": metrics}


def rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def main(arguments: list[str]) -> None:
    """Record runs, each as NAME=FOLDER."""
    runs = recorded() if FILE.exists() else {}
    for name, _, folder in (argument.partition("=") for argument in arguments):
        runs[name] = of_run(Path(folder))
    blocks = []
    for name, run in sorted(runs.items()):
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in run.items() if key != "metrics"]
        metrics = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in run["metrics"].items())
        blocks.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + f',\n "metrics": {{\n{metrics}}}}}')
    FILE.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

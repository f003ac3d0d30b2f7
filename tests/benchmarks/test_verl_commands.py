"""The count of verl's commands: a call resolves or has its first problem in the table, and the page says the same."""

import json
from pathlib import Path

import pytest

from benchmarks.resumable import ROOT
from benchmarks.verl_commands import BEGIN, END, check_all, counts, reasons

SOUND = ["data.train_files=a.parquet", "data.val_files=b.parquet", "actor_rollout_ref.model.path=m"]


def _write(folder: Path, tree: str, *calls: list[str]) -> None:
    lines = [json.dumps({"script": f"run_{index}.sh", "args": args}) for index, args in enumerate(calls)]
    (folder / f"commands_{tree}.jsonl").write_text("\n".join(lines))


def test_each_call_resolves_or_is_counted_under_its_first_problem(tmp_path: Path) -> None:
    preset = ["--config-path=config", "--config-name=ppo_trainer.yaml"]
    npu, images = "trainer.device=npu", "+data.image_key=images"
    _write(tmp_path, "new", [*preset, *SOUND, images], [*SOUND, npu], [*SOUND, npu], [*SOUND, npu, "a.b=1"])
    _write(tmp_path, "old", SOUND, ["--config-path", "/nowhere", "--config-name", "mine", *SOUND])
    trees = check_all(tmp_path)
    assert counts(trees)[2:] == ["| new | 4 | 1 | 1 |", "| old | 2 | 1 | 0 |"]
    table = reasons(trees)
    assert table[0] == "| key | new | old | why (of the first) |"
    assert table[2].startswith("| trainer.device | 2 | 0 | 'npu' is not one of auto, cpu")
    assert {row.rpartition(" | ")[0] for row in table[3:]} == {"| --config-name | 0 | 1", "| a.b | 1 | 0"}


def test_a_folder_without_recorded_calls_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \.jsonl is in it"):
        check_all(tmp_path)


@pytest.mark.slow
def test_the_page_has_the_counts_of_the_recorded_calls(test_data: Path) -> None:
    trees = check_all(test_data / "verl_commands")
    page = (ROOT / "docs/guides/coming-from-verl.md").read_text(encoding="utf-8")
    shown = page.partition(f"{BEGIN}\n\n")[2].partition(f"\n{END}")[0]
    assert shown == "\n".join([*counts(trees), "", *reasons(trees)])

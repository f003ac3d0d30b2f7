"""Promise 5: what is wrong with a configuration is refused by name, all at once, before anything heavy is imported."""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from tests.config.loading import BASE
from tether.config import ConfigError, load_config
from tether.config.keys import keys
from tether.config.problems import Problem

ROOT = Path(__file__).resolve().parents[2]
MAX_SECONDS = 2.0


def slips(path: str, at: int) -> Iterator[str]:
    """A letter left out, two neighbours swapped, a letter mistyped."""
    yield path[:at] + path[at + 1 :]
    yield path[:at] + path[at : at + 2][::-1] + path[at + 2 :]
    yield path[:at] + ("q" if path[at] != "q" else "z") + path[at + 1 :]


def one_letter_typos(slips_a_key: int) -> dict[str, str]:
    """Typo -> the key that was meant, of each kind at places drawn anywhere in the dotted path; without other keys."""
    places = random.Random(0)
    typos = {
        typo: path
        for path in keys()
        for at in places.sample(range(len(path)), slips_a_key)
        for typo in slips(path, at)
        if typo not in keys()
    }
    assert len(typos) > 2.5 * slips_a_key * len(keys())
    return typos


def distance(one: str, other: str) -> int:
    """Letters to add, leave out, replace or swap with a neighbour (optimal string alignment)."""
    rows = [list(range(len(other) + 1))]
    for i, a in enumerate(one, start=1):
        row = [i]
        for j, b in enumerate(other, start=1):
            best = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and b == one[i - 2]:
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]


def problems_of(file: Path) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as error:
        load_config(file, [])
    return {problem.path: problem for problem in error.value.problems}


@pytest.mark.parametrize("slips_a_key", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_every_typo_is_refused_with_the_key_that_was_meant(slips_a_key: int, tmp_path: Path) -> None:
    typos = one_letter_typos(slips_a_key)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(dict.fromkeys(typos, 1)))
    problems = problems_of(file)
    wrong = {}
    for typo, meant in typos.items():
        found = problems[typo].fix.removeprefix("did you mean ").removesuffix("?")
        # As near as the key itself is right, too: nobody can tell which was meant.
        if found != meant and (found not in keys() or distance(typo, found) > 1):
            wrong[typo] = (meant, found)
    assert wrong == {}


def test_a_grammar_that_takes_any_new_key_would_show() -> None:
    """The negative control: with Hydra's `+key=value`, verl takes a typo for a new key and says nothing."""
    taken = OmegaConf.create({"algorithm": {"gamma": 1.0}})
    OmegaConf.update(taken, "algorithm.gama", 0.9, force_add=True)
    assert taken.algorithm == {"gamma": 1.0, "gama": 0.9}
    with pytest.raises(ConfigError, match=r"algorithm.gama: unknown key. did you mean algorithm.gamma\?"):
        load_config(None, [*BASE, "+algorithm.gama=0.9"])


WRONG = {
    "algorithm.gemma": "0.9",
    "algorithm.lam": "high",
    "trainer.esi_redundant_time": "2",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "2048",
    "actor_rollout_ref.rollout.response_length": "8",
    "actor_rollout_ref.rollout.val_kwargs.n": "4",
    "critic.enable": "False",
    "trainer.critic_warmup": "5",
    "trainer.resume_mode": "resume_path",
    "data.custom_cls.name": "Mine",
    "data.train_max_samples": "0",
}
"""A typo, a wrong type, a refused value, then contradictions; the key that a message begins with, if it is another."""
MISSING = {"data.train_files", "data.val_files", "actor_rollout_ref.model.path"}
"""Files of `BASE` that are missing: reported in the same round."""
NAMED = (
    WRONG.keys() - {"trainer.resume_mode", "data.custom_cls.name"}
    | MISSING
    | {
        "trainer.resume_from_path",
        "data.custom_cls.path",
    }
)


@pytest.mark.parametrize("command", [["config", "check"], ["train"]])
def test_all_problems_come_at_once_in_two_seconds_and_without_torch(command: list[str]) -> None:
    code = """
import resource, sys
from tether.commands.cli import main
try:
    main()
except SystemExit as end:
    code = end.code
used = resource.getrusage(resource.RUSAGE_SELF)
print(code, 'torch' in sys.modules, used.ru_utime + used.ru_stime)
"""
    arguments = [*command, *BASE, *(f"{key}={value}" for key, value in WRONG.items())]
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    exit_code, has_torch, seconds = ended.stdout.split()
    assert {line.split(": ")[0] for line in ended.stderr.splitlines()} == NAMED
    assert (exit_code, has_torch) == ("2", "False")
    assert float(seconds) < MAX_SECONDS, "of the processor, which other programs do not change"

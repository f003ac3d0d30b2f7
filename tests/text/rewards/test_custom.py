import os
import sys
from functools import partial

import pytest

from tether.text.rewards.custom import load_reward_function

GOOD = """def compute_score(data_source, solution_str, ground_truth, extra_info, scale=1):
    return scale * len(solution_str)
"""
CALL = {"data_source": "s", "solution_str": "abc", "ground_truth": None, "extra_info": {}}


@pytest.fixture
def reward(tmp_path):
    def load(text, name="compute_score", **reward_kwargs):
        path = tmp_path / "reward.py"
        path.write_text(text)
        return load_reward_function(path, name, reward_kwargs)

    return load


def test_a_good_file(reward):
    assert reward(GOOD)(**CALL) == 3
    assert reward(GOOD, scale=2)(**CALL) == 6
    assert reward("def f(**kwargs):\n    return sorted(kwargs)", "f")(**CALL) == sorted(CALL)
    assert isinstance(reward("class F:\n    def __call__(self, **kw): ...\nf = F()", "f"), partial)


def test_a_change_within_a_second_is_read(tmp_path, monkeypatch):
    """Also one that keeps the size, where Python would take the bytecode of before."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for factor in ("1", "2"):
        (tmp_path / "reward.py").write_text(GOOD.replace("scale *", f"{factor} *"))
        os.utime(tmp_path / "reward.py", (1e9, 1e9))
        assert load_reward_function(tmp_path / "reward.py", "compute_score", {})(**CALL) == 3 * int(factor)
    assert [file.name for file in tmp_path.iterdir()] == ["reward.py"]


def test_a_dataclass_in_the_file_works(reward):
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
        + GOOD
    )
    assert reward(text)(**CALL) == 3


@pytest.mark.parametrize(
    ("text", "name", "problem"),
    [
        ("x = 1\ndef compute_score(:\n", "compute_score", r"reward\.py, line 2: invalid syntax"),
        ("import no_such_module\n", "compute_score", "importing the file failed.*No module named 'no_such_module'"),
        ("import sys\nsys.exit(0)", "compute_score", r"importing the file failed.*line 2.*SystemExit: 0"),
        ("1 / 0", "compute_score", r"importing the file failed.*line 1.*ZeroDivisionError"),
        (GOOD, "compute_scores", "no such function. Did you mean compute_score. It has: compute_score$"),
        ("", "compute_score", "It has: no function at all"),
        ("compute_score = 3", "compute_score", "defines it as int"),
        ("def compute_score(text, answer): ...", "compute_score", r"compute_score\(text, answer\).*missing a required"),
        ("def compute_score(data_source, solution_str, ground_truth): ...", "compute_score", "extra_info"),
    ],
)
def test_what_is_wrong_is_said_once(reward, text, name, problem):
    with pytest.raises(ValueError, match=f"(?s)custom_reward_function.*{problem}"):
        reward(text, name)


def test_reward_kwargs_must_fit(reward):
    with pytest.raises(ValueError, match="unexpected keyword argument 'scael'"):
        reward(GOOD, scael=2)
    with pytest.raises(ValueError, match="reward_kwargs: ground_truth comes from the row"):
        reward(GOOD, ground_truth=2)


def test_paths_that_are_no_python_file(tmp_path):
    with pytest.raises(ValueError, match=r"path=.*no\.py: no such file"):
        load_reward_function(tmp_path / "no.py", "compute_score", {})
    with pytest.raises(ValueError, match="is a folder"):
        load_reward_function(tmp_path, "compute_score", {})
    text = tmp_path / "reward.txt"
    text.write_text(GOOD)
    with pytest.raises(ValueError, match=r"must end in \.py"):
        load_reward_function(text, "compute_score", {})

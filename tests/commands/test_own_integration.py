"""A package of somebody else's adds a reward and a section of the configuration, by the entry point group."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tether.config import ConfigError, Section, integration_config, load_config
from tether.integrations import installed
from tether.text.rewards.build import build_rewards
from tether.text.rewards.outcome import RewardRequest, Score

PAGE = Path(__file__).parents[2] / "docs/guides/integrations.md"
RUN = ["data.train_files=rows.parquet", "actor_rollout_ref.model.path=model"]
PART = "reward_model.parts.luck={kind: coins, weight: 0.5}"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the package of the page as pip does: its modules, and a dist-info folder with its entry points."""
    files = dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL))
    (project,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (name, value), info = re.findall(r'^(\w+) = "(\w+)"$', project, re.MULTILINE)[-1], tmp_path / "coins-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: coins\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tether.integrations]\n{name} = {value}\n")
    for file, code in {f"{value}/__init__.py": "", **files}.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    installed.cache_clear()
    yield
    installed.cache_clear()


@pytest.mark.usefixtures("package")
def test_its_reward_scores_with_the_keys_of_its_section() -> None:
    config = load_config(None, [*RUN, PART, "integrations.coins.bonus=4"]).config
    assert isinstance(integration_config(config.integrations, "coins"), Section)
    with build_rewards(config) as rewards:
        outcomes = rewards.score([RewardRequest("coins", text, "heads") for text in ("heads", "tails")])
    assert [outcome.value for outcome in outcomes if isinstance(outcome, Score)] == [2.0, 0.0]
    with build_rewards(load_config(None, [*RUN, PART]).config) as rewards:  # its default
        assert rewards.score([RewardRequest("coins", "heads", "heads")])[0] == Score(0.5, {"luck": 1.0})


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        ([PART, "integrations.coins.bonis=4"], "integrations.coins.bonis", "bonus"),
        ([PART, "integrations.coins.bonus=many"], "integrations.coins.bonus", "'many'"),
        ([PART, "integrations.coins.bonus=-1"], "integrations.coins.bonus", "set it above 0"),
        (["integrations.coins.bonus=4"], "integrations.coins", "nothing in this run uses it"),
        ([PART, "integrations.dice.sides=6"], "integrations.dice", "coins"),
        (["reward_model.parts.luck={kind: coin}"], "reward_model.parts.luck.kind", "Did you mean coins?"),
        ([f"{PART[:-1]}, bonus: 4}}"], "reward_model.parts.luck.bonus", "no such key"),
    ],
)
def test_a_mistake_in_its_section_is_named_before_anything_loads(overrides: list[str], key: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [*RUN, *overrides])
    (problem,) = error.value.problems
    assert problem.path == key
    assert said in str(problem)


def test_a_package_that_is_not_installed_is_named() -> None:
    installed.cache_clear()
    with pytest.raises(ConfigError, match=r"integrations\.coins: no installed package has this integration"):
        load_config(None, [*RUN, "integrations.coins.bonus=4"])

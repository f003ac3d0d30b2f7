"""`tether config import-rlinf`: a native file that loads, and a listing of every key."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from tests.integrations.rlinf.recipes import RECIPES, write_recipe
from tether.commands.cli import app
from tether.config import ConfigError, load_config

PAGE = str(Path(__file__).parent / "page_embodied.yaml")


def run(*arguments):
    return CliRunner().invoke(app, ["config", "import-rlinf", *arguments])


def test_the_printed_file_is_the_same_run(tmp_path):
    said = run(PAGE, "runner.max_epochs=3", "--out", str(tmp_path / "native.yaml"))
    assert said.exit_code == 0, said
    native = load_config(tmp_path / "native.yaml", [])
    assert native.config == load_config(Path(PAGE), ["runner.max_epochs=3"]).config
    assert native.notes == ()
    assert "  lam: 0.95  # algorithm.gae_lambda\n" in (tmp_path / "native.yaml").read_text()
    assert "not supported" not in said.stderr


def test_every_key_is_listed(tmp_path):
    said = run(str(write_recipe(tmp_path, "maniskill_ppo_mlp_vlm_trend_reward")), "algorithm.gamma=2")
    assert said.exit_code == 0
    listing = said.stderr
    headings = [line.split(" (")[0] for line in listing.splitlines() if line and not line.startswith(" ")]
    summary = "1 key is not supported, listed at the end: training is refused until it is removed"
    assert headings == [summary, "mapped", "defaulted", "no effect", "not supported", "still to be set before it runs"]
    assert said.stdout.startswith(f"# {summary}\n")
    assert "  algorithm.gae_lambda=0.9  -> algorithm.lam=0.9\n" in listing
    assert "  actor.model.obs_dim=42  (the environment's spaces say so)\n" in listing
    assert "  env.eval.video_cfg.save_video=True  -> env.eval.video_cfg.save_video=True\n" in listing
    assert "  reward.use_reward_model=True  (learned rewards of images are not supported yet" in listing
    assert "  algorithm.gamma: 2 is not a number from 0 to 1. the default is" in listing
    assert "algorithm:\n" in said.stdout


def test_the_advice_on_a_simulator_that_is_not_translated_leads_to_a_file(tmp_path):
    page = tmp_path / "page.yaml"
    page.write_text(Path(PAGE).read_text().replace("env_type: gymnasium", "env_type: metaworld"))
    advice = "give env.train.env_type=metaworld env.train.id=TASK with the file"
    with pytest.raises(ConfigError, match=advice):
        load_config(page, [])
    overrides = [word.replace("TASK", "MT50") for word in advice.split() if "=" in word]
    said = run(str(page), *overrides, "--out", str(tmp_path / "native.yaml"))
    assert said.exit_code == 0, said.exception
    native = load_config(tmp_path / "native.yaml", [])
    assert native.config == load_config(page, overrides).config
    assert (native.config.env.train.env_type, native.config.env.eval.env_type) == ("metaworld", "metaworld")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([PAGE, "policy.hidden_dim=3"], "policy.hidden_dim: is no key of RLinf's"),
        ([PAGE, "actor.nonsense=3"], "actor.nonsense: unknown key of RLinf"),
        (["recipes/quickstart/run.yaml"], "is not a file of RLinf's"),
        (["nowhere.yaml"], "cannot be read"),
        (["algorithm.gamma=1"], "names no YAML file"),
    ],
)
def test_what_cannot_be_translated(arguments, says, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[3])
    error = run(*arguments).exception
    assert isinstance(error, ConfigError)
    assert says in str(error)


def test_what_is_refused_stays_refused_in_the_written_file(tmp_path):
    recipe = write_recipe(tmp_path, "maniskill_ppo_mlp_resnet_reward")
    native = tmp_path / "native.yaml"
    assert run(str(recipe), "--out", str(native)).exit_code == 0
    with pytest.raises(ConfigError) as error:
        load_config(native, [])
    (problem,) = error.value.problems
    assert problem.path == "not_supported.reward.use_reward_model"
    assert "learned rewards of images are not supported yet" in str(problem)
    assert "take the line out of native.yaml" in problem.fix
    native.write_text(native.read_text().replace("  reward.use_reward_model: ", "  # "))
    assert load_config(native, []).config.env.train.id == "PickCube-v1"


def test_what_a_written_file_refuses_is_freed_on_the_command_line(tmp_path):
    recipe = write_recipe(tmp_path, "maniskill_ppo_mlp_resnet_reward")
    native = tmp_path / "native.yaml"
    assert run(str(recipe), "--out", str(native)).exit_code == 0
    (problem,) = problems_of(native)
    freed = "~not_supported.reward.use_reward_model"
    assert freed in problem.fix
    for override in (freed, "~not_supported"):
        assert load_config(native, [override, "env.train.id=Other-v1"]).config.env.train.id == "Other-v1"
    assert {found.path for found in problems_of(native, "~not_supported.reward.use")} == {
        "not_supported.reward.use_reward_model",
        "not_supported.reward.use",
    }


GR00T = """
runner: {task_type: embodied}
env: {train: {env_type: gymnasium, id: Pendulum-v1, total_num_envs: 8, max_steps_per_rollout_epoch: 40}}
actor: {model: {model_type: gr00t, model_path: /models/gr00t, precision: "32"}}
"""


def test_a_refused_policy_that_is_freed_becomes_no_other_one(tmp_path):
    file, native = tmp_path / "run.yaml", tmp_path / "native.yaml"
    file.write_text(GR00T)
    assert run(str(file), "--out", str(native)).exit_code == 0
    freed = "~not_supported.actor.model.model_type"
    (problem,) = problems_of(native, freed)
    assert problem.path == "policy.model_type"
    assert "still to be given" in problem.what
    assert "tether config explain policy.model_type" in problem.fix
    chosen = load_config(native, [freed, "policy.model_type=mlp_policy", "~actor_rollout_ref.model.path"])
    assert chosen.config.policy.model_type == "mlp_policy"
    assert [problem.path for problem in problems_of(file)] == ["actor.model.model_type"]
    assert [problem.path for problem in problems_of(file, "~actor.model.model_type")] == ["policy.model_type"]


@pytest.mark.parametrize(
    ("text", "open_key"),
    [
        ("env: {eval: {env_type: libero}}\nalgorithm: {loss_type: actor_critic}", "env.eval.env_type"),
        ("runner: {}\nenv: {train: {env_type: libero, id: CartPole-v1}}", "env.train.env_type"),
        ("runner: {task_type: embodied}\nalgorithm: {adv_type: opd}", "algorithm.adv_estimator"),
        ("runner: {task_type: reasoning}\nalgorithm: {adv_type: opd}", "algorithm.adv_estimator"),
        (
            "runner: {task_type: reasoning}\nalgorithm: {loss_type: sac}",
            "actor_rollout_ref.actor.policy_loss.loss_mode",
        ),
        ("runner: {task_type: reasoning}\nreward: {reward_type: vqa}", "data.data_source"),
        ("runner: {task_type: reasoning}\nreward: {use_reward_model: true}", "reward_model.enable"),
        (
            "runner: {task_type: embodied}\nactor: {optim: {lr_scheduler: wave}}",
            "actor_rollout_ref.actor.optim.lr_scheduler_type",
        ),
    ],
)
def test_what_a_refused_value_would_set_is_left_open(tmp_path, text, open_key):
    file, native = tmp_path / "run.yaml", tmp_path / "native.yaml"
    file.write_text(text)
    assert run(str(file), "--out", str(native)).exit_code == 0
    assert OmegaConf.is_missing(
        OmegaConf.select(OmegaConf.load(native), open_key.rpartition(".")[0]), open_key.rpartition(".")[2]
    )
    assert open_key in {problem.path for problem in problems_of(native, "~not_supported")}


@pytest.mark.parametrize("name", RECIPES)
def test_a_written_recipe_is_refused_for_the_same_keys(tmp_path, name):
    recipe, native = write_recipe(tmp_path, name), tmp_path / "native.yaml"
    assert run(str(recipe), "--out", str(native)).exit_code == 0
    refused = {f"not_supported.{key}" for key in RECIPES[name][2]}
    found = set() if not refused else {problem.path for problem in problems_of(native)}
    assert {path for path in found if path.startswith("not_supported.")} == refused
    assert not {path for path in found if path.startswith(("data.", "actor_rollout_ref.model.path"))}


def problems_of(file, *overrides):
    with pytest.raises(ConfigError) as error:
        load_config(file, overrides)
    return error.value.problems


def test_refusals_are_named_beside_unknown_keys(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("env: {train: {env_type: libero}}\nactor: {nonsense: 1}\n")
    error = run(str(file)).exception
    assert isinstance(error, ConfigError)
    assert [problem.path for problem in error.problems] == ["env.train.env_type", "actor.nonsense"]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ValueError, match="cannot be written"):
        CliRunner().invoke(app, ["config", "import-rlinf", PAGE, "-o", str(tmp_path)], catch_exceptions=False)
    assert run(PAGE, "-o", str(tmp_path / "new" / "native.yaml")).exit_code == 0
    assert (tmp_path / "new" / "native.yaml").exists()


def test_a_file_that_was_edited_is_not_written_over(tmp_path):
    native = tmp_path / "native.yaml"
    for _ in range(2):  # what it would write anyway is no loss
        assert run(PAGE, "-o", str(native)).exit_code == 0
    edited = native.read_text() + "# mine\n"
    native.write_text(edited)
    refused = run(PAGE, "-o", str(native)).exception
    assert isinstance(refused, ValueError)
    assert str(refused) == (f"--out {native}: exists already with other content. Name a new file, or delete this one")
    assert native.read_text() == edited

"""Files and overrides: grammar, precedence, interpolation, inheritance, second names, types, reloading."""

import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import ValidationError

from tests.config.loading import load, problems_of
from tether.config import ConfigError, load_config
from tether.config.keys import values_of
from tether.config.loading.overrides import parse_overrides
from tether.config.render import to_yaml

ROOT = Path(__file__).resolve().parents[2]
ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
MICRO, MICRO_PER_GPU = f"{ACTOR}.ppo_micro_batch_size", f"{ACTOR}.ppo_micro_batch_size_per_gpu"


@pytest.fixture
def write(tmp_path):
    def write_yaml(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write_yaml


# Grammar


@pytest.mark.parametrize(
    "text",
    [
        """trainer.logger='["console","wandb"]'""",
        "trainer.logger=['console','wandb']",
        "trainer.logger=[console,wandb]",
        """trainer.logger=["console","wandb"]""",
        "+trainer.logger=[console,wandb]",
        "++trainer.logger=[console,wandb]",
        "trainer={logger: [console, wandb]}",
    ],
)
def test_every_way_to_write_a_list(text):
    assert load(text).config.trainer.logger == ("console", "wandb")


@pytest.mark.parametrize(
    "text", ["trainer.logger=console", """trainer.logger="console\"""", "trainer.logger='console'"]
)
def test_one_name_is_a_list_of_one(text):
    assert load(text).config.trainer.logger == ("console",)


def test_files_may_be_a_list_inside_a_string():
    config = load("""data.train_files="['a.parquet', 'b.parquet']\"""").config
    assert config.data.train_files == ("a.parquet", "b.parquet")


def test_numbers():
    config = load(f"{ACTOR}.optim.lr=1e-6", "critic.optim.lr=1", "algorithm.lam=0.95").config
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert config.critic.optim.lr == 1.0
    assert config.algorithm.lam == 0.95


def test_a_name_may_look_like_a_number():
    config = load("trainer.experiment_name=20250101").config
    assert config.trainer.default_local_dir == "checkpoints/tether/20250101"


def test_the_last_override_wins():
    assert load("trainer.seed=2", "trainer.seed=3").config.trainer.seed == 3


def test_deleting_goes_back_to_the_default(write):
    path = write("trainer: {seed: 5, total_epochs: 2}\nalgorithm: {lam: 0.9, gamma: 0.5}")
    config = load("~trainer.seed", "~algorithm", path=path).config
    assert (config.trainer.seed, config.trainer.total_epochs) == (1, 2)
    assert (config.algorithm.lam, config.algorithm.gamma) == (1.0, 1.0)


def test_a_mapping_takes_any_names(write):
    path = write("data: {apply_chat_template_kwargs: {a: 1, b: {c: 2}}}")
    kwargs = "data.apply_chat_template_kwargs"
    config = load(f"+{kwargs}.enable_thinking=False", f"{kwargs}.b.d=3", f"~{kwargs}.a", path=path).config
    assert config.data.apply_chat_template_kwargs == {"b": {"c": 2, "d": 3}, "enable_thinking": False}


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ("trainer.seed", "trainer.seed", "an override is key=value, +key=value, ++key=value or ~key"),
        (" ", "' '", "an override is key=value"),
        ("--config-name=x", "--config-name=x", "an override is key=value"),
        ("trainer.seed=1,2", "trainer.seed=1,2", "asks for several runs. give one value; a list is written [a,b]"),
        ("trainer@x.seed=1", "trainer@x.seed=1", "names a package with @"),
        (
            "data.train_files=reasoning_gym:sums?n=3",
            "data.train_files=reasoning_gym:sums?n=3",
            """quote the value, inside quotes for the shell: 'data.train_files="reasoning_gym:sums?n=3"'""",
        ),
        ("critic=null", "critic", "is a section, which cannot be null. see `tether config explain critic`"),
        ("~trainer.sed", "trainer.sed", "unknown key. did you mean trainer.seed?"),
    ],
)
def test_an_unreadable_override_says_how_to_write_it(text, path, message):
    problems = problems_of(text)
    assert list(problems) == [path]
    assert message in problems[path]


def test_the_quoted_value_of_a_hint_is_the_one_that_was_meant():
    for value in ('it\'s "odd" x', 'a\\b \\"c', "a b {"):
        _, problems = parse_overrides([f"trainer.experiment_name={value}"])
        again = shlex.split(str(problems[0]).partition("for the shell: ")[2])
        assert parse_overrides(again)[0][0].value == value


def test_a_problem_is_told_once():
    assert list(problems_of("+algorithm.bogus=1", "~algorithm.bogus")) == ["algorithm.bogus"]


def test_what_the_message_proposes_works():
    assert load("""data.train_files="reasoning_gym:sums?n=3\"""").config.data.train_files == ("reasoning_gym:sums?n=3",)


# Files


def test_a_file_alone(write):
    path = write("data: {train_files: a}\nactor_rollout_ref: {model: {path: m}}\ncritic:\ntrainer: {seed: 1_000}")
    loaded = load_config(path, [])
    assert loaded.config.trainer.seed == 1000
    assert loaded.sources["trainer.seed"] == "run.yaml"
    assert loaded.sources["trainer.total_epochs"] == "default"


def test_a_file_gives_a_free_mapping_as_one(write):
    key = "ray_kwargs.ray_init.num_cpus"
    assert problems_of(path=write(f"{key}: 2"))[key] == (
        f"{key}: is a part of ray_kwargs.ray_init, which a file gives as one mapping. "
        f"write it below ray_kwargs.ray_init, or give {key}=2 in the command"
    )
    assert load(f"{key}=2", path=write("ray_kwargs.ray_init: {num_gpus: 0}")).config.ray_kwargs.ray_init == {
        "num_gpus": 0,
        "num_cpus": 2,
    }


def test_the_command_line_goes_over_the_file(write):
    loaded = load("trainer.seed=3", path=write("trainer: {seed: 2, total_epochs: 4}"))
    assert (loaded.config.trainer.seed, loaded.config.trainer.total_epochs) == (3, 4)
    assert loaded.sources["trainer.seed"] == "command line"
    assert loaded.sources["trainer.total_epochs"] == "run.yaml"


def test_marks_of_printed_verl_configs_are_passed_over(write):
    path = write("algorithm: {_target_: verl.AlgoConfig, gamma: 0.9}\nactor_rollout_ref: {rollout: {name: '???'}}")
    config = load(path=path).config
    assert (config.actor_rollout_ref.rollout.name, config.algorithm.gamma) == ("native", 0.9)


def test_a_value_still_to_be_given_is_an_error(write):
    path = write("algorithm: {lam: '???', gamma: 0.9}")
    assert list(problems_of(path=path)) == ["algorithm.lam"]
    assert "tether config explain algorithm.lam" in problems_of(path=path)["algorithm.lam"]
    assert load("algorithm.lam=0.9", path=path).config.algorithm.lam == 0.9
    assert list(problems_of("algorithm.lam='???'")) == ["algorithm.lam"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "cannot be read as YAML (while parsing a flow node"),
        ("trainer:\n  seed: 1\n  seed: 2", "found duplicate key seed"),
        ("42", "cannot be read"),
        ("- a\n- b", "holds a list, not keys. write key: value lines"),
        ("trainer: {seed: '${'}", "no viable alternative"),
    ],
)
def test_an_unreadable_file_is_named_once(write, text, message):
    path = write(text)
    problems = problems_of(path=path)
    assert list(problems) == [str(path)]
    assert message in problems[str(path)]


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "nope.yaml"
    assert problems_of(path=path) == {
        str(path): f"{path}: cannot be read (No such file or directory). give a YAML file"
    }


def test_sections_of_hydra_itself_are_turned_away(write):
    problems = problems_of("defaults=x", path=write("hydra: {run: {dir: x}, searchpath: [y]}"))
    assert list(problems) == ["hydra.run.dir", "defaults"]


@pytest.mark.parametrize("text", ["0E0", "1e5", "-1e3", "+1_0e-3", "1e+07"])
def test_text_that_looks_like_a_number_stays_text_when_saved(write, text):
    saved = load(f"trainer.project_name='{text}'").to_yaml()
    assert load_config(write(saved), []).config.trainer.project_name == text


# Interpolation


def test_interpolation_sees_defaults_inheritance_and_the_environment(write, monkeypatch):
    monkeypatch.setenv("TETHER_TEST_DIR", "/data")
    path = write(
        "data: {train_files: '${oc.env:TETHER_TEST_DIR}/a.parquet', max_prompt_length: 64}\n"
        "actor_rollout_ref: {model: {path: m}}\n"
        "trainer: {seed: '${actor_rollout_ref.rollout.prompt_length}', experiment_name: 'lr${critic.optim.lr}'}"
    )
    config = load_config(path, ["data.max_response_length=${data.max_prompt_length}"]).config
    assert config.data.train_files == ("/data/a.parquet",)
    assert config.trainer.seed == config.data.max_response_length == 64
    assert config.trainer.experiment_name == "lr1e-05"


def test_interpolation_sees_a_value_given_under_its_second_name():
    config = load(f"{MICRO}=2", f"critic.ppo_micro_batch_size_per_gpu=${{{MICRO_PER_GPU}}}").config
    assert config.critic.ppo_micro_batch_size_per_gpu == 2


@pytest.mark.parametrize(
    "value", ["${trainer.nope}", "${oc.env:TETHER_NO_SUCH_VARIABLE}", "${trainer.seed}", "${nope:1}", "'${'"]
)
def test_interpolation_that_leads_nowhere(value):
    problems = problems_of(f"trainer.seed={value}")
    assert list(problems) == ["trainer.seed"]
    assert "does not resolve" in problems["trainer.seed"] or "cannot be read" in problems["trainer.seed"]


# Inheritance


def test_clip_ratio_reaches_both_sides():
    actor = load(f"{ACTOR}.clip_ratio=0.3", f"{ACTOR}.clip_ratio_high=0.4").config.actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.3, 0.4)


@pytest.mark.parametrize("value", ["null", "${trainer.total_training_steps}"])
def test_null_leaves_a_key_to_its_inheritance(value):
    loaded = load(f"{ACTOR}.clip_ratio=0.3", "data.seed=null", "trainer.seed=7", f"critic.ppo_epochs={value}")
    assert loaded.config.data.seed == 7
    assert loaded.config.critic.ppo_epochs == 1
    assert loaded.sources["data.seed"] == "inherits trainer.seed"


def test_the_critic_follows_the_actor_where_it_is_silent():
    config = load(
        f"{ACTOR}.ppo_mini_batch_size=32",
        f"{ACTOR}.ppo_epochs=3",
        f"{ACTOR}.use_dynamic_bsz=True",
        f"{ACTOR}.shuffle=True",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum",
        "critic.ppo_epochs=2",
        "critic.ppo_max_token_len_per_gpu=512",
    ).config
    critic = config.critic
    assert (critic.ppo_mini_batch_size, critic.ppo_epochs, critic.use_dynamic_bsz, critic.shuffle) == (
        32,
        2,
        True,
        True,
    )
    assert critic.loss_agg_mode == "seq-mean-token-sum"
    assert critic.forward_max_token_len_per_gpu == 512
    assert (critic.model.path, critic.model.use_remove_padding) == ("m", False)
    assert critic.optim.lr == 1e-5


@pytest.mark.parametrize(("estimator", "critic"), [("gae", True), ("grpo", False), ("rloo", False)])
def test_only_gae_has_a_critic(estimator, critic):
    config = load(f"algorithm.adv_estimator={estimator}", f"{ROLLOUT}.n=4").config
    assert config.critic.enable is critic


# Two names of one quantity


def test_a_second_name_moves_to_the_key():
    loaded = load(f"{MICRO}=2", f"{ACTOR}.grad_clip=0.5", "actor_rollout_ref.model.custom_chat_template='{{ T }}'")
    actor = loaded.config.actor_rollout_ref.actor
    assert (actor.ppo_micro_batch_size_per_gpu, actor.ppo_micro_batch_size) == (2, None)
    assert (actor.optim.clip_grad, actor.grad_clip) == (0.5, None)
    assert loaded.config.data.chat_template == "{{ T }}"
    assert loaded.sources[MICRO_PER_GPU] == f"command line, as {MICRO}"
    assert loaded.notes == ()


@pytest.mark.parametrize(("first", "second", "size"), [(MICRO, MICRO_PER_GPU, 4), (MICRO_PER_GPU, MICRO, 4)])
def test_the_later_of_two_names_counts_and_is_noted(first, second, size):
    loaded = load(f"{first}=2", f"{second}=4")
    assert loaded.config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == size
    assert loaded.notes == (f"{second}=4 counts, being later than its other name {first}=2",)


def test_a_name_taken_back_does_not_count():
    assert load(f"{MICRO_PER_GPU}=4", f"{MICRO}=2", f"{MICRO}=null").config.actor_rollout_ref.actor == (
        load(f"{MICRO_PER_GPU}=4").config.actor_rollout_ref.actor
    )


def test_two_names_in_one_file_contradict_each_other(write):
    path = write("actor_rollout_ref: {actor: {ppo_micro_batch_size: 2, ppo_micro_batch_size_per_gpu: 4}}")
    assert problems_of(path=path) == {
        MICRO: f"{MICRO}: 2 contradicts {MICRO_PER_GPU}=4 given in the same place; both name one quantity. "
        f"keep {MICRO_PER_GPU}"
    }


def test_the_command_line_settles_what_a_file_says_twice(write):
    path = write("actor_rollout_ref: {actor: {ppo_micro_batch_size: 2, ppo_micro_batch_size_per_gpu: 4}}")
    assert load(f"{MICRO}=3", path=path).config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 3


def test_no_micro_batch_size_is_fine():
    config = load(f"{MICRO_PER_GPU}=null").config
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 8
    assert config.critic.ppo_micro_batch_size_per_gpu == 8


# Types


MISTYPED = [
    ("trainer.seed=x", "trainer.seed: 'x' is not a whole number from 0 to 2**63 - 1. the default is 1"),
    ("trainer.seed=1.0", "trainer.seed: 1.0 is not a whole number from 0 to 2**63 - 1. the default is 1"),
    ("data.shuffle=1", "data.shuffle: 1 is not true or false. the default is True"),
    ("data.shuffle=null", "data.shuffle: None is not true or false. the default is True"),
    ("data.prompt_key=3", """data.prompt_key: 3 is not a string. put it in quotes: 'data.prompt_key="3"'"""),
    (
        "data.truncation=middel",
        "data.truncation: 'middel' is not one of error, left, right, middle. did you mean middle?",
    ),
    (f"{ACTOR}.clip_ratio_c=1", f"{ACTOR}.clip_ratio_c: 1 is not a number above 1 or null. the default is 3.0"),
    (f"{ACTOR}.optim.lr=-1", f"{ACTOR}.optim.lr: -1 is not a number, 0 or above. the default is 1e-06"),
    (
        f"{ACTOR}.optim.betas=[0.9]",
        f"{ACTOR}.optim.betas: [0.9] is not a list of two numbers, from 0 to below 1. the default is [0.9,0.999]",
    ),
    (
        f"{ROLLOUT}.top_p=1.5",
        f"{ROLLOUT}.top_p: 1.5 is not a number above 0, at most 1",
    ),
    (f"{ROLLOUT}.top_p=0", f"{ROLLOUT}.top_p: 0 is not a number above 0, at most 1"),
    (f"{ROLLOUT}.temperature=0", f"{ROLLOUT}.temperature: 0 is not a number above 0"),
    ("trainer.total_training_steps=0", "trainer.total_training_steps: 0 is not a whole number above 0 or null"),
    ("data.train_batch_size=-4", "data.train_batch_size: -4 is not a whole number above 0. the default is 1024"),
    (
        "actor_rollout_ref.rollout.max_staleness=0",
        "actor_rollout_ref.rollout.max_staleness: 0 is not a whole number above 0. the default is 1",
    ),
    ("critic.ppo_epochs=0", "critic.ppo_epochs: 0 is not a whole number above 0. leave it out to inherit"),
    ("data.val_files='[a,{b]'", "data.val_files: '[a,{b]' is not a string or a list of strings. the default is []"),
    (f"{MICRO}=x", f"{MICRO}: 'x' is not a whole number above 0"),
    ("algorithm.gamma=nan", "algorithm.gamma: nan is not a number from 0 to 1"),
    ("trainer.resume_mode=yes", "trainer.resume_mode: 'yes' is not one of auto, disable, resume_path"),
]


@pytest.mark.parametrize("half", [MISTYPED[::2], MISTYPED[1::2]], ids=["even", "odd"])
def test_values_of_the_wrong_type(half):
    problems = problems_of(*(override for override, _ in half))
    assert len(problems) == len(half)
    for override, message in half:
        assert problems[override.split("=")[0]].startswith(message)


def test_what_only_inherits_a_bad_value_is_not_named():
    assert list(problems_of(f"{ACTOR}.ppo_epochs=x")) == [f"{ACTOR}.ppo_epochs"]


def test_required_keys():
    problems = problems_of(base=[])
    assert problems == {
        "data.train_files": "data.train_files: missing, and there is no default. "
        "give it, for example data.train_files=data/gsm8k/train.parquet",
        "actor_rollout_ref.model.path": "actor_rollout_ref.model.path: missing, and there is no default. "
        "give it, for example actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct",
    }


def test_everything_at_once():
    problems = problems_of(
        "trainer.loger=x",
        "trainer.seed=x",
        "trainer.logger=1,2",
        "trainer.esi_redundant_time=2",
        "algorithm.adv_estimator=grpo_passk",
        "data.prompt_key=${nope}",
        "trainer.resume_mode=resume_path",
        base=["actor_rollout_ref.model.path=m"],
    )
    assert set(problems) == {
        "trainer.loger",
        "trainer.seed",
        "trainer.logger=1,2",
        "trainer.esi_redundant_time",
        f"{ROLLOUT}.n",
        "data.prompt_key",
        "trainer.resume_from_path",
        "data.train_files",
    }


def test_the_config_is_frozen():
    config = load().config
    with pytest.raises(ValidationError):
        config.trainer.seed = 3


# Saving and loading again


def test_saved_and_loaded_again_it_is_the_same(write):
    first = load(
        f"{MICRO}=2",
        f"{ACTOR}.clip_ratio=0.3",
        "critic.ppo_epochs=2",
        f"{ROLLOUT}.scheduling_policy=lifo",
        "data.apply_chat_template_kwargs={enable_thinking: false}",
        "data.chat_template='{% for m in messages %}\\${m}: \"x\"{% endfor %}'",
        "trainer.logger=[console,wandb]",
    )
    again = load_config(write(first.to_yaml()), [])
    assert again.config == first.config
    assert "scheduling_policy" not in first.to_yaml()  # nothing reads it
    assert "megatron" not in first.to_yaml()


def test_the_tree_is_complete_and_loads_to_the_same(write):
    first = load(f"{ACTOR}.clip_ratio=0.3", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2")
    tree = first.tree()
    assert tree["critic"]["enable"] is False
    assert tree["actor_rollout_ref"]["actor"]["clip_ratio_high"] == 0.3
    assert load_config(write(yaml.safe_dump(tree)), []).config == first.config


def test_a_saved_config_still_passes_changes_on(write):
    path = write(load(f"{ACTOR}.clip_ratio=0.3", "trainer.experiment_name=a").to_yaml())
    again = load_config(path, [f"{ACTOR}.clip_ratio=0.1", "trainer.experiment_name=b"]).config
    assert again.actor_rollout_ref.actor.clip_ratio_low == 0.1
    assert again.trainer.default_local_dir == "checkpoints/tether/b"


@pytest.fixture(scope="module")
def default():
    return load()


@settings(deadline=None, max_examples=20)
@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.text("\\${}ab'\" #:\n\x85é"))
@example("\x85")
@example("two\n\nlines ${x} \\${y}")
def test_any_text_survives_saving(default, text):
    path, mapping = "data.chat_template", "data.apply_chat_template_kwargs"
    values = values_of(default.config) | {path: text, mapping: {"a": [text, 1]}}
    saved = to_yaml(values, default.sources | {path: "command line", mapping: "command line"})
    data = OmegaConf.to_container(OmegaConf.create(saved), resolve=True)["data"]
    assert data["chat_template"] == text
    assert data["apply_chat_template_kwargs"] == {"a": [text, 1]}
    assert len(saved.split("\n")) == len(default.to_yaml().split("\n"))


# Cost


def test_errors_come_before_torch_and_in_two_seconds():
    code = (
        "import sys\n"
        "from tether.config import ConfigError, load_config\n"
        "try: load_config(None, ['trainer.loger=x', 'trainer.seed=x'])\n"
        "except ConfigError as error: print(error)\n"
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    seconds, text = run(code)
    assert len(text.splitlines()) == 4
    assert "did you mean trainer.logger?" in text
    if seconds >= 2:  # too busy a machine to tell by the clock: compare with its libraries alone, a third of it at rest
        assert seconds < 8 * run("import pydantic.main, omegaconf, hydra.core.override_parser.overrides_parser")[0]


def run(code):
    """Run code in a fresh process; returns its CPU seconds and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def test_a_bad_call_raises_one_kind_of_error():
    with pytest.raises(ConfigError):
        load_config(None, ["x"])

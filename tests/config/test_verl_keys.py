"""verl's own configuration: every key of it is known, and what it prints as its defaults loads."""

import math
from pathlib import Path
from pprint import pformat

import pytest
import torch
import yaml
from typer.testing import CliRunner

from tests.config.loading import BASE, load, problems_of
from tether.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from tether.commands.cli import app
from tether.config import ConfigError, explain, load_config
from tether.config.keys import keys, values_of
from tether.config.loading.interpolation import nest
from tether.config.loading.yaml_file import read_yaml
from tether.config.schema.algorithm import WITHOUT_PEERS
from tether.config.support.verl_keys import is_unread_section, renamed, unread_keys

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL, CORRECTION = "actor_rollout_ref.model", "algorithm.rollout_correction"


@pytest.fixture(scope="module")
def defaults():
    """verl's own configuration: dotted key -> value."""
    return yaml.safe_load(Path(__file__).with_name("verl_defaults.yaml").read_text(encoding="utf-8"))


def printed(folder: Path, values) -> Path:
    """Values as verl prints its configuration: `pprint` of a nested dict."""
    path = folder / "printed.txt"
    path.write_text(pformat(nest(values)))
    return path


def test_every_key_of_verl_is_known(defaults, tmp_path):
    values = {name: "x" if value is None else value for name, value in defaults.items()}
    with pytest.raises(ConfigError) as error:
        load(path=printed(tmp_path, values))
    assert [str(problem) for problem in error.value.problems if problem.what == "unknown key"] == []


def test_what_a_run_of_verl_prints_at_its_start_loads(defaults, tmp_path):
    """Also as Ray shows the lines of another process."""
    file = printed(tmp_path, defaults)
    loaded = load(path=file)
    assert loaded.config.trainer.n_gpus_per_node == 8
    assert loaded.config.trainer.total_epochs == 30
    assert loaded.config.reward_model.num_workers == 8
    lines = file.read_text().splitlines()
    assert any("None" in line for line in lines)
    for prefix in ("(TaskRunner pid=31) ", "\x1b[36m(main_task pid=31, ip=10.0.0.2)\x1b[0m "):
        file.write_text("".join(f"{prefix}{line}\n" for line in lines))
        assert read_yaml(file) == nest(defaults), prefix


def test_yaml_of_verls_defaults_is_read_as_what_it_prints(defaults, tmp_path):
    sections = ("data.", "reward", "trainer.")
    tree = nest({name: value for name, value in defaults.items() if name.startswith(sections)})
    file = tmp_path / "defaults.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert read_yaml(file) == tree


def test_numbers_that_are_not_finite_are_none_of_words(tmp_path):
    """With one of them, None was read as a word."""
    tree = {"a": float("inf"), "b": [float("-inf"), 1], "c": None, "d": "inf"}
    file = tmp_path / "printed.txt"
    file.write_text(pformat(tree))
    assert read_yaml(file) == tree


@pytest.mark.parametrize("text", ["{'a': None, 'b': run()", "{'a': None", "{'a': None}, 1]"])
def test_what_is_neither_a_printed_dict_nor_yaml_is_refused(text, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert "cannot be read as YAML" in problems_of(path=file)[str(file)]


def test_values_under_newer_names_arrive(defaults, tmp_path):
    """In a file that has the older names, too, with nulls."""
    changes = {"reward.custom_reward_function.path": "r.py", "reward.num_workers": 3}
    config = load("trainer.n_gpus_per_node=1", path=printed(tmp_path, defaults | changes)).config
    assert config.custom_reward_function.path == "r.py"
    assert config.reward_model.num_workers == 3
    assert load("reward.num_workers=2").config.reward_model.num_workers == 2
    assert load("critic.fsdp.dtype=float32").config.critic.model.fsdp_config.dtype == "float32"
    sapo = load(f"{ACTOR}.policy_loss.loss_mode=sapo", f"{ACTOR}.policy_loss.tau_pos=1.5", f"{ACTOR}.tau_neg=2.0")
    assert (sapo.config.actor_rollout_ref.actor.tau_pos, sapo.config.actor_rollout_ref.actor.tau_neg) == (1.5, 2.0)
    assert load("global_profiler.steps=[2,4]").config.trainer.profile_steps == (2, 4)


def test_a_problem_names_the_newer_name():
    assert "reward.num_workers" in problems_of("reward.num_workers=0")["reward_model.num_workers"]
    assert "critic.fsdp.dtipe" in problems_of("critic.fsdp.dtipe=0")


def test_two_names_in_one_file_that_disagree_are_refused(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("reward_model: {num_workers: 4}\nreward: {num_workers: 2}\n")
    assert "contradicts" in problems_of(path=file)["reward_model.num_workers"]


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("actor_rollout_ref.model.mtp.enable=True", "multi-token prediction"),
        ("actor_rollout_ref.actor.load_weight=False", "Hugging Face directory"),
        ("+actor_rollout_ref.actor.megatron.override_mcore_model_config.num_layers=3", "config.json"),
        ("actor_rollout_ref.model.lora.rank=8", "lora_rank"),
        ("reward_model.model.override_config={rope_theta: 1}", "config.json"),
        ("actor_rollout_ref.actor.optim.optimizer=SGD", "AdamW"),
    ],
)
def test_what_verl_would_act_on_is_refused(override, why):
    ((path, text),) = problems_of(override).items()
    assert path.split(".")[-1] in override
    assert "is refused: " in text
    assert why in text


def test_what_is_read_nowhere_is_noted_by_name_and_reason():
    notes = load("actor_rollout_ref.actor.megatron.seed=7", "actor_rollout_ref.rollout.scheduling_policy=lifo").notes
    assert any("actor.megatron.seed=7 (weights are read, never drawn" in note for note in notes)
    assert any("scheduling_policy=lifo (tether sets up its inference servers" in note for note in notes)


def test_many_such_keys_of_a_file_are_counted(tmp_path):
    names = [name for name in unread_keys() if name.startswith("trainer.v1.separate_async.")]
    assert len(names) > 4
    file = tmp_path / "run.yaml"
    file.write_text("".join(f"{name}: 1\n" for name in names))
    note = next(note for note in load(path=file).notes if "trainer.v1" in note)
    assert note.count("trainer.v1") == 3
    assert f"and {len(names) - 3} more keys" in note
    note = next(note for note in load(*[f"{name}=2" for name in names], path=file).notes if "trainer.v1" in note)
    assert note.count("=2") == len(names)


def test_each_is_refused_or_noted():
    rows = unread_keys()
    own = [name for name, row in rows.items() if not row.is_translated and not is_unread_section(name)]
    values = {name: "one" if name.endswith("save_contents") else "other" for name in own}
    settings = {name: f"+{name}={value}" for name, value in values.items()}
    problems = problems_of(*settings.values())
    assert all(" is refused: " in text for text in problems.values())
    taken = [name for name in settings if name not in problems]
    notes = "\n".join(load(*[settings[name] for name in taken]).notes)
    assert len(problems) > 50
    assert len(taken) > 300
    assert [name for name in taken if f"{name}={values[name]}" not in notes] == []


def test_nulls_and_empty_sections_ask_for_nothing():
    assert (
        load(
            "actor_rollout_ref.model.mtp.enable=null",
            "actor_rollout_ref.actor.megatron={}",
            "global_profiler=null",
            "data.val_files=null",
        ).notes
        == load().notes
    )


def test_a_deleted_one_is_forgotten():
    assert load("reward_model.enable=True", "~reward_model.enable").notes == load().notes
    assert load("+actor_rollout_ref.model.mtp.enable=True", "~actor_rollout_ref.model.mtp").notes == load().notes


def test_a_read_key_may_interpolate_one_that_is_not(tmp_path):
    config = load("critic.optim.lr=${actor_rollout_ref.actor.optim.min_lr}", "actor_rollout_ref.actor.optim.min_lr=0")
    assert config.config.critic.optim.lr == 0


def test_a_misspelled_one_is_rejected():
    text = problems_of("distillation.enabeld=True")["distillation.enabeld"]
    assert text.endswith("did you mean distillation.enabled?")
    assert "unknown key" in problems_of("critic.megatron.tensor_model_parallel_sise=2").popitem()[1]


def test_explain_knows_them():
    assert "refused: any value but false (multi-token" in explain("actor_rollout_ref.model.mtp.enable").lower()
    assert "no effect here: tether sets up" in explain("actor_rollout_ref.rollout.scheduling_policy")
    assert explain("reward.num_workers").startswith("reward_model.num_workers\n")


def test_no_key_is_both_read_and_not():
    assert not unread_keys().keys() & keys().keys()
    assert not [name for name in unread_keys() if renamed(name) != name]
    assert BASE


# Hydra's composition


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Write files into a folder, and work there."""

    def write(**texts: str) -> Path:
        for name, text in texts.items():
            path = tmp_path / f"{name.replace('__', '/')}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    monkeypatch.chdir(tmp_path)
    return write


def command(*arguments: str) -> str:
    """The output of `tether config check`."""
    result = CliRunner().invoke(app, ["config", "check", "--no-files", *arguments, *BASE])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("ppo_trainer", ["--config-path=./config"]),
        ("ppo_megatron_trainer", ["--config-path", "config"]),
        ("ppo_megatron_trainer.yaml", ["-cp", "x/config"]),
        ("ppo_trainer", []),
    ],
)
def test_verls_own_configurations_stand_for_its_defaults(files, name, path):
    files()
    output = command(*path, f"--config-name={name}", "data.train_batch_size=512")
    assert f"note: {name.removesuffix('.yaml')} stands for verl's defaults" in output
    assert output.endswith("sound\n")


def test_verls_megatron_configuration_chooses_megatron(files):
    for name in ("ppo_megatron_trainer", "ppo_trainer"):
        config = load_config(Path(f"{name}.yaml"), BASE).config
        expected = "megatron" if "megatron" in name else "fsdp"
        assert (config.actor_rollout_ref.actor.strategy, config.critic.strategy) == (expected, expected)
    folder = files(mine="defaults: [ppo_megatron_trainer, _self_]\ndata: {train_batch_size: 512}\n")
    assert load(path=folder / "mine.yaml").config.actor_rollout_ref.actor.strategy == "megatron"
    folder = files(
        mine="defaults: [actor@actor_rollout_ref.actor: megatron_actor, _self_]\ndata: {train_batch_size: 512}\n"
    )
    assert load(path=folder / "mine.yaml").config.critic.strategy == "megatron"


def test_verls_model_engine_chooses_the_strategy(files):
    chosen = [
        {"overrides": ["model_engine=megatron"]},
        {"mine": "model_engine: megatron\n"},
        {"mine": "defaults: [ppo_trainer, {override model_engine: megatron}, _self_]\n"},
        # a copy of verl's own file
        {"mine": "defaults: [{model_engine: megatron}, {actor@actor_rollout_ref.actor: '${model_engine}_actor'}]\n"},
        {"mine": "defaults: [{model_engine: dp}, {critic@critic: '${model_engine}_critic'}]\nmodel_engine: megatron\n"},
    ]
    for case in chosen:
        path = files(mine=case.get("mine", "")) / "mine.yaml"
        config = load("data.train_batch_size=512", *case.get("overrides", []), path=path).config
        assert (config.actor_rollout_ref.actor.strategy, config.critic.strategy) == ("megatron", "megatron"), case
    loaded = load("model_engine=megatron", "actor_rollout_ref.actor.strategy=fsdp2", "data.train_batch_size=512")
    assert loaded.config.actor_rollout_ref.actor.strategy == "fsdp2"
    assert load("model_engine=dp", "data.train_batch_size=512").config.actor_rollout_ref.actor.strategy == "fsdp"


def test_a_folder_that_is_mistyped_is_not_verls(files):
    folder = files(mine="")
    for arguments in (
        ["--config-path=/typo", "--config-name=ppo_trainer"],
        [str(folder / "conf" / "ppo_trainer.yaml")],
    ):
        with pytest.raises(ConfigError, match=r"ppo_trainer\.yaml: cannot be read"):
            command(*arguments)


def test_mappings_are_merged_as_hydra_merges_them():
    key = "actor_rollout_ref.rollout.engine_kwargs"
    given = [f"{key}={{vllm: {{a: 1, b: {{c: 1}}}}}}", f"+{key}={{vllm: {{b: {{d: 2}}}}}}", f"{key}.vllm={{e: 3}}"]
    loaded = load(*given, "data.train_batch_size=512")
    assert loaded.config.actor_rollout_ref.rollout.engine_kwargs.vllm == {"a": 1, "b": {"c": 1, "d": 2}, "e": 3}


def test_a_key_that_is_written_twice_is_said(files):
    folder = files(mine="data.seed: 1\ndata: {seed: 2}\n")
    assert problems_of(path=folder / "mine.yaml")["data.seed"].startswith(
        "data.seed: 2 contradicts 1; it is written twice"
    )


def test_a_configuration_is_named_as_hydra_names_it(files):
    files(conf__mine="data: {train_batch_size: 0}\n")
    for name in ("mine", "mine.yaml"):
        with pytest.raises(ConfigError, match=r"data\.train_batch_size: 0 is not"):
            command("--config-path=conf", "--config-name", name)
    with pytest.raises(
        ConfigError, match=r"conf/other\.yaml: cannot be read \(No such file or directory\)\. give a YAML"
    ):
        command("--config-path=conf", "--config-name=other")
    for arguments, meant in (
        (["--config-path=conf", "--config-name=mien"], "conf/mine.yaml"),
        (["conf/mien.yaml"], "conf/mine.yaml"),
        (["--config-name=ppo_traner"], "ppo_trainer.yaml"),
        (["--config-path=config", "--config-name=ppo_megatron_traner"], "config/ppo_megatron_trainer.yaml"),
    ):
        with pytest.raises(ConfigError, match=rf"cannot be read .*did you mean {meant}\?"):
            command(*arguments)
    with pytest.raises(ValueError, match="are two configurations"):
        command("run.yaml", "--config-name=mine")


def test_a_configuration_over_verls(files):
    folder = files(
        mine="""
hydra: {searchpath: [file://verl/trainer/config]}
defaults: [ppo_trainer, _self_]
data: {train_batch_size: 512}
actor_rollout_ref: {hybrid_engine: true, actor: {ppo_mini_batch_size: 64}}
"""
    )
    loaded = load("actor_rollout_ref.actor.ppo_mini_batch_size=32", path=folder / "mine.yaml")
    assert loaded.config.data.train_batch_size == 512
    assert loaded.config.actor_rollout_ref.actor.ppo_mini_batch_size == 32


def test_groups_are_relative_to_the_file_that_names_them(files):
    folder = files(
        run="defaults: [actor@actor_rollout_ref.actor: dp_actor, trainer, _self_]\ndata: {seed: 3}\n",
        actor__dp_actor="defaults: [../optim@optim: fsdp, actor, _self_]\nppo_epochs: 4\n",
        actor__actor="ppo_epochs: 2\nclip_ratio: 0.1\n",
        optim__fsdp="lr: 3e-6\n",
        trainer="trainer: {seed: 9}\n",
    )
    config = load(path=folder / "run.yaml").config
    actor = config.actor_rollout_ref.actor
    assert (actor.ppo_epochs, actor.clip_ratio, actor.optim.lr) == (4, 0.1, 3e-6)
    assert (config.data.seed, config.trainer.seed) == (3, 9)


def test_a_file_that_is_not_there_is_named(files):
    folder = files(run="defaults: [ppo_trainer, models/small]\n")
    assert "models/small.yaml is not in" in problems_of(path=folder / "run.yaml")["defaults"]


def test_a_file_that_includes_itself_is_named(files):
    folder = files(run="defaults: [a]\n", a="defaults: [b]\n", b="defaults: [a]\n")
    assert "includes itself" in problems_of(path=folder / "run.yaml")["defaults"]


# Values that verl takes


@pytest.mark.parametrize("estimator", WITHOUT_PEERS)
def test_one_response_a_prompt_learns_from_its_score_with_a_note(estimator):
    loaded = load(f"algorithm.adv_estimator={estimator}", "actor_rollout_ref.rollout.n=1")
    assert any("the advantage is the score" in note for note in loaded.notes)
    # Rows of 2 tokens and scores 1 and 0, each alone in its group: no baseline is subtracted. Whitening
    # (reinforce_plus_plus_baseline) brings (1, 1, 0, 0) to +-1/2 over the deviation sqrt(1/3), and gpg multiplies by
    # rows over rows with a score.
    scores, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2)
    found = ADVANTAGE_ESTIMATORS[estimator](scores, mask, uid=[0, 1]).advantages
    first = {"reinforce_plus_plus_baseline": 0.75**0.5, "gpg": 2.0}.get(estimator, 1.0)
    assert found[0].tolist() == pytest.approx([first, first], rel=1e-4)


def test_the_clip_range_of_verls_cispo_recipe():
    actor = "actor_rollout_ref.actor"
    loaded = load(f"{actor}.policy_loss.loss_mode=cispo", f"{actor}.clip_ratio_low=10", f"{actor}.clip_ratio_high=0.2")
    assert loaded.config.actor_rollout_ref.actor.clip_ratio_low == 10
    # Ratios 0.1 and 3 against bounds 1 - 10 and 1.2: only the upper one cuts. L = -ratio A log p with A = 1.
    log_probs = torch.tensor([[0.1, 3.0]]).log()
    one = torch.ones(1, 2)
    loss = POLICY_LOSSES["cispo"](log_probs, 0 * one, one, one, clip_ratio_low=10.0, clip_ratio_high=0.2).loss
    assert loss.tolist()[0] == pytest.approx([-0.1 * math.log(0.1), -1.2 * math.log(3)])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [(["temperature=0.6"], "validation samples: "), (["do_sample=True"], "validation is greedy: ")],
)
def test_temperature_decides_how_validation_samples(overrides, says):
    section = "actor_rollout_ref.rollout.val_kwargs"
    assert any(note.startswith(says) for note in load(*[f"{section}.{text}" for text in overrides]).notes)
    assert not any("validation" in note for note in load(f"{section}.temperature=1", f"{section}.do_sample=True").notes)


def test_bypass_mode_takes_importance_weights_which_it_logs_and_does_not_normalise():
    section = "algorithm.rollout_correction"
    given = [f"{section}.bypass_mode=True", f"{section}.rollout_is=token"]
    assert not any("rollout_is" in text for text in load(*given).notes)
    normalised = load(*given, f"{section}.rollout_is_batch_normalize=True").notes
    assert any(text.startswith(f"no effect: {section}.rollout_is_batch_normalize=True") for text in normalised)


@pytest.mark.parametrize(
    ("spelling", "name"), [("bf16", "bfloat16"), ("fp32", "float32"), ("torch.float32", "float32")]
)
def test_number_formats_have_both_spellings(spelling, name):
    config = load(
        f"actor_rollout_ref.rollout.dtype={spelling}", f"actor_rollout_ref.actor.fsdp_config.dtype={spelling}",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=float32",
    ).config.actor_rollout_ref  # fmt: skip
    assert config.rollout.dtype == config.actor.fsdp_config.dtype == name
    assert "is not one of" in problems_of("actor_rollout_ref.rollout.dtype=fp16")["actor_rollout_ref.rollout.dtype"]


def test_false_turns_validation_off():
    assert load("trainer.test_freq=False").config.trainer.test_freq == 0
    assert "trainer.test_freq" in problems_of("trainer.test_freq=True")


@pytest.mark.parametrize("key", ["reward_model.reward_manager", "reward_manager.name", "reward.reward_manager.name"])
def test_the_reward_manager_has_one_rule_under_all_names(key):
    for name in ("dapo", "gdpo", "prime", "remote"):
        assert load(f"{key}={name}").config.reward_model.reward_manager == "naive"
    assert "needs custom_reward_function.path" in str(problems_of(f"{key}=batch"))
    assert "at most reward_model.num_workers calls" in str(problems_of(f"{key}=rate_limited"))
    assert "is not one of naive, batch, dapo, gdpo, prime, remote" in str(problems_of(f"{key}=no_such"))
    assert "did you mean batch?" in str(problems_of(f"{key}=bacth"))


# What verl would act on, and tether does not


@pytest.mark.parametrize("key", ["tool_config_path", "function_tool_path", "interaction_config_path"])
def test_tools_need_turns(key):
    path = f"actor_rollout_ref.rollout.multi_turn.{key}"
    assert "multi_turn.enable=False leaves out" in problems_of(f"{path}=tools.yaml")[path]


def test_validation_on_a_file_without_a_name_is_refused():
    assert "asks for validation" in problems_of("data.val_files=''", "trainer.test_freq=5")["data.val_files"]


def test_training_names_everything_that_is_missing_at_once(files):
    files()
    named = ["custom_reward_function.path=r.py", "actor_rollout_ref.model.path=./m"]
    wrong = ["algorithm.gama=1", "critic.enable=7", "trainer.esi_redundant_time=2", "trainer.resume_mode=resume_path"]
    with pytest.raises(ConfigError) as error:
        CliRunner().invoke(app, ["train", *BASE, *named, *wrong], catch_exceptions=False)
    assert {problem.path for problem in error.value.problems} == {
        "actor_rollout_ref.model.path", "data.train_files", "data.val_files", "custom_reward_function.path",
        "algorithm.gama", "critic.enable", "trainer.esi_redundant_time", "trainer.resume_from_path",
    }  # fmt: skip


def test_a_model_that_is_not_named_is_missing_once(files):
    files()
    with pytest.raises(ConfigError) as error:
        CliRunner().invoke(app, ["config", "check", "data.train_files=x.jsonl"], catch_exceptions=False)
    found = [problem.path for problem in error.value.problems]
    assert sorted(found) == ["actor_rollout_ref.model.path", "data.train_files"]


# Settings of verl's newer versions and of its other trainers

MANY = "trainer.n_gpus_per_node=8"
MEGATRON = f"{ACTOR}.strategy=megatron"
IN_OPTIMIZER = f"{ACTOR}.optim.override_optimizer_config"
TEACHERS, OF_TEACHER = "distillation.teacher_models", "distillation.distillation_loss"
TEACHER = ["distillation.enabled=True", f"{TEACHERS}.teacher_model.model_path=large"]
NOTED: dict[str, tuple[list[str], str | None]] = {
    "the tools of the dataset are those of the turns": (
        [
            *(f"{ROLLOUT}.multi_turn.{setting}" for setting in ("enable=True", "tool_config_path=t.yaml")),
            "data.tool_config_path=t.yaml",
        ],
        None,
    ),
    "no metric to filter by": (["algorithm.filter_groups.metric=null"], None),
    "tokens across turns": (["data.continuous_token.enable=True"], "from the tokens that were sampled"),
    "no warm-up in steps": ([f"{ACTOR}.optim.lr_warmup_steps=null", "critic.optim.lr_warmup_steps=null"], None),
    "no lowest rate": (["critic.optim.min_lr_ratio=null"], None),
    "no bound of weights that there are not": (["algorithm.rollout_correction.rollout_is_threshold=null"], None),
    "the scale of no adapters": ([f"{MODEL}.lora_rank=0", f"{MODEL}.lora_alpha=0"], "lora_rank is 0"),
    "modules without adapters": ([f"{MODEL}.exclude_modules=DONT_EXCLUDE"], "actor_rollout_ref.model.lora_rank is 0"),
    "GDPO's manager": (
        ["algorithm.adv_estimator=gdpo", f"{ROLLOUT}.n=4", "algorithm.gdpo_reward_keys=[a,b]",
         "reward.reward_manager.name=gdpo"],
        None,
    ),
    "a reward model on the host": (["reward_model.param_offload=False"], "the reward model runs where the policy does"),
    "sampling in one call": ([f"{ROLLOUT}.mode=sync"], "there is one way to sample"),
    "no scheduler": ([f"{ROLLOUT}.chat_scheduler="], None),
    "Megatron's optimizer in parts on the host": (
        [MANY, MEGATRON, f"{IN_OPTIMIZER}.optimizer_cpu_offload=True", f"{IN_OPTIMIZER}.offload_fraction=0.5"],
        "megatron.optimizer_offload moves them to the host",
    ),
    "Megatron's optimizer where it is": ([f"{IN_OPTIMIZER}.optimizer_cpu_offload=False"], "in fp32 here"),
    "a profiler": (["global_profiler.tool=nsys", "global_profiler.steps=[1,2]"], "torch.profiler writes the traces"),
    "the profiler of torch": (["global_profiler.tool=torch", "global_profiler.steps=[1]"], None),
    "a profiler of the policy": ([f"{ACTOR}.profiler.enable=True"], "trainer.profile_steps"),
    "a checkpoint that the mode does not read": (["trainer.resume_from_path=c"], "trainer.resume_mode is auto"),
    "a transfer queue": (["transfer_queue.enable=True"], "Ray's object store"),
    "another engine's settings": ([f"{ACTOR}.veomni.fsdp_size=2", f"{ACTOR}.engine.tp=2"], "another engine"),
    "a teacher that nothing asks": ([f"{TEACHERS}.mine.key=x"], "distillation.enabled is False"),
    "a teacher's server": ([*TEACHER, f"{TEACHERS}.teacher_model.inference.name=vllm"], "a teacher is no server"),
    "a teacher's devices": ([*TEACHER, "distillation.nnodes=1"], "cluster.component_placement.inference"),
    "verl's policy gradient towards a teacher": (
        [
            *(*TEACHER, "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2"),
            *(f"{OF_TEACHER}.{one}" for one in ("loss_mode=k1", "topk=64", "log_prob_min_clamp=-10.0")),
            *(f"{OF_TEACHER}.{one}" for one in ("use_policy_gradient=True", "use_task_rewards=False")),
        ],
        "topk=64, distillation.distillation_loss.log_prob_min_clamp=-10.0 (distillation.distillation_loss.loss_mode is",
    ),
    "teachers of other columns": (
        [*TEACHER, "distillation.teacher_key=data_source"],
        None,
    ),
    "the rows of a teacher": ([*TEACHER, f"{TEACHERS}.teacher_model.key=math"], "all rows have the same teacher"),
    "weights in shared memory": (["actor_rollout_ref.model.use_shm=True"], "never copied to shared memory"),
    "weights in bf16": (["critic.model.fsdp_config.model_dtype=bf16"], "fp32, which takes more memory"),
    "Megatron-FSDP": (
        [MANY, MEGATRON, *(f"{part}.megatron.use_megatron_fsdp=True" for part in (ACTOR, "critic"))],
        "Megatron-FSDP saves memory alone",
    ),
    "a reference in bf16": (["actor_rollout_ref.ref.fsdp_config.model_dtype=bf16"], "ref.fsdp_config.dtype"),
}  # fmt: skip
"""What is said -> settings, and a part of the note on them, if there is one."""
TURBO = f"{ACTOR}.fsdp_config.turbo_config.memory.recompute=True"
BY_NAME: dict[str, tuple[list[str], str]] = {
    "VeOmni": (["model_engine=veomni", f"{ACTOR}.veomni.fsdp_size=4"], "veomni is refused: of verl's engines"),
    "FSDP-Turbo": (
        [f"{ACTOR}.strategy=fsdp_turbo", "actor_rollout_ref.ref.strategy=fsdp_turbo", TURBO],
        "fsdp_turbo is refused, as in actor_rollout_ref.ref.strategy: of verl's engines",
    ),
    "MindSpeed": ([f"{ACTOR}.strategy=mindspeed", f"{ACTOR}.mindspeed.x.y=1"], "mindspeed is refused"),
    "another policy loss": ([*TEACHER, f"{OF_TEACHER}.policy_loss_mode=gspo"], "the clipped one"),
}
"""What tether does not have -> settings that ask for it, and a part of the one line on them."""


def test_what_changes_no_result_is_a_note():
    wrong = {}
    for what, (settings, expected) in NOTED.items():
        loaded = load(*settings)
        if not any(expected in note for note in loaded.notes) if expected else loaded.notes:
            wrong[what] = loaded.notes
    assert wrong == {}


def test_teachers_have_any_name_and_verls_empty_entry_is_none(defaults, tmp_path):
    """verl's own entry stays in what it prints beside those of other names."""
    servers = {f"{TEACHERS}.{name}.num_replicas": 2 for name in ("gsm8k", "geo3k")}
    keys = {f"{TEACHERS}.gsm8k.key": "openai/gsm8k", f"{TEACHERS}.geo3k.key": "hiyouga/geometry3k"}
    paths = {f"{TEACHERS}.{name}.model_path": f"large-{name}" for name in ("gsm8k", "geo3k")}
    printed_values = defaults | servers | keys | paths | {"distillation.enabled": True, f"{ROLLOUT}.n": 2}
    loaded = load("algorithm.adv_estimator=grpo", path=printed(tmp_path, printed_values))
    expected = {
        "gsm8k": {"key": "openai/gsm8k", "model_path": "large-gsm8k"},
        "geo3k": {"key": "hiyouga/geometry3k", "model_path": "large-geo3k"},
    }
    assert loaded.config.distillation.teacher_models == expected
    (note,) = (note for note in loaded.notes if "a teacher is no server" in note and TEACHERS in note)
    assert f"{TEACHERS}.geo3k.num_replicas, {TEACHERS}.gsm8k.num_replicas (" in note
    assert "teacher_model.inference" not in note
    other = problems_of(*TEACHER, "distillation.teacher_key=task")["distillation.teacher_key"]
    assert "the column that data.reward_fn_key names" in other


def test_what_is_not_there_is_one_line_with_its_name():
    found = {what: list(problems_of(*settings).values()) for what, (settings, _) in BY_NAME.items()}
    assert {what: text for what, text in found.items() if len(text) != 1 or BY_NAME[what][1] not in text[0]} == {}
    for name in ("veomni", "torchtitan"):
        (problem,) = problems_of(path=Path(f"ppo_{name}_trainer.yaml")).values()
        assert f"{name} is refused: of verl's engines" in problem


def test_sequences_are_shared_as_the_engine_or_the_model_says():
    loaded = load(MANY, f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2")
    policy = loaded.config.actor_rollout_ref
    assert policy.actor.ulysses_sequence_parallel_size == policy.ref.ulysses_sequence_parallel_size == 2


def test_asynchronous_trainers_of_verl_become_the_keys_of_tether():
    mode, staleness, partial = "trainer.async_mode", f"{ROLLOUT}.max_staleness", f"{ROLLOUT}.partial_rollout"
    batch, steps, bypass = "data.train_batch_size", "trainer.total_training_steps", f"{CORRECTION}.bypass_mode"
    fully = [f"{ACTOR}.ppo_mini_batch_size=32", "async_training.require_batches=2", "data.train_batch_size=0"]
    # 32 prompts a mini-batch x 2 x 4 of them (verl's default) until the sampler gets weights: a step of 256 prompts,
    # of which 1000 prompts take four.
    both = {mode: "fully_async", partial: True}
    cases: list[tuple[Path | None, list[str], dict[str, object]]] = [
        (
            None,
            [*fully, "async_training.staleness_threshold=0.5", "rollout.total_rollout_steps=1000"],
            {**both, staleness: 1, batch: 256, steps: 4, bypass: True},
        ),
        (None, [*fully, "async_training.staleness_threshold=0"], {mode: "off", batch: 256}),
        (
            Path("config/fully_async_ppo_trainer.yaml"),
            ["async_training.staleness_threshold=2.5", "async_training.partial_rollout=False"],
            {mode: "fully_async", partial: False, staleness: 3, batch: 1024},
        ),
        (Path("one_step_off_ppo_trainer.yaml"), [], {mode: "one_step_off", bypass: True}),
        (None, ["trainer.v1.trainer_mode=separate_async"], {**both, staleness: 1}),
        (
            None,
            ["trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=3"],
            {**both, staleness: 3},
        ),
        (None, ["trainer.v1.trainer_mode=sync"], {mode: "off"}),
        (None, ["async_training.staleness_threshold=0.5", f"{mode}=one_step_off"], {mode: "one_step_off"}),
    ]
    for path, settings, expected in cases:
        loaded = load(*settings, path=path)
        values = values_of(loaded.config)
        assert {key: values[key] for key in expected} == expected, settings
        text = " ".join(note for note in loaded.notes if " set " in note or "stands for verl's defaults" in note)
        is_own = settings[-1:] in ([f"{mode}=one_step_off"], ["trainer.v1.trainer_mode=sync"])
        assert (f"{mode}=" in text) != is_own, settings
    for setting in ("async_training.staleness_threshold=often", "trainer.v1.trainer_mode=separate"):
        assert " is refused: " in problems_of(setting)[setting.split("=")[0]]

"""Every recipe's configuration is sound, and verl's command is verl's."""

import importlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.test_reference_command import PAGE, RUN_GEMMA
from tether.config import LoadedConfig, load_config
from tether.text.data.examples import assistant_mask
from tether.text.data.pairs import pair_problems
from tether.text.data.sources import load_rows
from tether.text.rewards.custom import load_reward_function

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
RUNS = sorted(RECIPES.glob("*/*.yaml"))


def load(name: str) -> LoadedConfig:
    return load_config(RECIPES / name / "run.yaml", [])


def test_every_recipe_loads_without_a_note() -> None:
    assert len(RUNS) > 30
    notes = {str(path.relative_to(RECIPES)): load_config(path, []).notes for path in RUNS}
    assert {path: found for path, found in notes.items() if found} == {}


def test_every_recipe_has_a_readme() -> None:
    pages = [path / "README.md" for path in RECIPES.iterdir() if path.is_dir()]
    assert [str(page) for page in pages if "## Result" not in page.read_text(encoding="utf-8")] == []


def test_ppo_on_words_has_all_three_models_and_a_clip_that_acts() -> None:
    for name in ("quickstart", "gsm8k-smollm2", "gsm8k-qwen"):
        config = load(name).config
        assert config.critic.enable
        assert config.algorithm.use_kl_in_reward  # which is what a reference is loaded for
        assert config.actor_rollout_ref.actor.ppo_mini_batch_size < config.data.train_batch_size
        assert config.data.val_files


def test_quickstart_never_trains_on_a_test_question() -> None:
    data = load("quickstart").config.data
    assert all("part=train" in source for source in data.train_files)
    assert all("part=test" in source for source in data.val_files)


def test_gsm8k_may_begin_with_the_format() -> None:
    score = load_reward_function(RECIPES / "gsm8k-smollm2/format_first.py", "compute_score", {})

    def scored(reply: str) -> tuple[float, float, float]:
        found = score(data_source="openai/gsm8k", solution_str=reply, ground_truth="7", extra_info={})
        return found["score"], found["acc"], found["format"]

    assert scored("3 + 4 = 7\n#### 7") == (1, 1, 1)
    assert scored("3 + 4 = 8\n#### 8 ") == (0.1, 0, 1)
    assert scored("#### 7 pens") == (1, 1, 0.5)  # right by the strict rule, which does not ask for the end
    assert scored("#### 8, which is the answer") == (0.05, 0, 0.5)
    assert scored("the answer is 7") == (0, 0, 0)


def test_steps_come_before_the_format() -> None:
    """A bare answer would be the cheapest way to the form, and PPO finds it."""
    score = load_reward_function(RECIPES / "gsm8k-qwen/form_after_steps.py", "compute_score", {})

    def scored(reply: str) -> tuple[float, float, float]:
        found = score(data_source="openai/gsm8k", solution_str=reply, ground_truth="7", extra_info={})
        return found["score"], found["acc"], found["format"]

    steps = "He has 3 pens and buys 4 more of them in the afternoon, so that he has 3 + 4 = 8 pens at last."
    assert scored(f"{steps}\n#### 8 ") == (0.1, 0, 1)
    assert scored(f"{steps[steps.index('more') :]}\n#### 8") == (0, 0, 0)  # fewer than 20 words
    assert scored(f"{steps}\n#### 8, which is the answer") == (0, 0, 0)
    assert scored("#### 8") == (0, 0, 0)
    assert scored("#### 7") == (1, 1, 0)
    assert scored(f"{steps}\n#### 7") == (1, 1, 1)


def test_the_twins_of_ppo_on_gsm8k_differ_in_their_algorithm_alone() -> None:
    names = ("run", "grpo", "grpo_lora", "ppo_lora")
    ppo, grpo, lora, small = (load_config(RECIPES / f"gsm8k-qwen/{name}.yaml", []).config for name in names)
    answers = [config.data.train_batch_size * config.actor_rollout_ref.rollout.n for config in (ppo, grpo, lora, small)]
    assert len(set(answers)) == 1  # so that steps can be compared
    for twin in (grpo, lora):
        assert not twin.critic.enable
        assert twin.custom_reward_function == ppo.custom_reward_function
        assert twin.data.train_files == ppo.data.train_files
        assert twin.data.max_response_length == ppo.data.max_response_length
    assert small.critic.enable
    assert small.algorithm.adv_estimator == ppo.algorithm.adv_estimator
    assert small.custom_reward_function == ppo.custom_reward_function
    assert lora.actor_rollout_ref.model.lora_rank == small.actor_rollout_ref.model.lora_rank > 0
    assert lora.actor_rollout_ref.actor.optim.lr > grpo.actor_rollout_ref.actor.optim.lr


def arguments_of(script: Path, **environment: str) -> list[str]:
    """The arguments that a script hands to tether, one a line."""
    environment = {**os.environ, "TETHER": r"printf %s\n", **environment}
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_verls_page_key_for_key() -> None:
    script = RECIPES / "verl-ppo-page/run.sh"
    given = arguments_of(script, DATA="/root/data", MODEL="Qwen/Qwen2.5-0.5B-Instruct")
    assert [argument.split("=")[0] for argument in given] == [line.split("=")[0] for line in [*RUN_GEMMA, *PAGE]]
    assert load_config(None, given).config == load_config(None, [*RUN_GEMMA, *PAGE]).config


def test_verls_page_takes_local_paths() -> None:
    given = arguments_of(RECIPES / "verl-ppo-page/run.sh", DATA="here", MODEL="my/model")
    config = load_config(None, given).config
    assert config.actor_rollout_ref.model.path == config.critic.model.path == "my/model"
    assert config.data.train_files == ("here/gsm8k/train.parquet",)


def test_quickstart_has_the_distinct_held_out_questions_that_it_asks_for() -> None:
    data = load("quickstart").config.data
    train, test = (
        [row.messages[-1]["content"] for row in load_rows(files)] for files in (data.train_files, data.val_files)
    )
    assert len(test) == len(set(test))
    assert not set(test) & set(train)


def test_the_pairs_of_the_reward_model_follow_the_gold_score_and_no_tested_prompt_is_trained_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = RECIPES / "reward-model"
    monkeypatch.syspath_prepend(str(folder))
    gold, make = (importlib.import_module(name) for name in ("gold", "make"))

    def score(text: str) -> float:
        return gold.compute_score("notes", text, None, {})["score"]

    # Two different words of praise; near is said four times, which is two too many.
    assert score("warm calm warm near near near near on") == 2 - 2 * 0.5
    rows = make.rows(random.Random(1))
    assert not {str(row["prompt"]) for row in rows["train"]} & {str(row["prompt"]) for row in rows["test"]}
    assert not [problem for pair in rows["pairs"] for problem in pair_problems(pair)]
    ahead = sum(score(pair["chosen"]) > score(pair["rejected"]) for pair in rows["pairs"])
    behind = sum(score(pair["chosen"]) < score(pair["rejected"]) for pair in rows["pairs"])
    assert 0.65 < ahead / (ahead + behind) < 0.85  # some pairs are wrong
    words = make.tokenizer()
    for row in rows["train"]:
        asked = words.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        assert words.unk_token_id not in words.encode(f"{asked}{rows['pairs'][0]['chosen']}")


def test_the_fine_tuned_words_are_reversed_and_no_tested_one_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RECIPES / "sft-reverse"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "make", raising=False)  # that of another recipe
    make, reward = (importlib.import_module(name) for name in ("make", "reward"))
    rows = make.rows(random.Random(1))
    tested = {row["prompt"][0]["content"] for row in rows["test"]}
    assert {row["messages"][0]["content"] for row in rows["held_out"]} == tested
    assert not tested & {row["messages"][0]["content"] for row in rows["chats"]}
    assert not tested & {row["prompt"][0]["content"] for row in rows["train"]}
    words = make.tokenizer()
    for row in rows["chats"]:
        asked, answer = (message["content"] for message in row["messages"])
        assert reward.compute_score("reverse", answer, asked[::-1], None) == {"score": 1, "acc": 1}
        ids, mask = assistant_mask(row["messages"], words, {"chat_template": None})
        assert words.decode(ids[mask]) == f"{answer} <|im_end|>"
    assert reward.compute_score("reverse", "a b", "a c d", None) == {"score": 1 / 3, "acc": 0}
    of_teacher = make.rows(random.Random(1), chats=448)
    assert not tested & {row["messages"][0]["content"] for row in of_teacher["chats"]}
    assert len(of_teacher["chats"]) == len(rows["train"])
    assert of_teacher["test"] == rows["test"]  # the student and its teacher are tested on the same words
    teacher, student = (load_config(RECIPES / f"distill-reverse/{name}.yaml", []).config for name in ("teacher", "run"))
    path = f"{teacher.trainer.default_local_dir}/best"
    assert student.distillation.teacher_models == {"teacher_model": {"model_path": path}}
    fine_tuning, ppo = (load_config(folder / f"{name}.yaml", []).config for name in ("run", "ppo"))
    assert fine_tuning.sft.enable
    assert ppo.actor_rollout_ref.model.path == f"{fine_tuning.trainer.default_local_dir}/best"
    monkeypatch.delitem(sys.modules, "make")

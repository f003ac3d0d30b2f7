"""A learned reward model in a run: it scores in place of rules or beside them, and what it cannot read is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig

from tests.runs.forked_group import ForkedGroup
from tests.runs.steps import first_step
from tests.runs.tiny_run import (
    FAST,
    GRPO,
    base_overrides,
    measured,
    rows,
    same,
    train,
    weights,
    write_inputs,
    write_jsonl,
)
from tests.tiny import VOCAB_SIZE, save_tiny, save_tiny_reward_model, tiny_tokenizer
from tether.commands.reward import check_reward
from tether.config import load_config
from tether.distributed import groups
from tether.metrics.loggers.jsonl import read_samples
from tether.text.build import build_run
from tether.text.input_checks import missing_inputs
from tether.text.rewards.outcome import RewardFailure


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("rewarded"))
    save_tiny_reward_model(folder / "rm", seed=3)
    return folder


def overrides(inputs: Path, run: Path, *more: str) -> list[str]:
    base = [text for text in base_overrides(inputs, run) if not text.startswith("custom_reward_function")]
    learned = [
        "reward_model.enable=True",
        f"reward_model.model.path={inputs / 'rm'}",
        "reward_model.model.fsdp_config.dtype=float32",
    ]
    return [*base, *GRPO, *FAST, *learned, "trainer.total_training_steps=2", "trainer.test_freq=2", *more]


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps, with a checkpoint and a validation of each; to be read only."""
    return train(overrides(inputs, tmp_path_factory.mktemp("whole"), *EACH_STEP))


EACH_STEP = ["trainer.save_freq=1", "trainer.test_freq=1"]


def test_the_score_is_the_models(inputs: Path, whole: Path) -> None:
    """`data_source` has no rule here, and none is asked for."""
    model = AutoModelForSequenceClassification.from_pretrained(inputs / "rm").eval()
    tokenizer = AutoTokenizer.from_pretrained(inputs / "rm")
    samples = read_samples(whole)[1]
    assert len(samples) == 7
    for sample in samples:
        chat = [{"role": "user", "content": _question(sample)}, {"role": "assistant", "content": sample["response"]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        with torch.no_grad():
            wanted = model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits.item()
        assert sample["reward"] == pytest.approx(wanted, abs=1e-3)
    assert measured(whole)[1]["critic/score/max"] > measured(whole)[1]["critic/score/min"]


def test_rows_without_a_ground_truth_have_no_most_frequent_answer(inputs: Path, tmp_path: Path) -> None:
    unanswered = [row | {"reward_model": {"style": "model", "ground_truth": ""}} for row in rows()]
    named = f"data.val_files={write_jsonl(tmp_path / 'val.jsonl', unanswered)}"
    run = train(
        overrides(inputs, tmp_path / "run", named, "trainer.val_before_train=True", "trainer.total_training_steps=1")
    )
    first = measured(run)[0]
    assert first["val-aux/tiny/sums/num_distinct"] == 10
    assert "val-aux/tiny/sums/majority_answer" not in first


def _question(sample: dict[str, Any]) -> str:
    """The text between the marks of the template."""
    return str(sample["prompt"]).split("user\n")[1].split("<|im_end|>")[0].split("\nassistant")[0]


def test_ids_as_they_are_and_token_budgets(inputs: Path, whole: Path, tmp_path: Path) -> None:
    """Each setting changes what it should, and nothing else."""
    as_ids = "reward_model.model.input_tokenizer=null"
    budget = ["reward_model.use_dynamic_bsz=True", "reward_model.forward_max_token_len_per_gpu=90"]
    by_rows, by_tokens = (
        first_step(overrides(inputs, tmp_path, *more))["critic/score/mean"] for more in ([as_ids], [as_ids, *budget])
    )
    templated = measured(whole)[1]["critic/score/mean"]
    assert by_rows == pytest.approx(by_tokens, abs=1e-5)
    assert abs(by_rows - templated) > 1e-3


def test_resume_is_exact(inputs: Path, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "global_step_1", tmp_path / "part" / "global_step_1")
    part = train(overrides(inputs, tmp_path / "part", *EACH_STEP))
    assert same(measured(part)[2], measured(whole)[2])
    assert same(weights(part / "global_step_2"), weights(whole / "global_step_2"))


def test_another_reward_model_is_no_resume(inputs: Path, whole: Path, tmp_path: Path) -> None:
    other = f"reward_model.model.path={save_tiny_reward_model(tmp_path / 'rm', seed=4)}"
    shutil.copytree(whole / "global_step_1", tmp_path / "run" / "global_step_1")
    with pytest.raises(ValueError, match=r"reward_model\.model\.path: not what .* was trained with"):
        train(overrides(inputs, tmp_path / "run", other))


def broken(inputs: Path, name: str, folder: Path) -> Path:
    """A reward model with one fault."""
    match name:
        case "two outputs":
            return save_tiny_reward_model(folder, num_labels=2)
        case "causal LM":
            return save_tiny(folder)
        case "no template":
            return save_tiny_reward_model(folder, chat_template=False)
        case "encoder":
            shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
            model = AutoModelForSequenceClassification.from_config(
                BertConfig(vocab_size=VOCAB_SIZE, num_labels=1, **shape)
            )
            model.save_pretrained(folder)
            tiny_tokenizer().save_pretrained(folder)
            return folder
        case "small vocabulary":
            return save_tiny_reward_model(folder, vocab_size=VOCAB_SIZE - 1)
    raise AssertionError(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("two outputs", "its head has 2 outputs, and a reward model has 1"),
        ("causal LM", "LlamaForCausalLM has no head that scores a sequence"),
        ("encoder", "BertForSequenceClassification does not read its score at the last token, as decoders do"),
        ("no template", "its tokenizer has no chat template, so responses cannot be written for it"),
        ("small vocabulary", f"its vocabulary has {VOCAB_SIZE - 1} tokens, and its tokenizer {VOCAB_SIZE}"),
    ],
)
def test_what_cannot_score_is_refused_before_any_weight_is_loaded(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    path = broken(inputs, name, tmp_path / "rm")
    for loads in (
        "tether.text.learning.build.load_causal_lm",
        "tether.text.rewards.build.load_reward_model",
    ):
        monkeypatch.setattr(loads, lambda *args, **kwargs: pytest.fail("weights were loaded"))
    with pytest.raises(ValueError, match="rm") as error:
        build_run(load_config(None, overrides(inputs, tmp_path / "run", f"reward_model.model.path={path}")))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_without_a_template_ids_may_be_read(inputs: Path, tmp_path: Path) -> None:
    path = broken(inputs, "no template", tmp_path / "rm")
    more = [f"reward_model.model.path={path}", "reward_model.model.input_tokenizer=null"]
    first_step(overrides(inputs, tmp_path / "run", *more))


def check_ids_are_refused(inputs: Path, tmp_path: Path, path: Path, says: str) -> None:
    more = [f"reward_model.model.path={path}", "reward_model.model.input_tokenizer=null"]
    with pytest.raises(ValueError, match=says):
        build_run(load_config(None, overrides(inputs, tmp_path / "run", *more)))


def test_ids_of_another_tokenizer_are_refused(inputs: Path, tmp_path: Path) -> None:
    """It would score other texts than the policy wrote, and nothing would show it."""
    path = save_tiny_reward_model(tmp_path / "rm")
    saved = json.loads((path / "tokenizer.json").read_text())
    words = saved["model"]["vocab"]
    words["!"], words["A"] = words["A"], words["!"]
    (path / "tokenizer.json").write_text(json.dumps(saved))
    says = r"input_tokenizer=null: .*rm has another tokenizer .*token \d+ is 'A', .*'!'\)"
    check_ids_are_refused(inputs, tmp_path, path, says)


def test_ids_of_a_smaller_tokenizer_are_refused(inputs: Path, tmp_path: Path) -> None:
    """One that has all of the policy's bytes, and merges beside them, never read texts byte by byte."""
    path = save_tiny_reward_model(tmp_path / "rm", vocab_size=VOCAB_SIZE + 1)
    saved = json.loads((path / "tokenizer.json").read_text())
    saved["model"]["vocab"]["ab"], saved["model"]["merges"] = VOCAB_SIZE, [["a", "b"]]
    (path / "tokenizer.json").write_text(json.dumps(saved))
    says = rf"input_tokenizer=null: .*rm has another tokenizer .*token {VOCAB_SIZE} is 'ab', the policy's none\)"
    check_ids_are_refused(inputs, tmp_path, path, says)


def test_ids_whose_end_of_sequence_is_another_token_are_refused(inputs: Path, tmp_path: Path) -> None:
    """As padding it would not be read at all."""
    path = save_tiny_reward_model(tmp_path / "rm")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_text((path / name).read_text().replace("<|im_end|>", "<|unused|>"))
    says = r"has another tokenizer .*token 3 is '<\|unused\|>', the policy's '<\|im_end\|>'\)"
    check_ids_are_refused(inputs, tmp_path, path, says)


def test_the_audit_tries_it(inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its random scores are faults; texts cannot be read as ids."""
    loaded = load_config(None, overrides(inputs, tmp_path, "reward_model.max_length=100"))
    assert not check_reward(loaded, rows=3, samples=4, out=None)
    said = capsys.readouterr().out
    assert "praise of itself" in said
    legend = said.splitlines()[-1]
    assert legend.startswith("A fault means that calls fail, that wrong replies are rewarded")
    assert ("A warning may be intended" in legend) == ("\nwarning: " in said)
    assert "calls failed" not in said  # replies have at most data.max_response_length tokens
    as_ids = load_config(None, overrides(inputs, tmp_path, "reward_model.model.input_tokenizer=null"))
    with pytest.raises(ValueError, match=r"input_tokenizer=null: the replies that are tried are texts"):
        check_reward(as_ids, rows=3, samples=0, out=None)


def test_the_audit_of_rows_without_ground_truth(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is called the truth, and a reward model is not blamed for liking one reply more than another."""
    unanswered = [row | {"reward_model": {"style": "model", "ground_truth": ""}} for row in rows()]
    named = f"data.train_files={write_jsonl(tmp_path / 'train.jsonl', unanswered)}"
    loaded = load_config(None, overrides(inputs, tmp_path, named))
    assert check_reward(loaded, rows=3, samples=4, out=None)
    assert "ground truth  high" not in capsys.readouterr().out


def test_scores_that_are_not_finite_stop_the_run(inputs: Path, tmp_path: Path) -> None:
    """Finite weights, of which one gives an infinite score: errors of the rows, above the rate."""
    folder = save_tiny_reward_model(tmp_path / "rm")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    torch.nn.init.constant_(model.score.weight, 3e38)
    model.save_pretrained(folder)
    with pytest.raises(
        RewardFailure, match=r"16 of 16 rewards failed .*\n.*the reward model returned .*; a score must be finite"
    ):
        train(overrides(inputs, tmp_path / "run", f"reward_model.model.path={folder}"))


def test_a_missing_folder_is_named(inputs: Path, tmp_path: Path) -> None:
    config = load_config(None, overrides(inputs, tmp_path, f"reward_model.model.path={tmp_path / 'nowhere'}")).config
    assert [problem.path for problem in missing_inputs(config)] == ["reward_model.model.path"]


@pytest.mark.parametrize(
    ("name", "says"), [("two outputs", "its head has 2 outputs"), ("no template", "its tokenizer has no chat template")]
)
def test_what_its_files_say_is_found_without_loading_it(name: str, says: str, inputs: Path, tmp_path: Path) -> None:
    path = broken(inputs, name, tmp_path / "rm")
    more = [f"reward_model.model.path={path}"]
    (problem,) = missing_inputs(load_config(None, overrides(inputs, tmp_path, *more)).config)
    assert problem.path == "reward_model.model.path"
    assert says in problem.what
    assert not missing_inputs(load_config(None, overrides(inputs, tmp_path)).config)
    as_ids = load_config(None, overrides(inputs, tmp_path, *more, "reward_model.model.input_tokenizer=null"))
    assert bool(missing_inputs(as_ids.config)) == (name == "two outputs")


def test_an_address_that_is_none_is_named_before_a_run(inputs: Path, tmp_path: Path) -> None:
    more = [
        f"reward_model.model.path={save_tiny_reward_model(tmp_path / 'rm')}",
        "reward_model.server.url=localhost:8000",
    ]
    (problem,) = missing_inputs(load_config(None, overrides(inputs, tmp_path, *more)).config)
    assert str(problem).startswith("reward_model.server.url: localhost:8000 is no address")


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["reward_model.model.fsdp_config.param_offload=True"]], ids=["", "offloaded"])
def test_two_devices_share_it(inputs: Path, tmp_path: Path, more: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scores some of the responses with shards of the model; the scores are those of one device."""
    monkeypatch.setattr(groups, "_start_group", ForkedGroup)
    length = "trainer.total_training_steps=1"
    one = measured(train(overrides(inputs, tmp_path / "one", length)))[1]
    two = measured(train(overrides(inputs, tmp_path / "two", length, "trainer.n_gpus_per_node=2", *more)))[1]
    for key in ("critic/score/mean", "critic/score/max", "val-core/tiny/sums/reward/mean@1"):
        assert two[key] == pytest.approx(one[key], abs=1e-4), key


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("devices", [1, 2])
def test_devices_of_its_own_score_as_one_process(devices: int, inputs: Path, tmp_path: Path) -> None:
    """The policy is on one device and the model on others; the second step is of a run that resumed."""
    pool = [f"reward_model.{key}" for key in ("enable_resource_pool=True", "nnodes=1", f"n_gpus_per_node={devices}")]
    kept = ["trainer.save_freq=1", "trainer.device=cpu", "actor_rollout_ref.actor.optim.lr_scheduler_type=constant"]
    one = train(overrides(inputs, tmp_path / "one", *kept))
    for steps in (1, 2):
        apart = train(overrides(inputs, tmp_path / "apart", *kept, *pool, f"trainer.total_training_steps={steps}"))
    assert len(list((apart / "ranks").glob("*.log"))) == 1 + devices
    expected, found = measured(one), measured(apart)
    for step in (1, 2):
        for key in ("critic/score/mean", "critic/score/max", "actor/grad_norm"):
            assert found[step][key] == pytest.approx(expected[step][key], abs=1e-4), key
    if devices == 1:  # more sum the model's rows in another order
        assert same(weights(one / "global_step_2"), weights(apart / "global_step_2"))

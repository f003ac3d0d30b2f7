"""`tether sft`: which tokens are learned, their loss, a run that is resumed, and PPO from its result."""

import json
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.device import DEVICE
from tests.runs.tiny_run import GRPO, base_overrides, measured, same, train, weights, write_inputs, write_jsonl
from tests.tiny import CHATML, EOS, EOS_ID, IM_START, tiny_tokenizer
from tether.commands.build import build
from tether.commands.card import write_card
from tether.commands.cli import app
from tether.commands.evaluate import evaluate
from tether.commands.policy import load
from tether.commands.report import show_report
from tether.commands.result import read_result
from tether.config import ConfigError, load_config
from tether.loop.loop import Trainer
from tether.metrics.keys import describe
from tether.metrics.plot import plot_run
from tether.runtime.terminal import Screen
from tether.text.data.chats import ChatRow, load_chats
from tether.text.data.config import DataConfig
from tether.text.data.examples import Example, ExampleDataset, assistant_mask
from tether.text.data.prompts import PromptOptions
from tether.text.input_checks import missing_inputs

MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The same text as that of CHATML, with the assistant's tokens marked."""
LAST_ONLY = CHATML.replace("message['content']", "(message['content'] if loop.last else 'old')")
"""A template that writes earlier messages differently, as those that leave out earlier thoughts."""
SILENT = "{% for m in messages %}{{ m['content'] if m['role'] == 'user' else '' }}{% endfor %}"


save = Trainer.save


def said(*contents: str) -> list[dict[str, str]]:
    """Messages of the user and the assistant in turn."""
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


def conversations(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Sums of digits, answered by a word; every third has two turns."""
    words = ["zero", "one", "two", "three", "four"]
    return [
        {"messages": said(f"{i}?", words[i % 5], *(("and?", words[-i % 5]) if i % 3 == 0 else ()))}
        for i in range(first, first + count)
    ]


def overrides(folder: Path, run: Path, *more: str) -> list[str]:
    """A fine-tuning of eight conversations with two steps in each epoch, in verl's names."""
    return [
        "sft.enable=True",
        f"model.partial_pretrain={folder / 'model'}",
        f"data.train_files={folder / 'chats.jsonl'}",
        f"data.val_files={folder / 'held_out.jsonl'}",
        "data.train_batch_size=4",
        "data.micro_batch_size_per_gpu=4",
        "model.fsdp_config.dtype=float32",
        "model.enable_gradient_checkpointing=False",
        "optim.lr=1e-2",
        f"trainer.device={DEVICE}",
        "trainer.num_threads=1",
        "trainer.total_epochs=2",
        "trainer.preflight=False",
        f"trainer.default_local_dir={run}",
        *more,
    ]


def fit(settings: Sequence[str], stop_after: int | None = None) -> Path:
    """Train in this process; returns the folder of the run."""
    run = build(load_config(None, settings))
    try:
        run.trainer.fit(lambda: run.trainer.step_number == stop_after)
    finally:
        run.close()
    return run.directory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("sft"))
    write_jsonl(folder / "chats.jsonl", conversations(8))
    write_jsonl(folder / "held_out.jsonl", conversations(3, first=10))
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    return fit(overrides(folder, folder / "trained", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1"))


def dataset(rows: list[list[dict[str, str]]], template: str = CHATML, **options: Any) -> list[Example]:
    found = [ChatRow(tuple(messages), f"chats.jsonl row {row}") for row, messages in enumerate(rows)]
    options = {"max_prompt_length": 256, "chat_template": template, **options}
    return list(ExampleDataset(found, tiny_tokenizer(), PromptOptions(**options)))


# --- which tokens are learned ---------------------------------------------------------------------------------------


def test_the_assistants_tokens_are_learned_up_to_the_end_of_its_turn() -> None:
    """By ids: of a template that marks them, and of one whose prefixes are rendered."""
    tokenizer = tiny_tokenizer()
    ids = [*tokenizer.encode(f"{IM_START}user\nhi{EOS}\n{IM_START}assistant\n"), *tokenizer.encode(f"yo{EOS}")]
    expected = [False] * (len(ids) - 3) + [True] * 3
    for template in (CHATML, MARKED):
        (example,) = dataset([said("hi", "yo")], template)
        assert (example.token_ids.tolist(), example.mask.tolist()) == (ids, expected)
        assert example.token_ids[-1] == EOS_ID
        (turns,) = dataset([said("a", "bc", "d", "ef")], template)
        learned = tokenizer.decode(turns.token_ids[turns.mask])
        assert learned == f"bc{EOS}ef{EOS}"


def test_a_marked_template_gives_transformers_own_mask() -> None:
    tokenizer, messages = tiny_tokenizer(), said("a", "bc", "d", "ef")
    ids, mask = assistant_mask(messages, tokenizer, {"chat_template": MARKED})
    theirs: Any = tokenizer.apply_chat_template(
        messages, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids.tolist() == theirs["input_ids"]
    assert mask.tolist() == [bool(flag) for flag in theirs["assistant_masks"]]


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        ([said("a", "b"), said("a", "b", "c", "d")], {"template": LAST_ONLY}, "row 1: .* message 1 differently when"),
        ([said("a", "b")], {"template": SILENT}, "row 0: the chat template marks no token of the assistant, so there"),
        ([said("a", "b" * 300)], {}, r"row 0: the conversation has 322 tokens, more than data.max_length=256\. Raise"),
        ([said("a" * 300, "b")], {"truncation": "right"}, "row 0: .* among the 256 tokens that data.truncation=right"),
        ([said("a", "b" * 300)], {"filter_overlong_prompts": True}, "all 1 conversations have more than data.max_len"),
    ],
)
def test_conversations_that_cannot_be_learned_are_named(rows: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dataset(rows, **options)


def test_long_conversations_are_cut_or_dropped_as_asked() -> None:
    rows = [said("a", "b" * 300), said("a", "b")]
    cut, _ = dataset(rows, truncation="right")
    assert len(cut.token_ids) == 256
    assert cut.mask.sum() == 256 - len("<user\na>\n<assistant\n")  # each bracket stands for a control token
    (kept,) = dataset(rows, filter_overlong_prompts=True)
    assert kept.place == "chats.jsonl row 1"


def load_rows(path: Path, rows: list[Any], **keys: str) -> list[ChatRow]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig.model_construct(prompt_key="prompt", response_key="response", messages_key="messages")
    return load_chats(data.model_copy(update=keys), [str(path)])


def test_rows_have_messages_or_prompt_and_response(tmp_path: Path) -> None:
    rows = [{"messages": said("a", "b")}, {"prompt": "a", "response": "b"}, {"prompt": said("a"), "response": "b"}]
    for row in rows:
        (found,) = load_rows(tmp_path / "rows.jsonl", [row])
        assert list(found.messages) == said("a", "b")
    (named,) = load_rows(tmp_path / "rows.jsonl", [{"q": "a", "a": "b"}], prompt_key="q", response_key="a")
    assert list(named.messages) == said("a", "b")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": said("a")}, "row 1: `messages` has no message of the role assistant, so there is nothing to"),
        ({"messages": "a"}, r"row 1: `messages` is a text\. Give a list of \{role, content\}"),
        ({"messages": [{"from": "human", "value": "a"}]}, r"row 1: `messages`\[0\] is .* both strings"),
        ({"messages": []}, "row 1: no `messages`"),
        ({"prompt": "a", "response": None}, "row 1: `response` is None, not a text"),
        ([1], "row 1: a list, not an object with keys"),
    ],
)
def test_rows_that_are_no_conversation_are_named(row: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        load_rows(tmp_path / "rows.jsonl", [{"messages": said("a", "b")}, row])


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"conversations": said("a", "b")}, "Name its columns: data.messages_key=conversations"),
        ({"question": "a", "completion": "b"}, "data.prompt_key=question data.response_key=completion"),
    ],
)
def test_a_missing_column_is_named_with_the_keys(row: dict[str, Any], hint: str, folder: Path, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [row])
    with pytest.raises(ConfigError, match=r"data\.train_files.*no `messages` \(data\.messages_key\), and not") as error:
        load_config(None, overrides(folder, tmp_path / "run", f"data.train_files={file}"), missing_inputs)
    assert hint in str(error.value)


# --- the loss -------------------------------------------------------------------------------------------------------


def reference_losses(model: Path, examples: Sequence[Example]) -> tuple[float, float]:
    """The cross entropy of transformers' own model over the learned tokens: their mean, and the mean of the rows'."""
    network, sums, counts = AutoModelForCausalLM.from_pretrained(model), list[float](), list[int]()
    for example in examples:
        ids = torch.tensor(example.token_ids)[None].long()
        labels = torch.where(torch.tensor(example.mask), ids[0], -100)[1:]
        with torch.no_grad():
            logits = network(input_ids=ids).logits[0, :-1].float()
        sums.append(float(cross_entropy(logits, labels, ignore_index=-100, reduction="sum")))
        counts.append(int(example.mask.sum()))
    return sum(sums) / sum(counts), fmean(total / count for total, count in zip(sums, counts, strict=True))


def losses(settings: list[str]) -> dict[str, float]:
    """The validation loss before the first step, and the training loss of that step."""
    steps = measured(fit([*settings, "trainer.total_training_steps=1", "trainer.save_freq=0"]))
    return {"val": steps[0]["val/loss"], "train": steps[1]["train/loss"], "norm": steps[1]["actor/grad_norm"]}


def test_the_loss_is_transformers_cross_entropy_packed_or_not_and_in_any_micro_batches(
    folder: Path, tmp_path: Path
) -> None:
    """Of all rows at once, so that the training loss is that of the first batch, too."""
    everything = [f"data.val_files={folder / 'chats.jsonl'}", "data.train_batch_size=8"]
    packed = losses(overrides(folder, tmp_path / "packed", *everything))
    examples = dataset([row["messages"] for row in conversations(8)])
    by_token, by_row = reference_losses(folder / "model", examples)
    assert packed["val"] == pytest.approx(by_token, rel=1e-5)
    rows_alike = [*everything, "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"]
    assert losses(overrides(folder, tmp_path / "rows", *rows_alike))["val"] == pytest.approx(by_row, rel=1e-5)
    assert abs(by_row - by_token) > 1e-3
    assert packed["train"] == pytest.approx(packed["val"], rel=1e-6)
    for name, settings in {
        "padded": ["use_remove_padding=False"],
        "single": ["data.micro_batch_size_per_gpu=1", "data.val_batch_size=3"],
        "dynamic": ["data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=100"],
    }.items():
        assert losses(overrides(folder, tmp_path / name, *everything, *settings)) == pytest.approx(packed, rel=1e-5)


# --- a run ----------------------------------------------------------------------------------------------------------


def test_held_out_loss_falls(trained: Path) -> None:
    steps = measured(trained)
    assert sorted(steps) == [0, 1, 2, 3, 4]
    assert [step for step in steps if "val/loss" in steps[step]] == [0, 2, 4]  # before, and after each epoch
    assert steps[4]["val/loss"] < 0.8 * steps[0]["val/loss"]
    assert steps[1]["train/learned_tokens"] > 0


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_that_was_stopped_or_killed_resumes_bitwise(
    killed: bool, trained: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed run saves nothing, and repeats the step after its last checkpoint."""
    settings = overrides(folder, tmp_path / "run", "trainer.save_freq=2")
    with monkeypatch.context() as during:
        if killed:
            during.setattr(Trainer, "save", lambda run, **_: sys.exit() if run.step_number > 2 else save(run))
            during.setattr(Trainer, "_saving_on_error", lambda *_: nullcontext())
        with suppress(SystemExit):
            fit(settings, stop_after=3)
    assert (tmp_path / "run" / "global_step_3").exists() != killed
    assert sorted(measured(tmp_path / "run")) == [0, 1, 2, 3]
    fit(settings)
    assert measured(tmp_path / "run") == measured(trained)
    last = "global_step_4"
    assert same(weights(tmp_path / "run" / last), weights(trained / last))
    write_jsonl(tmp_path / "others.jsonl", conversations(8, first=1))
    with pytest.raises(ValueError, match=r"data\.train_files: not what .* was trained with"):
        fit([*settings, f"data.train_files={tmp_path / 'others.jsonl'}"])


def test_ppo_starts_from_the_folder_of_the_run(trained: Path, folder: Path, tmp_path: Path) -> None:
    settings = [*base_overrides(folder, tmp_path), *GRPO, "trainer.total_training_steps=1", "trainer.save_freq=1"]
    run = train([*settings, f"actor_rollout_ref.model.path={trained}", "actor_rollout_ref.actor.optim.lr=0"])
    assert same(weights(run / "global_step_1"), weights(trained / "global_step_4"))


def test_commands_take_the_run(
    trained: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(trained).generate("1?", max_new_tokens=4)[0].text
    with pytest.raises(ValueError, match=r"was fine-tuned \(tether sft\), and its validation rows name no reward"):
        evaluate(str(trained), None, [])
    scored = [f"custom_reward_function.path={folder / 'reward.py'}", "reward_model.num_workers=1"]
    evaluate(str(trained), None, [f"data.val_files={folder / 'val.jsonl'}", "data.max_response_length=4", *scored])
    assert "val-core/tiny/sums" in capsys.readouterr().out
    assert "trained with supervised fine-tuning by tether" in write_card(trained).read_text()
    assert plot_run(trained, tmp_path / "curves.png").stat().st_size > 0
    shown = CliRunner().invoke(app, ["view", str(trained), "--json", "--key", "val/loss"])
    assert (shown.exit_code, "val/loss" in shown.output) == (0, True), shown.output
    planned = CliRunner().invoke(app, ["plan", str(trained / "global_step_4" / "run.yaml"), "--device", "h100-80g"])
    assert (planned.exit_code, "update_actor" in planned.output) == (0, True), planned.output
    show_report(trained, Screen(), "tether sft")
    assert "val/loss" in capsys.readouterr().out
    result = read_result(trained, step=4, total_steps=4)
    assert (result.score, result.best_score) == ("val/loss", min(result.column("val/loss")[::2]))
    assert all(describe(key) for row in result.metrics for key in row if key != "step")


def test_adapters_alone_are_trained(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    lora = ["model.lora_rank=2", "model.target_modules=[q_proj]", "trainer.total_epochs=1"]
    run = fit(overrides(folder, tmp_path / "run", *lora))
    before, after = load_file(folder / "model" / "model.safetensors"), weights(run / "global_step_2")
    assert {name.split(".")[-2] for name in before if not same(before[name], after[name])} == {"q_proj"}
    assert (run / "global_step_2" / "adapter" / "adapter_model.safetensors").is_file()
    assert measured(run)[2]["val/loss"] < measured(run)[0]["val/loss"]


def test_the_best_checkpoint_has_the_lowest_loss(folder: Path, tmp_path: Path) -> None:
    """At a rate at which the second epoch undoes the first."""
    run = fit(overrides(folder, tmp_path, "trainer.keep_best=True", "optim.lr=3e-1", "optim.lr_scheduler=constant"))
    losses = {step: metrics["val/loss"] for step, metrics in measured(run).items() if "val/loss" in metrics}
    assert losses[2] < losses[4]
    assert [path.name for path in (run / "best").glob("global_step_*")] == ["global_step_2"]


def test_verls_names_and_a_file_of_ppo_are_read(folder: Path, tmp_path: Path) -> None:
    """What only PPO reads is named; the file's own names and verl's of its SFT trainer set the same keys."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "data: {train_files: a.jsonl, micro_batch_size_per_gpu: 3}\nmodel: {partial_pretrain: m, lora_rank: 4}\n"
        "optim: {lr: 1e-4}\nalgorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 5}}\n"
    )
    loaded = load_config(file, ["sft.enable=True", "optim.weight_decay=0.5"])
    model, actor = loaded.config.actor_rollout_ref.model, loaded.config.actor_rollout_ref.actor
    assert (model.path, model.lora_rank, actor.ppo_micro_batch_size_per_gpu) == ("m", 4, 3)
    assert (actor.optim.lr, actor.optim.weight_decay, actor.optim.lr_scheduler_type) == (1e-4, 0.5, "cosine")
    (note,) = loaded.notes
    assert note.startswith("no effect: actor_rollout_ref.rollout.n=5, algorithm.adv_estimator=grpo (sft.enable is true")
    again = tmp_path / "saved.yaml"
    again.write_text(loaded.to_yaml())
    assert load_config(again, []).config == loaded.config
    with pytest.raises(ConfigError, match=r"model\.path: unknown key"):
        load_config(None, ["model.path=m", "data.train_files=a.jsonl"])


def test_the_command_prints_the_tokens_that_are_learned(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = overrides(folder, tmp_path / "run", "trainer.preflight=True", "trainer.total_training_steps=1")
    monkeypatch.setattr("sys.argv", ["tether", "sft"])
    done = CliRunner().invoke(app, ["sft", *settings[1:]])
    assert done.exit_code == 0, done.output
    printed = " ".join(done.output.replace("\u2502", "").split())
    assert re.search(
        r"row 0, \d+ tokens, of which the green ones are learned <\|im_start\|>user 0\?<\|im_end\|>", printed
    )
    assert "8 conversations" in printed
    assert "clip" not in done.output


@pytest.mark.slow
def test_two_devices_learn_the_same(folder: Path, trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    run = fit(overrides(folder, tmp_path / "run", "trainer.device=cpu", "trainer.n_gpus_per_node=2"))
    for step in (0, 2, 4):
        assert measured(run)[step]["val/loss"] == pytest.approx(measured(trained)[step]["val/loss"], rel=1e-3)

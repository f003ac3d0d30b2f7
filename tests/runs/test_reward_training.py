"""`tether rm train`: learns which response is preferred, refuses what are no pairs, and PPO climbs the result."""

import json
import math
import random
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from io import StringIO
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.runs.tiny_run import FAST, base_overrides, measured, same, train, write_inputs, write_jsonl
from tests.tiny import save_tiny, save_tiny_reward_model
from tether.integrations.reward_models.build import RewardTrainingOptions, build_reward_training
from tether.integrations.reward_models.command import train_reward_model
from tether.integrations.reward_models.trainer import beats_chance, preference_batch, split_pairs, until_unusable
from tether.metrics.loggers.jsonl import read_metrics
from tether.runtime.run_lock import RunFolderBusy, RunLock
from tether.text.data.pairs import Pair, load_pairs, pair_ids
from tether.text.learning.pretraining import Pretraining
from tether.text.models.load import load_tokenizer

LETTERS = "abcdefgh"
QUICK = RewardTrainingOptions(lr=3e-3, epochs=3, batch_size=16, micro_batch_size=16, held_out=0.25, seed=1)


def preferences(count: int, *, shuffled: bool = False) -> list[dict[str, object]]:
    """The response with more `a` is preferred; shuffled: a coin says which."""
    draws, found = random.Random(0), []
    while len(found) < count:
        sides = ["".join(draws.choices(LETTERS, k=6)) for _ in range(2)]
        sides.sort(key=lambda text: -text.count("a"))
        if sides[0].count("a") - sides[1].count("a") < 2:
            continue
        if shuffled and draws.random() < 0.5:
            sides.reverse()
        prompt = [{"role": "user", "content": f"{len(found)}?"}]
        found.append({"prompt": prompt, "chosen": sides[0], "rejected": sides[1]})
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rm")
    write_inputs(folder)
    return folder


Trained = tuple[Path, list[float], str]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Two threads would wait for each other longer than they compute."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def trained(folder: Path) -> Trained:
    """A reward model that likes `a`, its accuracy on the way, and what the command printed."""
    torch.set_num_threads(1)
    pairs, printed = write_jsonl(folder / "pairs.jsonl", preferences(240)), StringIO()
    with redirect_stdout(printed):
        accuracy = train_reward_model(str(folder / "model"), [str(pairs)], folder / "trained", QUICK)
    return folder / "trained", accuracy, printed.getvalue()


def test_a_preference_is_learned(trained: Trained) -> None:
    path, accuracy, printed = trained
    assert accuracy[0] == 0.0  # all scores are exactly 0 before the first step
    assert accuracy[-1] > 0.9
    assert "held-out accuracy: 0.000 before (an untrained head" in printed.splitlines()[-1]
    assert "warning" not in printed
    metrics = read_metrics(path)
    assert metrics[1]["rm/loss"] == pytest.approx(0.6931, abs=1e-3)
    assert not list(path.parent.glob(".trained*"))


def test_long_preparation_says_how_far_it_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tether.runtime.terminal.monotonic", count(0, 11).__next__)
    pairs = load_pairs([str(write_jsonl(tmp_path / "pairs.jsonl", preferences(3)))])
    preference_batch(pairs, load_tokenizer(folder / "model"), 0, 99)
    assert capsys.readouterr().err.startswith("preparing pairs:1/3 - eta:")


def test_a_training_that_was_stopped_goes_on_bitwise(
    trained: Trained, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in step 17 of 33, it goes on after step 15; with another rate, or other pairs, it is refused."""
    pairs, out, whole = folder / "pairs.jsonl", tmp_path / "rm", Pretraining.run
    mine = write_jsonl(tmp_path / "pairs.jsonl", preferences(240))

    def stopped(training: Pretraining, done: int = 0) -> Iterator[tuple[int, dict[str, float]]]:
        for step, metrics in whole(training, done):
            yield step, metrics
            if step == 17:
                raise KeyboardInterrupt

    monkeypatch.setattr(Pretraining, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        train_reward_model(str(folder / "model"), [str(mine)], out, QUICK, save_every=5)
    assert not out.exists()
    monkeypatch.undo()
    for options, changed in ((replace(QUICK, lr=1e-3), "--lr"), (QUICK, f"the file {mine}")):
        if options is QUICK:
            write_jsonl(mine, preferences(200))
        with pytest.raises(ValueError, match=rf"an interrupted training in this folder had another value of {changed}"):
            train_reward_model(str(folder / "model"), [str(mine)], out, options, save_every=5)
    write_jsonl(mine, preferences(240))
    assert train_reward_model(str(folder / "model"), [str(mine)], out, QUICK) == trained[1]
    assert pairs.read_bytes() == mine.read_bytes()
    assert same(load_file(out / "model.safetensors"), load_file(trained[0] / "model.safetensors"))
    assert read_metrics(out) == read_metrics(trained[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs.jsonl", "rm"]


SLOW = [pytest.param(stops, marks=pytest.mark.slow) for stops in (None, 5, 9, "moving")]


@pytest.mark.parametrize("stops", [8, *SLOW])
def test_the_weights_of_the_best_accuracy_are_kept(
    stops: int | str | None,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A third epoch forgets: as in a whole training of two; also where it is stopped and resumed, be it at the end."""
    pairs, whole, out = write_jsonl(tmp_path / "pairs.jsonl", preferences(80)), Pretraining.run, tmp_path / "rm"
    second, known = tmp_path / "second", {4: 0.7, 8: 0.9, 12: 0.8}

    def forgetful(training: Pretraining, done: int = 0) -> Iterator[tuple[int, dict[str, float]]]:
        for step, metrics in whole(training, done):
            if step == 8:
                training.learner.engine.save(second)
            yield step, metrics | ({"rm/held_out_accuracy": known[step]} if step in known else {})
            if step == stops and not done:
                raise KeyboardInterrupt

    def killed(whole: Path, out: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Pretraining, "run", forgetful)
    with suppress(KeyboardInterrupt), monkeypatch.context() as during:
        if stops == "moving":
            during.setattr("tether.integrations.reward_models.command._move", killed)
        train_reward_model(str(folder / "model"), [str(pairs)], out, QUICK, save_every=3)
    assert out.exists() == (stops is None)
    if stops:
        train_reward_model(str(folder / "model"), [str(pairs)], out, QUICK, save_every=3)
    assert same(load_file(out / "model.safetensors"), load_file(second / "model.safetensors"))
    assert "0.900 after step 8, which is kept (0.800 after step 12, the last)" in capsys.readouterr().out


def test_best_weights_of_a_killed_training_go_when_it_begins_again(folder: Path, tmp_path: Path) -> None:
    """It had no checkpoint; with other options, whose epochs end elsewhere."""
    pairs, left = write_jsonl(tmp_path / "pairs.jsonl", preferences(60)), tmp_path / ".rm.training" / "best-1"
    left.mkdir(parents=True)
    train_reward_model(str(folder / "model"), [str(pairs)], tmp_path / "rm", replace(QUICK, epochs=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs.jsonl", "rm"]


def test_a_second_training_of_the_same_folder_leaves_the_first_ones_work(folder: Path, tmp_path: Path) -> None:
    pairs, work = write_jsonl(tmp_path / "pairs.jsonl", preferences(8)), tmp_path / ".rm.training"
    with RunLock(work):
        (work / "metrics.jsonl").write_text("of the first")
        with pytest.raises(RunFolderBusy, match="another run uses this folder"):
            train_reward_model(str(folder / "model"), [str(pairs)], tmp_path / "rm", QUICK)
        assert sorted(path.name for path in work.iterdir()) == ["metrics.jsonl", "run.lock"]


def test_a_trained_model_is_kept_where_its_folder_was_taken_meanwhile(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs, out, whole = write_jsonl(tmp_path / "pairs.jsonl", preferences(8)), tmp_path / "rm", Pretraining.run

    def taken(training: Pretraining, done: int = 0) -> Iterator[tuple[int, dict[str, float]]]:
        yield from whole(training, done)
        out.mkdir()
        (out / "mine").touch()

    monkeypatch.setattr(Pretraining, "run", taken)
    with pytest.raises(ValueError, match=rf"--out={out}: cannot be written .* The trained model is in ") as error:
        train_reward_model(str(folder / "model"), [str(pairs)], out, QUICK)
    (kept,) = (tmp_path / ".rm.training").glob("best-*")
    assert f"is in {kept};" in str(error.value)
    assert AutoModelForSequenceClassification.from_pretrained(kept).config.num_labels == 1
    with pytest.raises(ValueError, match="exists already"):  # and a second try leaves it, too
        train_reward_model(str(folder / "model"), [str(pairs)], out, QUICK)
    assert sorted(path.name for path in out.iterdir()) == ["mine"]
    assert (kept / "model.safetensors").is_file()


def test_labels_without_a_rule_are_not_learned(folder: Path) -> None:
    """Negative control: the same pairs, labelled by a coin."""
    pairs = write_jsonl(folder / "shuffled.jsonl", preferences(160, shuffled=True))
    accuracy = train_reward_model(str(folder / "model"), [str(pairs)], folder / "shuffled", replace(QUICK, epochs=1))
    assert 0.25 < accuracy[-1] < 0.75


def test_the_result_is_a_plain_sequence_classifier(trained: Trained) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(trained[0]).eval()
    tokenizer = AutoTokenizer.from_pretrained(trained[0])
    assert model.config.num_labels == 1
    assert model.config.pad_token_id == tokenizer.pad_token_id

    def score(answer: str) -> float:
        chat = [{"role": "user", "content": "5?"}, {"role": "assistant", "content": answer}]
        ids = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), return_tensors="pt")
        with torch.no_grad():
            return model(**ids).logits.item()

    assert score("aaacad") > score("bbcfed")


def test_training_goes_on_from_a_reward_model(trained: Trained, folder: Path) -> None:
    more = build_reward_training(str(trained[0]), [str(folder / "pairs.jsonl")], QUICK)
    _, first = next(more.run())
    assert first["rm/held_out_accuracy"] == pytest.approx(trained[1][-1])


def test_micro_batches_do_not_change_the_result(folder: Path) -> None:
    pairs = write_jsonl(folder / "few.jsonl", preferences(24))
    found = []
    for size in (16, 3):
        options = RewardTrainingOptions(lr=1e-3, batch_size=16, micro_batch_size=size)
        training = build_reward_training(str(folder / "model"), [str(pairs)], options)
        found.append([metrics["rm/loss"] for step, metrics in training.run() if step])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_ppo_raises_the_learned_score(trained: Trained, folder: Path, tmp_path: Path) -> None:
    base = [text for text in base_overrides(folder, tmp_path) if not text.startswith("custom_reward_function")]
    run = train(
        [
            *base,
            *FAST,
            *("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8", "data.train_batch_size=8"),
            *(
                "actor_rollout_ref.actor.ppo_mini_batch_size=8",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
            ),
            *("reward_model.enable=True", f"reward_model.model.path={trained[0]}", "trainer.total_training_steps=12"),
        ]
    )
    scores = [step["critic/score/mean"] for step in measured(run).values()]
    assert sum(scores[-4:]) / 4 > sum(scores[:4]) / 4 + 0.4


# --- pairs ----------------------------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "hi"}]
GOOD = [{"role": "assistant", "content": "hello"}]
SYSTEM = {"role": "system", "content": "Be brief."}
LAST = "\n\nHuman: and?\n\nAssistant:"
HH = f"\n\nHuman: hi\n\nAssistant: hello{LAST}"


def conversation(*contents: str) -> list[dict[str, str]]:
    """Turns of the user and of the assistant, who has the last one."""
    return [{"role": ("assistant", "user")[at % 2], "content": contents[-1 - at]} for at in range(len(contents))][::-1]


TURNS = conversation("a", "b", "c", "yes")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "chosen": "hello", "rejected": "no"},
        {"prompt": CHAT, "chosen": GOOD, "rejected": [{"role": "assistant", "content": "no"}]},
        {"chosen": [*CHAT, *GOOD], "rejected": [*CHAT, {"role": "assistant", "content": "no"}]},
        {"prompt": None, "chosen": [*CHAT, *GOOD], "rejected": [*CHAT, {"role": "assistant", "content": "no"}]},
        # as UltraFeedback has it
        {"prompt": "hi", "chosen": [*CHAT, *GOOD], "rejected": [*CHAT, {"role": "assistant", "content": "no"}]},
        {"prompt": CHAT, "chosen": [*CHAT, *GOOD], "rejected": [*CHAT, {"role": "assistant", "content": "no"}]},
    ],
)
def test_layouts_of_conversations(row: dict[str, object], folder: Path, tmp_path: Path) -> None:
    (pair,) = load_pairs([str(write_jsonl(tmp_path / "pairs.jsonl", [row]))])
    tokenizer = load_tokenizer(folder / "model")
    chosen, rejected = (tokenizer.decode(ids) for ids in pair_ids(pair, tokenizer))
    opening = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (chosen, rejected) == (f"{opening}hello<|im_end|>\n", f"{opening}no<|im_end|>\n")


def test_a_prompt_that_both_sides_repeat_after_a_system_message(tmp_path: Path) -> None:
    sides = {
        side: [{"role": "system", "content": "Be brief."}, *CHAT, {"role": "assistant", "content": side}]
        for side in ("chosen", "rejected")
    }
    longer = {"prompt": CHAT, **{side: [*CHAT, *GOOD, *CHAT, messages[-1]] for side, messages in sides.items()}}
    file = write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "hi", **sides}, longer])
    repeated, several = load_pairs([str(file)])
    assert (repeated.chosen, repeated.rejected) == (sides["chosen"], sides["rejected"])
    assert several.chosen == longer["chosen"]


def test_turns_of_the_prompt_that_both_sides_repeat_are_read_once(tmp_path: Path) -> None:
    whole = {"chosen": conversation("a", "b", "c", "yes"), "rejected": conversation("a", "b", "c", "no")}
    prompt = whole["chosen"][:3]
    rows = [{"prompt": prompt, **{side: whole[side][turns:] for side in whole}} for turns in range(4)]
    system = [{"role": "system", "content": "Be brief."}]
    rows.append({"prompt": [*system, *prompt], **{side: whole[side] for side in whole}})
    rows.append({"prompt": "a ", "chosen": conversation("a", "yes"), "rejected": conversation("a", "no")})
    *pairs, with_system, spaced = load_pairs([str(write_jsonl(tmp_path / "pairs.jsonl", rows))])
    assert [(pair.chosen, pair.rejected) for pair in pairs] == [(whole["chosen"], whole["rejected"])] * 4
    assert with_system.rejected == [*system, *whole["rejected"]]
    assert spaced.chosen == conversation("a", "yes")


def test_a_response_may_begin_as_its_prompt_ends(tmp_path: Path) -> None:
    """A greeting is greeted back; a longer echo is part of the response where one side alone has it."""
    rows = [
        {"prompt": "hi", "chosen": "hi there", "rejected": "hi."},
        {"prompt": "What is the sum of 1 and 1?", "chosen": "What is the sum of 1 and 1? It is 2.", "rejected": "3"},
        {"prompt": [SYSTEM], "chosen": conversation("a", "b"), "rejected": conversation("a", "c")},
    ]
    greeted, echoed, system = load_pairs([str(write_jsonl(tmp_path / "pairs.jsonl", rows))])
    assert [len(pair.chosen) for pair in (greeted, echoed, system)] == [2, 2, 3]


def test_texts_stand_as_they_are(folder: Path, tmp_path: Path) -> None:
    row = {"chosen": "\n\nHuman: hi\n\nAssistant: hello", "rejected": "\n\nHuman: hi\n\nAssistant: no"}
    (pair,) = load_pairs([str(write_jsonl(tmp_path / "pairs.jsonl", [row]))])
    tokenizer = load_tokenizer(folder / "model")
    assert [tokenizer.decode(ids) for ids in pair_ids(pair, tokenizer)] == list(row.values())


NO_PAIRS: list[tuple[object, str]] = [
    ({"chosen": "yes"}, "row 1: has no `rejected`, so nothing is compared"),
    (
        {"chosen": "yes", "loser": "no"},
        "row 1: has no `rejected`, so nothing is compared; its keys are chosen, loser",
    ),
    ({"chosen": "yes", "rejected": ""}, "row 1: has no `rejected`"),
    ({"chosen": " \n", "rejected": "no"}, "row 1: has no `chosen`"),
    (
        {"chosen": [*CHAT, *GOOD], "rejected": [*CHAT, *CHAT, *GOOD]},
        "row 1: `chosen` and `rejected` differ before the assistant's first message: they answer different prompts",
    ),
    ({"chosen": "yes", "rejected": "yes"}, "row 1: `chosen` and `rejected` are the same"),
    ({"chosen": "yes", "rejected": "no", "margin": "3"}, "row 1: `margin` is '3', not a finite number"),
    ({"chosen": 1, "rejected": "no"}, "row 1: `chosen` is neither text nor a list of {role, content}"),
    ({"chosen": [{"role": "user"}], "rejected": "no"}, "row 1: `chosen` is neither text"),
    *(
        ({"prompt": prompt, "chosen": "yes", "rejected": "no"}, "row 1: `prompt` is neither text")
        for prompt in (3, 0, False, {})
    ),
    *(
        ({"prompt": prompt, "chosen": "yes", "rejected": "no"}, "row 1: `prompt` is empty; write null")
        for prompt in ("", " \n", [])
    ),
    ({"prompt": "a", "chosen": "a\ud83d", "rejected": "b"}, "row 1: `chosen` holds half a character"),
    ({"prompt": "a\ud83d", "chosen": "a", "rejected": "b"}, "row 1: `prompt` holds half a character"),
    (
        {"chosen": [*CHAT, *GOOD], "rejected": [*CHAT, {"role": "assistant", "content": "\ude00"}]},
        "row 1: `rejected` holds half a character",
    ),
    (
        {"prompt": TURNS[:3], "chosen": TURNS[1:], "rejected": conversation("no")},
        "row 1: of the last messages of `prompt` `chosen` repeats 2 and `rejected` 0; leave them out of both",
    ),
    (
        {"prompt": "hello", "chosen": [*CHAT, *GOOD], "rejected": [*CHAT, {"role": "assistant", "content": "no"}]},
        "row 1: `prompt` ends with a message of the user, and `chosen` begins with another one",
    ),
    (
        {"prompt": CHAT, "chosen": [SYSTEM, *TURNS], "rejected": [SYSTEM, *TURNS[:3], *GOOD]},
        "row 1: `prompt` ends with a message of the user, and `chosen` begins with one of the role system",
    ),
    *(
        (
            {"prompt": prompt, "chosen": f"{repeated} yes", "rejected": f"{repeated} no"},
            f"row 1: `chosen` and `rejected` begin with {shown!r}, with which `prompt` ends",
        )
        for prompt, repeated, shown in (
            (HH, HH, HH.strip()),
            (HH, LAST, LAST.strip()),
            (HH + " ", HH.lstrip(), HH.strip()),
            ([*TURNS[:2], {"role": "user", "content": HH}], "\n\nAssistant:", "Assistant:"),
            ("What is the sum of 1 and 1?", "What is the sum of 1 and 1?", "What is the sum of 1 and 1?"),
        )
    ),
    ({"chosen": [*CHAT, *GOOD], "rejected": CHAT}, "row 1: `rejected` ends with a message of the role user"),
    ({"chosen": [*CHAT, *GOOD], "rejected": "no"}, "row 1: one of `chosen` and `rejected` is a text"),
    ([1], "row 1: is no object with `chosen` and `rejected`"),
]


def test_what_is_no_pair_is_named(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    for row, says in NO_PAIRS:
        file.write_text("".join(json.dumps(line) + "\n" for line in ({"chosen": "a", "rejected": "b"}, row)))
        with pytest.raises(ValueError, match=r"pairs\.jsonl") as error:
            load_pairs([str(file)])
        assert says in str(error.value)
        assert "row 0" not in str(error.value)


def test_the_margin_of_a_pair_reaches_the_loss(folder: Path, tmp_path: Path) -> None:
    rows = [{"chosen": "a", "rejected": "b"} | margin for margin in ({"margin": 3}, {"margin": None}, {})]
    pairs = load_pairs([str(write_jsonl(tmp_path / "pairs.jsonl", rows))])
    batch = preference_batch(pairs, load_tokenizer(folder / "model"), None, 99)
    assert batch.token_level_scores.sum(-1).tolist() == [3.0, 0.0, 0.0]


def test_a_side_without_a_token_is_named(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder / "model")
    row = {"chosen": f"{tokenizer.pad_token}{tokenizer.pad_token}", "rejected": "b"}
    pairs = load_pairs([str(write_jsonl(tmp_path / "pairs.jsonl", [{"chosen": "a", "rejected": "b"}, row]))])
    with pytest.raises(ValueError, match=r"pairs\.jsonl row 1: `chosen` has only padding tokens"):
        preference_batch(pairs, tokenizer, tokenizer.pad_token_id, 99)


def test_prompts_are_learned_from_or_held_out() -> None:
    pairs = [Pair([{"role": "user", "content": str(i // 2)}, *GOOD], CHAT, f"row {i}") for i in range(20)]
    learned, held_out = split_pairs(pairs, 0.3, seed=1)
    assert (len(learned), len(held_out)) == (14, 6)
    assert not {pair.prompt for pair in learned} & {pair.prompt for pair in held_out}
    with pytest.raises(ValueError, match="all rows have the same prompt"):
        split_pairs(pairs[:2], 0.3, seed=1)


def short(path: Path) -> Path:
    """A model with a token less than its tokenizer."""
    tokenizer = load_tokenizer(save_tiny(path))
    return save_tiny(path, vocab_size=len(tokenizer) - 1)


def refusals(folder: Path, tmp_path: Path) -> dict[str, tuple[str, RewardTrainingOptions]]:
    return {
        "its head has 2 outputs": (str(save_tiny_reward_model(tmp_path / "two", num_labels=2)), QUICK),
        "has no chat template": (str(save_tiny(tmp_path / "plain", chat_template=False)), QUICK),
        "^--model=.*: its vocabulary has [0-9]+ tokens, and its tokenizer [0-9]+": (
            str(short(tmp_path / "short")),
            QUICK,
        ),
        "tokens are more than 9; remove it": (str(folder / "model"), RewardTrainingOptions(max_length=9)),
        "no such file or directory": (str(tmp_path / "nowhere"), QUICK),
        "^--lr=inf: is no finite number": (str(folder / "model"), replace(QUICK, lr=math.inf)),
        "^--lr=nan: is no finite number": (str(folder / "model"), replace(QUICK, lr=math.nan)),
        "^--weight-decay=inf: is no finite number": (str(folder / "model"), replace(QUICK, weight_decay=math.inf)),
        "^--held-out=0: ": (str(folder / "model"), replace(QUICK, held_out=0)),
        "^--device=tpu: is no device. Available: cpu": (str(folder / "model"), replace(QUICK, device="tpu")),
        "^--max-length=4097: the model has 512 positions": (str(folder / "model"), replace(QUICK, max_length=4097)),
    }


def test_what_cannot_be_trained_is_refused_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    pairs = write_jsonl(tmp_path / "pairs.jsonl", preferences(4))
    refused = refusals(folder, tmp_path)
    before = set(tmp_path.iterdir())
    for says, (model, options) in refused.items():
        with pytest.raises(ValueError, match=says):
            train_reward_model(model, [str(pairs)], tmp_path / "out", options)
        assert set(tmp_path.iterdir()) == before, says


@pytest.mark.parametrize(
    ("lr", "says"),
    [
        (1e9, "the scores of held-out pairs are not finite"),
        (1e30, "2 of the last 3 updates were skipped, since their gradients were not finite"),
    ],
)
def test_a_training_that_blows_up_is_no_success(lr: float, says: str, folder: Path, tmp_path: Path) -> None:
    pairs = write_jsonl(tmp_path / "pairs.jsonl", preferences(60))
    with pytest.raises(ValueError, match=rf"{says}.* lower --lr"):
        train_reward_model(str(folder / "model"), [str(pairs)], tmp_path / "rm", replace(QUICK, lr=lr))
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.jsonl"]


def test_a_model_that_ranks_no_better_than_chance_is_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of pairs that stand there the other way round, too, no model ranks more than half."""
    rows = preferences(40)
    rows += [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    pairs = write_jsonl(tmp_path / "pairs.jsonl", rows)
    _, after = train_reward_model(str(folder / "model"), [str(pairs)], tmp_path / "rm", replace(QUICK, epochs=1))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        f"warning: the held-out accuracy is {after:.3f} of 20 pairs, no better than chance (0.5): the model"
    )


def test_few_held_out_pairs_are_told_as_too_few(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Coins rank four of four right once in 16 times, and five of five once in 32."""
    pairs = write_jsonl(tmp_path / "pairs.jsonl", preferences(4))
    train_reward_model(str(folder / "model"), [str(pairs)], tmp_path / "rm", QUICK)
    assert (
        "warning: with only 1 held-out pairs, 100% accuracy is not distinguishable from chance"
        in capsys.readouterr().out
    )
    assert [beats_chance(1.0, pairs) for pairs in (1, 3, 4, 5)] == [False, False, False, True]
    assert not beats_chance(8 / 10, 10)  # 5.5 %
    assert beats_chance(7 / 8, 8)  # 3.5 %


def test_options_behind_the_name_of_a_file_of_pairs_are_refused(tmp_path: Path) -> None:
    pairs = write_jsonl(tmp_path / "pairs.jsonl", preferences(2))
    with pytest.raises(
        ValueError, match="a file of pairs has no options; call its columns prompt, chosen and rejected"
    ):
        load_pairs([f"{pairs}?question=chosen"])


def test_a_training_whose_updates_are_skipped_ends_soon() -> None:
    def steps(skipped: str) -> int:
        """Steps that are made before it ends."""
        made = []
        with suppress(ValueError):
            for step, _ in until_unusable((n, {"rm/skipped_updates": float(s)}) for n, s in enumerate(skipped)):
                made.append(step)
        return len(made)

    assert steps("1" * 99) == 10
    assert steps("110" * 33) == 99

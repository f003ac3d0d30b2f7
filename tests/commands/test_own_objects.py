"""A trainer from objects of one's own: dataset, reward, model, tokenizer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tether
from tests.runs.loops import contents
from tests.runs.tiny_run import GAE, GRPO, base_overrides, measured, rows, same, write_inputs
from tests.tiny import tiny_model, tiny_tokenizer
from tether.batch import Prompt
from tether.metrics.loggers.jsonl import read_metrics

PARTS = ("data.", "actor_rollout_ref.model.path", "critic.model.path", "custom_reward_function")


def settings(run: Path, *more: str) -> list[str]:
    """Those of a tiny run, without what it is made of."""
    base_settings = [item for item in base_overrides(Path("unused"), run) if not item.startswith(PARTS)]
    return [*base_settings, "data.train_batch_size=4", "data.max_prompt_length=64", "data.max_response_length=8", *more]


def reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, float]:
    return {"score": sum(c.isalpha() for c in solution_str) / 8, "digits": sum(c.isdigit() for c in solution_str)}


def parts(**more: Any) -> dict[str, Any]:
    return {"dataset": rows(), "reward": reward, "model": tiny_model("llama"), "tokenizer": tiny_tokenizer()} | more


def test_objects_train_as_the_same_things_in_files(tmp_path: Path) -> None:
    """Weights, metrics and optimizer bit for bit; the objects stay as they were."""
    inputs = write_inputs(tmp_path)
    short = ["trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.preflight=False"]
    tether.train(overrides=[*base_overrides(inputs, tmp_path / "files"), *GAE, *short])
    model = LlamaForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = tether.train(
        overrides=settings(tmp_path / "objects", *GAE, *short), **parts(model=model, val_dataset=rows("tiny/sums", 5))
    )
    files, objects = (measured(tmp_path / name) for name in ("files", "objects"))
    for step in files:
        trained = {key: value for key, value in files[step].items() if not key.startswith("val")}
        assert same(trained, {key: value for key, value in objects[step].items() if not key.startswith("val")}), step
    one, other = (contents(tmp_path / name / "global_step_2") for name in ("files", "objects"))
    assert same(one["actor/model.safetensors"], other["actor/model.safetensors"])
    assert same(one["critic/model.safetensors"], other["critic/model.safetensors"])
    assert same(before, dict(model.state_dict()))
    assert tether.load(run.folder).generate("1+1?", max_new_tokens=2)[0].token_ids


class Twice(torch.nn.Module):
    """Doubles what another module gives."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(x)


class Doubling(LlamaForCausalLM):
    """A class of one's own, with the configuration of another: its last hidden states are doubled."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.norm = Twice(self.model.norm)


@pytest.mark.slow
def test_a_class_of_ones_own_trains_and_resumes(tmp_path: Path) -> None:
    """With a reference; resumed after a step it ends as the uninterrupted run."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        pad_token_id=0, bos_token_id=1, eos_token_id=3,
    )  # fmt: skip
    own_objects = parts(model=Doubling(config))
    short = ["trainer.total_training_steps=2", "trainer.preflight=False"]
    full = settings(tmp_path / "whole", *GRPO, *short, "trainer.save_freq=1")
    run = tether.train(overrides=full, **own_objects)
    path = f"trainer.resume_from_path={tmp_path / 'whole/global_step_1'}"
    resumed = settings(
        tmp_path / "resumed", *GRPO, *short, "trainer.resume_mode=resume_path", path, "trainer.save_freq=2"
    )
    tether.train(overrides=resumed, **own_objects)
    one, other = (contents(tmp_path / name / "global_step_2") for name in ("whole", "resumed"))
    assert same(one["actor/model.safetensors"], other["actor/model.safetensors"])
    assert read_metrics(run.folder)[1]["training/rollout_probs_diff_max"] < 1e-4  # sampler and trainer agree
    trained = Doubling.from_pretrained(run.checkpoint / "actor", dtype=torch.float32)
    assert type(trained) is Doubling
    with pytest.raises(ValueError, match=r"of your own class; load it with Doubling\.from_pretrained"):
        tether.load(run.folder)
    own_objects["model"] = Doubling(config)
    with pytest.raises(ValueError, match=r"actor_rollout_ref\.model\.path: not what .* was trained with"):
        tether.train(overrides=full, **own_objects)
    del own_objects["model"], own_objects["tokenizer"]
    with pytest.raises(ValueError, match=r"object:tokenizer: .*Give it again, as tokenizer=\.\.\."):
        tether.train(run.checkpoint / "run.yaml", **own_objects)


def test_rewards_may_be_closures_and_their_failures_are_counted(tmp_path: Path) -> None:
    calls: list[str] = []

    def noted(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float | None:
        calls.append(solution_str)
        if len(calls) % 3 == 0:
            raise KeyError("mine")
        while len(calls) == 4:
            pass
        return float(len(solution_str))

    more = ["trainer.total_training_steps=1", "trainer.preflight=False", "reward_model.max_error_rate=1.0"]
    run = tether.train(
        overrides=settings(tmp_path / "run", *GRPO, *more, "reward_model.timeout=0.5"), **parts(reward=noted)
    )
    assert len(calls) == 16
    assert run.metrics[-1]["reward/error_rate"] == 6 / 16  # calls 3, 6, 9, 12, 15 raise, the fourth never ends


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": iter([])}, "dataset: a list_iterator is no sequence of rows"),
        ({"dataset": []}, "dataset: no rows"),
        ({"dataset": [{"prompt": "1+1?"}]}, r"dataset row 0: no `data_source`"),
        ({"reward": 3}, "reward=3: is not a function"),
        ({"reward": lambda response: 1.0}, r"reward defines <lambda>\(response\), which is called by keyword"),
        ({"model": torch.nn.Linear(2, 2)}, "model: Linear is no transformers.PreTrainedModel"),
        ({"tokenizer": b"bytes"}, "tokenizer: bytes is no tokenizer"),
        ({"tokenizer": None}, "model: give its tokenizer, too"),
    ],
)
def test_objects_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        tether.train(overrides=settings(tmp_path / "run", *GRPO), **parts(**arguments))


def test_prompts_of_ones_own_are_taken_as_they_are(tmp_path: Path) -> None:
    prompts = [Prompt(token_ids=(5, 6, 7 + i), data_source="mine", ground_truth=None) for i in range(4)]
    more = ["trainer.total_training_steps=1", "trainer.preflight=False"]
    run = tether.train(overrides=settings(tmp_path / "run", *GRPO, *more), **parts(dataset=prompts))
    assert run.metrics[-1]["prompt_length/mean"] == 3

"""Is a calculator used where it pays? A small model on word problems, three seeds, a few minutes of one core.

    python -m benchmarks.calculator
    python -m benchmarks.calculator --write recipes/gsm8k-calculator/README.md --plot docs/assets/calculator.png

Each question has two or three numbers, whose sum, difference or product a model of this size cannot compute. It is
first taught by imitation, in a plain loop of PyTorch, to answer in the form of GSM8K (`#### 42`): a third of the
examples call the calculator, the others guess. From there all runs begin, with questions of their own: GRPO with the
calculator and the rule of recipes/gsm8k-calculator, 1 for the right number, else 0. The control is the same with calls
that are never answered. The taught model and the runs are kept beside --results and not made again.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.resumable import ROOT, all_runs, arguments_of_runs, fields, save_figure, write_between
from tether.config import load_config
from tether.metrics.loggers.headline import validation_means
from tether.metrics.loggers.jsonl import read_metrics
from tether.runtime.machine import set_threads
from tether.text.build import build_run

BEGIN, END = "<!-- calculator:begin -->", "<!-- calculator:end -->"
PROBLEMS = (
    ("Ann has {a} apples and buys {b} more. How many are there?", "{a} + {b}"),
    ("Ben has {a} coins and spends {b}. How many are left?", "{a} - {b}"),
    ("A hall has {a} rows of {b} seats. How many are there?", "{a} * {b}"),
    ("{a} boys and {b} girls get {c} apples each. How many are there?", "({a} + {b}) * {c}"),
)
CALL, CALLED = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
MARKS = ("<pad>", "<|im_start|>", "<|im_end|>", CALL, CALLED)
PAD, TURN_END = 0, 2
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PIECES = r"\d|#### | ?[A-Za-z]+|\n|."
TAUGHT, BATCH, SHARE_OF_CALLS = 800, 32, 1 / 3
STEPS, LAST = 20, 5
KEYS = ("critic/score/mean", "reward/extra/tool_calls/mean")
UNANSWERED = "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=1"


@dataclass(frozen=True)
class Problem:
    """A question, what to give the calculator, and the answer."""

    question: str
    expression: str
    answer: int


@dataclass(frozen=True)
class Learned:
    """Scores and tool calls of a run."""

    held_out: list[float]
    """Score of sampled answers to held-out questions before the first step and after the last one."""
    scores: list[float]
    """Of the training batch of each step."""
    calls: list[float]
    """A reply of each step."""


def problem(draws: random.Random) -> Problem:
    """One of the four kinds."""
    question, expression = draws.choice(PROBLEMS)
    low, high = sorted(draws.sample(range(10, 100), 2))
    numbers = {"a": high, "b": low, "c": draws.randint(2, 9)}
    text = expression.format(**numbers)
    return Problem(question.format(**numbers), text, int(eval(text)))


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a word and a digit; a call's beginning and end are one each."""
    texts = [text for pair in PROBLEMS for text in pair] + ["user\nassistant\ntool\n#### 0123456789-"]
    words = dict.fromkeys(piece for text in texts for piece in re.findall(PIECES, re.sub(r"\{.\}", "0", text)))
    names = [*MARKS, *words, "<unk>"]
    fast = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    fast.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS[:3]])
    fast.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS[3:]])
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    fast.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=fast, pad_token=MARKS[PAD], eos_token=MARKS[TURN_END])
    made.chat_template = TEMPLATE
    return made


def taught_model() -> LlamaForCausalLM:
    """Two layers, 64 wide, drawn at random and taught by imitation; only what the model itself says is learned."""
    torch.manual_seed(0)
    words, draws = tokenizer(), random.Random(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=96, pad_token_id=PAD, bos_token_id=None, eos_token_id=TURN_END,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TAUGHT)
    for step in range(TAUGHT):
        rows = [_example(words, problem(draws), draws) for _ in range(BATCH)]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [PAD] * (width - len(ids)) for ids, _ in rows])
        said = torch.tensor([said + [False] * (width - len(said)) for _, said in rows])[:, 1:]
        logits = model(ids[:, :-1]).logits
        optimizer.zero_grad()
        loss = cross_entropy(logits[said], ids[:, 1:][said])
        loss.backward()
        optimizer.step()
        rate.step()
        if step % 200 == 199:
            print(f"imitation, step {step + 1}: {loss.item():.3f} nats per token", file=sys.stderr, flush=True)
    return model.eval()


def _example(words: PreTrainedTokenizerFast, one: Problem, draws: random.Random) -> tuple[list[int], list[bool]]:
    """A conversation, and which of its tokens the model says."""
    if draws.random() < SHARE_OF_CALLS:
        turns = [f"{CALL}{one.expression}{CALLED}", f"#### {one.answer}"]
    else:
        turns = [f"#### {draws.randint(10, 2000)}"]
    ids: list[int] = []
    said: list[bool] = []
    for number, turn in enumerate(turns):
        before = f"<|im_start|>tool\n{one.answer}" if number else f"<|im_start|>user\n{one.question}"
        parts = [(f"{before}<|im_end|><|im_start|>assistant\n", False), (f"{turn}<|im_end|>", True)]
        for text, own in parts:
            new = words.encode(text, add_special_tokens=False)
            ids += new
            said += [own] * len(new)
    return ids, said


def write_model(folder: Path) -> None:
    """Write the taught model, where it is not there yet."""
    if not (folder / "tokenizer.json").exists():
        taught_model().save_pretrained(folder)
        tokenizer().save_pretrained(folder)


def write_questions(seed: int, folder: Path) -> None:
    """Questions in verl's layout; none of the held-out ones is trained on."""
    draws, seen = random.Random(1000 + seed), set[str]()
    for name, count in (("train", 1024), ("test", 128)):
        rows = []
        while len(rows) < count:
            one = problem(draws)
            if one.question not in seen:
                seen.add(one.question)
                truth = {"style": "rule", "ground_truth": str(one.answer)}
                prompt = [{"role": "user", "content": one.question}]
                rows.append({"data_source": "openai/gsm8k", "prompt": prompt, "reward_model": truth})
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def overrides(seed: int, model: Path, folder: Path) -> list[str]:
    """GRPO with the calculator of the recipe."""
    rollout = "actor_rollout_ref.rollout"
    return [
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.val_files={folder / 'test.jsonl'}",
        "data.train_batch_size=16",
        "data.max_prompt_length=32",
        "data.max_response_length=48",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=256",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        f"{rollout}.dtype=float32",
        f"{rollout}.n=8",
        f"{rollout}.multi_turn.enable=True",
        f"{rollout}.multi_turn.tool_config_path={ROOT / 'recipes/gsm8k-calculator/tools/calculator.yaml'}",
        f"{rollout}.multi_turn.max_assistant_turns=2",
        f"{rollout}.multi_turn.tokenization_sanity_check_mode=disable",  # its words are none of this vocabulary
        f"{rollout}.agent.default_agent_loop=tool_agent",
        f"{rollout}.agent.num_workers=1",
        f"{rollout}.val_kwargs.do_sample=True",
        f"{rollout}.val_kwargs.temperature=1",
        "algorithm.adv_estimator=grpo",
        "reward_model.num_workers=1",
        f"trainer.seed={seed}",
        "trainer.device=cpu",
        "trainer.num_threads=1",
        "trainer.logger=file",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={folder / 'run'}",
    ]


def train(seed: int, model: Path, *more: str) -> Learned:
    """Train the taught model."""
    with tempfile.TemporaryDirectory() as name:
        write_questions(seed, Path(name))
        run = build_run(load_config(None, [*overrides(seed, model, Path(name)), *more]))
        try:
            run.trainer.fit()
        finally:
            run.close()
        metrics = read_metrics(run.directory)
    tested = [fmean(validation_means(metrics[step]).values()) for step in (0, STEPS)]
    scores, calls = ([metrics[step][key] for step in range(1, STEPS + 1)] for key in KEYS)
    return Learned(tested, scores, calls)


def table(runs: Mapping[str, Learned]) -> str:
    """A line a run."""
    heads = ["seed", "held out before", "after", "score of step 1", f"of the last {LAST} of {STEPS}"]
    heads += ["calls a reply in step 1", "at the end"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name, run in runs.items():
        numbers = [*run.held_out, run.scores[0], fmean(run.scores[-LAST:]), run.calls[0], fmean(run.calls[-LAST:])]
        lines.append(f"| {name} | {' | '.join(f'{number:.2f}' for number in numbers)} |")
    return "\n".join(lines)


def plot(runs: Mapping[str, Learned], path: Path) -> None:
    """Draw score and calls a reply over the steps."""
    figure, axes = fields(2, 8.8, 3.2, sharex=True)
    for name, run in runs.items():
        for axis, values in zip(axes, (run.scores, run.calls), strict=True):
            axis.plot(range(1, len(values) + 1), values, label=name)
    axes[0].set(xlabel="step", ylabel="score of the training batch", ylim=(0, 1.02))
    axes[1].set(xlabel="step", ylabel="calls a reply")
    axes[1].legend(title="seed", loc="center right")
    save_figure(figure, path)


def main() -> None:
    """See the module."""
    parser = arguments_of_runs(__doc__, ROOT / "runs/calculator.jsonl")
    given = parser.parse_args()
    asked = [{"seed": seed, "answered": True} for seed in given.seeds]
    asked.append({"seed": given.seeds[0], "answered": False})
    names = [f"{one['seed']}" + ("" if one["answered"] else ", calls never answered") for one in asked]
    model = given.results.with_suffix("")
    set_threads(1)

    def make(seed: int, *, answered: bool) -> dict[str, Any]:
        write_model(model)
        return asdict(train(seed, model, *([] if answered else [UNANSWERED])))

    found = all_runs(make, asked, given.results, made_only=given.made_only)
    runs = {name: Learned(**run) for name, run in zip(names, found, strict=True) if run is not None}
    if not runs:
        parser.error(f"{given.results}: holds none of these runs")
    print(found_table := table(runs))
    if given.write:
        write_between(given.write, BEGIN, END, found_table)
    if given.plot:
        plot(runs, given.plot)


if __name__ == "__main__":
    main()

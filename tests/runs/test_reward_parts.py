"""Runs whose reward has several parts: rules, functions, a reward model here or behind a server, and judges."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.runs.steps import first_step
from tests.runs.tiny_run import (
    FAST,
    GRPO,
    LIGHT,
    base_overrides,
    measured,
    rows,
    set_eos,
    train,
    write_inputs,
    write_jsonl,
)
from tests.text.rewards.model_server import KEY, ModelServer, served
from tests.tiny import EOS_ID, save_tiny, save_tiny_reward_model
from tether.commands.reward import check_reward
from tether.config import RunConfig, load_config
from tether.text.build import build_run
from tether.text.input_checks import missing_inputs
from tether.text.rewards.build import build_judge
from tether.text.rewards.config_parts import read_parts
from tether.text.rewards.judge import Judge
from tether.text.rewards.outcome import Dialogue, RewardError, RewardFailure, RewardRequest, Score

STYLE = """
def signs(data_source, solution_str, ground_truth, extra_info, each=1.0):
    return {"score": each * sum(not c.isalnum() for c in solution_str), "length": len(solution_str)}
"""
SHORT = ["trainer.total_training_steps=1", "trainer.test_freq=-1", "data.val_files=[]"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("rewarded"))
    save_tiny_reward_model(folder / "rm", seed=3)
    (folder / "style.py").write_text(STYLE)
    return folder


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with served() as server:
        yield server


def given(inputs: Path, run: Path, parts: dict[str, object], *more: str) -> tuple[list[str], Path]:
    """Overrides, and a file with the parts."""
    file = run.with_suffix(".yaml")
    file.write_text(json.dumps({"reward_model": {"parts": parts}}))  # which is YAML
    return [*base_overrides(inputs, run), *GRPO, *LIGHT, *SHORT, *more], file


def build(overrides: list[str], file: Path) -> None:
    """Build a run, which refuses what cannot work."""
    build_run(load_config(file, overrides)).close()


def loaded(inputs: Path, run: Path, parts: dict[str, object], *more: str) -> RunConfig:
    overrides, file = given(inputs, run, parts, *more)
    return load_config(file, overrides).config


def judge(server: ModelServer, **options: object) -> dict[str, object]:
    endpoint = {"base_url": f"{server.url}/v1", "model": "big", "prompt": "Rate [{response}]"}
    return {"kind": "judge"} | endpoint | options


def learned(inputs: Path) -> list[str]:
    path = f"reward_model.model.path={inputs / 'rm'}"
    return ["reward_model.enable=True", path, "reward_model.model.fsdp_config.dtype=float32"]


def test_every_kind_at_once_is_weighted_and_logged_apart(
    inputs: Path, tmp_path: Path, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server.wants_key = True
    server.judge = lambda text: f"Score: {text.count('e')}"
    parts = {
        "letters": {"kind": "rules", "weight": 2.0},
        "style": {"kind": "function", "path": str(inputs / "style.py"), "name": "signs", "reward_kwargs": {"each": 3}},
        "learned": {"kind": "model", "weight": 0.5},
        "helpful": judge(server, weight=-0.25, api_key_env="JUDGE_KEY"),
        "watched": judge(server, weight=0.0, api_key_env="JUDGE_KEY"),
    }
    run = train(*given(inputs, tmp_path / "run", parts, *learned(inputs), "trainer.save_freq=1"))
    step = measured(run)[1]
    means = {name: step[f"reward/extra/{name}/mean"] for name in parts}
    total = 2 * means["letters"] + means["style"] + 0.5 * means["learned"] - 0.25 * means["helpful"]
    assert step["critic/score/mean"] == pytest.approx(total, abs=1e-4)
    assert all(means.values())
    assert means["watched"] == means["helpful"]
    assert {"reward/extra/digits/mean", "reward/extra/style/length/mean"} <= step.keys()
    assert len(server.bodies) == 2 * 16
    assert not [path for path in run.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def test_parts_for_rows_of_their_own(inputs: Path, tmp_path: Path, server: ModelServer) -> None:
    """A rule where there is ground truth, a judge for the rest: a score or its absence per row, as in verl."""
    mixed = [*rows("openai/gsm8k", 2), *rows("chat", 4)[2:]]
    for row in mixed[2:]:
        row["reward_model"] = {"style": "model", "ground_truth": None}
    data = write_jsonl(tmp_path / "mixed.jsonl", mixed)
    parts = {
        "right": {"kind": "rules", "data_sources": "openai/gsm8k"},
        "judged": judge(server, data_sources=["chat"]),
    }
    more = [f"data.train_files={data}", "custom_reward_function.path=null"]
    step = measured(train(*given(inputs, tmp_path / "run", parts, *more)))[1]
    assert step["critic/score/mean"] == pytest.approx(0.5)  # 8 of 16 are judged 1, and 8 are wrong
    assert step["reward/extra/judged/mean"] == 1.0
    assert step["reward/extra/right/mean"] == 0.0
    assert step["reward/abstain_rate"] == 0.0
    assert missing_inputs(loaded(inputs, tmp_path / "run", parts, *more)) == []
    del parts["judged"]
    (problem,) = missing_inputs(loaded(inputs, tmp_path / "run", parts, *more))
    assert "`data_source` is 'chat', which none of reward_model.parts scores" in str(problem)
    with pytest.raises(ValueError, match=r"`data_source` is 'chat', which none of reward_model\.parts scores"):
        build(*given(inputs, tmp_path / "run2", parts, *more))


def test_a_part_for_rows_that_there_are_not_is_refused(inputs: Path, tmp_path: Path) -> None:
    """It would add nothing, and no number would show it; of a run on a few of its rows others may have it."""
    style = {"kind": "function", "path": str(inputs / "style.py"), "name": "signs"}
    parts = {"right": {"kind": "rules"}, "style": style | {"data_sources": ["tiny/sums", "tiny/smus"]}}
    says = r"reward_model\.parts\.style\.data_sources: no row has 'tiny/smus'.* Did you mean tiny/sums\?"
    with pytest.raises(ValueError, match=says):
        build(*given(inputs, tmp_path / "run", parts))
    build(*given(inputs, tmp_path / "few", parts, "data.train_max_samples=8"))
    parts["style"] = style | {"data_sources": ["tiny/other"]}
    build(*given(inputs, tmp_path / "tests", parts, f"data.val_files={inputs / 'val.jsonl'}"))


def test_a_nonsense_judge_stops_the_run(inputs: Path, tmp_path: Path, server: ModelServer) -> None:
    server.judge = lambda text: "As an AI, I cannot."
    with pytest.raises(RewardFailure, match=r"16 of 16 rewards failed .*\n.*part j: the judge's answer has"):
        train(*given(inputs, tmp_path / "run", {"j": judge(server)}, "custom_reward_function.path=null"))


def test_a_judge_that_is_tried_reads_replies_no_longer_than_those_of_a_run(
    inputs: Path, tmp_path: Path, server: ModelServer
) -> None:
    more = ["data.max_response_length=5", "custom_reward_function.path=null"]
    overrides, file = given(inputs, tmp_path / "run", {"helpful": judge(server)}, *more)
    check_reward(load_config(file, overrides), rows=2, samples=0, out=None)
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    read = [body["messages"][-1]["content"].removeprefix("Rate [").removesuffix("]") for body in server.bodies]
    assert max(len(tokenizer(reply, add_special_tokens=False)["input_ids"]) for reply in read) == 5


def test_a_model_of_tethers_own_judges(inputs: Path, tmp_path: Path) -> None:
    """It answers as transformers does greedily; an answer that does not end is no score."""
    path = save_tiny(tmp_path / "judge", seed=11, max_position_embeddings=96)
    set_eos(path, [EOS_ID, *range(4, 60)])
    letters = {chr(code): code / 8 for code in range(33, 127)}
    part = {"kind": "judge", "path": str(path), "prompt": "{prompt} {response}", "parser": r"(\S)", "scores": letters}
    parts = {"letters": {"kind": "rules"}, "j": part | {"max_tokens": 24, "dtype": "float32", "weight": 0.5}}
    config = loaded(inputs, tmp_path / "run", parts)
    judge = build_judge("j", read_parts(config.reward_model.parts)["j"], torch.device("cpu"), None)
    texts = [str(2**number) for number in range(8)]
    requests = [RewardRequest("x", text, None, {}, Dialogue([{"role": "user", "content": "?"}], ())) for text in texts]
    found = judge.score([*requests, RewardRequest("x", "long" * 30, None, {}, requests[0].dialogue)])
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    for text, outcome in zip(texts, found, strict=False):
        chat = [{"role": "user", "content": f"? {text}"}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        answer = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
        if int(answer[-1]) not in model.generation_config.eos_token_id:
            assert "did not end its answer within 24 tokens" in outcome.message
        else:
            wanted = Judge("", parser=r"(\S)", scores=letters).read(tokenizer.decode(answer, skip_special_tokens=True))
            assert outcome == wanted or isinstance(wanted, RewardError)
    assert sum(isinstance(outcome, Score) for outcome in found) > 3
    assert "the judge has 96 positions" in found[-1].message
    short = read_parts({"j": part | {"max_tokens": 1}})["j"]
    terse = build_judge("j", short, torch.device("cpu"), None)
    cut = [found for found in terse.score(requests) if isinstance(found, RewardError)]
    assert any(re.search(r"answer within 1 tokens; it ends in '\S+'$", error.message) for error in cut)
    step = measured(train(*given(inputs, tmp_path / "run", parts, "reward_model.max_error_rate=1.0")))[1]
    assert 0 <= step["reward/error_rate"] < 1
    assert step["reward/extra/j/mean"] > 0


def test_a_served_reward_model_scores_as_one_of_this_process(inputs: Path, tmp_path: Path, server: ModelServer) -> None:
    """The server runs the same weights with transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(inputs / "rm").eval()
    tokenizer = AutoTokenizer.from_pretrained(inputs / "rm")

    def ids_of(content):
        return tokenizer(content, add_special_tokens=False)["input_ids"] if isinstance(content, str) else content

    def score(content):
        with torch.no_grad():
            return model(input_ids=torch.tensor([ids_of(content)])).logits.item()

    server.score, server.tokens = score, lambda content: len(ids_of(content))
    own_model = [*FAST, *learned(inputs), "custom_reward_function.path=null"]
    base = [*base_overrides(inputs, tmp_path), *GRPO, *SHORT, *own_model, "actor_rollout_ref.rollout.n=2"]
    here = first_step(base)
    for api in ("vllm", "sglang"):
        remote = [f"reward_model.server.{key}" for key in (f"url={server.url}", f"api={api}", "model=rm")]
        there = first_step([*base, *remote])
        for key in ("critic/score/mean", "critic/score/max"):
            assert there[key] == pytest.approx(here[key], abs=1e-4), api
        assert server.bodies.pop()["model"] == "rm"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"base_url": "http://127.0.0.1:9/v1"}, r"reward_model\.parts\.j\.base_url: nothing answers at http://127.0.0.1:9"),
        ({"base_url": "here"}, r"j\.base_url: here is no address"),
        ({"api_key_env": "NO_SUCH_KEY"}, r"j\.api_key_env=NO_SUCH_KEY: this environment variable is not set"),
        ({"prompt": "{prompt}"}, r"j\.prompt: it does not show the response"),
        ({"prompt": "nowhere.txt"}, r"j\.prompt: nowhere\.txt cannot be read \(No such file"),
        ({"prompt": "latin.txt"}, r"j\.prompt: latin\.txt cannot be read \(it is no UTF-8 text"),
    ],
)  # fmt: skip
def test_a_judge_that_cannot_be_asked_is_refused_before_any_weight_is_loaded(
    inputs: Path, tmp_path: Path, server: ModelServer, monkeypatch: pytest.MonkeyPatch, options, says
) -> None:
    monkeypatch.setattr("tether.text.learning.build.load_causal_lm", lambda *args, **kwargs: pytest.fail("was loaded"))
    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes("{response} prêt".encode("latin-1"))
    parts = {"r": {"kind": "rules"}, "j": judge(server, **options)}
    with pytest.raises(ValueError, match=says):
        build(*given(inputs, tmp_path / "run", parts))


def test_missing_files_of_parts_are_named(inputs: Path, tmp_path: Path) -> None:
    parts = {"f": {"kind": "function", "path": str(tmp_path / "no.py")}}
    problems = missing_inputs(loaded(inputs, tmp_path / "run", parts, "custom_reward_function.path=null"))
    assert [problem.path for problem in problems] == ["reward_model.parts.f.path"]
    parts["f"]["path"] = str(inputs / "style.py")  # which defines no compute_score
    problems = missing_inputs(loaded(inputs, tmp_path / "run", parts, "custom_reward_function.path=null"))
    assert "no compute_score" in str(problems[0])


@pytest.mark.parametrize(("options", "says"), [
    ({"prompt": "How good?"}, "reward_model.parts.j.prompt: it does not show the response"),
    ({"prompt": "gone.txt"}, "reward_model.parts.j.prompt: gone.txt cannot be read"),
    ({"parser": "(a"}, "reward_model.parts.j.parser: (a is not a regular expression"),
    ({"base_url": "localhost:8000/v1"}, "reward_model.parts.j.base_url: localhost:8000/v1 is no address"),
])  # fmt: skip
def test_a_check_finds_judges_that_cannot_be_asked(
    inputs: Path, tmp_path: Path, server: ModelServer, options, says
) -> None:
    parts = {"r": {"kind": "rules"}, "j": judge(server, **options)}
    (problem,) = missing_inputs(loaded(inputs, tmp_path / "run", parts, "custom_reward_function.path=null"))
    assert str(problem).startswith(says)

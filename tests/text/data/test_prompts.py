import resource
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.text.data.conftest import record, write_jsonl
from tether.runtime.terminal import Waiting
from tether.text.data import prompts
from tether.text.data.checks import repeated_problem
from tether.text.data.prompts import PromptDataset, PromptOptions
from tether.text.data.rows import Row, Rows, RowSource
from tether.text.data.sources import load_rows

Make = Callable[..., PreTrainedTokenizerFast]


def rows_of(*contents: str, **changes: Any) -> Rows:
    return Rows([RowSource("toy.jsonl", [record(content, **changes) for content in contents], ())])


def texts(dataset: PromptDataset, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return [tokenizer.decode(prompt.token_ids) for prompt in dataset]


def test_the_template_is_applied_once_with_one_bos(tokenizer: PreTrainedTokenizerFast) -> None:
    dataset = PromptDataset(rows_of("hi", "a b"), tokenizer, PromptOptions(max_prompt_length=20))
    assert tokenizer("hi")["input_ids"][0] == tokenizer.bos_token_id
    assert texts(dataset, tokenizer) == [
        "<bos><|user|>hi<|end|><|assistant|>",
        "<bos><|user|>a b<|end|><|assistant|>",
    ]
    assert len(dataset[0].token_ids) == 6


def test_a_prompt_brings_all_that_the_reward_needs(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = PromptDataset(rows_of("x", "y"), tokenizer, PromptOptions(max_prompt_length=20))[1]
    assert (prompt.data_source, prompt.ground_truth, prompt.index) == ("toy", "2", 1)
    assert prompt.extra_info == {"split": "train", "index": 0}
    assert prompt.messages == ({"role": "user", "content": "y"},)


def test_rows_that_a_check_refuses_are_reported_together(tokenizer: PreTrainedTokenizerFast) -> None:
    """The first ten by place, the others by number."""
    dataset = PromptDataset(rows_of(*"abcdefghijklmn"), tokenizer, PromptOptions(20))

    def check(row: Row) -> None:
        if row.number not in (1, 3):
            raise ValueError("odd")

    with pytest.raises(ValueError) as caught:
        dataset.check_rows(check)
    lines = str(caught.value).splitlines()
    assert lines[:2] == ["toy.jsonl row 0: odd", "toy.jsonl row 2: odd"]
    assert lines[9:] == ["toy.jsonl row 11: odd", "... and 2 more"]


def test_chunks_do_not_change_the_prompts(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(*"abcdefg")
    whole = PromptDataset(rows, tokenizer, PromptOptions(20)).fingerprint()
    monkeypatch.setattr(prompts, "CHUNK", 3)
    assert PromptDataset(rows, tokenizer, PromptOptions(20)).fingerprint() == whole


def test_template_and_its_variables_can_be_given(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer()
    options = PromptOptions(20, chat_template_kwargs={"suffix": "<think>"})
    assert texts(PromptDataset(rows_of("q"), tokenizer, options), tokenizer) == [
        "<bos><|user|>q<|end|><|assistant|><think>"
    ]
    bare = make_tokenizer(template=None)
    options = PromptOptions(20, chat_template="Q: {{ messages[0]['content'] }} A:")
    assert texts(PromptDataset(rows_of("q"), bare, options), bare) == ["Q: q A:"]


def test_a_model_without_a_chat_template(make_tokenizer: Make) -> None:
    with pytest.raises(ValueError, match=r"^models/tiny: its tokenizer has no chat template.*data\.chat_template"):
        PromptDataset(rows_of("q"), make_tokenizer(template=None), PromptOptions(20))


def test_a_conversation_that_the_template_refuses(tokenizer: PreTrainedTokenizerFast) -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}hello"
    rows = rows_of("q", prompt=[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    with pytest.raises(ValueError, match=r"^toy.jsonl row 0: .*\(roles: system, user\): no system role"):
        PromptDataset(rows, tokenizer, PromptOptions(20, chat_template=template))


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ messages[7]['content'] + 1 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_or_does_not_end_is_named(template: str, make_tokenizer: Make, monkeypatch) -> None:
    monkeypatch.setattr(prompts, "TEMPLATE_SECONDS", 0.5)
    with pytest.raises(ValueError, match=r"the chat template refuses the conversation.*data\.chat_template"):
        PromptDataset(rows_of("a"), make_tokenizer(), PromptOptions(20, chat_template=template))


def test_a_template_takes_no_memory_without_end(make_tokenizer: Make, monkeypatch) -> None:
    monkeypatch.setattr(prompts, "TEMPLATE_BYTES", 1 << 28)
    monkeypatch.setattr(prompts, "LONGEST_TEXT", 999_999)
    doubles = "{% set n = namespace(text='x') %}{% for i in range(40) %}{% set n.text = n.text + n.text %}{% endfor %}"
    before = resource.getrlimit(resource.RLIMIT_AS)
    for template in ("{{ 'x' * 10**11 }}", doubles, "{{ 'x' | center(10**11) }}", "{{ 'x' * 10**6 }}"):
        with pytest.raises(ValueError, match=r"takes more than 0.25 GiB|wrote 1000000 characters"):
            PromptDataset(rows_of("a"), make_tokenizer(), PromptOptions(20, chat_template=template))
    assert resource.getrlimit(resource.RLIMIT_AS) == before


# "hello" renders to 9 tokens: <bos> <|user|> h e l l o <|end|> <|assistant|>


def test_truncation_cuts_the_side_that_it_names(tokenizer: PreTrainedTokenizerFast) -> None:
    for truncation, limit, expected in (
        ("left", 4, "lo<|end|><|assistant|>"),
        ("right", 4, "<bos><|user|>he"),
        ("middle", 4, "<bos><|user|><|end|><|assistant|>"),
        ("middle", 5, "<bos><|user|>o<|end|><|assistant|>"),
        ("left", 1, "<|assistant|>"),
        ("middle", 1, "<|assistant|>"),
        ("right", 1, "<bos>"),
    ):
        dataset = PromptDataset(rows_of("hello"), tokenizer, PromptOptions(limit, truncation=truncation))
        assert texts(dataset, tokenizer) == [expected], (truncation, limit)
        assert (dataset.report.num_truncated, dataset.report.longest) == (1, 9)


def test_a_prompt_that_just_fits_is_left_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    for truncation in ("error", "left", "right", "middle"):
        dataset = PromptDataset(rows_of("hello"), tokenizer, PromptOptions(9, truncation=truncation))
        assert texts(dataset, tokenizer) == ["<bos><|user|>hello<|end|><|assistant|>"]
        assert dataset.report.num_truncated == 0


def test_truncation_error_names_rows_lengths_and_ways_out(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError) as caught:
        PromptDataset(rows_of("hello", "hi", *["hello!"] * 11), tokenizer, PromptOptions(8))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("toy.jsonl row 0: the prompt has 9 tokens, more than data.max_prompt_length=8.")
    assert "data.filter_overlong_prompts=True" in lines[0]
    assert "data.truncation=left|right|middle" in lines[0]
    assert lines[1].startswith("toy.jsonl row 2: the prompt has 10 tokens")
    assert (len(lines), lines[-1]) == (11, "... and 2 more")


@pytest.mark.parametrize("truncation", ["error", "left"])
def test_filtering_drops_and_counts(tokenizer: PreTrainedTokenizerFast, truncation: str) -> None:
    options = PromptOptions(8, filter_overlong_prompts=True, truncation=truncation)
    dataset = PromptDataset(rows_of("hello", "hi", "hello!", "four"), tokenizer, options)
    assert [prompt.index for prompt in dataset] == [1, 3]
    assert (dataset.report.num_dropped, dataset.report.num_truncated) == (2, 0)
    assert str(dataset.report) == ("2 prompts of 4 rows, 2 longer than 8 tokens dropped; the longest has 10 tokens")


def test_nothing_left(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="no prompt is left: 0 prompts of 1 rows, 1 longer than 3 tokens dropped"):
        PromptDataset(rows_of("hello"), tokenizer, PromptOptions(3, filter_overlong_prompts=True))


def test_an_unknown_truncation(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"'rigth'; it may be error, left, right, middle. Did you mean right?"):
        PromptDataset(rows_of("q"), tokenizer, PromptOptions(20, truncation="rigth"))


def chosen(tokenizer: PreTrainedTokenizerFast, **options: Any) -> list[int]:
    dataset = PromptDataset(rows_of(*["q"] * 30), tokenizer, PromptOptions(20, **options))
    return [prompt.index for prompt in dataset]


def test_max_samples_takes_the_first_or_a_seeded_pick(tokenizer: PreTrainedTokenizerFast) -> None:
    assert chosen(tokenizer, max_samples=4, seed=1) == [0, 1, 2, 3]
    picked = chosen(tokenizer, max_samples=4, shuffle=True, seed=1)
    assert len(set(picked)) == 4
    assert picked == sorted(picked) != [0, 1, 2, 3]
    assert chosen(tokenizer, max_samples=4, shuffle=True, seed=1) == picked
    assert chosen(tokenizer, max_samples=4, shuffle=True, seed=2) != picked
    assert chosen(tokenizer, max_samples=-1, shuffle=True) == chosen(tokenizer, max_samples=99) == list(range(30))


def test_max_samples_counts_before_long_rows_are_dropped(tokenizer: PreTrainedTokenizerFast) -> None:
    options = PromptOptions(8, filter_overlong_prompts=True, max_samples=2)
    report = PromptDataset(rows_of("hello", "hi", "ho"), tokenizer, options).report
    assert (report.num_rows, report.num_chosen, report.num_dropped) == (3, 2, 1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(
    content=st.text(max_size=30).filter(bool),
    limit=st.integers(1, 40),
    truncation=st.sampled_from(["left", "right", "middle"]),
)
def test_a_cut_prompt_has_exactly_the_limit_and_both_ends_are_its_own(
    tokenizer: PreTrainedTokenizerFast, truncation: str, content: str, limit: int
) -> None:
    whole = PromptDataset(rows_of(content), tokenizer, PromptOptions(1000))[0].token_ids.tolist()
    cut = PromptDataset(rows_of(content), tokenizer, PromptOptions(limit, truncation=truncation))[0].token_ids.tolist()
    assert len(cut) == min(limit, len(whole))
    head = {"left": 0, "right": len(cut), "middle": len(cut) // 2}[truncation]
    assert cut[:head] == whole[:head]
    assert cut[head:] == whole[len(whole) - (len(cut) - head) :]


def test_the_fingerprint_sees_every_part_of_the_data(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    options = PromptOptions(20)

    def fingerprint(rows: Rows, options: PromptOptions = options) -> str:
        return PromptDataset(rows, tokenizer, options).fingerprint()

    base = fingerprint(rows_of("abcdefgh", "b"))
    changed = [
        fingerprint(rows_of("abcdefgx", "b")),
        fingerprint(rows_of("b", "abcdefgh")),
        fingerprint(rows_of("abcdefgh")),
        fingerprint(rows_of("abcdefgh", "b", data_source="other")),
        fingerprint(rows_of("abcdefgh", "b", reward_model={"style": "rule", "ground_truth": "3"})),
        fingerprint(rows_of("abcdefgh", "b", extra_info={"index": 1})),
        fingerprint(rows_of("abcdefgh", "b"), replace(options, chat_template_kwargs={"suffix": "!"})),
        fingerprint(rows_of("abcdefgh", "b"), replace(options, max_prompt_length=10, truncation="left")),
    ]
    assert len({base, *changed}) == 1 + len(changed)
    same = load_rows(write_jsonl(tmp_path / "moved.jsonl", [record("abcdefgh"), record("b")]))
    assert fingerprint(same) == base


@pytest.mark.parametrize("seconds", [-1.0, 100.0])
def test_a_bar_appears_only_when_it_takes_long(
    tokenizer: PreTrainedTokenizerFast,
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich takes the captured stream for a terminal
    monkeypatch.setattr(Waiting, "QUIET", seconds)
    PromptDataset(rows_of("q"), tokenizer, PromptOptions(20))
    assert ("preparing prompts" in capsys.readouterr().err) == (seconds < 0)


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, ""), (11.0, "preparing prompts:1/1\n")])
def test_where_there_is_no_terminal_long_work_says_how_far_it_is(
    seconds: float,
    lines: str,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tether.runtime.terminal.monotonic", count(0, seconds).__next__)
    PromptDataset(rows_of("q"), tokenizer, PromptOptions(20))
    assert capsys.readouterr().err == lines


@pytest.mark.slow
def test_real_data(test_data: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    files = [str(test_data / "gsm8k/test.parquet"), str(test_data / "math/test.parquet")]
    rows = load_rows(files)
    dataset = PromptDataset(rows, tokenizer, PromptOptions(512, filter_overlong_prompts=True))
    fits = [number for number, row in enumerate(rows) if len(row.messages[0]["content"].encode()) + 4 <= 512]
    assert [prompt.index for prompt in dataset] == fits
    assert dataset.report.num_dropped == 6319 - len(fits) > 100
    first = tokenizer.decode(dataset[0].token_ids)
    assert first.startswith("<bos><|user|>Janet’s ducks lay 16 eggs per day.")
    assert first.endswith('final answer after "####".<|end|><|assistant|>')


def test_generated_validation_prompts_that_repeat_or_are_trained_are_left_out(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    def dataset(*contents: str, generated: bool) -> PromptDataset:
        source = RowSource("toy", [record(content) for content in contents], (), generated=generated)
        return PromptDataset(Rows([source]), tokenizer, PromptOptions(20))

    train = dataset("a", "b", "b", generated=True)
    assert str(train.report).startswith("3 prompts (2 distinct) of 3 rows")
    held_out = dataset("b", "c", "c", "d", generated=True).as_validation_for(train)
    assert [prompt.index for prompt in held_out] == [1, 3]
    assert str(held_out.report).startswith("2 prompts of 4 rows, 2 repeated or in training left out")
    assert repeated_problem(held_out.report, len(held_out)) is None
    with pytest.raises(ValueError, match="part=train and part=test"):
        dataset("a", "b", generated=True).as_validation_for(train)

    of_file = dataset("b", "c", "c", "d", generated=False).as_validation_for(train)
    assert len(of_file) == 4  # a score of a file is over all its rows
    said = repeated_problem(of_file.report, len(of_file))
    assert said is not None
    assert "3 of 4 prompts are distinct, and 1 are in the training data" in said


@pytest.mark.parametrize("agent", ["", "single_turn_agent", None])
def test_a_row_may_name_the_single_turn_agent(agent: str | None) -> None:
    assert len(rows_of("q", agent_name=agent)) == 1


def test_an_agent_has_a_name() -> None:
    assert rows_of("q", agent_name="tool_agent")[0].agent_name == "tool_agent"
    with pytest.raises(ValueError, match=r"row 0: `agent_name` is 7, not a name"):
        rows_of("q", agent_name=7)

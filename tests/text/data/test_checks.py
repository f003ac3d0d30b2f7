from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from tests.text.data.conftest import MARKERS, TEMPLATE, record
from tether.batch import Prompt
from tether.text.data.checks import bos_problem, cut_problem, template_problem
from tether.text.data.prompts import PromptDataset, PromptOptions
from tether.text.data.rows import Rows, RowSource

Make = Callable[..., PreTrainedTokenizerFast]
BARE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def dataset(tokenizer: PreTrainedTokenizerFast, content: str = "What is 1 + 1?", limit: int = 99) -> PromptDataset:
    rows = Rows([RowSource("toy", [record(content), record("short")], ())])
    return PromptDataset(rows, tokenizer, PromptOptions(limit, truncation="right"))


def prompt(tokenizer: PreTrainedTokenizerFast, content: str = "What is 1 + 1?") -> Prompt:
    return dataset(tokenizer, content)[0]


def test_a_good_prompt_has_no_problem(make_tokenizer: Make) -> None:
    for adds_bos in (True, False):
        tokenizer = make_tokenizer(adds_bos=adds_bos)
        good = prompt(tokenizer)
        assert bos_problem(tokenizer, good.token_ids) is None
        assert template_problem(tokenizer, good.token_ids, good.messages) is None
        assert cut_problem(dataset(tokenizer).report) is None


@pytest.mark.parametrize(
    ("template", "content"), [("{{ bos_token }}" + TEMPLATE, "hi"), (TEMPLATE.replace("<|{{", "<bos><|{{"), "hi")]
)
def test_doubled_bos(make_tokenizer: Make, template: str, content: str) -> None:
    tokenizer = make_tokenizer(template)
    problem = bos_problem(tokenizer, prompt(tokenizer, content).token_ids)
    assert problem is not None
    assert problem.startswith("doubled BOS: the prompt begins with '<bos>' twice")


def test_missing_bos_is_one_that_the_tokenizer_would_have_added(make_tokenizer: Make) -> None:
    template = TEMPLATE.removeprefix("{{ bos_token }}")
    tokenizer = make_tokenizer(template)
    problem = bos_problem(tokenizer, prompt(tokenizer).token_ids)
    assert problem is not None
    assert problem.startswith("missing BOS: the tokenizer begins every text with '<bos>'")
    modest = make_tokenizer(template, adds_bos=False)
    assert bos_problem(modest, prompt(modest).token_ids) is None


def test_a_model_without_bos_misses_none(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(adds_bos=False)
    tokenizer.bos_token = None
    assert bos_problem(tokenizer, [5, 6]) is None


@pytest.mark.parametrize("template", [BARE, "{{ bos_token }}" + BARE])
def test_template_not_applied(make_tokenizer: Make, template: str) -> None:
    tokenizer = make_tokenizer(template)
    bare = prompt(tokenizer)
    problem = template_problem(tokenizer, bare.token_ids, bare.messages)
    assert problem is not None
    assert problem.startswith("chat template not applied: the prompt is the messages' bare text")


def test_any_mark_of_a_turn_counts_as_a_template(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer("User: {{ messages[0]['content'] }}\nAssistant:")
    plain = prompt(tokenizer)
    assert template_problem(tokenizer, plain.token_ids, plain.messages) is None
    assert template_problem(tokenizer, plain.token_ids, ()) is None


def test_cut_prompts_are_counted(make_tokenizer: Make) -> None:
    problem = cut_problem(dataset(make_tokenizer(), limit=12).report)
    assert problem is not None
    assert problem.startswith("prompt cut: 1 of 2 prompts lost their end (the question's end")
    assert f"the longest had {len('What is 1 + 1?') + len(MARKERS) - 1}" in problem

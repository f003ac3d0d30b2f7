"""A tokenizer small enough to count by hand: every byte of text is one token, every marker of the template is one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.text.data.hub_server import use_hub

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{{ suffix | default('') }}"
)
MARKERS = ["<bos>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """Like Llama's, it puts <bos> before plain text by itself, unless `adds_bos` is False."""

    def make(template: str | None = TEMPLATE, *, adds_bos: bool = True) -> PreTrainedTokenizerFast:
        symbols = [*MARKERS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
        core = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(symbols)}, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        if adds_bos:
            core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
        made = PreTrainedTokenizerFast(
            tokenizer_object=core, bos_token="<bos>", additional_special_tokens=MARKERS[1:], name_or_path="models/tiny"
        )
        made.chat_template = template
        return made

    return make


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    return make_tokenizer()


def record(content: str = "1 + 1?", **changes: Any) -> dict[str, Any]:
    """One row in verl's layout; a change to None takes the key out."""
    row = {
        "data_source": "toy",
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0},
    } | changes
    return {key: value for key, value in row.items() if value is not None}


def write_jsonl(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in records))
    return str(path)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Make an address the hub's, and keep downloads in a folder of the test."""
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))
    return lambda url: use_hub(url, monkeypatch)

"""Results of checks, and what checks share: the device, a folder, a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config

from tether.runtime.machine import computes_in_bfloat16

# With the 256 bytes an even vocabulary size, for two ranks.
SPECIAL_TOKENS = ("<pad>", "<|im_start|>", "<|im_end|>", "<unused>")
EOS_ID = 2
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(character.isalpha() for character in solution_str) / 8
"""
"""Reward of the tiny run: the share of letters in a response of eight bytes."""


@dataclass(frozen=True)
class CheckOutcome:
    """The result of a check."""

    status: Literal["pass", "fail", "not applicable"]
    detail: str
    """What was measured; for a check that does not apply, what it would need."""


def passed(detail: str) -> CheckOutcome:
    """Return the outcome of a check that succeeded."""
    return CheckOutcome("pass", detail)


def failed(detail: str) -> CheckOutcome:
    """Return the outcome of a check that failed."""
    return CheckOutcome("fail", detail)


def not_applicable(needs: str) -> CheckOutcome:
    """Return the outcome of a check that cannot run on this machine or installation."""
    return CheckOutcome("not applicable", needs)


def passes_if(holds: bool, detail: str) -> CheckOutcome:
    """Return a passed or failed outcome, depending on a comparison."""
    return passed(detail) if holds else failed(detail)


@dataclass(frozen=True)
class CheckContext:
    """Inputs that all checks of a selftest share."""

    device: torch.device
    folder: Path
    """An empty folder for files, deleted afterwards."""
    quick: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which runs compute on this device."""
        return torch.bfloat16 if computes_in_bfloat16(self.device) else torch.float32

    @cached_property
    def inputs(self) -> Path:
        """Folder with the inputs of a tiny run: ``model``, ``train.jsonl`` and ``reward.py``."""
        folder = self.folder / "inputs"
        model, tokenizer = random_model(num_hidden_layers=2), _tokenizer()
        # About a third of the byte values end a response, so that lengths differ.
        model.generation_config.eos_token_id = [EOS_ID, *range(4, 90)]
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        rows = [
            {
                "data_source": "selftest",
                "prompt": [{"role": "user", "content": f"{number}+{number}?"}],
                "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
            }
            for number in range(8)
        ]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "reward.py").write_text(REWARD)
        return folder


@dataclass(frozen=True)
class Check:
    """A check with its name."""

    name: str
    run: Callable[[CheckContext], CheckOutcome]
    fix: str
    """How to fix a failure."""
    quick: bool = True
    """Whether ``--quick`` includes it."""


def random_model(
    *, dtype: torch.dtype = torch.float32, device: torch.device | None = None, seed: int = 0, **sizes: int
) -> PreTrainedModel:
    """Return a random Qwen2 with outputs far from uniform, so that a wrong mask or kernel changes them visibly."""
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "vocab_size": len(SPECIAL_TOKENS) + 256, "num_hidden_layers": 2, **sizes}
    shape |= {"max_position_embeddings": 1024, "initializer_range": 0.1, "tie_word_embeddings": True}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            Qwen2Config(**shape, pad_token_id=0, eos_token_id=EOS_ID), dtype=dtype
        )
    nn.Module.to(model, device)
    return model.eval()


def relative_distance(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference relative to the norm of the expected tensor."""
    exact, reference = value.detach().double().cpu(), expected.detach().double().cpu()
    return float((exact - reference).norm() / reference.norm().clamp_min(1e-30))


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte."""
    tokens = (*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, start, end, unused = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=end, additional_special_tokens=[start, unused]
    )
    fast.chat_template = TEMPLATE
    return fast

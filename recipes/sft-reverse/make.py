"""Write what the recipe begins with: a random model, conversations to fine-tune it on, and prompts for PPO.

python recipes/sft-reverse/make.py --out FOLDER [--seed 1] [--chats 48] [--width 64]
"""

import argparse
import json
import random
from itertools import product
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = "abcdefgh"
WORDS = [" ".join(letters) for letters in product(LETTERS, repeat=3)]
CHATS, TESTED, WIDTH = 48, 64, 64
MARKS = ("<pad>", "<|im_start|>", "<|im_end|>", "<unk>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|> ' + m['role'] + ' ' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + ' <|im_end|> ' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + ' <|im_end|> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a letter."""
    names = [*MARKS, "user", "assistant", *LETTERS]
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    words.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=MARKS[0], eos_token=MARKS[2], unk_token="<unk>", chat_template=TEMPLATE
    )


def model(vocabulary: int, width: int = WIDTH) -> LlamaForCausalLM:
    """Two layers of random weights."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=None,
        eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def chat(word: str) -> dict[str, object]:
    """A conversation in which the assistant reverses a word."""
    return {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]}


def prompt(word: str) -> dict[str, object]:
    """A prompt in verl's layout."""
    messages = [{"role": "user", "content": word}]
    return {"data_source": "reverse", "prompt": messages, "reward_model": {"style": "rule", "ground_truth": word[::-1]}}


def rows(draws: random.Random, chats: int = CHATS) -> dict[str, list[dict[str, object]]]:
    """File -> its rows; no tested word is in a conversation or among the prompts of training."""
    words = draws.sample(WORDS, len(WORDS))
    tested, trained = words[:TESTED], words[TESTED:]
    return {
        "chats": [chat(word) for word in trained[:chats]],
        "held_out": [chat(word) for word in tested],
        "train": [prompt(word) for word in trained],
        "test": [prompt(word) for word in tested],
    }


def main() -> None:
    """Write the model and the data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chats", type=int, default=CHATS)
    parser.add_argument("--width", type=int, default=WIDTH)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    words = tokenizer()
    model(len(words), options.width).save_pretrained(options.out / "model")
    words.save_pretrained(options.out / "model")
    for name, found in rows(random.Random(options.seed), options.chats).items():
        text = "".join(json.dumps(one) + "\n" for one in found)
        (options.out / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

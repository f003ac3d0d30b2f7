"""Write what the recipe begins with: a random model, and a row for each number.

python recipes/guess-number/make.py --out FOLDER [--seed 1]
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUMBERS = "1234567"
WORDS = ("guess", "higher", "lower", "number")
MARKS = ("<pad>", "<|im_start|>", "<|im_end|>", "<unk>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|> ' + m['role'] + ' ' + m['content'] + ' <|im_end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a word."""
    names = [*MARKS, "user", "assistant", *WORDS, *NUMBERS]
    words = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    words.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=MARKS[0], eos_token=MARKS[2], unk_token="<unk>", chat_template=TEMPLATE
    )


def model(vocabulary: int) -> LlamaForCausalLM:
    """Two layers, 64 wide, of random weights."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def rows() -> list[dict[str, object]]:
    """A row in verl's layout for each number, which the model does not see."""
    return [
        {
            "data_source": "guess",
            "prompt": [{"role": "user", "content": "guess"}],
            "reward_model": {"style": "rule", "ground_truth": number},
        }
        for number in NUMBERS
    ]


def main() -> None:
    """Write the model and the data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    words = tokenizer()
    model(len(words)).save_pretrained(options.out / "model")
    words.save_pretrained(options.out / "model")
    text = "".join(json.dumps(row) + "\n" for row in rows())
    (options.out / "train.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

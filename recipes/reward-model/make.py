"""Write what the recipe begins with: a small policy that writes notes, prompts, and pairs of notes like its own.

python recipes/reward-model/make.py --out FOLDER [--seed 1]
"""

import argparse
import json
import math
import random
from itertools import permutations
from pathlib import Path

import torch
from gold import PRAISE, compute_score
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SUBJECTS = (
    "book", "bridge", "city", "concert", "dinner", "film", "garden", "hotel", "lecture", "museum", "park", "poem",
    "recipe", "song", "speech", "view",
)  # fmt: skip
PLAIN = (
    "at", "away", "back", "by", "down", "early", "far", "first", "from", "here", "in", "it", "just", "last", "late",
    "long", "more", "near", "new", "not", "now", "of", "off", "old", "on", "once", "one", "out", "over", "past",
    "quite", "rather", "so", "some", "soon", "still", "that", "then", "there", "while",
)  # fmt: skip
LENGTH = 16
PROMPTS = [f"about the {first} and the {second}" for first, second in permutations(SUBJECTS, 2)]
TESTED, PAIRS, STEPS, BATCH = 48, 1000, 300, 64
MARKS = ("<pad>", "<|im_start|>", "<|im_end|>", "<unk>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|> ' + m['role'] + ' ' + m['content'] + ' <|im_end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a word."""
    names = [*MARKS, "user", "assistant", "about", "the", "and", *SUBJECTS, *PRAISE, *PLAIN]
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    words.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=MARKS[0], eos_token=MARKS[2], unk_token="<unk>", chat_template=TEMPLATE
    )


def note(draws: random.Random) -> str:
    """Words at random."""
    return " ".join(draws.choices([*PRAISE, *PLAIN], k=LENGTH))


def policy(draws: random.Random, words: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Two layers, 64 wide, taught by imitation to write such notes."""
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        asked = [f"<|im_start|> user {draws.choice(PROMPTS)} <|im_end|> <|im_start|> assistant" for _ in range(BATCH)]
        ids = torch.tensor([words.encode(f"{text} {note(draws)}") for text in asked])
        logits = model(ids[:, :-1]).logits[:, -LENGTH:]
        loss = cross_entropy(logits.flatten(0, 1), ids[:, -LENGTH:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def pair(draws: random.Random) -> dict[str, object]:
    """Two notes; which of them is chosen follows Bradley-Terry's model of the gold score, so that some are wrong."""
    first, second = note(draws), note(draws)
    ahead = [float(compute_score("notes", text, None, {})["score"]) for text in (first, second)]
    if draws.random() > 1 / (1 + math.exp(ahead[1] - ahead[0])):
        first, second = second, first
    return {"prompt": draws.choice(PROMPTS), "chosen": first, "rejected": second}


def row(prompt: str) -> dict[str, object]:
    """A prompt in verl's layout."""
    messages = [{"role": "user", "content": prompt}]
    return {"data_source": "notes", "prompt": messages, "reward_model": {"style": "model", "ground_truth": ""}}


def rows(draws: random.Random) -> dict[str, list[dict[str, object]]]:
    """File -> its rows; no prompt is both trained on and tested."""
    prompts = draws.sample(PROMPTS, len(PROMPTS))
    return {
        "pairs": [pair(draws) for _ in range(PAIRS)],
        "train": [row(prompt) for prompt in prompts[TESTED:]],
        "test": [row(prompt) for prompt in prompts[:TESTED]],
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    draws, words = random.Random(options.seed), tokenizer()
    policy(draws, words).save_pretrained(options.out / "policy")
    words.save_pretrained(options.out / "policy")
    for name, found in rows(draws).items():
        text = "".join(json.dumps(one) + "\n" for one in found)
        (options.out / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

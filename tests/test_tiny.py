"""The tiny factory itself: what other tests take for granted."""

import pytest
import torch

from tests.tiny import BOS_ID, EOS_ID, TINY_CONFIGS, VOCAB_SIZE, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_models_are_reproducible_and_leave_the_random_state_alone(name):
    before = torch.random.get_rng_state()
    first, second = tiny_model(name, dtype=torch.float64), tiny_model(name, dtype=torch.float64)
    assert torch.equal(before, torch.random.get_rng_state())
    ids = torch.arange(4, 12)[None]
    with torch.no_grad():
        assert torch.equal(first(ids).logits, second(ids).logits)
    assert first.config.vocab_size == VOCAB_SIZE
    assert first.config.eos_token_id == EOS_ID


@pytest.mark.parametrize("text", ["", "2 + 3 = 5\n", "naïve 漢字 🙂", "<|im_start|>user\nhi<|im_end|>\n"])
def test_tokenizer_round_trips(text):
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(i < VOCAB_SIZE for i in ids)


def test_tokenizer_template_and_special_ids():
    tokenizer = tiny_tokenizer()
    assert len(tokenizer) == VOCAB_SIZE
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, BOS_ID, EOS_ID)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(rendered)[0] == 2
    assert tokenizer.decode(tokenizer.encode("hi<|im_end|>"), skip_special_tokens=True) == "hi"
    assert tiny_tokenizer(chat_template=False).chat_template is None
    assert tiny_tokenizer(add_bos=True).encode("a")[0] == BOS_ID

"""Chat templates of well-known families, and a tokenizer that knows their control tokens."""

from tests.tiny import CHATML, tiny_tokenizer

LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
    "+ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'tool' %}{{ '[TOOL_RESULTS] ' + m['content'] + '[/TOOL_RESULTS]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + '</s>' }}{% else %}"
    "{{ raise_exception('Only user, tool and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim "
    "+ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
QWEN3 = (  # thoughts stand only after the last question of a user
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set content = m['content'] %}"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + ('user' if m['role'] == 'tool' else m['role']) + '\n' }}"
    "{{ '<tool_response>\n' + content + '\n</tool_response>' if m['role'] == 'tool' else content }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (  # the end of a turn has a space in front of it, which the policy would have to sample
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<s>[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' </s>' }}{% endif %}{% endfor %}"
)
FAMILIES = {
    "chatml": (CHATML, "<|im_end|>"), "llama3": (LLAMA3, "<|eot_id|>"), "mistral": (MISTRAL, "</s>"),
    "gemma": (GEMMA, "<end_of_turn>"), "phi3": (PHI3, "<|end|>"), "zephyr": (ZEPHYR, "</s>"),
    "qwen3": (QWEN3, "<|im_end|>"), "llama2": (LLAMA2, "</s>"),
}  # fmt: skip
CONTROL = [
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]", "</s>",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<bos>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>",
    "<|tool|>", "<|end|>",
]  # fmt: skip


def family(name):
    """A tokenizer with the template of a family, and the id that ends its turns."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": CONTROL}, replace_extra_special_tokens=False)
    tokenizer.chat_template, end = FAMILIES[name]
    return tokenizer, tokenizer.convert_tokens_to_ids(end)

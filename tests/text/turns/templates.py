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
GPT_OSS = (  # its lines on tools: a reply names the function of the last call, and nothing else may come before it
    "{% set ns = namespace(name=none) %}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% if 'tool_calls' in m %}{% set call = m['tool_calls'][0]['function'] %}{% set ns.name = call['name'] %}"
    "{{ '<|start|>assistant to=functions.' + call['name'] + '<|channel|>commentary json<|message|>' }}"
    "{{ call['arguments'] | tojson + '<|call|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m['content'] + '<|end|>' }}{% endif %}"
    "{% elif m['role'] == 'tool' %}{% if ns.name is none %}{{ raise_exception('no previous tool call!') }}{% endif %}"
    "{{ '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{ m['content'] | tojson + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
KIMI = (  # a reply names the id of its call
    "{% for m in messages %}{{ '<|im_' + {'assistant': 'assistant', 'user': 'user'}.get(m['role'], 'system') + '|>' }}"
    "{{ (m['name'] or m['role']) + '<|im_middle|>' }}"
    "{% if m['tool_calls'] %}{{ m['content'] + '<|tool_calls_section_begin|>' }}{% for call in m['tool_calls'] %}"
    "{{ '<|tool_call_begin|>' + call['id'] + '<|tool_call_argument_begin|>' }}"
    "{{ call['function']['arguments'] | tojson + '<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_section_end|>' }}"
    "{% elif m['role'] == 'tool' %}{{ '## Return of ' + m['tool_call_id'] + '\n' + m['content'] }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)
FAMILIES = {
    "chatml": (CHATML, "<|im_end|>"), "llama3": (LLAMA3, "<|eot_id|>"), "mistral": (MISTRAL, "</s>"),
    "gemma": (GEMMA, "<end_of_turn>"), "phi3": (PHI3, "<|end|>"), "zephyr": (ZEPHYR, "</s>"),
    "qwen3": (QWEN3, "<|im_end|>"), "llama2": (LLAMA2, "</s>"),
    "gpt-oss": (GPT_OSS, "<|call|>"), "kimi": (KIMI, "<|im_end|>"),
}  # fmt: skip
CONTROL = [
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]", "</s>",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<bos>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>",
    "<|tool|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|im_assistant|>", "<|im_middle|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
]  # fmt: skip


def family(name):
    """A tokenizer with the template of a family, and the id that ends its turns."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": CONTROL}, replace_extra_special_tokens=False)
    tokenizer.chat_template, end = FAMILIES[name]
    return tokenizer, tokenizer.convert_tokens_to_ids(end)

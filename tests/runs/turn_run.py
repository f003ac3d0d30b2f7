"""A task of turns for a tiny model: the policy is asked for a digit that only the tool knows.

The vocabulary has 21 tokens, one of which is a whole call of the tool, so that a random model makes calls.
"""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.device import DEVICE
from tests.runs.tiny_run import write_jsonl
from tests.tiny import TINY_CONFIGS

CALL = '<tool_call>{"name": "ask", "arguments": {}}</tool_call>'
SPECIAL = ["<pad>", "<s>", "<|im_start|>", "<|im_end|>", "<unk>"]
WORDS = [*SPECIAL, "\n", "user", "assistant", "tool", CALL, *"0123456789?"]
ID = {word: number for number, word in enumerate(WORDS)}
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = """
class Ask:
    schema = {"type": "function", "function": {"name": "ask", "parameters": {"type": "object"}}}

    def __init__(self, knows=True):
        self.knows = knows

    def call(self, truth):
        return truth if self.knows else "?"


class Digits:
    '''Says how many digits there were so far, and pays for each.'''

    def reset(self, messages, row):
        self.count = 0

    def step(self, messages):
        digits = sum(c.isdigit() for c in messages[-1]["content"])
        self.count += digits
        return str(self.count % 10), float(digits), self.count > 5
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    said = [m["content"] for m in extra_info["conversation"] if m["role"] == "assistant"] or [""]
    form = 0.2 * (extra_info["num_turns"] > 1) + 0.2 * (len(said[-1]) == 1 and said[-1].isdigit())
    return form + 0.6 * (said[-1] == ground_truth)
"""
ROLLOUT = "actor_rollout_ref.rollout"


def tokenizer():
    fast = Tokenizer(models.WordLevel(vocab=ID, unk_token="<unk>"))
    fast.add_tokens([AddedToken(word, normalized=False, special=False) for word in WORDS[len(SPECIAL) :]])
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", bos_token="<s>", eos_token="<|im_end|>", unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    made.chat_template = TEMPLATE
    return made


def write_turn_inputs(folder: Path, *, digits: str = "0123", seed: int = 0, std: float = 0.02) -> Path:
    """Write model/, train.jsonl, tools.py, tools.yaml and reward.py; returns `folder`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = TINY_CONFIGS["llama"](vocab_size=len(WORDS), initializer_range=std)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "ask",
            "prompt": [{"role": "user", "content": "?"}],
            "reward_model": {"style": "rule", "ground_truth": digit},
            "extra_info": {"index": i, "tools_kwargs": {"ask": {"truth": digit}}},
        }
        for i, digit in enumerate(digits)
    ]
    write_jsonl(folder / "train.jsonl", rows)
    (folder / "tools.py").write_text(TOOLS)
    (folder / "reward.py").write_text(REWARD)
    (folder / "tools.yaml").write_text(f"tools: [{{class_name: '{folder / 'tools.py'}:Ask', config: {{}}}}]")
    (folder / "useless.yaml").write_text(
        f"tools: [{{class_name: '{folder / 'tools.py'}:Ask', config: {{knows: false}}}}]"
    )
    return folder


def turn_overrides(folder: Path, run: Path, *, tools: str = "tools.yaml") -> list[str]:
    """A GRPO run on the task."""
    return [
        f"data.train_files={folder / 'train.jsonl'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=24",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        f"{ROLLOUT}.dtype=float32",
        f"{ROLLOUT}.n=16",
        f"{ROLLOUT}.multi_turn.enable=True",
        f"{ROLLOUT}.multi_turn.tool_config_path={folder / tools}",
        f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode=disable",
        f"{ROLLOUT}.multi_turn.max_assistant_turns=2",
        f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
        f"{ROLLOUT}.agent.num_workers=1",
        "algorithm.adv_estimator=grpo",
        f"custom_reward_function.path={folder / 'reward.py'}",
        "reward_model.num_workers=1",
        f"trainer.device={DEVICE}",
        "trainer.num_threads=1",
        "trainer.logger=file",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=False",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={run}",
    ]

"""Two command lines, of a text run and of an embodied one, on which every key that a run reads can be changed."""

import importlib
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from tests.installed import HAS_MEGATRON, is_installed
from tests.runs.tiny_run import LIGHT, base_overrides, rows, train, write_inputs, write_jsonl
from tests.tiny import EOS, save_tiny, save_tiny_reward_model, tiny_model
from tether.config import load_config
from tether.config.keys import keys

MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"
CORRECTION = "algorithm.rollout_correction"
SHARDED = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic.model", "reward_model.model")
MEGATRONS = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
VALIDATION, BUFFER = f"{ROLLOUT}.val_kwargs", "reward_model.overlong_buffer"
LEARNED = ["reward_model.enable"] + [
    f"reward_model.{name}"
    for name in (
        *("micro_batch_size_per_gpu", "use_dynamic_bsz", "forward_max_token_len_per_gpu", "max_length"),
        *("enable_resource_pool", "nnodes", "n_gpus_per_node"),
        *(f"model.{part}" for part in ("path", "input_tokenizer", "trust_remote_code", "fsdp_config.dtype")),
        *(
            f"model.fsdp_config.{part}"
            for part in ("fsdp_size", "reshard_after_forward", "param_offload", "offload_policy")
        ),
    )
]
SERVED = (  # by vLLM
    *("server_urls", "server_timeout", "parity_freq", "update_weights_bucket_megabytes", "weight_transfer"),
    "free_cache_engine",
    *("tensor_model_parallel_size", "gpu_memory_utilization", "max_num_batched_tokens", "enforce_eager"),
    *("enable_chunked_prefill", "enable_prefix_caching", "load_format", "engine_kwargs.vllm"),
)
BY_SGLANG = ("engine_kwargs.sglang",)
ROLLBACKS = {key: ["trainer.save_freq=5"] for key in ("trainer.rollback_lr_factor", "trainer.max_rollbacks")}
SCORING_SERVER = ("api", "model", "api_key_env", "timeout", "attempts", "max_concurrent")
_socket = socket.create_server(("127.0.0.1", 0))
LISTENING = f"http://127.0.0.1:{_socket.getsockname()[1]}"
"""An address that takes connections, and nothing more."""
REWARDS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, weight=1.0):
    letters = sum(c.isalpha() for c in solution_str)
    return {"score": weight * letters / 8, "acc": float(letters > 2)}

other_score = compute_score
"""
FEATURES = """
import torch

class Features(torch.nn.Module):
    def __init__(self, shapes):
        super().__init__()
        self.layer = torch.nn.Linear(shapes["state"][0], 3)

    def forward(self, parts):
        return self.layer(parts["state"])
"""
TALKERS = """
class Echo:
    schema = {"type": "function", "function": {"name": "echo", "parameters": {}}}

    def call(self, text):
        return text

class Say:
    def reset(self, messages, row):
        pass

    def step(self, messages):
        return "yes", 0.0, len(messages) > 3
"""
DATASETS = """
import json

class First:
    def __init__(self, *, data_files, tokenizer, config):
        self.rows = [json.loads(line) for line in open(data_files[0])]
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        return self.rows[index]

class Second(First):
    def __getitem__(self, index):
        return self.rows[-1 - index]
"""


@dataclass(frozen=True)
class Situation:
    """A command line, and what it takes for single keys to act on it."""

    base: list[str]
    context: dict[str, list[str]]
    """Key -> what must stand beside it for it to act, beyond what its switch says."""
    others: dict[str, list[str]]
    """Key -> other values of it, where its type does not say enough to make one up."""


def text(folder: Path) -> Situation:
    """A run on prompts, with a critic and a reference."""
    write_files(folder)
    base = [
        *base_overrides(folder, folder / "run"),
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        f"{ROLLOUT}.n=2",
        "trainer.total_training_steps=2",
    ]
    train([*base, *LIGHT, f"trainer.default_local_dir={folder / 'before'}", "trainer.save_freq=1"])
    shutil.copytree(folder / "before", folder / "resumed")  # a start afresh sets its checkpoints aside
    return Situation(base, text_context(folder), text_others(folder))


def write_files(folder: Path) -> None:
    """Everything that a key may name, twice."""
    write_inputs(folder)
    save_tiny(folder / "model2", seed=5)
    for name, seed in (("rm", 1), ("rm2", 2)):
        save_tiny_reward_model(folder / name, seed=seed)
    if HAS_MEGATRON:
        of_megatron = importlib.import_module("tests.integrations.megatron.stored")
        for name in ("stored", "stored2"):
            of_megatron.write(folder / name, of_megatron.tensors_of(tiny_model("llama")))
    if is_installed("peft"):
        lora, adapted = importlib.import_module("tether.text.models.lora"), tiny_model("llama")
        lora.add_lora(adapted, lora.LoraOptions(rank=2))
        lora.save_adapter(adapted, folder / "adapter")
    for name in ("reward.py", "reward2.py"):
        (folder / name).write_text(REWARDS)
    for name in ("tools", "tools2"):
        (folder / f"{name}.py").write_text(TALKERS)
        (folder / f"{name}.yaml").write_text(
            f"tools: [{{class_name: '{folder / name}.py:Echo', config: {{}}}}]\n"
            f"interaction: [{{name: say, class_name: '{folder / name}.py:Say'}}]\n"
        )
    for name in ("datasets.py", "datasets2.py"):
        (folder / name).write_text(DATASETS)
    ragged = rows(count=8)
    ragged[3]["prompt"][0]["content"] += " Think about it for a while."
    write_jsonl(folder / "ragged.jsonl", ragged)
    ragged[3]["prompt"][0]["content"] += f"{EOS} And now?"
    write_jsonl(folder / "control_tokens.jsonl", ragged)
    chats = [row | {"messages": [*row["prompt"], {"role": "assistant", "content": "7"}]} for row in rows(count=8)]
    write_jsonl(folder / "chats.jsonl", chats)
    write_jsonl(folder / "answered.jsonl", [row | {"response": "7"} for row in rows(count=8)])
    unnamed = [{key: value for key, value in row.items() if key != "data_source"} for row in rows(count=8)]
    write_jsonl(folder / "unnamed.jsonl", unnamed)


def text_context(folder: Path) -> dict[str, list[str]]:
    """See `Situation.context`."""
    overlong = [f"data.train_files={folder / 'ragged.jsonl'}", "data.max_prompt_length=50"]
    fine_tuning = [f"data.{name}={folder / 'chats.jsonl'}" for name in ("train_files", "val_files")]
    own_class = ["data.custom_cls.name=First", f"data.custom_cls.path={folder / 'datasets.py'}"]
    learned = ["reward_model.enable=True", f"reward_model.model.path={folder / 'rm'}"]
    both = [*learned, "reward_model.parts={m: {kind: model}, r: {kind: rules}}"]
    server = [*both, f"reward_model.server.url={LISTENING}"]
    turns = [
        f"{TURNS}.enable=True",
        f"{ROLLOUT}.agent.default_agent_loop={folder / 'tools.py'}:Say",
        f"{ROLLOUT}.agent.num_workers=1",
    ]
    program = [
        f"{ROLLOUT}.agent.default_agent_loop=endpoint",
        f"{ROLLOUT}.agent.endpoint.program=echo 1",
        f"{ROLLOUT}.agent.num_workers=1",
    ]
    sampled = [f"{VALIDATION}.do_sample=True", f"{VALIDATION}.temperature=1"]
    teacher = f"distillation.teacher_models.teacher_model.model_path={folder / 'model2'}"
    taught = ["distillation.enabled=True", "algorithm.use_kl_in_reward=False", teacher]
    read = "megatron.dist_checkpointing_path"
    stored = {
        f"{role}.{read[:-4]}{end}": [f"{role}.{read}={folder / 'stored'}"]
        for role in MEGATRONS
        for end in ("path", "prefix")
    }
    return {
        **stored,
        "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size": [
            "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"
        ],
        "critic.ulysses_sequence_parallel_size": ["critic.model.use_remove_padding=True"],
        "data.truncation": [*overlong, "data.truncation=left"],
        "data.filter_overlong_prompts": [*overlong, "data.truncation=left"],
        "data.apply_chat_template_kwargs": ['data.chat_template="{{ flag }}{{ messages[0].content }}"'],
        "data.chat_template_date": ["data.chat_template=\"{{ strftime_now('%d') }}{{ messages[0].content }}\""],
        "data.control_tokens_as_text": [
            f"data.train_files={folder / 'control_tokens.jsonl'}",
            "data.max_prompt_length=80",
        ],
        "data.data_source": [f"data.train_files={folder / 'unnamed.jsonl'}", "data.data_source=toy"],
        "sft.enable": fine_tuning,
        "data.messages_key": fine_tuning,
        "data.max_length": fine_tuning,
        "data.response_key": [f"data.{name}={folder / 'answered.jsonl'}" for name in ("train_files", "val_files")],
        "data.custom_cls.path": own_class,
        "data.custom_cls.name": own_class,
        f"{VALIDATION}.temperature": sampled,
        f"{VALIDATION}.n": sampled,
        "critic.enable": ["algorithm.adv_estimator=grpo"],
        "algorithm.gdpo_reward_keys": ["algorithm.use_kl_in_reward=False", "algorithm.gdpo_reward_keys=[score,acc]"],
        "algorithm.gdpo_reward_weights": ["algorithm.use_kl_in_reward=False", "algorithm.gdpo_reward_keys=[score]"],
        **{f"{BUFFER}.{name}": [f"{BUFFER}.len=2"] for name in ("enable", "len", "penalty_factor")},
        f"{CORRECTION}.rollout_rs": [f"{CORRECTION}.rollout_rs_threshold=2"],
        f"{CORRECTION}.rollout_rs_threshold": [f"{CORRECTION}.rollout_rs_threshold=2"],
        f"{CORRECTION}.rollout_rs_threshold_lower": [f"{CORRECTION}.rollout_rs_threshold=2"],
        **dict.fromkeys(LEARNED, both),
        "reward_model.server.url": both,
        **{f"reward_model.server.{name}": server for name in SCORING_SERVER},
        **{f"{ROLLOUT}.{name}": [f"{ROLLOUT}.name=vllm"] for name in SERVED},
        **{f"{ROLLOUT}.{name}": [f"{ROLLOUT}.name=sglang"] for name in BY_SGLANG},
        **dict.fromkeys((key for key in keys() if key.startswith((f"{TURNS}.", f"{ROLLOUT}.agent."))), turns),
        **dict.fromkeys((key for key in keys() if key.startswith(f"{ROLLOUT}.agent.endpoint.")), program),
        f"{TURNS}.enable": turns[2:],
        **{key: taught for key in keys() if key.startswith("distillation.")},
        "distillation.enabled": taught[1:],
        "trainer.total_epochs": ["trainer.total_training_steps=null"],
        **ROLLBACKS,
        "trainer.project_name": ["~trainer.default_local_dir"],
        "trainer.experiment_name": ["~trainer.default_local_dir"],
        "trainer.resume_mode": [f"trainer.default_local_dir={folder / 'resumed'}"],
        "trainer.resume_from_path": [
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={folder / 'before' / 'global_step_1'}",
        ],
    }


def text_others(folder: Path) -> dict[str, list[str]]:
    """See `Situation.others`."""
    return {
        "data.train_files": [f"{folder / 'ragged.jsonl'}"],
        f"{ROLLOUT}.name": ["vllm"],
        **{f"{role}.megatron.dist_checkpointing_path": [f"{folder / 'stored2'}"] for role in MEGATRONS},
        **{f"{role}.strategy": ["megatron"] for role in ("actor_rollout_ref.ref", "critic")},
        f"{ROLLOUT}.server_urls": ["[http://127.0.0.1:9]"],
        f"{ROLLOUT}.load_format": ["auto"],
        f"{ROLLOUT}.engine_kwargs.vllm": ["{swap_space: 3}"],
        f"{ROLLOUT}.engine_kwargs.sglang": ["{attention_backend: triton}"],
        "data.val_files": [f"{folder / 'train.jsonl'}"],
        "data.chat_template": ['"{{ messages[0].content }}"'],
        "data.chat_template_date": ["2026-01-31"],
        "data.apply_chat_template_kwargs": ["{flag: 7}"],
        "data.custom_cls.path": [f"{folder / 'datasets2.py'}"],
        "data.custom_cls.name": ["Second"],
        f"{MODEL}.path": [f"{folder / 'model2'}"],
        f"{MODEL}.tokenizer_path": [f"{folder / 'model2'}"],
        **{f"{role}.target_modules": ["[q_proj]"] for role in (MODEL, "critic.model")},
        **{f"{role}.exclude_modules": ["[q_proj]"] for role in (MODEL, "critic.model")},
        **{f"{role}.lora_adapter_path": [f"{folder / 'adapter'}"] for role in (MODEL, "critic.model")},
        f"{MODEL}.override_config": ["{rms_norm_eps: 0.1}"],
        "critic.model.path": [f"{folder / 'model2'}"],
        "distillation.teacher_models": [f"{{teacher_model: {{model_path: {folder / 'model'}}}}}"],
        "distillation.distillation_loss.log_prob_min_clamp": ["-5.0"],
        "reward_model.model.path": [f"{folder / 'rm2'}"],
        "reward_model.model.input_tokenizer": ["null"],
        "reward_model.max_length": ["16"],
        "reward_model.parts": ["{rule: {kind: rules, weight: 0.5}}"],
        "reward_model.server.url": [LISTENING],
        "reward_model.server.api": ["sglang"],
        "critic.model.override_config": ["{rms_norm_eps: 0.1}"],
        "algorithm.gdpo_reward_keys": ["[score]"],
        "algorithm.filter_groups.metric": ["acc"],
        f"{CORRECTION}.rollout_rs_threshold": ["3"],
        f"{CORRECTION}.rollout_rs_threshold_lower": ["0.3"],
        "algorithm.gdpo_reward_weights": ["[0.5]"],
        "custom_reward_function.path": [f"{folder / 'reward2.py'}"],
        "custom_reward_function.name": ["other_score"],
        "custom_reward_function.reward_kwargs": ["{weight: 2.0}"],
        f"{ROLLOUT}.max_model_len": ["65"],
        **{f"{model}.fsdp_config.fsdp_size": ["1"] for model in SHARDED},
        f"{ROLLOUT}.agent.default_agent_loop": [f"{folder / 'tools2.py'}:Say"],
        f"{ROLLOUT}.agent.agent_loop_config_path": [f"{folder / 'tools.yaml'}"],
        f"{ROLLOUT}.agent.endpoint.program": ["echo 2"],
        f"{TURNS}.tool_config_path": [f"{folder / 'tools.yaml'}"],
        f"{TURNS}.function_tool_path": [f"{folder / 'tools.py'}"],
        f"{TURNS}.interaction_config_path": [f"{folder / 'tools.yaml'}"],
        "trainer.default_local_dir": [f"{folder / 'elsewhere'}"],
        "trainer.logger": ["console"],
        "trainer.profile_steps": ["[1]"],
        "trainer.resume_mode": ["disable"],
        "trainer.resume_from_path": [f"{folder / 'before' / 'global_step_2'}"],
    }


ON_RANKS = (
    *(f"trainer.{name}" for name in ("n_gpus_per_node", "nnodes", "max_restarts", "max_silence")),
    "trainer.ray_wait_register_center_timeout",
    "actor_rollout_ref.nccl_timeout",
    "ray_kwargs.ray_init",
)


def control(folder: Path) -> Situation:
    """A run in toy environments with continuous actions."""
    features = folder / "features.py"
    features.write_text(FEATURES)
    base = [
        "env.train.id=tether/Identity-box-v0", "env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=16",
        "env.eval.num_episodes=3", "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "policy.normalize_observations=True", "policy.normalize_rewards=True", "trainer.logger=file",
        "trainer.log_freq=1", "trainer.total_training_steps=2", "trainer.test_freq=1",
        f"trainer.default_local_dir={folder / 'control'}",
    ]  # fmt: skip
    in_envpool = ["env.train.id=CartPole-v1"]
    in_pictures = ["env.train.id=tether/Spot-v0"]
    filmed = ["env.train.id=CartPole-v1", "trainer.total_training_steps=1"]
    whole_episodes = ["env.train.auto_reset=False"]
    tokens = ["policy.model_type=openvla", "policy.hidden_dim=16", "policy.num_layers=1"]
    video = "env.eval.video_cfg"
    context = {
        "algorithm.rewards_lower_bound": whole_episodes,
        "algorithm.rewards_upper_bound": whole_episodes,
        "trainer.async_mode": whole_episodes,
        "actor_rollout_ref.rollout.max_staleness": whole_episodes,
        "algorithm.norm_adv_by_std_in_grpo": [*whole_episodes, "env.train.group_size=2"],
        **{f"{video}.{name}": filmed for name in ("save_video", "video_base_dir", "fps")},
        **{f"{MODEL}.{name}": tokens for name in ("lora_rank", "lora_alpha", "target_modules")},
        "policy.cnn_type": in_pictures,
        "policy.pixel_scale": in_pictures,
        "env.train.num_workers": in_envpool,
        "env.eval.num_workers": in_envpool,
        **ROLLBACKS,
        **{key: ["trainer.device=cpu"] for key in ON_RANKS},
        "trainer.total_env_steps": ["trainer.total_training_steps=null", "trainer.total_env_steps=64"],
        "trainer.project_name": ["~trainer.default_local_dir"],
        "trainer.experiment_name": ["~trainer.default_local_dir"],
        "trainer.resume_from_path": [
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={folder / 'episodes' / 'global_step_1'}",
            "policy.init_logstd=0",
        ],
    }
    others = {
        "actor_rollout_ref.actor.clip_ratio_c": ["2.5"],
        "env.train.drop_observations": ["[nothing]"],
        "env.train.action_masks": ["true"],
        "env.train.info_metrics": ["[speed]"],
        "policy.normalize_only": ["[speed]"],
        "policy.features_extractor": [f"{features}:Features"],
        "trainer.device": ["cuda"],
        "trainer.profile_steps": ["[1]"],
        "trainer.resume_from_path": [f"{folder / 'episodes' / 'global_step_2'}"],
        f"{MODEL}.target_modules": ["[q_proj]"],
        **{f"env.{role}.wrappers": ["[gymnasium.wrappers:FlattenObservation]"] for role in ("train", "eval")},
    }
    saved = [*base, f"trainer.default_local_dir={folder / 'episodes'}", "trainer.save_freq=1", "policy.init_logstd=0"]
    run = importlib.import_module("tether.commands.build").build(load_config(None, saved))
    run.trainer.fit()
    run.close()
    return Situation(base, context, others)

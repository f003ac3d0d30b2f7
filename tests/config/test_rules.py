"""Contradictions between keys: each is found, says both keys, and its fix works."""

from pathlib import Path

import pytest

from tests.config.loading import load, problems_of
from tether.config import ConfigError, Override, contradictions
from tether.config.devices import placed
from tether.config.keys import keys
from tether.text.config_rules import RULES
from tether.text.learning.config_rules import SHARDED

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VAL = f"{ROLLOUT}.val_kwargs"
PLACES = "cluster.component_placement"
EXPLAINED = "trainer.critic_warmup_until_explained_variance"
LEARNED = ["reward_model.enable=True", "reward_model.model.path=rm"]
GDPO = ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[acc,format]", f"{ROLLOUT}.n=2"]

REPLAY, MEGATRONS_REPLAY = f"{ACTOR}.router_replay.mode", f"{ACTOR}.megatron.router_replay.mode"
RECORDS = f"{ROLLOUT}.enable_rollout_routing_replay"
BY_MEGATRON = f"{ACTOR}.strategy=megatron"

TEACHER, DISTILLATION = "distillation.teacher_models.teacher_model.model_path", "distillation.distillation_loss"
DISTILLS = ["distillation.enabled=True", f"{TEACHER}=large"]
TEACHERS = "distillation.teacher_models"
SEVERAL = [
    "distillation.enabled=True",
    *(f"{TEACHERS}.math.{setting}" for setting in ("key=a", "model_path=large")),
    *(f"{TEACHERS}.code.{setting}" for setting in ("key=b", "model_path=larger")),
]

# rule -> (overrides, path of the problem, text in it, overrides that mend it)
PROGRAM = [f"{ROLLOUT}.agent.default_agent_loop=endpoint", f"{ROLLOUT}.agent.endpoint.program=agent.py:play"]
CASES = {
    "rollouts_record_what_is_replayed": (
        [f"{REPLAY}=R3"],
        RECORDS,
        f"False records no experts, which {REPLAY}=R3 replays",
        [f"{RECORDS}=True"],
    ),
    "what_rollouts_record_is_replayed": (
        [f"{RECORDS}=True"],
        RECORDS,
        f"records experts that {REPLAY}=disabled does not replay",
        [f"{REPLAY}=R3"],
    ),
    "megatron_records_what_it_replays": (
        [BY_MEGATRON, f"{MEGATRONS_REPLAY}=R3"],
        RECORDS,
        f"which {MEGATRONS_REPLAY}=R3 replays",
        [f"{RECORDS}=True"],
    ),
    "megatron_follows_the_older_key": (
        [BY_MEGATRON, f"{REPLAY}=R3"],
        RECORDS,
        f"which {MEGATRONS_REPLAY}=R3 replays",
        [f"{RECORDS}=True"],
    ),
    "one_mode_of_replay": (
        [BY_MEGATRON, f"{REPLAY}=R2", f"{MEGATRONS_REPLAY}=disabled"],
        MEGATRONS_REPLAY,
        f"disabled contradicts {REPLAY}=R2. leave {MEGATRONS_REPLAY} out",
        [f"{MEGATRONS_REPLAY}=null"],
    ),
    "r2_replays_a_pass": (
        [f"{REPLAY}=R2", "algorithm.rollout_correction.bypass_mode=True"],
        REPLAY,
        "R2 replays the pass over the old policy that algorithm.rollout_correction.bypass_mode=True leaves out",
        ["algorithm.rollout_correction.bypass_mode=False"],
    ),
    "routers_can_replay_experts": (
        [BY_MEGATRON, f"{REPLAY}=R2", f"{ACTOR}.megatron.override_transformer_config={{moe_router_fusion: true}}"],
        MEGATRONS_REPLAY,
        "override_transformer_config.moe_router_fusion=True does not support. leave moe_router_fusion out",
        [f"~{ACTOR}.megatron.override_transformer_config.moe_router_fusion"],
    ),
    "training_data_is_named": (["data.train_files=[]"], "data.train_files", "names no file", ["data.train_files=a"]),
    "actor_mini_batch_fits": (
        ["data.train_batch_size=64"],
        f"{ACTOR}.ppo_mini_batch_size",
        "256 (the default) is more than data.train_batch_size=64. set it to at most 64",
        [f"{ACTOR}.ppo_mini_batch_size=64"],
    ),
    "critic_mini_batch_fits": (
        ["data.train_batch_size=256", "critic.ppo_mini_batch_size=257"],
        "critic.ppo_mini_batch_size",
        "257 is more than data.train_batch_size=256",
        ["critic.ppo_mini_batch_size=256"],
    ),
    "group_has_peers": (
        ["algorithm.adv_estimator=rloo_vectorized"],
        f"{ROLLOUT}.n",
        "1 response a prompt carries no signal for algorithm.adv_estimator=rloo_vectorized",
        [f"{ROLLOUT}.n=2"],
    ),
    "gdpo_has_components": (
        ["algorithm.adv_estimator=gdpo", f"{ROLLOUT}.n=2"],
        "algorithm.gdpo_reward_keys",
        "empty, and algorithm.adv_estimator=gdpo adds up the components",
        ["algorithm.gdpo_reward_keys=[score,acc]", "algorithm.gdpo_reward_weights=[1,0.5]"],
    ),
    "gdpo_reads_components_only": (
        [*GDPO, "reward_model.overlong_buffer.enable=True", "reward_model.overlong_buffer.len=9"],
        "reward_model.overlong_buffer.enable",
        "changes the score, but algorithm.adv_estimator=gdpo learns from algorithm.gdpo_reward_keys",
        ["algorithm.adv_estimator=grpo"],
    ),
    "remax_scores_keep_their_scale": (
        ["algorithm.adv_estimator=remax", "algorithm.normalize_rewards=running"],
        "algorithm.normalize_rewards",
        "running moves scores away from the greedy answer's",
        ["algorithm.normalize_rewards=none"],
    ),
    "lambda_is_used": (
        ["algorithm.lam=0.9", "algorithm.lam_critic=1", "algorithm.lam_actor_alpha=0.05"],
        "algorithm.lam",
        "0.9 is read by neither half",
        ["algorithm.lam_critic=null"],
    ),
    "overlong_buffer_fits": (
        ["reward_model.overlong_buffer.enable=True", "reward_model.overlong_buffer.len=513"],
        "reward_model.overlong_buffer.len",
        "513 tokens do not fit in data.max_response_length=512. set it from 1 to 512",
        ["data.max_response_length=513"],
    ),
    "server_for_programs_serves_all_workers": (
        [
            "reward_model.sandbox_fusion.url=http://here/run_code",
            "reward_model.sandbox_fusion.max_concurrent=2",
            "reward_model.num_workers=3",
        ],
        "reward_model.num_workers",
        "3 is more than reward_model.sandbox_fusion.max_concurrent=2",
        ["reward_model.num_workers=2"],
    ),
    "gae_has_a_critic": (
        ["critic.enable=False"],
        "critic.enable",
        "False leaves algorithm.adv_estimator=gae without values",
        ["critic.enable=null"],
    ),
    "clip_cov_bounds_enclose_something": (
        [f"{ACTOR}.policy_loss.loss_mode=clip_cov", f"{ACTOR}.policy_loss.clip_cov_lb=5"],
        f"{ACTOR}.policy_loss.clip_cov_lb",
        f"5.0 is not below {ACTOR}.policy_loss.clip_cov_ub=5.0, so clip_cov drops no token",
        [f"{ACTOR}.policy_loss.clip_cov_lb=4.5"],
    ),
    "adaptive_kl_has_horizon_and_target": (
        ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=0"],
        "algorithm.kl_ctrl.horizon",
        "0 cannot be divided by, as algorithm.kl_ctrl.type=adaptive does",
        ["algorithm.kl_ctrl.type=fixed"],
    ),
    "actor_warmup_is_said_once": (
        [f"{ACTOR}.optim.lr_warmup_steps=5", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"],
        f"{ACTOR}.optim.lr_warmup_steps",
        f"5 and {ACTOR}.optim.lr_warmup_steps_ratio=0.1 say the same thing twice",
        [f"{ACTOR}.optim.lr_warmup_steps=-1"],
    ),
    "critic_warmup_is_said_once": (
        ["critic.optim.lr_warmup_steps=5", "critic.optim.lr_warmup_steps_ratio=0.1"],
        "critic.optim.lr_warmup_steps",
        "say the same thing twice",
        ["critic.optim.lr_warmup_steps_ratio=0"],
    ),
    "critic_warmup_has_a_critic": (
        ["algorithm.adv_estimator=rloo", f"{ROLLOUT}.n=2", "trainer.critic_warmup=3"],
        "trainer.critic_warmup",
        "2 steps train a critic alone, and critic.enable is False",
        ["trainer.critic_warmup=0"],
    ),
    "critic_warmup_ends": (
        ["trainer.critic_warmup=10", "trainer.total_training_steps=9"],
        "trainer.critic_warmup",
        "10 leaves the actor untrained in trainer.total_training_steps=9",
        ["trainer.critic_warmup=9"],
    ),
    "prompt_length_is_one": (
        [f"{ROLLOUT}.prompt_length=8"],
        f"{ROLLOUT}.prompt_length",
        "8 contradicts data.max_prompt_length=512",
        ["data.max_prompt_length=8"],
    ),
    "response_length_is_one": (
        [f"{ROLLOUT}.response_length=8"],
        f"{ROLLOUT}.response_length",
        "8 contradicts data.max_response_length=512",
        ["data.max_response_length=8"],
    ),
    "longest_prompt_leaves_room": (
        ["data.max_prompt_length=512", f"{ROLLOUT}.max_model_len=512"],
        f"{ROLLOUT}.max_model_len",
        "512 leaves a prompt of data.max_prompt_length=512 tokens no room",
        [f"{ROLLOUT}.max_model_len=513"],
    ),
    "servers_can_report_kept_tokens": (
        [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.top_p=0.9"],
        f"{ROLLOUT}.top_p",
        "0.9 alone: vllm tells which tokens it kept only together with",
        [f"{ROLLOUT}.top_k=50"],
    ),
    "agents_are_known": (
        [f"{ROLLOUT}.agent.default_agent_loop=tools"],
        f"{ROLLOUT}.agent.default_agent_loop",
        "tools is no agent",
        [f"{ROLLOUT}.agent.default_agent_loop=single_turn_agent"],
    ),
    "tools_need_turns": (
        [f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml"],
        f"{ROLLOUT}.multi_turn.tool_config_path",
        "multi_turn.enable=False leaves out",
        [f"{ROLLOUT}.multi_turn.enable=True"],
    ),
    "functions_need_turns": (
        [f"{ROLLOUT}.multi_turn.function_tool_path=tools.py"],
        f"{ROLLOUT}.multi_turn.function_tool_path",
        "multi_turn.enable=False leaves out",
        [f"{ROLLOUT}.multi_turn.enable=True"],
    ),
    "named_agents_need_turns": (
        [f"{ROLLOUT}.agent.agent_loop_config_path=agents.yaml"],
        f"{ROLLOUT}.agent.agent_loop_config_path",
        "multi_turn.enable=False leaves out",
        [f"{ROLLOUT}.multi_turn.enable=True"],
    ),
    "environments_need_turns": (
        [f"{ROLLOUT}.multi_turn.interaction_config_path=tools.yaml"],
        f"{ROLLOUT}.multi_turn.interaction_config_path",
        "multi_turn.enable=False leaves out",
        [f"{ROLLOUT}.multi_turn.enable=True"],
    ),
    "an_endpoint_has_a_program": (
        [f"{ROLLOUT}.agent.default_agent_loop=endpoint"],
        f"{ROLLOUT}.agent.endpoint.program",
        "missing, and actor_rollout_ref.rollout.agent.default_agent_loop=endpoint needs it",
        [f"{ROLLOUT}.agent.endpoint.program=agent.py:play"],
    ),
    "programs_hold_their_conversations": (
        [*PROGRAM, f"{ROLLOUT}.multi_turn.enable=True"],
        f"{ROLLOUT}.multi_turn.enable",
        "whose programs hold their conversations themselves",
        [f"{ROLLOUT}.multi_turn.enable=False"],
    ),
    "programs_score_alone": (
        [*PROGRAM, f"{ROLLOUT}.agent.endpoint.reward=program", "custom_reward_function.path=reward.py"],
        f"{ROLLOUT}.agent.endpoint.reward",
        "program leaves the score to the program, and custom_reward_function.path is set",
        [f"{ROLLOUT}.agent.endpoint.reward=function"],
    ),
    "experts_of_programs_are_not_recorded": (
        [*PROGRAM, f"{ROLLOUT}.enable_rollout_routing_replay=True", "actor_rollout_ref.actor.router_replay.mode=R3"],
        f"{ROLLOUT}.enable_rollout_routing_replay",
        "experts are not recorded with",
        [f"{ROLLOUT}.enable_rollout_routing_replay=False", "actor_rollout_ref.actor.router_replay.mode=disabled"],
    ),
    "turns_of_programs_end": (
        [*PROGRAM, f"{ROLLOUT}.ignore_eos=True"],
        f"{ROLLOUT}.ignore_eos",
        "default_agent_loop=endpoint asks for several",
        [f"{ROLLOUT}.ignore_eos=False"],
    ),
    "turns_can_end": (
        [f"{ROLLOUT}.multi_turn.enable=True", f"{ROLLOUT}.ignore_eos=True"],
        f"{ROLLOUT}.ignore_eos",
        "True lets no turn end",
        [f"{ROLLOUT}.ignore_eos=False"],
    ),
    "turns_are_sampled_here": (
        [f"{ROLLOUT}.multi_turn.enable=True", "trainer.n_gpus_per_node=2"],
        f"{ROLLOUT}.name",
        "native samples conversations (actor_rollout_ref.rollout.multi_turn.enable=True) on one device, not on 2",
        [f"{ROLLOUT}.name=vllm"],
    ),
    "async_sampling_has_separate_devices": (
        ["trainer.async_mode=fully_async", "trainer.n_gpus_per_node=2"],
        f"{ROLLOUT}.name",
        "native samples on the 2 devices that train; trainer.async_mode=fully_async asks for both at once",
        [f"{ROLLOUT}.name=vllm"],
    ),
    "scoring_ahead_has_devices_of_its_own": (
        [
            "trainer.async_mode=fully_async",
            "trainer.nnodes=2",
            f"{ROLLOUT}.name=vllm",
            "reward_model.enable=True",
            "reward_model.model.path=somewhere",
        ],
        "reward_model.server.url",
        "none: the 2 devices that train score, too; trainer.async_mode=fully_async asks for both at once",
        ["reward_model.server.url=http://localhost:1"],
    ),
    "models_are_placed": (
        ["trainer.n_gpus_per_node=4", f"{PLACES}={{rollout: 2-3}}"],
        f"{PLACES}.actor",
        "shares devices [2, 3] of 0-3 with rollout, which has 2-3",
        [f"{PLACES}={{actor: 0-1, critic: 0-1, rollout: 2-3}}"],
    ),
    "the_reference_of_a_full_kl_is_where_the_actor_is": (
        [
            *("trainer.n_gpus_per_node=2", "algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=full"),
            *(f"{ACTOR}.use_kl_loss=True", f"{PLACES}={{actor: 0, critic: 0, rollout: 0, inference: 1}}"),
        ],
        f"{PLACES}.inference",
        "is separate from the actor, which computes the KL on both models together (algorithm.kl_penalty=full)",
        [f"{PLACES}={{actor: 0-1, critic: 0-1, rollout: 0-1, inference: 0-1}}"],
    ),
    "partial_rollout_is_supported": (
        ["trainer.async_mode=fully_async", f"{ROLLOUT}.partial_rollout=True", f"{ROLLOUT}.nnodes=1"],
        f"{ROLLOUT}.partial_rollout",
        "devices of its own",
        [f"{ROLLOUT}.nnodes=0"],
    ),
    "vllm_can_sleep": (
        [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.engine_kwargs.vllm={{enable-sleep-mode: false}}"],
        f"{ROLLOUT}.engine_kwargs.vllm.enable_sleep_mode",
        f"False takes from the servers what {ROLLOUT}.free_cache_engine=True needs. "
        f"set {ROLLOUT}.free_cache_engine=False, or leave enable_sleep_mode out",
        [f"{ROLLOUT}.free_cache_engine=False"],
    ),
    "sglang_can_sleep": (
        [f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.engine_kwargs.sglang={{enable_weights_cpu_backup: false}}"],
        f"{ROLLOUT}.engine_kwargs.sglang.enable_weights_cpu_backup",
        f"False takes from the servers what {ROLLOUT}.free_cache_engine=True needs",
        [f"{ROLLOUT}.server_urls=[http://localhost:1]"],
    ),
    "server_addresses_are_not_overridden": (
        [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.engine_kwargs.vllm={{served-model-name: m, port: 8100}}"],
        f"{ROLLOUT}.engine_kwargs.vllm.port",
        "8100 moves a server away from where the run looks for it. leave it out",
        [f"{ROLLOUT}.server_urls=[http://localhost:1]"],
    ),
    "server_urls_need_a_server_engine": (
        [f"{ROLLOUT}.server_urls=[http://h:1]"],
        f"{ROLLOUT}.server_urls",
        f"http://h:1 is given, while {ROLLOUT}.name=native samples without servers. set {ROLLOUT}.name to vllm or",
        [f"{ROLLOUT}.name=sglang"],
    ),
    "server_urls_are_unique": (
        [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.server_urls=[http://h:1, 'http://h:1/']"],
        f"{ROLLOUT}.server_urls",
        "http://h:1 is named more than once. name each server once",
        [f"{ROLLOUT}.server_urls=[http://h:1, 'http://h:2']"],
    ),
    "tensor_parallel_size_divides_devices": (
        [
            *(f"{ROLLOUT}.name=vllm", "trainer.device=cuda", "trainer.n_gpus_per_node=8"),
            f"{ROLLOUT}.tensor_model_parallel_size=3",
        ],
        f"{ROLLOUT}.tensor_model_parallel_size",
        "3 does not divide the 8 devices of a machine (trainer.n_gpus_per_node). set it to a divisor of 8",
        [f"{ROLLOUT}.tensor_model_parallel_size=4"],
    ),
    "servers_are_named_once_by_any_name": (
        [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.server_urls=['http://127.0.0.1:80', 'http://LocalHost']"],
        f"{ROLLOUT}.server_urls",
        "http://LocalHost is named more than once (before as http://127.0.0.1:80). name each server once",
        [f"{ROLLOUT}.server_urls=['http://127.0.0.1:80', 'http://localhost:8000']"],
    ),
    "nccl_transfer_needs_one_device": (
        [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.weight_transfer=nccl", "trainer.n_gpus_per_node=2"],
        f"{ROLLOUT}.weight_transfer",
        "nccl broadcasts from one device, and the run has 2, with vllm beside them",
        [f"{ROLLOUT}.weight_transfer=auto"],
    ),
    "a_pass_of_vllm_has_a_token_of_each_row": (
        [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.max_num_batched_tokens=16"],
        f"{ROLLOUT}.max_num_batched_tokens",
        f"16 is less than {ROLLOUT}.max_num_seqs=256, so that vllm would not start. set it to 256 or above, or lower",
        [f"{ROLLOUT}.max_num_seqs=16"],
    ),
    "a_pass_of_vllm_has_a_whole_row": (
        [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.enable_chunked_prefill=False", "data.max_response_length=8000"],
        f"{ROLLOUT}.max_num_batched_tokens",
        f"8192 is less than the 8512 tokens of a row, so that vllm would not start without {ROLLOUT}.enable_ch",
        [f"{ROLLOUT}.engine_kwargs.vllm={{max_num_batched_tokens: 9000}}"],
    ),
    "vllm_supports_lora_rank": (
        [f"{ROLLOUT}.name=vllm", "actor_rollout_ref.model.lora_rank=513"],
        "actor_rollout_ref.model.lora_rank",
        "513 is more than the 512 of adapters that vllm takes. set actor_rollout_ref.model.lora.merge=True",
        ["actor_rollout_ref.model.lora.merge=True"],
    ),
    "max_staleness_has_an_effect": (
        ["trainer.async_mode=fully_async", f"{ROLLOUT}.max_staleness=4", "trainer.total_training_steps=4"],
        f"{ROLLOUT}.max_staleness",
        "4 updates lie between no two of the 4 steps of this run. set it below 4",
        [f"{ROLLOUT}.max_staleness=3"],
    ),
    "greedy_validation_samples_once": (
        [f"{VAL}.n=4"],
        f"{VAL}.n",
        "4 greedy answers to a prompt are all the same",
        [f"{VAL}.do_sample=True", f"{VAL}.temperature=1"],
    ),
    "validation_has_data": (
        ["data.val_files=[]", "trainer.test_freq=5"],
        "data.val_files",
        "empty, and trainer.test_freq asks for validation",
        ["trainer.test_freq=-1"],
    ),
    "resume_path_is_given": (
        ["trainer.resume_mode=resume_path"],
        "trainer.resume_from_path",
        "missing with trainer.resume_mode=resume_path",
        ["trainer.resume_from_path=c/global_step_3"],
    ),
    "adapters_have_a_scale": (
        ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=0"],
        "actor_rollout_ref.model.lora_alpha",
        "0 multiplies the adapters of actor_rollout_ref.model.lora_rank=8 by nothing",
        ["actor_rollout_ref.model.lora_alpha=16"],
    ),
    "adapters_of_the_critic_have_a_scale": (
        ["critic.model.lora_rank=8", "critic.model.lora_alpha=0"],
        "critic.model.lora_alpha",
        "0 multiplies the adapters of critic.model.lora_rank=8 by nothing",
        ["critic.model.lora_alpha=16"],
    ),
    "checkpoints_are_kept_together": (
        ["trainer.max_actor_ckpt_to_keep=2", "trainer.max_critic_ckpt_to_keep=3"],
        "trainer.max_critic_ckpt_to_keep",
        "3 contradicts trainer.max_actor_ckpt_to_keep=2",
        ["trainer.max_critic_ckpt_to_keep=2"],
    ),
    "custom_dataset_is_complete": (
        ["data.custom_cls.path=x.py"],
        "data.custom_cls.name",
        "missing beside data.custom_cls.path=x.py. give both",
        ["data.custom_cls.name=Mine"],
    ),
    "custom_dataset_is_complete_the_other_way": (
        ["data.custom_cls.name=Mine"],
        "data.custom_cls.path",
        "missing beside data.custom_cls.name=Mine. give both",
        ["data.custom_cls.path=x.py"],
    ),
    "subsets_are_not_empty": (
        ["data.train_max_samples=0"],
        "data.train_max_samples",
        "0 leaves no row",
        ["data.train_max_samples=-1"],
    ),
    "chat_template_is_jinja": (
        ["data.chat_template=qwen3.jinja"],
        "data.chat_template",
        "qwen3.jinja has no {{ }} or {% %}. give the text of a Jinja template",
        ["data.chat_template='{% for m in messages %}{{ m.content }}{% endfor %}'"],
    ),
    "rollbacks_have_checkpoints": (
        ["trainer.on_collapse=rollback"],
        "trainer.on_collapse",
        "rollback goes back to a checkpoint, and trainer.save_freq=-1 saves none. set trainer.save_freq above 0",
        ["trainer.save_freq=5"],
    ),
    "reward_model_is_named": (
        ["reward_model.enable=True"],
        "reward_model.model.path",
        "missing with reward_model.enable=True. give a sequence classifier with one output",
        ["reward_model.model.path=rm"],
    ),
    "functions_beside_a_model_have_a_weight": (
        [*LEARNED, "custom_reward_function.path=x.py"],
        "custom_reward_function.path",
        "x.py is never called with reward_model.enable=True, and no reward_model.parts says what both are worth",
        ["reward_model.parts={m: {kind: model}, r: {kind: rules}}"],
    ),
    "parts_are_whole": (
        ["reward_model.parts={a: {kind: rulez}}"],
        "reward_model.parts.a.kind",
        "'rulez' is not a kind of reward. choose one of rules, function, model, judge. Did you mean rules?",
        ["reward_model.parts={a: {kind: rules}}"],
    ),
    "integrations_are_installed": (
        ["integrations={coins: {bonus: 2}}"],
        "integrations.coins",
        "no installed package has this integration. install it",
        ["~integrations"],
    ),
    "responses_are_decoded_by_the_policys_tokenizer": (
        [*LEARNED, "reward_model.model.input_tokenizer=other/model"],
        "reward_model.model.input_tokenizer",
        "other/model is not the policy's tokenizer",
        ["reward_model.model.input_tokenizer=null"],
    ),
}
CORRECTION, FILTER = "algorithm.rollout_correction", "algorithm.filter_groups"
REJECTING = [f"{CORRECTION}.rollout_rs='token_k1,seq_max_k3'"]
CASES |= {
    "critic_is_there_to_wait_for": (
        ["critic.enable=False", "algorithm.adv_estimator=reinforce_plus_plus", f"{EXPLAINED}=0.2"],
        EXPLAINED,
        "0.2 needs what critic.enable=False leaves out",
        [f"{EXPLAINED}=null"],
    ),
    "rejection_modes_have_bounds": (
        REJECTING,
        f"{CORRECTION}.rollout_rs_threshold",
        f"missing with {CORRECTION}.rollout_rs=token_k1,seq_max_k3",
        [f"{CORRECTION}.rollout_rs_threshold='0.5_2,1.5'"],
    ),
    "rejection_has_one_lower_bound": (
        [*REJECTING, f"{CORRECTION}.rollout_rs_threshold=2", f"{CORRECTION}.rollout_rs_threshold_lower=3"],
        f"{CORRECTION}.rollout_rs_threshold_lower",
        f"3.0 is above {CORRECTION}.rollout_rs_threshold=2",
        [f"{CORRECTION}.rollout_rs_threshold_lower=0.5"],
    ),
    "bypass_mode_matches_loss_mode": (
        [f"{ACTOR}.policy_loss.loss_mode=bypass_mode"],
        f"{ACTOR}.policy_loss.loss_mode",
        f"bypass_mode contradicts {CORRECTION}.bypass_mode=False",
        [f"{CORRECTION}.bypass_mode=True"],
    ),
    "weights_have_bounds": (
        [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0.5_5"],
        f"{CORRECTION}.rollout_is_threshold",
        "0.55 changes the weight of a token that both policies give the same probability, which is 1 (unquoted, 0.5_5",
        [f"{CORRECTION}.rollout_is_threshold='0.5_5'"],
    ),
    "decoupled_corrects_once": (
        [f"{ACTOR}.policy_loss.loss_mode=decoupled", f"{CORRECTION}.rollout_is=token"],
        f"{CORRECTION}.rollout_is",
        "token would weigh a second time",
        [f"{CORRECTION}.rollout_is=null"],
    ),
    "bypass_has_no_mean_weight": (
        [
            f"{CORRECTION}.bypass_mode=True",
            f"{CORRECTION}.loss_type=reinforce",
            f"{CORRECTION}.rollout_is=token",
            f"{CORRECTION}.rollout_is_batch_normalize=True",
        ],
        f"{CORRECTION}.rollout_is_batch_normalize",
        "True needs the weights of the whole batch",
        [f"{CORRECTION}.rollout_is_batch_normalize=False"],
    ),
    "bypass_has_no_token_baseline": (
        [f"{CORRECTION}.bypass_mode=True", "algorithm.adv_estimator=optimal_token_baseline", f"{ROLLOUT}.n=2"],
        "algorithm.adv_estimator",
        "optimal_token_baseline needs the pass over the old policy",
        [f"{CORRECTION}.bypass_mode=False"],
    ),
    "bypass_has_no_full_kl_in_reward": (
        [f"{CORRECTION}.bypass_mode=True", "algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=full"],
        "algorithm.kl_penalty",
        "full needs the pass over the old policy",
        ["algorithm.kl_penalty=kl"],
    ),
    "filtered_groups_have_peers": (
        [f"{FILTER}.enable=True"],
        f"{ROLLOUT}.n",
        f"1 response a prompt has no two scores, so {FILTER}.enable=True would drop every prompt",
        [f"{ROLLOUT}.n=4"],
    ),
    "dynamic_sampling_has_a_limit": (
        [f"{FILTER}.enable=True", f"{FILTER}.max_num_gen_batches=0", f"{ROLLOUT}.n=2"],
        f"{FILTER}.max_num_gen_batches",
        "0 would sample without end while no group has two different scores",
        [f"{FILTER}.max_num_gen_batches=10"],
    ),
    "groups_are_filtered_before_the_kl": (
        [f"{FILTER}.enable=True", f"{FILTER}.metric=seq_final_reward", f"{ROLLOUT}.n=2"],
        f"{FILTER}.metric",
        "seq_final_reward is known only after the batch is complete",
        [f"{FILTER}.metric=acc"],
    ),
}
PAGE = Path(__file__).parents[2] / "docs/guides/coming-from-verl.md"
CASES |= {
    f"shards_of_{model}_divide_the_devices": (
        [f"{model}.fsdp_config.fsdp_size=3", "trainer.n_gpus_per_node=4"],
        f"{model}.fsdp_config.fsdp_size",
        "3 does not divide the 4 devices",
        [f"{model}.fsdp_config.fsdp_size=2"],
    )
    for model in SHARDED
}
SHARES = "ulysses_sequence_parallel_size"
ON_FOUR = ["trainer.n_gpus_per_node=4", "critic.model.use_remove_padding=True"]
CASES |= {
    f"rows_of_{role}_are_shared_by_a_divisor": (
        [*ON_FOUR, f"{role}.{SHARES}=3"],
        f"{role}.{SHARES}",
        "3 does not divide the 4 devices",
        [f"{role}.{SHARES}=2"],
    )
    for role in (ACTOR, "actor_rollout_ref.ref", "critic")
}
PACKS = "actor_rollout_ref.model.use_remove_padding"
CASES |= {
    f"shared_rows_of_{role}_are_packed": (
        [*ON_FOUR, f"{packs}=False", f"{role}.{SHARES}=2"],
        f"{role}.{SHARES}",
        f"2 devices share packed rows only, and {packs} is False",
        [f"{packs}=True"],
    )
    for role, packs in (
        *((ACTOR, PACKS), ("actor_rollout_ref.ref", PACKS), ("critic", "critic.model.use_remove_padding")),
    )
}
ON_MEGATRON = [f"{ACTOR}.strategy=megatron", "trainer.n_gpus_per_node=4"]
SIZES = f"{ACTOR}.megatron"
OF_MEGATRON = [f"{SIZES}.use_dist_checkpointing=True", f"{SIZES}.dist_checkpointing_path=folder"]
CASES |= {
    "megatron_has_all_models": (
        [*ON_MEGATRON, "critic.strategy=fsdp"],
        "critic.strategy",
        f"fsdp contradicts {ACTOR}.strategy=megatron",
        ["critic.strategy=megatron"],
    ),
    "megatron_has_the_reference_too": (
        [*ON_MEGATRON, f"{ACTOR}.use_kl_loss=True", "actor_rollout_ref.ref.strategy=fsdp2"],
        "actor_rollout_ref.ref.strategy",
        f"fsdp2 contradicts {ACTOR}.strategy=megatron",
        ["actor_rollout_ref.ref.strategy=megatron"],
    ),
    "megatron_has_one_layout": (
        [*ON_MEGATRON, f"{SIZES}.tensor_model_parallel_size=2", "critic.megatron.tensor_model_parallel_size=1"],
        "critic.megatron.tensor_model_parallel_size",
        f"1 contradicts {SIZES}.tensor_model_parallel_size=2: models on the same devices share a layout",
        ["critic.megatron.tensor_model_parallel_size=2"],
    ),
    "megatron_has_one_layout_with_the_reference": (
        [
            *ON_MEGATRON,
            f"{ACTOR}.use_kl_loss=True",
            f"{SIZES}.pipeline_model_parallel_size=2",
            "actor_rollout_ref.ref.megatron.override_transformer_config={num_layers_in_first_pipeline_stage: 1}",
        ],
        "actor_rollout_ref.ref.megatron.override_transformer_config",
        f"its num_layers_in_first_pipeline_stage contradicts that of {SIZES}.override_transformer_config",
        [f"{SIZES}.override_transformer_config={{num_layers_in_first_pipeline_stage: 1}}"],
    ),
    "megatron_sizes_divide_the_devices": (
        [*ON_MEGATRON, f"{SIZES}.tensor_model_parallel_size=2", f"{SIZES}.pipeline_model_parallel_size=3"],
        f"{SIZES}.tensor_model_parallel_size",
        "= 6 does not divide the 4 devices",
        [f"{SIZES}.pipeline_model_parallel_size=2"],
    ),
    "megatron_experts_divide_the_devices": (
        [*ON_MEGATRON, f"{SIZES}.tensor_model_parallel_size=2", f"{SIZES}.expert_model_parallel_size=4"],
        f"{SIZES}.expert_model_parallel_size",
        "expert 4 x expert tensor 2",
        [f"{SIZES}.expert_tensor_parallel_size=1"],
    ),
    "megatron_is_told_where_its_weights_are": (
        [*ON_MEGATRON, f"{SIZES}.use_dist_checkpointing=True"],
        f"{SIZES}.use_dist_checkpointing",
        f"True reads weights from {SIZES}.dist_checkpointing_path, which is null. set it to the directory",
        [f"{SIZES}.dist_checkpointing_path=folder"],
    ),
    "megatron_is_told_where_the_critics_weights_are": (
        [*ON_MEGATRON, "critic.megatron.use_dist_checkpointing=True"],
        "critic.megatron.use_dist_checkpointing",
        "True reads weights from critic.megatron.dist_checkpointing_path, which is null",
        ["critic.megatron.dist_checkpointing_path=folder"],
    ),
    "megatron_is_told_where_the_references_weights_are": (
        [
            *ON_MEGATRON,
            f"{ACTOR}.use_kl_loss=True",
            "actor_rollout_ref.ref.megatron.use_dist_checkpointing=True",
        ],
        "actor_rollout_ref.ref.megatron.use_dist_checkpointing",
        "which is null",
        ["actor_rollout_ref.ref.megatron.use_dist_checkpointing=null"],
    ),
    "megatron_reads_its_weights_by_its_ranks": (
        [
            f"{SIZES}.use_dist_checkpointing=True",
            f"{SIZES}.dist_checkpointing_path=folder",
            "trainer.n_gpus_per_node=2",
        ],
        f"{SIZES}.use_dist_checkpointing",
        f"there are none: {ACTOR}.strategy=fsdp. leave {SIZES}.use_dist_checkpointing out to read model.path",
        ON_MEGATRON,
    ),
    "megatron_reads_its_weights_by_several_ranks": (
        [BY_MEGATRON, *OF_MEGATRON],
        f"{SIZES}.use_dist_checkpointing",
        "there are none: one device (trainer.n_gpus_per_node x trainer.nnodes), which trains without Megatron",
        ON_MEGATRON,
    ),
    "megatron_pieces_have_a_pipeline": (
        [*ON_MEGATRON, f"{SIZES}.virtual_pipeline_model_parallel_size=2"],
        f"{SIZES}.virtual_pipeline_model_parallel_size",
        "2 virtual stages need a pipeline of several devices",
        [f"{SIZES}.pipeline_model_parallel_size=2"],
    ),
    "megatron_reads_no_reference_beside_adapters": (
        [
            *ON_MEGATRON,
            f"{ACTOR}.use_kl_loss=True",
            "actor_rollout_ref.model.lora_rank=8",
            "actor_rollout_ref.ref.megatron.use_dist_checkpointing=True",
            "actor_rollout_ref.ref.megatron.dist_checkpointing_path=folder",
        ],
        "actor_rollout_ref.ref.megatron.use_dist_checkpointing",
        "True reads weights for a reference that is the policy without adapter",
        ["actor_rollout_ref.ref.megatron.use_dist_checkpointing=null"],
    ),
    "batches_are_scored_by_a_function": (
        ["reward_model.reward_manager=batch"],
        "reward_model.reward_manager",
        "batch needs custom_reward_function.path",
        ["custom_reward_function.path=mine.py"],
    ),
    "megatron_has_one_model_before_an_update": (
        [*ON_MEGATRON, "algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=full"],
        "algorithm.kl_penalty",
        "full runs the reference beside the policy",
        ["algorithm.kl_penalty=low_var_kl"],
    ),
    "megatron_has_one_model_at_a_time": (
        [*ON_MEGATRON, f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=full"],
        f"{ACTOR}.kl_loss_type",
        "full runs the reference beside the policy",
        [f"{ACTOR}.kl_loss_type=low_var_kl"],
    ),
    "distillation_has_a_teacher": (
        ["distillation.enabled=True"],
        TEACHER,
        "missing with distillation.enabled=True",
        [f"{TEACHER}=large"],
    ),
    "a_teacher_has_a_model": (
        ["distillation.enabled=True", f"{TEACHERS}.math.key=a"],
        f"{TEACHERS}.math.model_path",
        "the teacher has no model",
        [f"{TEACHERS}.math.model_path=large"],
    ),
    "teachers_have_known_settings": (
        [*DISTILLS, f"{TEACHERS}.teacher_model.model_paht=other"],
        f"{TEACHERS}.teacher_model.model_paht",
        "a teacher has no such key",
        [f"~{TEACHERS}.teacher_model.model_paht"],
    ),
    "several_teachers_have_keys": (
        [*DISTILLS, f"{TEACHERS}.math.model_path=b", f"{TEACHERS}.math.key=a"],
        f"{TEACHERS}.teacher_model.key",
        "with 2 teachers each needs the data_source of the rows that it scores",
        [f"{TEACHERS}.teacher_model.key=c"],
    ),
    "a_row_has_one_teacher": (
        [*SEVERAL, f"{TEACHERS}.code.key=a"],
        f"{TEACHERS}.code.key",
        "'a' is the key of math as well",
        [f"{TEACHERS}.code.key=c"],
    ),
    "a_server_has_settings_of_its_own": (
        [*DISTILLS, f"{TEACHERS}.teacher_model.timeout=9.0"],
        f"{TEACHERS}.teacher_model.timeout",
        "is of a teacher on a server, and this one runs here",
        [f"{TEACHERS}.teacher_model.server_url=http://teacher:8000"],
    ),
    "servers_compute_at_a_temperature_of_1": (
        [*DISTILLS, f"{TEACHERS}.teacher_model.server_url=http://teacher:8000", f"{ROLLOUT}.temperature=0.7"],
        f"{TEACHERS}.teacher_model.server_url",
        "a server computes at a temperature of 1",
        [f"{ROLLOUT}.temperature=1"],
    ),
    "servers_return_log_probs_of_tokens": (
        [*DISTILLS, f"{TEACHERS}.teacher_model.server_url=http://teacher:8000", f"{DISTILLATION}.loss_mode=full"],
        f"{TEACHERS}.teacher_model.server_url",
        "full (distillation.distillation_loss.loss_mode) compares distributions",
        [f"{DISTILLATION}.loss_mode=k3"],
    ),
    "teachers_have_names": (
        ["distillation.enabled=True", f"{TEACHERS}={{a/b: {{model_path: large}}}}"],
        f"{TEACHERS}.a/b",
        "is not a name",
        [f"~{TEACHERS}", f"{TEACHER}=large"],
    ),
    "the_teacher_is_the_only_reference": (
        [*DISTILLS, f"{ACTOR}.use_kl_loss=True"],
        f"{ACTOR}.use_kl_loss",
        "with distillation.enabled=True the teacher is the reference",
        [f"{ACTOR}.use_kl_loss=False"],
    ),
    "k1_is_no_loss": (
        [*DISTILLS, f"{DISTILLATION}.loss_mode=k1"],
        f"{DISTILLATION}.loss_mode",
        "k1 has an expected gradient of 0, whatever the teacher is",
        [f"{DISTILLATION}.use_policy_gradient=True"],
    ),
    "a_kl_over_the_vocabulary_is_no_advantage": (
        [*DISTILLS, f"{DISTILLATION}.loss_mode=forward_kl_topk", f"{DISTILLATION}.use_policy_gradient=True"],
        f"{DISTILLATION}.loss_mode",
        "forward_kl_topk is the same whichever token was sampled",
        [f"{DISTILLATION}.use_policy_gradient=False"],
    ),
    "distillation_runs_on_fsdp": (
        [*ON_MEGATRON, *DISTILLS],
        "distillation.enabled",
        f"True is not supported with {ACTOR}.strategy=megatron",
        [f"{role}.strategy=fsdp" for role in (ACTOR, "critic")],
    ),
}


def broken_by(case):
    """What is wrong with a case of the table: it is not refused as it says, or its fix does not help."""
    overrides, path, message, mended = case
    problems = problems_of(*overrides)
    if list(problems) != [path] or message not in problems[path]:
        return problems
    try:
        load(*overrides, *mended)
    except ConfigError as error:
        return {"its fix": str(error)}
    return {}


def test_each_contradiction_is_one_problem_and_its_fix_works(monkeypatch):
    """Every rule of the table is broken by one of the cases, too."""
    broken = set()

    def watched(rule):
        def look(cfg):
            problem = rule(cfg)
            broken.update([rule] if problem else [])
            return problem

        return look

    monkeypatch.setattr(contradictions, "TEXT_RULES", [watched(rule) for rule in RULES])
    assert {name: wrong for name, case in CASES.items() if (wrong := broken_by(case))} == {}
    assert [rule for rule in RULES if rule not in broken] == []


NOT_TAKEN_BY_VERL = {
    *(name for name in CASES if name.startswith("megatron_")),
    *(name for name in CASES if name.startswith(("rows_of_", "shared_rows_of_"))),
    *("vllm_supports_lora_rank", "a_pass_of_vllm_has_a_token_of_each_row", "a_pass_of_vllm_has_a_whole_row"),
    *("training_data_is_named", "actor_mini_batch_fits", "critic_mini_batch_fits", "gae_has_a_critic"),
    *(
        "distillation_has_a_teacher",
        "a_teacher_has_a_model",
        "teachers_have_known_settings",
        "several_teachers_have_keys",
        "a_row_has_one_teacher",
        "k1_is_no_loss",
        "rejection_modes_have_bounds",
        "bypass_has_no_token_baseline",
        "bypass_has_no_full_kl_in_reward",
        "tensor_parallel_size_divides_devices",
        *(f"shards_of_{model}_divide_the_devices" for model in SHARDED),
    ),
}
"""verl refuses these, or fails at them, too."""
NOT_VERLS = {
    *("lambda_is_used", "critic_is_there_to_wait_for", "rejection_has_one_lower_bound", "decoupled_corrects_once"),
    *("gdpo_has_components", "gdpo_reads_components_only", "remax_scores_keep_their_scale"),
    *("parts_are_whole", "integrations_are_installed", "served_models_read_text", "rollbacks_have_checkpoints"),
    *("partial_rollout_is_supported", "max_staleness_has_an_effect", "vllm_can_sleep", "sglang_can_sleep"),
    *("models_are_placed", "the_reference_of_a_full_kl_is_where_the_actor_is"),
    *("server_urls_need_a_server_engine", "nccl_transfer_needs_one_device"),
    *("server_urls_are_unique", "servers_are_named_once_by_any_name", "server_addresses_are_not_overridden"),
    "routers_can_replay_experts",
    *("a_server_has_settings_of_its_own", "servers_compute_at_a_temperature_of_1", "teachers_have_names"),
    "servers_return_log_probs_of_tokens",
    *("an_endpoint_has_a_program", "programs_hold_their_conversations", "programs_score_alone"),
    *("experts_of_programs_are_not_recorded", "turns_of_programs_end"),
}
"""About keys, names or options that verl does not have or does not read."""


def test_what_verl_takes_stands_in_the_table_of_differences():
    differences = PAGE.read_text().split("## What differs on purpose")[1].split("## The same")[0]
    rules = sorted(CASES.keys() - NOT_TAKEN_BY_VERL - NOT_VERLS)
    assert [rule for rule in rules if f"`{CASES[rule][1]}" not in differences] == []


@pytest.mark.parametrize(
    ("modes", "threshold", "message"),
    [
        ("token_k1,token_k2", "'1,2,3'", "1,2,3 is no list of bounds for the 2 modes"),
        ("token_k2", "'0.5_2'", "'0.5_2' is no bound of token_k2"),
        ("token_k2", "two", "'two' is no bound of token_k2"),
        ("token_k2", "-1", "'-1.0' is no bound of token_k2"),
        ("token_k1", "0.5", "0.5 alone lets no ratio of token_k1"),
        ("token_k1", "'2_0.5'", "'2_0.5' is no bound of token_k1"),
    ],
)
def test_bounds_of_rejection(modes, threshold, message):
    overrides = [f"{CORRECTION}.rollout_rs='{modes}'", f"{CORRECTION}.rollout_rs_threshold={threshold}"]
    assert message in problems_of(*overrides)[f"{CORRECTION}.rollout_rs_threshold"]


def test_a_mode_of_rejection_is_named_once():
    overrides = [f"{CORRECTION}.rollout_rs='token_k2,token_k1,token_k2'", f"{CORRECTION}.rollout_rs_threshold=2"]
    assert "token_k2 is named twice" in problems_of(*overrides)[f"{CORRECTION}.rollout_rs"]


@pytest.mark.parametrize(
    ("modes", "threshold", "message"),
    [("token_k2", "2", "has no k1"), ("token_k1", "'0.4_2'", "0.5 is a second lower bound")],
)
def test_lower_bounds_of_rejection(modes, threshold, message):
    key = f"{CORRECTION}.rollout_rs_threshold"
    problems = problems_of(f"{CORRECTION}.rollout_rs='{modes}'", f"{key}={threshold}", f"{key}_lower=0.5")
    assert message in problems[f"{key}_lower"]


def test_an_unknown_rejection_mode_is_told_the_nearest():
    problem = problems_of(f"{CORRECTION}.rollout_rs=token_k4")[f"{CORRECTION}.rollout_rs"]
    assert "did you mean token_k" in problem


def test_components_and_their_weights_are_counted():
    problems = problems_of(*GDPO, "algorithm.gdpo_reward_weights=[1,2,3]")
    assert (
        "3 weights for 2 components in algorithm.gdpo_reward_keys. give 2" in problems["algorithm.gdpo_reward_weights"]
    )


@pytest.mark.parametrize("setting", ["algorithm.use_kl_in_reward=True", "algorithm.normalize_rewards=batch"])
def test_gdpo_ignores_no_change_of_the_score(setting):
    assert list(problems_of(*GDPO, setting)) == [setting.split("=")[0]]


def test_the_critics_lambda_follows_lam():
    assert load("algorithm.lam=0.9").config.algorithm.lam_critic == 0.9
    assert load("algorithm.lam=0.9", "algorithm.lam_critic=1").config.algorithm.lam_critic == 1


def test_both_kinds_of_kl_may_be_on():
    config = load("algorithm.use_kl_in_reward=True", f"{ACTOR}.use_kl_loss=True").config
    assert config.algorithm.use_kl_in_reward
    assert config.actor_rollout_ref.actor.use_kl_loss


def test_a_teacher_beside_adapters_may_have_devices_of_its_own():
    places = f"{PLACES}={{actor: 0, critic: 0, rollout: 0, inference: 1}}"
    config = load(*DISTILLS, "actor_rollout_ref.model.lora_rank=8", "trainer.n_gpus_per_node=2", places).config
    assert placed(config)["reference"] == range(1, 2)


def test_no_divisibility_is_asked_for():
    load("data.train_batch_size=7", f"{ACTOR}.ppo_mini_batch_size=5", f"{ACTOR}.ppo_micro_batch_size_per_gpu=3")


def test_a_rule_is_silent_about_a_key_that_is_wrong_by_itself():
    problems = problems_of("data.train_batch_size=x", f"{ACTOR}.ppo_mini_batch_size=2000")
    assert list(problems) == ["data.train_batch_size"]


def test_an_inheriting_key_takes_whatever_its_source_takes():
    looser = {"actor_rollout_ref.actor.clip_ratio_high", "data.gen_batch_size"}
    looser |= {key.path for key in keys().values() if key.path.endswith(("rollout_n", "forward_max_token_len_per_gpu"))}
    for key in keys().values():
        if key.inherits and key.inherits.equals is None and key.path not in looser:
            source = keys()[key.inherits.key].type_text
            assert key.type_text in (source, f"{source} or null"), key.path


@pytest.mark.parametrize(
    ("given", "key", "message"),
    [
        (["actor: 0-1, rollout: 3, critic: 0-1"], PLACES, "leaves devices [2] with nothing to do"),
        (["actor: 0-1, critic: 2, rollout: 2-4"], f"{PLACES}.rollout", "device 4 does not exist: there are 4"),
        (["actor: 0-1, critic: 2, env: 3"], f"{PLACES}.env", "no model of a text run"),
        (["actor: '0,2', critic: 1, rollout: 3"], f"{PLACES}.actor", "'0,2' is no range of devices. write"),
        (["actor: 3-1, critic: 0, rollout: 0"], f"{PLACES}.actor", "'3-1' is no range of devices"),
        (["actro: 0-1, critic: 2-3"], f"{PLACES}.actro", "Did you mean actor?"),
        (["actor: 0-1, critic: 0-1, rollout: 2-3", f"{ROLLOUT}.nnodes=1"], f"{ROLLOUT}.nnodes", "in addition to"),
        (["actor: 0-1, critic: 0-1, rollout: 2-3", f"{ACTOR}.strategy=megatron"], f"{PLACES}.rollout",
         "it shares the actor's"),
        (["actor: 0-2, rollout: 0-2, critic: 3", f"{ACTOR}.strategy=megatron", f"{SIZES}.tensor_model_parallel_size=3"],
         "critic.megatron.tensor_model_parallel_size", f"= 3 does not divide the 1 devices ({PLACES})"),
        (["", "reward_model.enable_resource_pool=True", "reward_model.nnodes=0"], "reward_model.nnodes", "0 machines"),
        (["", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.server_urls=[http://h:1]"],
         f"{ROLLOUT}.nnodes", f"4 devices have nothing to do: the servers of {ROLLOUT}.server_urls sample"),
        (["actor: 0, critic: 0, rollout: 1-3", f"{ACTOR}.fsdp_config.fsdp_size=2"], f"{ACTOR}.fsdp_config.fsdp_size",
         f"2 does not divide the 1 devices ({PLACES})"),
    ],
)  # fmt: skip
def test_a_placement_that_does_not_add_up_is_one_error(given, key, message):
    scores = ["reward_model.enable=True", "reward_model.model.path=scorer"] if "reward_model" in key else []
    places, *more = given
    found = problems_of("trainer.n_gpus_per_node=4", f"{PLACES}={{{places}}}", *scores, *more)
    assert list(found) == [key]
    assert message in found[key]


def test_a_component_has_one_placement():
    twice = Override(PLACES, {"actor,critic": "all", "actor": 0, "rollout": "ALL"}, delete=False)
    assert "is placed twice" in problems_of(twice, "trainer.n_gpus_per_node=2")[f"{PLACES}.actor"]


def test_models_have_the_devices_that_their_keys_say():
    loaded = load(f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=3", "trainer.n_gpus_per_node=2").config
    assert placed(loaded) == {"actor": range(2), "critic": range(2), "sampler": range(2, 5)}
    assert placed(load("trainer.n_gpus_per_node=2").config)["sampler"] == range(2)
    served = [f"{ROLLOUT}.name=vllm", "trainer.n_gpus_per_node=4", "algorithm.adv_estimator=grpo"]
    assert "sampler" not in placed(load(*served).config)  # the servers are on all devices
    assert placed(load(*served, f"{ROLLOUT}.nnodes=1").config)["sampler"] == range(4, 8)
    ahead = ["trainer.async_mode=one_step_off", f"{PLACES}={{actor: 0-1, rollout: 2-3}}"]
    assert placed(load(*served, *ahead).config)["sampler"] == range(2, 4)


def test_on_devices_of_its_own_megatrons_critic_has_a_layout_of_its_own():
    apart = f"{PLACES}={{actor: 0-1, rollout: 0-1, critic: 2-3}}"
    sizes = [f"{SIZES}.tensor_model_parallel_size=2", "critic.megatron.pipeline_model_parallel_size=2"]
    loaded = load(*ON_MEGATRON, apart, *sizes, "critic.megatron.tensor_model_parallel_size=1").config
    assert placed(loaded)["critic"] == range(2, 4)

"""`policy`: the control policy of an embodied run, and its critic."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from tether.config.schema.section import (
    ActsIf,
    Count,
    Inherits,
    Name,
    OffOrEvery,
    Positive,
    PositiveFloat,
    Range,
    Says,
    Section,
    Strings,
)

OwnNetwork = Annotated[str, Field(pattern=r"^(object|.+\.py):\w+$"), Says("a network of a file: FILE.py:NAME")]
VlaType = Literal["openvla", "openvla_oft"]
VLA_TYPES: tuple[str, ...] = get_args(VlaType)
FlowType = Literal["pi0", "pi05"]
FLOW_TYPES: tuple[str, ...] = get_args(FlowType)
NETWORK = ActsIf(".model_type", on=("mlp_policy", "cnn_policy"), own_function=False)
CNN = ActsIf(".model_type", on=("cnn_policy",), own_function=False)
FLOW = ActsIf(".model_type", on=FLOW_TYPES, own_function=False)
FIXED_NOISE = ActsIf(".noise_method", on=("flow_sde", "flow_cps"))
LEARNED_NOISE = ActsIf(".noise_method", on=("flow_noise",))
TRANSFORMER = ActsIf(".model_type", on=VLA_TYPES, own_function=False)
NARROW = ActsIf(".model_type", on=(*VLA_TYPES, "cnn_policy"), own_function=False)
PROMPTED = ActsIf(".model_type", on=(*VLA_TYPES, *FLOW_TYPES), own_function=False)
OWN_TOO = ActsIf(".model_type", on=("mlp_policy", "cnn_policy"))


class PolicyConfig(Section):
    """`policy`: the control policy of an embodied run, and its critic."""

    model_type: Literal["mlp_policy", "cnn_policy"] | VlaType | FlowType | OwnNetwork = "mlp_policy"
    """MLPs, a CNN, a transformer (VLA), a flow (lerobot's pi0 or pi0.5), or your own network as FILE.py:NAME."""
    cnn_type: Annotated[Literal["auto", "nature", "small"], CNN] = "auto"
    """CNN: Nature-CNN, or a small one for images of a few cells; auto: by the image size. (tether's own key.)"""
    features_extractor: Annotated[OwnNetwork | None, NETWORK] = None
    """FILE.py:NAME of your own module before the hidden layers, which replaces the CNN. (tether's own key.)"""
    pixel_scale: Annotated[PositiveFloat, CNN] = 255.0
    """Pixels are divided by this. If pixels encode categories, as in MiniGrid, set it to the largest code."""
    hidden_dim: Positive = 256
    """Width of the hidden layers, or of the transformer."""
    num_layers: Positive = 3
    """Number of hidden layers, or of the transformer's layers."""
    num_heads: Annotated[Positive, TRANSFORMER] = 4
    """Number of attention heads of the transformer."""
    temperature: Annotated[PositiveFloat, TRANSFORMER] = 1.0
    """Temperature of the softmax over action tokens, in sampling and in training."""
    dtype: Annotated[Literal["float32", "bfloat16"], NARROW] = "float32"
    """Dtype of the transformer or CNN in training; the optimizer keeps float32 weights. (tether's own key.)"""
    unnorm_key: Annotated[Name | None, TRANSFORMER] = None
    """Dataset whose statistics scale a published OpenVLA policy's actions; null: its only one. (OpenVLA's key.)"""
    center_crop: Annotated[bool, TRANSFORMER] = False
    """Crop images to their centre for a published OpenVLA policy, as fine-tuned ones expect. (OpenVLA's key.)"""
    num_steps: Annotated[Positive, FLOW] = 4
    """Number of denoising steps of a flow. (RLinf's key, as are the next six.)"""
    noise_method: Annotated[Literal["flow_sde", "flow_noise", "flow_cps"], FLOW] = "flow_sde"
    """How denoising steps sample: the flow's SDE, learned noise, or coefficient-preserving sampling (flow_cps)."""
    noise_level: Annotated[PositiveFloat, FIXED_NOISE] = 0.5
    """Noise scale of flow_sde and flow_cps."""
    noise_logvar_range: Annotated[Range, LEARNED_NOISE] = (0.08, 0.16)
    """Minimum and maximum standard deviation of flow_noise."""
    joint_logprob: Annotated[bool, FLOW] = False
    """Sample all denoising steps; false: one step, drawn for each decision, and the others are deterministic."""
    detach_critic_input: Annotated[bool, FLOW] = False
    """Stop the critic's gradient at its input, so that it does not train the network below it."""
    train_expert_only: Annotated[bool, FLOW] = False
    """Freeze the vision-language model, which reads images and prompt."""
    relative_actions: Annotated[Count, FLOW] = 0
    """Number of leading action columns that are generated relative to the same columns of the state. (tether's.)"""
    discrete_state_input: Annotated[bool, ActsIf(".model_type", on=("pi05",), own_function=False)] = True
    """Write the state into pi0.5's prompt; false: the policy does not see the state. (openpi's key.)"""
    step_logprobs: Annotated[Literal["sum", "mean"], ActsIf(".joint_logprob", on=(True,))] = "sum"
    """Log-prob of a chain: the sum over its steps (its density), or RLinf's mean over start and steps. (tether's.)"""
    tokenizer_path: Annotated[str | None, FLOW] = None
    """Folder of a flow's tokenizer; null: that of published weights, or bytes for a new flow. (tether's own key.)"""
    max_prompt_length: Annotated[Positive | None, PROMPTED] = None
    """Prompt tokens of a new flow (null: those of the longest prompt, or 200) or of published OpenVLA (null: 50)."""
    lstm_dim: Annotated[Positive | None, NETWORK] = None
    """Width of an LSTM after the hidden layers; null: no LSTM. (tether's own key.)"""
    activation: Annotated[Literal["tanh", "relu", "elu"], OWN_TOO] = "tanh"
    """Nonlinearity of the hidden layers."""
    share_critic: Annotated[bool, NETWORK] = False
    """Let the critic be a linear layer on the policy's features; false: it has its own network."""
    critic_hidden_dim: Annotated[Positive, Inherits(".hidden_dim"), NETWORK]
    """Width of the hidden layers of a separate critic. (tether's own key.)"""
    critic_num_layers: Annotated[Positive, Inherits(".num_layers"), NETWORK]
    """Number of hidden layers of a separate critic. (tether's own key.)"""
    init_logstd: Annotated[float, OWN_TOO] = -0.5
    """Initial log standard deviation of continuous actions, a parameter that does not depend on the state."""
    use_sde: Annotated[bool, NETWORK] = False
    """Continuous actions: noise that is a function of the state, fixed for several decisions (gSDE). (tether's key.)"""
    sde_sample_freq: Annotated[OffOrEvery, ActsIf(".use_sde", on=(True,))] = -1
    """Number of decisions after which a new noise function is drawn; -1: once per rollout. (tether's own key.)"""
    num_action_chunks: Positive = 1
    """Number of actions that one decision chooses; they are executed one after the other."""
    normalize_observations: Annotated[bool, OWN_TOO] = False
    """Normalise observations to mean 0 and variance 1 with running statistics, which are saved with the policy."""
    normalize_only: Annotated[Strings, ActsIf(".normalize_observations", on=(True,))] = ()
    """Entries of a Dict observation that are normalised; empty: all. (tether's own key.)"""
    clip_observations: Annotated[float, ActsIf(".normalize_observations", on=(True,))] = 10.0
    """Normalised observations are clipped to plus and minus this."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    clip_rewards: Annotated[float, ActsIf(".normalize_rewards", on=(True,))] = 10.0
    """Normalised rewards are clipped to plus and minus this."""

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
    """Perceptrons, a CNN, a transformer (VLA), a flow (lerobot's pi0, pi0.5), or your own FILE.py:NAME."""
    cnn_type: Annotated[Literal["auto", "nature", "small"], CNN] = "auto"
    """Nature-CNN, or a small one for pictures of a few cells; auto: by the size of the picture. (tether's own key.)"""
    features_extractor: Annotated[OwnNetwork | None, NETWORK] = None
    """FILE.py:NAME, a module of yours in front of the hidden layers, in the place of a CNN. (tether's own key.)"""
    pixel_scale: Annotated[PositiveFloat, CNN] = 255.0
    """Pixels are divided by this; for pictures whose bytes are numbers of things, the largest of these."""
    hidden_dim: Positive = 256
    """Width of the hidden layers, or of the transformer."""
    num_layers: Positive = 3
    """Hidden layers, or those of the transformer."""
    num_heads: Annotated[Positive, TRANSFORMER] = 4
    """Attention heads of the transformer."""
    temperature: Annotated[PositiveFloat, TRANSFORMER] = 1.0
    """Temperature of the softmax over action tokens, in acting and in learning."""
    dtype: Annotated[Literal["float32", "bfloat16"], NARROW] = "float32"
    """Format of the transformer or CNN in training; the optimizer keeps float32 weights. (tether's own key.)"""
    unnorm_key: Annotated[Name | None, TRANSFORMER] = None
    """Dataset whose statistics scale the actions of a published OpenVLA policy; null: its only one. (OpenVLA's key.)"""
    center_crop: Annotated[bool, TRANSFORMER] = False
    """Show a published OpenVLA policy the middle of pictures only, as fine-tuned ones expect. (OpenVLA's key.)"""
    num_steps: Annotated[Positive, FLOW] = 4
    """Denoising steps of a flow. (RLinf's key, as are the next ones but the two last.)"""
    noise_method: Annotated[Literal["flow_sde", "flow_noise", "flow_cps"], FLOW] = "flow_sde"
    """How a denoising step is made random: by the SDE of the flow, by learned noise, or keeping its share of noise."""
    noise_level: Annotated[PositiveFloat, FIXED_NOISE] = 0.5
    """Scale of the noise of flow_sde and flow_cps."""
    noise_logvar_range: Annotated[Range, LEARNED_NOISE] = (0.08, 0.16)
    """Least and largest standard deviation of flow_noise."""
    joint_logprob: Annotated[bool, FLOW] = False
    """Make all denoising steps random; else one, which is drawn for each decision."""
    detach_critic_input: Annotated[bool, FLOW] = False
    """Keep the gradient of the critic out of the network that it reads."""
    train_expert_only: Annotated[bool, FLOW] = False
    """Leave the part that reads pictures and prompt as it is."""
    relative_actions: Annotated[Count, FLOW] = 0
    """Leading columns of an action that are generated relative to the same numbers of the observation. (tether's.)"""
    discrete_state_input: Annotated[bool, ActsIf(".model_type", on=("pi05",), own_function=False)] = True
    """Write the state into pi0.5's prompt; without, it does not see it. (openpi's key.)"""
    step_logprobs: Annotated[Literal["sum", "mean"], ActsIf(".joint_logprob", on=(True,))] = "sum"
    """Log-prob of random steps: sum, the density of the chain; or RLinf's mean over start and steps. (tether's own.)"""
    tokenizer_path: Annotated[str | None, FLOW] = None
    """Folder of the tokenizer of a flow's prompts; null: beside the weights, or else bytes. (tether's own key.)"""
    max_prompt_length: Annotated[Positive | None, PROMPTED] = None
    """Tokens of the prompt of a new flow (null: the longest, or 200) or of a published OpenVLA policy (null: 50)."""
    lstm_dim: Annotated[Positive | None, NETWORK] = None
    """Width of an LSTM after the hidden layers, which remembers an episode; null: no memory. (tether's own key.)"""
    activation: Annotated[Literal["tanh", "relu", "elu"], OWN_TOO] = "tanh"
    """Nonlinearity of the hidden layers."""
    share_critic: Annotated[bool, NETWORK] = False
    """Let the critic be one more layer on the policy's hidden ones; else it has its own network."""
    critic_hidden_dim: Annotated[Positive, Inherits(".hidden_dim"), NETWORK]
    """Width of the critic's own hidden layers. (tether's own key.)"""
    critic_num_layers: Annotated[Positive, Inherits(".num_layers"), NETWORK]
    """Hidden layers of the critic's own network. (tether's own key.)"""
    init_logstd: Annotated[float, OWN_TOO] = -0.5
    """Continuous actions: logarithm of the first standard deviation, a parameter that is the same in all states."""
    use_sde: Annotated[bool, NETWORK] = False
    """Continuous actions: noise that is a function of the state, kept for a while (gSDE). (tether's own key.)"""
    sde_sample_freq: Annotated[OffOrEvery, ActsIf(".use_sde", on=(True,))] = -1
    """Decisions after which a new function is drawn; -1: at each rollout. (tether's own key.)"""
    num_action_chunks: Positive = 1
    """Actions that are decided on at once and then carried out one after the other."""
    normalize_observations: Annotated[bool, OWN_TOO] = False
    """Bring observations to mean 0 and variance 1 by running statistics, which are part of the policy."""
    normalize_only: Annotated[Strings, ActsIf(".normalize_observations", on=(True,))] = ()
    """Parts of a Dict observation that are normalised; empty: all. (tether's own key.)"""
    clip_observations: Annotated[float, ActsIf(".normalize_observations", on=(True,))] = 10.0
    """Normalised observations are cut at plus and minus this."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    clip_rewards: Annotated[float, ActsIf(".normalize_rewards", on=(True,))] = 10.0
    """Normalised rewards are cut at plus and minus this."""

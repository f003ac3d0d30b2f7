"""pi0 and pi0.5 with lerobot's classes, which are imported when a policy is built.

Their network is a PaliGemma (SigLIP and Gemma), whose layers share attention with a smaller Gemma, the action expert.
Small networks use the same classes with smaller configurations.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tether.control.policies.spec import NUMBERS, PICTURE
from tether.integrations.robots.flow.prompts import VOCAB_SIZE
from tether.integrations.robots.flow.spec import FlowSpec

TOKENS, TOKEN_MASK = "tokens", "token_mask"
HEADS = 8
"""Number of attention heads of both Gemmas, which is hard-coded in lerobot."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the networks of a small policy."""

    vlm_width: int
    vlm_mlp: int
    expert_width: int
    expert_mlp: int
    depth: int
    """Number of layers of both Gemmas."""
    head_dim: int
    vision_width: int
    vision_mlp: int
    vision_depth: int
    vision_heads: int
    patch_size: int
    vocab_size: int

    @classmethod
    def of(cls, width: int, depth: int, image_size: int, vocab_size: int = VOCAB_SIZE) -> Sizes:
        """Return sizes with one width for all networks and four patches on each side of an image."""
        patch = max(1, image_size // 4)
        return cls(width, 4 * width, width, 4 * width, depth, width // HEADS, width, 2 * width, 1, 2, patch, vocab_size)

    @classmethod
    def of_weights(cls, shapes: Mapping[str, Sequence[int]]) -> Sizes:
        """Return the sizes of a saved policy, from the shapes of its weights."""
        both = "model.paligemma_with_expert."
        vlm, expert = f"{both}paligemma.model.language_model.", f"{both}gemma_expert.model."
        vision = f"{both}paligemma.model.vision_tower."
        patches = next(shape for name, shape in shapes.items() if name.endswith("embeddings.patch_embedding.weight"))
        # Files store only one of two shared weights.
        tokens = next(n for n in (f"{vlm}embed_tokens.weight", f"{both}paligemma.lm_head.weight") if n in shapes)
        (vocab, width), (expert_mlp, expert_width) = shapes[tokens], shapes[f"{expert}layers.0.mlp.gate_proj.weight"]
        return cls(
            vlm_width=width,
            vlm_mlp=shapes[f"{vlm}layers.0.mlp.gate_proj.weight"][0],
            expert_width=expert_width,
            expert_mlp=expert_mlp,
            depth=sum(name.startswith(vlm) and name.endswith("mlp.gate_proj.weight") for name in shapes),
            head_dim=shapes[f"{vlm}layers.0.self_attn.k_proj.weight"][0],
            vision_width=patches[0],
            vision_mlp=next(s[0] for n, s in shapes.items() if n.startswith(vision) and n.endswith("mlp.fc1.weight")),
            vision_depth=sum(n.startswith(vision) and n.endswith("mlp.fc1.weight") for n in shapes),
            vision_heads=16 if patches[0] == 1152 else 2,
            patch_size=patches[-1],
            vocab_size=vocab,
        )


@dataclass(frozen=True)
class Prefix:
    """The network's encoding of B observations, which all denoising steps share."""

    critic_input: Tensor
    """[B, F]: inputs of the critic, without noise: for pi0 the token of the state, for pi0.5 the mean over all tokens
    of images and prompt."""
    saved: Any


class Backbone(Protocol):
    """The network of a flow-matching policy, a `torch.nn.Module`."""

    critic_width: int
    """F: width of the critic's inputs."""
    expert_width: int
    """E: width of the action expert."""

    def prefix(self, obs: TensorDict) -> Prefix:
        """Encode the `FlowPolicy.inputs` of B observations."""
        ...

    def velocity(self, prefix: Prefix, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return velocities [B, H, A], and the hidden states [B, H, E] from which they are computed.

        Args:
            prefix: the encoded observations.
            x: [B, H, A] states of the chain.
            t: [B] times of the states.
        """
        ...

    def matching_losses(self, obs: TensorDict, actions: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return squared errors [B, H, A] of the velocities at (1 - t) actions + t noise, with targets noise -
        actions."""
        ...


class LerobotBackbone(nn.Module):
    """Adapter of `lerobot`'s PI0Policy or PI05Policy to `Backbone`.

    Args:
        spec: spec of the policy.

    Raises:
        ValueError: lerobot is not installed.
    """

    def __init__(self, spec: FlowSpec) -> None:
        super().__init__()
        self._reads_state = spec.model_type == "pi0"
        self._pictures = len(spec.pictures)
        self._empty = spec.empty_cameras
        self._helpers = _import("lerobot.policies.common.vla_utils")
        module = _import(f"lerobot.policies.{spec.model_type}.modeling_{spec.model_type}")
        _fit_transformers()
        kind = {"pi0": "PI0", "pi05": "PI05"}[spec.model_type]
        config = getattr(module, f"{kind}Config")(
            chunk_size=spec.horizon,
            n_action_steps=spec.num_action_chunks,
            max_state_dim=spec.state_dim,
            max_action_dim=spec.latent_dim,
            tokenizer_max_length=spec.prompt_length,
            image_resolution=(spec.image_size, spec.image_size),
            train_expert_only=spec.train_expert_only,
            device="cpu",
        )
        with _network_sizes(module, spec.sizes):
            self.policy = getattr(module, f"{kind}Policy")(config)
        both = self.policy.model.paligemma_with_expert
        # The output layers for text are unused.
        for head in (both.paligemma.lm_head, both.gemma_expert.lm_head):
            head.requires_grad_(False)
        both.paligemma.model.language_model.config._attn_implementation = "eager"
        self.expert_width = both.gemma_expert.config.hidden_size
        self.critic_width = self.expert_width if self._reads_state else both.paligemma.config.text_config.hidden_size

    def prefix(self, obs: TensorDict) -> Prefix:
        model, helpers = self.policy.model, self._helpers
        embedded, pad, blocks = model.embed_prefix(*self._pictures_and_prompt(obs))
        (hidden, _), cache = model.paligemma_with_expert.forward(
            attention_mask=helpers.prepare_attention_masks_4d(helpers.make_att_2d_masks(pad, blocks), embedded.dtype),
            position_ids=pad.cumsum(dim=1) - 1,
            inputs_embeds=[embedded, None],
            use_cache=True,
        )
        if self._reads_state:
            return Prefix(self._state_token(obs[NUMBERS], pad, cache), (obs[NUMBERS], pad, cache))
        weights = pad.to(hidden.dtype)[..., None]
        return Prefix((hidden * weights).sum(dim=1) / weights.sum(dim=1), (None, pad, cache))

    def velocity(self, prefix: Prefix, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        model = self.policy.model
        state, pad, cache = prefix.saved
        read: list[Tensor] = []
        hook = model.action_out_proj.register_forward_pre_hook(lambda module, args: read.append(args[0]))
        with_state = {"state": state} if self._reads_state else {}
        try:
            velocities = model.denoise_step(
                prefix_pad_masks=pad, past_key_values=cache, x_t=x, timestep=t, **with_state
            )
        finally:
            hook.remove()
        return velocities, read[0]

    def matching_losses(self, obs: TensorDict, actions: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        state = (obs[NUMBERS],) if self._reads_state else ()
        losses: Tensor = self.policy.model.forward(*self._pictures_and_prompt(obs), *state, actions, noise, t)
        return losses

    def _pictures_and_prompt(self, obs: TensorDict) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        tokens, mask = obs[TOKENS], obs[TOKEN_MASK]
        size = self.policy.config.image_resolution
        images = []
        if self._pictures:
            for picture in obs[PICTURE].chunk(self._pictures, dim=1):
                resized = self._helpers.resize_with_pad_torch(picture.float() / 255, *size)
                images.append(2 * resized - 1)
        present = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
        empty = tokens.new_full((len(tokens), 3, *size), -1, dtype=torch.float32)
        images += [empty] * self._empty
        return images, [present] * self._pictures + [~present] * self._empty, tokens, mask

    def _state_token(self, state: Tensor, pad: Tensor, cache: object) -> Tensor:
        """Return the last hidden state [B, E] of the state's token, which attends to images and prompt, but not to
        actions."""
        model, helpers = self.policy.model, self._helpers
        embedded = model.state_proj(state)[:, None]
        seen = torch.cat([pad, pad.new_ones(len(pad), 1)], dim=1)[:, None]
        (_, hidden), _ = model.paligemma_with_expert.forward(
            attention_mask=helpers.prepare_attention_masks_4d(seen, embedded.dtype),
            position_ids=pad.sum(dim=1, keepdim=True),
            past_key_values=helpers.clone_past_key_values(cache),
            inputs_embeds=[None, embedded],
            use_cache=False,
        )
        last: Tensor = hidden[:, 0]
        return last


def make_backbone(spec: FlowSpec) -> Any:
    """Return a `Backbone` for a spec, with initial weights from torch's global generator.

    Raises:
        ValueError: lerobot is not installed.
    """
    return LerobotBackbone(spec)


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"policy.model_type: pi0 and pi05 are lerobot's, which cannot be imported here ({error}). It needs Python "
            "3.12; tether setup lerobot makes an environment with it."
        ) from error


def _fit_transformers() -> None:
    """Make lerobot 0.6.1, which requires transformers < 5.6, work with later versions, where a mask has one argument
    less."""
    gemma: Any = _import("lerobot.policies.pi_gemma")
    make_mask = gemma.create_causal_mask
    if "cache_position" in inspect.signature(make_mask).parameters:
        return

    def create_causal_mask(cache_position: object = None, **options: object) -> object:
        return make_mask(**options)

    gemma.create_causal_mask = create_causal_mask


@contextmanager
def _network_sizes(module: Any, sizes: Mapping[str, int] | None) -> Iterator[None]:
    """Make lerobot's classes build networks of these sizes inside the context; None: of lerobot's sizes."""
    if sizes is None:
        yield
        return
    custom = Sizes(**sizes)
    original = module.PaliGemmaWithExpertModel, module.get_gemma_config

    class SizedModel(module.PaliGemmaWithExpertModel):
        """The original class with networks of the given sizes."""

        def __init__(self, vlm: Any, expert: Any, use_adarms: Sequence[bool], **options: Any) -> None:
            nn.Module.__init__(self)
            self.freeze_vision_encoder = options["freeze_vision_encoder"]
            self.train_expert_only = options["train_expert_only"]
            configs = _configs(module, custom, options["image_size"], use_adarms)
            self.paligemma = module.PaliGemmaForConditionalGenerationWithPiGemma(config=configs[0])
            self.gemma_expert = module.PiGemmaForCausalLM(config=configs[1])
            self.gemma_expert.model.embed_tokens = None
            self.to_bfloat16_for_selected_params(options["precision"])
            self._set_requires_grad()

    def get_gemma_config(variant: str) -> Any:
        width = custom.expert_width if variant == "gemma_300m" else custom.vlm_width
        mlp = custom.expert_mlp if variant == "gemma_300m" else custom.vlm_mlp
        return module.GemmaConfig(width, custom.depth, mlp, HEADS, 1, custom.head_dim)

    module.PaliGemmaWithExpertModel, module.get_gemma_config = SizedModel, get_gemma_config
    try:
        yield
    finally:
        module.PaliGemmaWithExpertModel, module.get_gemma_config = original


def _configs(module: Any, sizes: Sizes, image_size: int, use_adarms: Sequence[bool]) -> tuple[Any, Any]:
    """Return transformers' configurations for PaliGemma and for the action expert."""

    def gemma(width: int, mlp: int) -> dict[str, Any]:
        return {
            "hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": sizes.depth,
            "num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": sizes.head_dim,
            "hidden_activation": "gelu_pytorch_tanh", "vocab_size": sizes.vocab_size,
        }  # fmt: skip

    paligemma = module.CONFIG_MAPPING["paligemma"](
        text_config={"model_type": "gemma", **gemma(sizes.vlm_width, sizes.vlm_mlp)},
        vision_config={
            "model_type": "siglip_vision_model", "hidden_size": sizes.vision_width,
            "intermediate_size": sizes.vision_mlp, "num_hidden_layers": sizes.vision_depth,
            "num_attention_heads": sizes.vision_heads, "patch_size": sizes.patch_size, "image_size": image_size,
            "projection_dim": sizes.vlm_width, "vision_use_head": False,
        },
        image_token_index=sizes.vocab_size - 1,
        projection_dim=sizes.vlm_width,
        hidden_size=sizes.vlm_width,
    )  # fmt: skip
    paligemma.text_config.use_adarms = use_adarms[0]
    paligemma.text_config.adarms_cond_dim = sizes.vlm_width if use_adarms[0] else None
    condition = sizes.expert_width if use_adarms[1] else None
    expert = module.CONFIG_MAPPING["gemma"](
        **gemma(sizes.expert_width, sizes.expert_mlp), use_adarms=use_adarms[1], adarms_cond_dim=condition
    )
    return paligemma, expert

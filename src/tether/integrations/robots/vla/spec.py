"""The spec of a vision-language-action policy, and its vocabulary.

The token ids of a small policy are, in order: begin, end of the prompt, the 256 bytes of a text, the action bins; those
of a published policy are Llama's. The bins are the last ids in reverse order, as in OpenVLA (Kim et al. 2024): bin b
has the id ``vocab_size - 1 - b``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tether.integrations.robots.vla.vit import VitSpec
from tether.observations import ObsLayout
from tether.types import JsonObject

BEGIN, END, FIRST_BYTE, BYTES = 0, 1, 2, 256
ACTION_BINS = 256


Resize = Literal["resize-naive", "letterbox"]


@dataclass(frozen=True)
class Network:
    """Describes a published OpenVLA network."""

    vits: tuple[VitSpec, ...]
    """The vision transformers that read the image; their tokens are concatenated along the width."""
    text_config: Mapping[str, object]
    """Fields of transformers' `LlamaConfig`."""
    vocab_size: int
    """Number of ids, without those that only pad the embeddings."""
    prompt_length: int
    """L: tokens of an instruction, padded on the left."""
    tokenizer: str
    """Folder with ``tokenizer.json``."""
    resize: Resize
    """How an image becomes a square: by stretching it, or with a border."""


@dataclass(frozen=True)
class VlaSpec:
    """Describes a policy, sufficient to create it again."""

    model_type: Literal["openvla", "openvla_oft"]
    """Whether action tokens are decoded one after the other, or all in one pass, independently of each other."""
    layout: ObsLayout
    """The fields of an observation."""
    action_width: int
    """D: columns of an action."""
    low: tuple[float, ...]
    """[D]: the lower end of the first bin, from the dataset or the action space."""
    high: tuple[float, ...]
    """[D]: the upper end of the last bin."""
    num_action_chunks: int = 1
    """K: actions per decision, which are K * D tokens."""
    value_width: int = 1
    """V: values per observation: 1, or K, one for the state before each action of the chunk; 0 without a critic."""
    hidden_dim: int = 128
    num_layers: int = 4
    num_heads: int = 4
    temperature: float = 1.0
    """Temperature of the softmax over action tokens, when acting and when training."""
    lora_rank: int = 0
    """Rank of LoRA adapters in the transformer; then only they and the critic are trained. 0: train all weights."""
    lora_alpha: int = 16
    target_modules: tuple[str, ...] = ("all-linear",)
    network: Network | None = None
    """The published network; None for a small network."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which the network computes in training; saved weights are float32."""
    center_crop: bool = False
    """Whether images are cropped to their centre for a published network."""

    @classmethod
    def of_fields(cls, fields: JsonObject) -> VlaSpec:
        """Build the spec from its fields, as `dataclasses.asdict` returns them."""
        network = fields.get("network")
        if network is not None:
            network = Network(**network | {"vits": tuple(VitSpec(**vit) for vit in network["vits"])})
        return cls(**{**fields, "network": network})

    @property
    def parts(self) -> ObsLayout:
        return self.layout

    @property
    def pictures(self) -> tuple[str, ...]:
        """Return the names of the pictures."""
        return tuple(component.name for component in self.layout if component.kind == "image")

    @property
    def text(self) -> str | None:
        """Return the name of the text, or None without one."""
        return next((component.name for component in self.layout if component.kind == "text"), None)

    @property
    def vocab_size(self) -> int:
        """Return the number of ids; the last ones are action tokens."""
        if self.network is not None:
            return self.network.vocab_size
        return FIRST_BYTE + BYTES + ACTION_BINS

    @property
    def choices(self) -> tuple[int, ...]:
        """Return the number of alternatives of each column of an action."""
        return (ACTION_BINS,) * self.action_width

    @property
    def action_tokens(self) -> int:
        """Return the number of action tokens, A = K * D."""
        return self.num_action_chunks * self.action_width

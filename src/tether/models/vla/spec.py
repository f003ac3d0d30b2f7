"""The shape of a vision-language-action policy, and its vocabulary.

Tokens of a small one, from the first id on: begin, end of the prompt, the 256 bytes of a text, the action bins; those
of a published one are Llama's. The bins are the last ids, backwards as in OpenVLA (Kim et al. 2024): bin b is the id
``vocab_size - 1 - b``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tether.models.vla.vit import VitSpec
from tether.observations import ObsLayout
from tether.types import JsonObject

BEGIN, END, FIRST_BYTE, BYTES = 0, 1, 2, 256
ACTION_BINS = 256


Resize = Literal["resize-naive", "letterbox"]


@dataclass(frozen=True)
class Network:
    """A published network: OpenVLA's."""

    vits: tuple[VitSpec, ...]
    """The networks that read the picture; the tokens of the second stand beside those of the first."""
    text_config: Mapping[str, object]
    """Of transformers' `LlamaConfig`."""
    vocab_size: int
    """Ids without those that fill the embeddings up."""
    prompt_length: int
    """L: tokens of an instruction, with padding before them."""
    tokenizer: str
    """Folder with its ``tokenizer.json``."""
    resize: Resize
    """How a picture becomes a square: stretched, or with a border."""


@dataclass(frozen=True)
class VlaSpec:
    """The shape of a policy: enough to build it again."""

    model_type: Literal["openvla", "openvla_oft"]
    """Action tokens one after the other, each seeing those before it; or all in one pass, independent of each other."""
    layout: ObsLayout
    """The parts of an observation."""
    action_width: int
    """D: columns of an action."""
    low: tuple[float, ...]
    """[D]: the action that the first bin begins with, of the dataset or of the action space."""
    high: tuple[float, ...]
    """[D]: the action that the last bin ends with."""
    num_action_chunks: int = 1
    """K: actions that are decided on at once: K * D tokens."""
    value_width: int = 1
    """V: values of an observation: 1, or K, one before each action of the chunk; 0: there is no critic."""
    hidden_dim: int = 128
    num_layers: int = 4
    num_heads: int = 4
    temperature: float = 1.0
    """Of the softmax over action tokens, when acting and when learning."""
    lora_rank: int = 0
    """Rank of LoRA adapters in the transformer, beside which only the critic is trained; 0: everything is."""
    lora_alpha: int = 16
    target_modules: tuple[str, ...] = ("all-linear",)
    network: Network | None = None
    """None: a small one."""
    center_crop: bool = False
    """Of pictures, a published network reads the middle nine tenths."""

    @classmethod
    def of_fields(cls, fields: JsonObject) -> VlaSpec:
        """The shape by its fields, as `dataclasses.asdict` gives them."""
        network = fields.get("network")
        if network is not None:
            network = Network(**network | {"vits": tuple(VitSpec(**vit) for vit in network["vits"])})
        return cls(**{**fields, "network": network})

    @property
    def parts(self) -> ObsLayout:
        """The parts of an observation."""
        return self.layout

    @property
    def pictures(self) -> tuple[str, ...]:
        """Names of the pictures."""
        return tuple(part.name for part in self.layout if part.kind == "image")

    @property
    def text(self) -> str | None:
        """Name of the text; None: there is none."""
        return next((part.name for part in self.layout if part.kind == "text"), None)

    @property
    def vocab_size(self) -> int:
        """Ids there are; the last are action tokens."""
        if self.network is not None:
            return self.network.vocab_size
        return FIRST_BYTE + BYTES + ACTION_BINS

    @property
    def choices(self) -> tuple[int, ...]:
        """Alternatives of each column of an action."""
        return (ACTION_BINS,) * self.action_width

    @property
    def action_tokens(self) -> int:
        """A = K * D."""
        return self.num_action_chunks * self.action_width

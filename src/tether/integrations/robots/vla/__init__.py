"""Vision-language-action policies: a causal transformer that reads a picture and a text and predicts action tokens.

Read in this order: `spec` (the shape and the vocabulary), `decoder` (scoring and sampling of action tokens), `model` (a
small network) or `published` (OpenVLA's, of `vit` and Llama, which `pretrained` loads), `policy` (for training and
acting).
"""

from tether.integrations.robots.vla.spec import VlaSpec

__all__ = ["VlaSpec"]

"""Vision-language-action policies: a causal transformer that reads an image and a text and predicts action tokens.

Reading order: `spec` (sizes and vocabulary), `decoder` (scoring and sampling of action tokens), `model` (a small
network) or `published` (OpenVLA's network of `vit` and Llama, which `pretrained` loads), `policy` (training and
acting).
"""

from tether.integrations.robots.vla.spec import VlaSpec

__all__ = ["VlaSpec"]

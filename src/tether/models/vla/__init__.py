"""Vision-language-action policies: a picture and a text in, action tokens out, by a causal transformer.

Read in this order: `spec` (the shape and the vocabulary), `decoder` (how action tokens are scored and chosen), `model`
(a small network) or `published` (OpenVLA's, of `vit` and Llama, which `pretrained` loads), `policy` (what trains and
acts).
"""

from tether.models.vla.spec import VlaSpec

__all__ = ["VlaSpec", "policy"]

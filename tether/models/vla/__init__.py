"""Vision-language-action policies: a picture and a text in, action tokens out, by a causal transformer.

Read in this order: `spec` (the shape and the vocabulary), `model` (the networks), `policy` (what trains and acts).
"""

from tether.models.vla.spec import VlaSpec

__all__ = ["VlaSpec", "policy"]

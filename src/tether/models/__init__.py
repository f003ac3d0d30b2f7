"""Networks: language models, control policies and vision-language-action policies.

`language` loads models of transformers, `layers` replaces some of their modules, `output` computes log-probabilities in
chunks of the vocabulary; `megatron` has language models sharded over several ranks; `control`, `vla` and `flow` have
the policies that act in simulators.
"""

__all__ = ["control", "flow", "language", "layers", "megatron", "output", "vla"]

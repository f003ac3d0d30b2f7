"""The native engine: sampling in the trainer's process, with the trainer's own modules.

Noise is keyed by prompt and position, so that a sample does not depend on its batch.
"""

from tether.text.sampling.engine import NativeEngine, eos_token_ids

__all__ = ["NativeEngine", "eos_token_ids"]

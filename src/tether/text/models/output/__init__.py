"""Log-probabilities, entropies and KL from hidden states, in chunks of the vocabulary.

The logits of a whole batch are never in memory at once.
"""

from tether.text.models.output.full_kl import full_kl_of_hidden
from tether.text.models.output.log_probs import LmHead, LogProbs, VocabularyShard, lm_head_of, token_log_probs
from tether.text.models.output.truncation_record import KeptRecorder, KeptSets

__all__ = [
    "KeptRecorder",
    "KeptSets",
    "LmHead",
    "LogProbs",
    "VocabularyShard",
    "full_kl_of_hidden",
    "lm_head_of",
    "token_log_probs",
]

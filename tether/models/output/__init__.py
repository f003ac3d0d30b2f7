"""Log-probabilities, entropies and KL from hidden states, in chunks of the vocabulary."""

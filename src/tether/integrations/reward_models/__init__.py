"""Training of reward models from pairs of answers, of which one was preferred."""

"""Training of reward models on pairs of responses, of which one is preferred."""

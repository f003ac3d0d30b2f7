"""Training of reward models on preference pairs."""

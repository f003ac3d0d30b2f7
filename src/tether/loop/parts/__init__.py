"""Steps of the training loop that a configuration switches on."""

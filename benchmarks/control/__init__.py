"""Control policies side by side with peers: the same simulators, hyperparameters, seeds and machine."""

"""PPO in simulators: everything needed to train a control policy, from environments to updates.

`build` assembles a run step by step. `envs` steps simulators, `policies` has the networks, `collecting` plays
episodes, and `learning` computes advantages, losses and gradients.
"""

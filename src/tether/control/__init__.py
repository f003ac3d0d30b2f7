"""PPO in simulators: everything that trains such a policy, from environments to updates.

`build` puts a run together, in order. `envs` steps simulators, `policies` are the networks, `collecting` plays
episodes, `learning` computes advantages, losses and gradients.
"""

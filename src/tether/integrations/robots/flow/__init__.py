"""Flow-matching policies: a few denoising steps turn noise into actions; PPO trains them as a Gaussian Markov chain.

Reading order: `spec` (sizes and options), `chain` (the mathematics), `backbone` (lerobot's pi0 and pi0.5), `policy`
(training and acting).
"""

from tether.integrations.robots.flow.spec import FlowSpec, Scale

__all__ = ["FlowSpec", "Scale"]

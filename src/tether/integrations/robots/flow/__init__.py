"""Flow-matching policies: actions by a few denoising steps from noise, which PPO trains as a Gaussian Markov chain.

Reading order: `spec` (the shape), `chain` (the mathematics), `backbone` (lerobot's pi0 and pi0.5), `policy` (training
and acting).
"""

from tether.integrations.robots.flow.spec import FlowSpec, Scale

__all__ = ["FlowSpec", "Scale"]

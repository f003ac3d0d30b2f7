"""Flow-matching policies: actions by a few denoising steps from noise, which PPO trains as a Gaussian Markov chain.

Read in this order: `spec` (the shape), `chain` (the mathematics), `backbone` (lerobot's pi0 and pi0.5), `policy` (what
trains and acts).
"""

from tether.models.flow.spec import FlowSpec, Scale

__all__ = ["FlowSpec", "Scale", "policy"]

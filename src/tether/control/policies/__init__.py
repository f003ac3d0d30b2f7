"""Control policies: networks that map observations to distributions over actions, and the actors that sample them.

A `PolicySpec` describes one; `make_policy`, `save_policy` and `load_policy` build, write and read it.
"""

from tether.control.policies.actors import Act
from tether.control.policies.mlp_policy import ControlPolicy, Policy, load_policy, make_policy, save_policy
from tether.control.policies.network_policy import SMALLEST, NetworkPolicy
from tether.control.policies.spec import Memory, Observations, PolicySpec, device_of, numbers_of, with_numbers

__all__ = [
    "SMALLEST",
    "Act",
    "ControlPolicy",
    "Memory",
    "NetworkPolicy",
    "Observations",
    "Policy",
    "PolicySpec",
    "device_of",
    "load_policy",
    "make_policy",
    "numbers_of",
    "save_policy",
    "with_numbers",
]

"""The engines and rollouts that the promises are tested over; a new one is one line here and no other test."""

from tests.conformance.flat_autograd import FlatAutogradEngine
from tether.control.learning.flat import FlatEngine

CONTROL_ENGINES = {"flat": FlatEngine, "autograd": FlatAutogradEngine}
"""Name -> (policy, optimizer's options, critic's rate) -> engine; the others are compared with the first."""

"""A control policy with a user-defined network: a class ``FILE.py:NAME``, or an object of this process.

The class is called with ``obs_dim``, ``outputs`` and ``values``, and the keys of `own_parts.PASSED_ON` that its
signature names. Its ``forward(obs [B, obs_dim])`` returns (outputs [B, outputs], values [B, values]): the logits of
discrete actions or the means of continuous ones, and the critic's values (None if ``values`` is 0). Parameters whose
names begin with ``critic`` are trained with ``critic.optim.lr``, all others with the policy's learning rate.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tether.control.policies.network_policy import NetworkPolicy
from tether.control.policies.own_parts import ROWS, construct
from tether.control.policies.spec import Observations, PolicySpec, masked, numbers_of
from tether.runtime.objects import is_object, registered_object
from tether.runtime.user_files import definition

KEY = "policy.model_type"


class OwnPolicy(NetworkPolicy):
    """A user-defined network, with a head, a normalizer and gradients by autograd.

    Args:
        spec: spec of the policy, with a `network`.
        seed: seed of the initial weights, which are drawn from torch's global generator; its state is restored.

    Raises:
        ValueError: the class does not exist, has other arguments, or returns invalid outputs in a test call.
    """

    state_width = 0
    """There is no recurrent state."""

    def __init__(self, spec: PolicySpec, seed: int) -> None:
        nn.Module.__init__(self)
        self.spec, self.row, self.pictures, self.micro_batch = spec, spec.make_row(), None, None
        self.head = spec.make_head()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = _make(spec, self.head.outputs)
        self.normalizer = spec.make_normalizer()

    def parameter_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        named = list(self.network.named_parameters())
        actor = [value for name, value in named if not name.startswith("critic")]
        return [*actor, *self.head.parameters()], [value for name, value in named if name.startswith("critic")]

    def networks(self) -> list[nn.Module]:
        return [self.network]

    def forward(self, obs: Observations, starts: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor | None]:
        numbers = numbers_of(obs)
        outputs, values = self.network(numbers.flatten(0, -2))
        rows = numbers.shape[:-1]
        return masked(outputs.unflatten(0, rows), obs), None if values is None else values.unflatten(0, rows)

    def step(self, obs: Observations, starts: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        return (*self(obs, starts, state), state)

    @torch.no_grad()
    def act(self, obs: Observations, state: Tensor) -> tuple[Tensor, Tensor]:
        return self(obs, None, state)[0], state


def _make(spec: PolicySpec, outputs: int) -> nn.Module:
    assert spec.network is not None
    sizes: Mapping[str, int] = {"obs_dim": spec.obs_dim, "outputs": outputs, "values": spec.value_width}
    where = f"{KEY}={spec.network}"
    factory = registered_object(spec.network) if is_object(spec.network) else definition(spec.network, KEY)
    network = copy.deepcopy(factory) if isinstance(factory, nn.Module) else construct(factory, spec, sizes, where)
    _test_call(network, sizes, where)
    return network


def _test_call(network: nn.Module, sizes: Mapping[str, int], where: str) -> None:
    call = f"{where}: a call on {ROWS} observations of {sizes['obs_dim']} numbers"
    try:
        result = network(torch.linspace(-1, 1, ROWS * sizes["obs_dim"]).reshape(ROWS, -1))
    except Exception as error:  # user code may raise anything
        raise ValueError(f"{call} raised {type(error).__name__}: {error}") from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"{call} returned {type(result).__name__}; expected a tuple (outputs, values)")
    for name, value in zip(("outputs", "values"), result, strict=True):
        width = sizes[name]
        if value is None and not width:
            continue
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if shape != [ROWS, width] or not width:
            wanted = [ROWS, width] if width else "None, since the estimator needs no critic"
            raise ValueError(f"{call} returned {name} {shape}; expected {wanted}")
        if not value.isfinite().all() or not value.requires_grad:
            wrong = "without a gradient" if value.isfinite().all() else "with a number that is not finite"
            raise ValueError(f"{call} returned {name} {wrong}")

"""A control policy whose network is the user's: a class ``FILE.py:NAME``, or an object of this process.

The class is called with ``obs_dim``, ``outputs`` and ``values``, and those of `own_parts.PASSED_ON` that its signature
names; its ``forward(obs [B, obs_dim])`` gives (outputs [B, outputs], values [B, values]): logits of every choice, or
means of every column of an action, and the critic's values (None where ``values`` is 0). Parameters whose names begin
with ``critic`` are trained with ``critic.optim.lr``, all others with the policy's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tether.models.control.network_policy import NetworkPolicy
from tether.models.control.own_parts import ROWS, called
from tether.models.control.spec import Observations, PolicySpec, masked, numbers_of
from tether.runtime.objects import held, is_object
from tether.runtime.user_files import definition

KEY = "policy.model_type"


class OwnPolicy(NetworkPolicy):
    """A network of the user's, with a head, a normalizer and gradients by autograd.

    Args:
        spec: the shape; its `network` is not None.
        seed: of the first weights, which are drawn from torch's global generator; it is left as it was.

    Raises:
        ValueError: no such class, it takes other arguments, or a dry call does not give what it should.
    """

    state_width = 0
    """There is no memory."""

    def __init__(self, spec: PolicySpec, seed: int) -> None:
        nn.Module.__init__(self)
        self.spec, self.row, self.pictures, self.micro_batch = spec, spec.make_row(), None, None
        self.head = spec.make_head()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = _make(spec, self.head.outputs)
        self.normalizer = spec.make_normalizer()

    def parameter_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Parameters of the actor, and of the critic."""
        named = list(self.network.named_parameters())
        actor = [value for name, value in named if not name.startswith("critic")]
        return [*actor, *self.head.parameters()], [value for name, value in named if name.startswith("critic")]

    def networks(self) -> list[nn.Module]:
        """See `NetworkPolicy.networks`."""
        return [self.network]

    def forward(self, obs: Observations, starts: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `NetworkPolicy.forward`."""
        numbers = numbers_of(obs)
        outputs, values = self.network(numbers.flatten(0, -2))
        rows = numbers.shape[:-1]
        return masked(outputs.unflatten(0, rows), obs), None if values is None else values.unflatten(0, rows)

    def step(self, obs: Observations, starts: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """See `NetworkPolicy.step`."""
        return (*self(obs, starts, state), state)

    @torch.no_grad()
    def act(self, obs: Observations, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `NetworkPolicy.act`."""
        return self(obs, None, state)[0], state


def _make(spec: PolicySpec, outputs: int) -> nn.Module:
    assert spec.network is not None
    sizes: Mapping[str, int] = {"obs_dim": spec.obs_dim, "outputs": outputs, "values": spec.value_width}
    where = f"{KEY}={spec.network}"
    found = held(spec.network) if is_object(spec.network) else definition(spec.network, KEY)
    network = copy.deepcopy(found) if isinstance(found, nn.Module) else called(found, spec, sizes, where)
    _dry_call(network, sizes, where)
    return network


def _dry_call(network: nn.Module, sizes: Mapping[str, int], where: str) -> None:
    call = f"{where}: a call on {ROWS} observations of {sizes['obs_dim']} numbers"
    try:
        given = network(torch.linspace(-1, 1, ROWS * sizes["obs_dim"]).reshape(ROWS, -1))
    except Exception as error:  # whatever a user's network raises on a small batch is one and the same problem
        raise ValueError(f"{call} raised {type(error).__name__}: {error}") from error
    if not isinstance(given, tuple) or len(given) != 2:
        raise ValueError(f"{call} gave {type(given).__name__}; expected a tuple (outputs, values)")
    for name, found in zip(("outputs", "values"), given, strict=True):
        width = sizes[name]
        if found is None and not width:
            continue
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        if shape != [ROWS, width] or not width:
            wanted = [ROWS, width] if width else "None, since the estimator needs no critic"
            raise ValueError(f"{call} gave {name} {shape}; expected {wanted}")
        if not found.isfinite().all() or not found.requires_grad:
            wrong = "without a gradient" if found.isfinite().all() else "with a number that is not finite"
            raise ValueError(f"{call} gave {name} {wrong}")

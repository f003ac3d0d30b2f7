"""Exports policies to files that can be run without torch and tether: NumPy's npz, and ONNX.

Both contain everything from the observation of an environment to its action: encoding of fields, normalisation,
networks, choice of the most likely action, and bounds of the action space.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from gymnasium import spaces
from torch import Tensor, nn

from tether.control.envs.conversion import ActionCodec, ObservationReader, is_channels_first
from tether.control.envs.gymnasium_types import Space
from tether.control.envs.spaces import spaces_from_json
from tether.control.policies.mlp_policy import ControlPolicy, Policy
from tether.control.policies.network_policy import CNNS, NetworkPolicy
from tether.control.policies.networks import FORBIDDEN, as_array
from tether.control.policies.spec import PolicySpec
from tether.observations import Array, ObsPart
from tether.runtime.install import pip_install
from tether.types import JsonObject

OPSET, IR_VERSION = 17, 8
"""Versions of ONNX's operators and file format. They are of 2022, so that older runtimes can read the file."""


@dataclass(frozen=True)
class Exported:
    """A policy as arrays, and a description of how actions are computed from them."""

    about: JsonObject
    """The description, in the format of the deployment guide."""
    arrays: Mapping[str, Array]
    """Name -> weights and constants, with the names of the deployment guide."""
    fields: Sequence[tuple[ObsPart, Space]]
    """The fields of an observation, and the space of each."""
    action_space: Space


def export_policy(policy: Policy, kind: str, file: Path) -> None:
    """Write a policy as a file of kind ``npz`` or ``onnx``.

    Raises:
        ValueError: the policy has networks that are not tether's own, was saved without the spaces of its environment,
            or a package is missing.
    """
    exported = export_arrays(policy)
    if kind == "npz":
        arrays: dict[str, Any] = {"about": np.array(json.dumps(exported.about)), **exported.arrays}
        with file.open("wb") as opened:
            np.savez(opened, **arrays)
        return
    try:
        onnx = importlib.import_module("onnx")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--to=onnx: needs the package onnx, which is not installed. Run: {pip_install('onnx')}"
        ) from error
    onnx.save(_onnx_model(exported, onnx), str(file))


def export_arrays(policy: Policy) -> Exported:
    """Return a policy as arrays.

    Raises:
        ValueError: as in `export_policy`.
    """
    spec = policy.spec
    network = isinstance(spec, PolicySpec) and (spec.network or spec.features_extractor)
    if not isinstance(policy, ControlPolicy | NetworkPolicy) or network:
        raise ValueError(
            "--to: npz and onnx are written of tether's own networks (policy.model_type=mlp_policy or cnn_policy), and "
            f"this policy has others ({network or type(policy).__name__})."
        )
    if policy.spaces is None:
        raise ValueError(
            "--to: the checkpoint was saved without the spaces of its environment, by an earlier version of tether. "
            "Resume its run for one more step, and export that checkpoint."
        )
    observations, actions = spaces_from_json(policy.spaces)
    if spec.num_action_chunks > 1 and isinstance(actions, spaces.Dict | spaces.Tuple):
        raise ValueError(f"--to: chunks of actions of {actions} are not written so far (policy.num_action_chunks).")
    fields = ObservationReader(observations, "the policy").fields
    arrays = _weights(policy) | _statistics(policy)
    if isinstance(actions, spaces.Box):
        arrays |= {"action.low": actions.low, "action.high": actions.high}
    layers_of_cnn = CNNS[spec.cnn_type] if spec.pictures else ()
    about = {
        "observation": [{"name": field.name, "kind": field.kind, "choices": field.choices} for field, _ in fields],
        "pictures": spec.pictures,
        "pixel_scale": spec.pixel_scale,
        "cnn": [{"stride": layer.stride, "padding": layer.padding} for layer in layers_of_cnn],
        "activation": spec.activation,
        "hidden": sum(name.startswith("hidden.") for name in arrays) // 2,
        "lstm_dim": spec.lstm_dim or 0,
        "choices": spec.choices or (),
        "num_action_chunks": spec.num_action_chunks,
        "spaces": policy.spaces,
    }
    return Exported(about, {name: array.copy() for name, array in arrays.items()}, fields, actions)


def _weights(policy: ControlPolicy | NetworkPolicy) -> dict[str, Array]:
    weights: dict[str, Tensor] = {}
    if isinstance(policy, ControlPolicy):
        (*hidden, last), cnn = policy.actor.layers, list[nn.Module]()
    else:
        torso, last = policy.torso, policy.actor
        hidden, cnn = [*torso.hidden], [] if torso.cnn is None else [*torso.cnn.layers]
        if torso.lstm is not None:
            lstm = {name.removesuffix("_l0"): weight.detach() for name, weight in torso.lstm.named_parameters()}
            weights |= {f"lstm.{name}": lstm[name] for name in ("weight_ih", "weight_hh")}
            weights["lstm.bias"] = lstm["bias_ih"] + lstm["bias_hh"]
    kinds = {"hidden": hidden, "cnn": cnn}
    layers = {f"{kind}.{index}": layer for kind, each in kinds.items() for index, layer in enumerate(each)}
    for name, layer in {**layers, "output": last}.items():
        weights |= {f"{name}.{kind}": layer.get_parameter(kind) for kind in ("weight", "bias")}
    return {name: as_array(weight) for name, weight in weights.items()}


def _statistics(policy: ControlPolicy | NetworkPolicy) -> dict[str, Array]:
    normalizer, size = policy.normalizer, policy.spec.obs_dim
    if normalizer is None:
        shift, scale, clip = (np.full(size, value, np.float32) for value in (0, 1, np.inf))
    else:
        shift, scale, clip = map(as_array, (normalizer.shift, normalizer.scale, normalizer.clip))
    return {"normalize.shift": shift, "normalize.scale": scale, "normalize.clip": clip}


def _onnx_model(exported: Exported, onnx: ModuleType) -> object:
    graph = _Graph(exported, onnx)
    actions = graph.actions(graph.outputs())
    helper, element = onnx.helper, onnx.helper.np_dtype_to_tensor_dtype
    chunk = exported.about["num_action_chunks"]
    rows: tuple[str | int, ...] = ("N",) if chunk == 1 else ("N", chunk)
    inputs = [
        helper.make_tensor_value_info(field.name, element(_dtype(space)), ["N", *(space.shape or ())])
        for field, space in exported.fields
    ]
    outputs = [
        helper.make_tensor_value_info(name, element(_dtype(space)), [*rows, *(space.shape or ())])
        for name, space in actions.items()
    ]
    if lstm_dim := exported.about["lstm_dim"]:
        memory = ["N", 2 * lstm_dim]
        inputs.append(helper.make_tensor_value_info("memory_in", onnx.TensorProto.FLOAT, memory))
        outputs.append(helper.make_tensor_value_info("memory_out", onnx.TensorProto.FLOAT, memory))
    made = helper.make_graph(graph.nodes, "policy", inputs, outputs, graph.constants)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    helper.set_model_props(model, {"about": json.dumps(exported.about)})
    onnx.checker.check_model(model)
    return model


def _dtype(space: Space) -> np.dtype[np.generic]:
    assert space.dtype is not None
    return np.dtype(space.dtype)


def _parts(codec: ActionCodec, columns: Sequence[int], name: str) -> Iterator[tuple[str, tuple[Space, Sequence[int]]]]:
    """Yield the name of each space that is no Dict or Tuple, the space, and its columns of an action."""
    if not codec.parts:
        yield name, (codec.space, columns)
    for key, (inner, which) in codec.parts.items():
        yield from _parts(inner, [columns[n] for n in which], f"{name}.{key}")


class _Graph:
    """Adds the nodes of a policy to an ONNX graph; values are referred to by name."""

    def __init__(self, exported: Exported, onnx: ModuleType) -> None:
        self._exported, self._onnx = exported, onnx
        self.nodes: list[object] = []
        self.constants: list[object] = []
        self._width = ActionCodec.of(exported.action_space, "the policy").spec.width
        self._activation = {"tanh": "Tanh", "relu": "Relu", "elu": "Elu"}[exported.about["activation"]]

    def outputs(self) -> str:
        """Add everything up to the outputs of the head, [N, outputs], and return their name."""
        about, fields = self._exported.about, self._exported.fields
        numbers = [
            self._numbers(field, space)
            for field, space in fields
            if field.kind != "mask" and field.name not in about["pictures"]
        ]
        features = []
        if numbers:
            features.append(self._normalized(self._joined(numbers)))
        if about["pictures"]:
            pictures = [self._picture(field.name, space) for field, space in fields if field.name in about["pictures"]]
            features.insert(0, self._features(self._joined(pictures)))
        x = self._joined(features)
        for index in range(about["hidden"]):
            x = self._op(self._activation, self._linear(x, f"hidden.{index}"))
        if about["lstm_dim"]:
            x = self._lstm(x)
        x = self._linear(x, "output")
        for field, _ in fields:
            if field.kind == "mask":
                flat = self._op("Reshape", field.name, self._constant(np.array([0, -1])))
                allowed, end = self._cast(flat, np.dtype(np.bool_)), sum(about["choices"])
                logits, others = self._columns(x, 0, end), self._columns(x, end, end + self._width)
                logits = self._op("Where", allowed, logits, self._constant(np.float32(FORBIDDEN)))
                x = self._joined([logits, others])
        return x

    def actions(self, outputs: str) -> dict[str, Space]:
        """Add the choice of the most likely action; return the space of each output.

        An output is ``action``, or ``action.KEY`` for each part of a Dict or Tuple.
        """
        about = self._exported.about
        choices, chunk, width = about["choices"] * about["num_action_chunks"], about["num_action_chunks"], self._width
        ends = np.cumsum((0, *choices)).tolist()
        columns = [
            self._op("ArgMax", self._columns(outputs, start, end), axis=1, keepdims=1) for start, end in pairwise(ends)
        ]
        columns += [self._columns(outputs, n, n + 1) for n in range(ends[-1], ends[-1] + width * chunk - len(columns))]
        leaves = dict(_parts(ActionCodec.of(self._exported.action_space, "the policy"), range(len(columns)), "action"))
        for name, (space, which) in leaves.items():
            shape = self._constant(np.array([-1, *([chunk] if chunk > 1 else []), *(space.shape or ())]))
            shaped = self._op("Reshape", self._joined([columns[n] for n in which]), shape)
            self._bounded(self._cast(shaped, _dtype(space)), space, name)
        return {name: space for name, (space, _) in leaves.items()}

    def _bounded(self, action: str, space: Space, name: str) -> None:
        if isinstance(space, spaces.Box):
            at_least = self._op("Max", action, self._constant(space.low))
            self._op("Min", at_least, self._constant(space.high), name=name)
        else:
            start = np.asarray(getattr(space, "start", 0), _dtype(space))  # MultiBinary begins at 0
            self._op("Add", action, self._constant(start), name=name)

    def _numbers(self, field: ObsPart, space: Space) -> str:
        """Add the encoding of a field; return the name of its columns [N, width] in the flat row."""
        if field.kind == "image":
            last = self._op("Transpose", self._picture(field.name, space), perm=(0, 2, 3, 1))
            return self._op("Reshape", last, self._constant(np.array([0, field.width])))
        if not field.choices:
            flat = self._op("Reshape", field.name, self._constant(np.array([-1, field.width])))
            return self._cast(flat, np.dtype(np.float32))
        start = np.reshape(getattr(space, "start", 0), -1).astype(np.int64)
        flat = self._op("Reshape", field.name, self._constant(np.array([-1, len(field.choices)])))
        chosen = self._op("Sub", self._cast(flat, np.dtype(np.int64)), self._constant(start))
        values = self._constant(np.array([0, 1], np.float32))
        columns = [
            self._op(
                "OneHot",
                self._op("Gather", chosen, self._constant(np.int64(index)), axis=1),
                self._constant(np.array([count])),
                values,
            )
            for index, count in enumerate(field.choices)
        ]
        return self._joined(columns)

    def _picture(self, name: str, space: Space) -> str:
        """Add the conversion of an image to floats [N, channels, height, width], with stacked frames as channels;
        return its name."""
        shape = space.shape or ()
        x = self._cast(name, np.dtype(np.float32))
        if len(shape) == 2:
            return self._op("Reshape", x, self._constant(np.array([-1, 1, *shape])))
        first = is_channels_first(shape)
        if not first:
            x = self._op("Transpose", x, perm=(0, 3, 1, 2) if len(shape) == 3 else (0, 1, 4, 2, 3))
        if len(shape) == 4:
            height, width = shape[-2:] if first else shape[-3:-1]
            x = self._op("Reshape", x, self._constant(np.array([0, -1, height, width])))
        return x

    def _features(self, picture: str) -> str:
        x = self._op("Div", picture, self._constant(np.float32(self._exported.about["pixel_scale"])))
        for index, layer in enumerate(self._exported.about["cnn"]):
            weight, bias = (self._weight(f"cnn.{index}.{name}") for name in ("weight", "bias"))
            strides, pads = [layer["stride"]] * 2, [layer["padding"]] * 4
            x = self._op(self._activation, self._op("Conv", x, weight, bias, strides=strides, pads=pads))
        return self._op("Flatten", x, axis=1)

    def _normalized(self, row: str) -> str:
        shift, scale, clip = (self._exported.arrays[f"normalize.{name}"] for name in ("shift", "scale", "clip"))
        x = self._op("Mul", self._op("Sub", row, self._constant(shift)), self._constant(scale))
        return self._op("Min", self._op("Max", x, self._constant(-clip)), self._constant(clip))

    def _lstm(self, x: str) -> str:
        width = self._exported.about["lstm_dim"]
        hidden, cell = (self._columns("memory_in", i * width, (i + 1) * width) for i in range(2))
        gates = self._op(
            "Sum",
            self._op("MatMul", x, self._constant(self._exported.arrays["lstm.weight_ih"].T)),
            self._op("MatMul", hidden, self._constant(self._exported.arrays["lstm.weight_hh"].T)),
            self._weight("lstm.bias"),
        )
        in_gate, forget_gate, new, out_gate = (self._columns(gates, i * width, (i + 1) * width) for i in range(4))
        in_gate, forget_gate, out_gate = (self._op("Sigmoid", gate) for gate in (in_gate, forget_gate, out_gate))
        cell = self._op("Add", self._op("Mul", forget_gate, cell), self._op("Mul", in_gate, self._op("Tanh", new)))
        hidden = self._op("Mul", out_gate, self._op("Tanh", cell))
        self._op("Concat", hidden, cell, axis=1, name="memory_out")
        return hidden

    def _linear(self, x: str, name: str) -> str:
        return self._op("Gemm", x, self._weight(f"{name}.weight"), self._weight(f"{name}.bias"), transB=1)

    def _columns(self, x: str, start: int, end: int) -> str:
        bounds = (self._constant(np.array([bound])) for bound in (start, end, 1))
        return self._op("Slice", x, *bounds)

    def _joined(self, columns: Sequence[str]) -> str:
        return columns[0] if len(columns) == 1 else self._op("Concat", *columns, axis=1)

    def _cast(self, x: str, dtype: np.dtype[np.generic]) -> str:
        return self._op("Cast", x, to=self._onnx.helper.np_dtype_to_tensor_dtype(dtype))

    def _weight(self, name: str) -> str:
        return self._constant(self._exported.arrays[name])

    def _constant(self, array: Array | np.generic) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(
            self._onnx.numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
        )
        return name

    def _op(self, kind: str, *inputs: str, name: str | None = None, **attributes: object) -> str:
        name = name or f"value_{len(self.nodes)}"
        self.nodes.append(self._onnx.helper.make_node(kind, list(inputs), [name], **attributes))
        return name

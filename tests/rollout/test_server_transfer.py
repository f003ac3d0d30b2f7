"""Files in memory by which servers on this machine get weights."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from tether.rollout.servers import shared_file
from tether.rollout.servers.transfer import buckets

TENSORS = {
    "scalar": torch.tensor(3, dtype=torch.int64),
    "flags": torch.tensor([True, False, True]),
    "none": torch.empty(0, 3),
    "narrow": torch.tensor([[1.5, -2.25, float("nan")]], dtype=torch.bfloat16),
    "half": torch.tensor([0.1, 65504.0], dtype=torch.float16),
    "wide": torch.tensor([[1e-300], [float("-inf")]], dtype=torch.float64),
    "eight": torch.tensor([0.5, 448.0, -0.0]).to(torch.float8_e4m3fn),
    "matrix": torch.arange(12, dtype=torch.float32).view(3, 4),
}


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, object]:
    return {
        name: (value.dtype, value.shape, value.flatten().view(torch.uint8).tolist()) for name, value in tensors.items()
    }


def test_a_shared_file_has_the_bits_of_its_tensors_until_it_is_left() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with shared_file(TENSORS) as path:
        assert bits(load_file(path)) == bits(TENSORS)
        assert "(deleted)" in str(Path(path).readlink())  # no name: nothing is left where the process is killed
    assert set(Path("/proc/self/fd").iterdir()) <= before


def test_buckets_hold_all_tensors_in_the_format_of_the_server() -> None:
    tensors = [("a", torch.ones(4, 2).T), ("b", torch.ones(3)), ("count", torch.tensor([7])), ("c", torch.ones(40))]
    parts = list(buckets(tensors, torch.bfloat16, 24))
    assert [list(part) for part in parts] == [["a", "b"], ["count"], ["c"]]
    for part in parts:
        with shared_file(part) as path:
            found = load_file(path)
        assert {name: value.dtype for name, value in found.items()} == {
            name: torch.int64 if name == "count" else torch.bfloat16 for name in part
        }
        assert all(torch.equal(found[name], part[name]) for name in part)

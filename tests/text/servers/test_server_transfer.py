"""Memory by which servers on this machine get weights: files, and a buffer that both sides keep open."""

import socket
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tether.text.servers import BroadcastGroup, Connections, broadcast, is_local, shared_file
from tether.text.servers.inside.tether_buffers import Buffer
from tether.text.servers.transfer import Staging, buckets

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


def anonymous_files() -> set[int]:
    """Inodes of the files without a name in a folder that this process has open; other threads may open others."""
    inodes = set[int]()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            inodes |= {descriptor.stat().st_ino} if "memfd" in str(descriptor.readlink()) else set()
    return inodes


def test_a_shared_file_has_the_bits_of_its_tensors_until_it_is_left() -> None:
    before = anonymous_files()
    with shared_file(TENSORS) as path:
        assert bits(load_file(path)) == bits(TENSORS)
        assert len(anonymous_files() - before) == 1
        assert "(deleted)" in str(Path(path).readlink())  # no name: nothing is left where the process is killed
    assert anonymous_files() == before


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


CPU = torch.device("cpu")


def test_a_buffer_is_filled_anew_and_opened_once() -> None:
    staging, theirs, places = Staging(), Buffer(), set[int]()
    before = anonymous_files()
    for value in (1.0, 2.0):
        tensors = [("a", torch.full((4, 2), value).T), ("count", torch.tensor([7])), ("b", torch.full((20,), value))]
        ends = []
        for staged in staging.fill(iter(tensors), torch.bfloat16, 128, CPU):
            theirs.open(staged.buffer)
            assert theirs.bytes is not None
            places.add(theirs.bytes.data_ptr())
            found = theirs.tensors(staged.tensors)
            expected = {name: tensor.bfloat16() if name != "count" else tensor for name, tensor in tensors}
            assert all(torch.equal(found[name], expected[name]) for name in found)
            assert all(theirs.holds(one) for one in found.values())
            ends.append(([*found], staged.last))
        assert ends == [(["a", "count"], False), (["b"], True)]
    assert len(places) == 1
    staging.close()
    del theirs, staged, found
    assert anonymous_files() == before


def test_another_file_under_the_number_of_a_buffer_is_refused(tmp_path: Path) -> None:
    staging = Staging()
    (staged,) = staging.fill([("a", torch.ones(3))], torch.float32, 64, CPU)
    (tmp_path / "file").write_bytes(bytes(64))
    for told in ({"name": "tether-of-another-run"}, {"path": str(tmp_path / "file")}, {"path": "/proc/1/fd/999"}):
        with pytest.raises(ValueError, match="the trainer's memory cannot be opened from here"):
            Buffer().open({**staged.buffer, **told})
    staging.close()


def test_a_server_of_this_machine_is_known_by_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert is_local(Connections(f"http://localhost:{server.getsockname()[1]}"))


def test_a_trainer_that_cannot_be_reached_is_named_at_once() -> None:
    """By the server's worker; the store itself would try for as long as an update may take."""
    with socket.socket() as not_listening:  # and held: with a program that takes the port, the store would wait in C
        not_listening.bind(("127.0.0.1", 0))
        port = not_listening.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot be reached from here at 127.0.0.1, port {port} .*refused"):
            Buffer().join("127.0.0.1", port, 1, 2, "group", "gloo", 600.0)


def test_an_address_at_which_this_machine_cannot_listen_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "_addresses", lambda http: ("192.0.2.1", ""))  # of no machine
    with pytest.raises(ValueError, match=r"for broadcasts, this machine cannot listen at .* 192\.0\.2\.1"):
        BroadcastGroup(Connections("http://127.0.0.1:1"), 1, "group", 0.2, "gloo")

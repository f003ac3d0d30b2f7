"""The store where ranks meet: who can reach it, and whose values count."""

import json
from pathlib import Path

import pytest

from tether.execution.ray_group import newest_heartbeats
from tether.runtime.rendezvous import StoreAddress, serve_store

LISTENS = "0A"


def test_a_store_listens_at_its_address_alone() -> None:
    store = serve_store("127.0.0.1")
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == LISTENS and row[1].endswith(f":{store.port:04X}")]
    assert listening == [f"0100007F:{store.port:04X}"]
    with pytest.raises(OSError, match="assign requested address"):
        serve_store("192.0.2.1")  # of no machine


def test_values_of_strangers_are_passed_over() -> None:
    store = serve_store("127.0.0.1")
    address = StoreAddress("127.0.0.1", store.port)
    assert address.secret.hex() not in repr(address)
    signs = [{"beat": 1, "doing": "build"}, {"beat": 5, "doing": "waits"}]
    for rank, sign in enumerate(signs):
        store.set(f"rank {rank}", address.signed(f"rank {rank}", json.dumps(sign).encode()))
    found = newest_heartbeats(address, store, [{}, {}])
    assert found == signs

    stranger, replayed = address.connect(), store.get("rank 1")
    junk = [b"", b"junk", bytes(40), b'{"beat": 9}', bytes(32) + b'{"beat": 9}', b"[" * 100_000, replayed]
    junk.append(StoreAddress("127.0.0.1", 1).signed("rank 0", b'{"beat": 9}'))
    for value in junk:
        stranger.set("rank 0", value)
        assert newest_heartbeats(address, store, found)[0] is found[0], value[:40]
    newer = {"beat": 2, "doing": "waits"}
    store.set("rank 0", address.signed("rank 0", json.dumps(newer).encode()))
    assert newest_heartbeats(address, store, found) == [newer, signs[1]]
    store.set("rank 1", address.signed("rank 1", b'{"beat": 4}'))  # an older one, stored and set again
    assert newest_heartbeats(address, store, found)[1] is found[1]

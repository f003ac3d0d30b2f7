"""Time: the simulation of sampling against schedules worked by hand, and what has to hold for any lengths."""

import statistics
from dataclasses import replace

import pytest

from tether.plan.architecture import KNOWN
from tether.plan.devices import DEVICES, Cluster, Device, read_device
from tether.plan.memory import Model
from tether.plan.timing import (
    GPU,
    Efficiency,
    Lengths,
    bus_seconds,
    decode_step,
    forward_seconds,
    gather_seconds,
    move_seconds,
    optimizer_seconds,
    simulate,
)


def one_second(rows: int, length: float) -> float:
    return 1.0


def test_a_sequence_that_ends_makes_room_for_the_next() -> None:
    # Two slots: 3 beside 1, then 2 in the free slot, which ends with the first.
    sampled = simulate([3, 1, 2], 2, one_second, prompt=0)
    assert (sampled.seconds, sampled.idle) == (3.0, 0.0)
    # The longest comes last and runs alone for 3 of 4 seconds: 5 of 8 slot-seconds are used.
    alone = simulate([1, 4], 2, one_second, prompt=0)
    assert (alone.seconds, alone.idle) == (4.0, pytest.approx(3 / 8))


def test_no_schedule_is_faster_than_full_slots_or_the_longest_response() -> None:
    lengths = Lengths(prompt=0, mean=200, tail=900, limit=1000).draw(500)
    sampled = simulate(lengths, 64, one_second, prompt=0)
    assert max(max(lengths), sum(lengths) / 64) <= sampled.seconds <= sum(lengths) / 64 + max(lengths)
    assert 0 < sampled.idle < 1


def test_drawn_lengths_have_the_mean_and_the_tail_that_were_asked_for() -> None:
    drawn = sorted(Lengths(prompt=0, mean=300, tail=1500, limit=100_000).draw(20_000))
    assert statistics.mean(drawn) == pytest.approx(300, rel=0.05)
    assert drawn[int(0.99 * len(drawn))] == pytest.approx(1500, rel=0.1)
    assert max(Lengths(prompt=0, mean=300, tail=400, limit=320).draw(1000)) <= 320


def test_seconds_of_a_forward_pass() -> None:
    sizes, device = KNOWN["smollm2-135m"], Device("slow", 1, 1e-12, 1, 1)  # one operation a second
    every = Efficiency(1.0, 0, 1.0, 1.0, 1.0, 0.0, "all of it")
    layers = 2 * sizes.active_in_layers * 10 + 2 * sizes.embedding * 5
    assert forward_seconds(sizes, 10, 50, 5, device, every) == pytest.approx(layers + 4 * 9 * 64 * 30 * 50)
    half = replace(every, attention=0.5)
    assert forward_seconds(sizes, 0, 50, 0, device, half) == pytest.approx(2 * 4 * 9 * 64 * 30 * 50)


def test_a_decoded_token_reads_the_weights_once_and_its_cache() -> None:
    sizes, device = KNOWN["qwen2.5-7b"], DEVICES["h100-80g"]
    step = decode_step(Model("actor", sizes), device, GPU)
    weights = 2 * (sizes.active_in_layers + sizes.embedding)
    rate = 3350e9 * GPU.bandwidth
    assert step(1, 0) == pytest.approx(weights / rate + 28 * GPU.per_layer)
    cache = 64 * 1000 * sizes.kv_per_token * 2
    assert step(64, 1000) - step(1, 0) == pytest.approx(cache / rate)


def test_traffic_of_a_sharded_model() -> None:
    """Of 3B weights on two cards: bfloat16 gathers and float32 sums over the link, and with offload_policy over the bus
    float32 weights twice and float32 gradients once, 18.5 GB in each micro-batch."""
    sizes, device = KNOWN["qwen2.5-3b"], DEVICES["rtx4090-24g"]
    model, count = Model("actor", sizes, ranks=2, shards=2, sharded=True), sizes.parameters
    assert device.link == 10
    assert gather_seconds(model, Cluster(device, 2), 2, 1) == pytest.approx((2 * 2 + 4) * count / 2 / 10e9)
    assert bus_seconds(model, device, 2, 1) == 0
    on_host = replace(model, on_host=True)
    assert bus_seconds(on_host, device, 2, 1) * device.bus == pytest.approx(18.5, rel=0.01)
    frozen = replace(on_host, trained=False)
    assert bus_seconds(frozen, device, 1, 0) == pytest.approx(2 * count / 2 / (device.bus * 1e9))
    rests = replace(model, offload_weights=True, offload_optimizer=True)
    assert move_seconds(rests, device, update=False) == pytest.approx(2 * 4 * count / 2 / (device.bus * 1e9))
    assert move_seconds(rests, device, update=True) == pytest.approx(2 * 12 * count / 2 / (device.bus * 1e9))
    assert optimizer_seconds(on_host, device, 2) > 10 * optimizer_seconds(model, device, 2)


def test_devices_of_a_table_and_ones_own() -> None:
    assert read_device("h100-80g:8") == (DEVICES["h100-80g"], 8)
    own, count = read_device("memory=24,teraflops=120,bandwidth=900,link=9:2")
    assert (own.memory, own.teraflops, own.bandwidth, own.link, count) == (24, 120, 900, 9, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100", "--device h100: h100 is not known. Did you mean "),
        ("h100-80g:x", "--device h100-80g:x: 'x' is no number of devices"),
        ("memory=24,teraflops=120", "--device memory=24,teraflops=120: bandwidth is missing"),
        ("memory=x,teraflops=120,bandwidth=1", "--device: 'memory=x' is not memory or "),
        ("memory=nan,teraflops=120,bandwidth=1", "--device: 'memory=nan' is not memory or "),
    ],
)
def test_a_device_that_is_unknown_is_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="^" + message.replace(".", r"\.")) as error:
        read_device(text)
    assert "\n" not in str(error.value)

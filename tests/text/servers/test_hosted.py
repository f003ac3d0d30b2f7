"""Servers on the nodes of ranks: their weights come in chunks, and each may die with its companion or its node."""

import json
import os
import pickle
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.distributed.parts import NEEDS_RAY, ray_group, two_nodes
from tests.processes import command_of
from tests.text.servers.bench import (
    EOS,
    KEY,
    POLICY,
    PROMPTS,
    SAMPLING,
    Bench,
    processes_of,
    rows_of,
    tiny_policy,
    wait_for,
)
from tests.text.servers.hosted_part import make
from tests.text.servers.stand_in import environment
from tether.batch import WeightUpdate
from tether.commands.status import show_status
from tether.config import load_config
from tether.distributed import StoredWeights
from tether.distributed.groups import RankGroups
from tether.distributed.handles import WeightsOnRanks
from tether.distributed.worker import Process, this_process
from tether.runtime.ranks import SERVERS_STATUS, Deadlines, Pool, RankLost
from tether.text import roles
from tether.text.servers import GenerateRequest, Launch, ServedEngine, ServerGone, ServerRefuses, Traffic, build
from tether.text.servers.build import PolicyInfo, SamplingRanks
from tether.text.servers.hosted import HostedServer, ServerHost, host_server
from tether.text.servers.protocol import NamedUpdate
from tether.text.servers.vllm_api import Vllm
from tether.text.servers.vllm_api import launch_of as launch_vllm
from tether.text.sources import ModelSpecs

TRAFFIC = Traffic(torch.float32, 1 << 16, frozenset(["lm_head.weight"]), max_num_seqs=8, sleeps=False)
API = Vllm(POLICY)


def launch(folder: Path, python: Path, number: int = 0, **environment: str) -> Launch:
    tiny_policy().config.save_pretrained(folder / "config")
    options = {"model": str(folder / "config"), "dtype": "float32", "max_model_len": 512, "load_format": "dummy"}
    return launch_vllm(python, folder / f"vllm-{number}.log", options, environment)


def stand_in(folder: Path, faults: str = "") -> Path:
    return environment(folder / "vllm", faults) / "bin/python"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ServerHost]:
    host = host_server(API, launch(tmp_path, stand_in(tmp_path)), 120, "node-b")
    yield host
    host.stop()


def chunks() -> list[StoredWeights]:
    tensors = list(tiny_policy().state_dict().items())
    return [StoredWeights.of(tensors[:5]), StoredWeights.of(tensors[5:])]


def begin(host: ServerHost, name: str) -> None:
    host.begin_update(NamedUpdate((), name, "run", TRAFFIC))


def test_a_server_gets_its_weights_in_chunks(host: ServerHost) -> None:
    host.wait_ready()
    assert host.url.startswith("node-b: http://127.0.0.1:")
    begin(host, "run-1")
    for chunk in chunks():
        host.add_chunk(chunk)
    tensors = dict(tiny_policy().named_parameters())
    assert host.finish_update() == sum(value.numel() * 4 for value in tensors.values())
    request = GenerateRequest(PROMPTS[0], SAMPLING, 6, 1, sorted(EOS), return_kept_tokens=False)
    assert host.generate(request, 260).weight_names == {"run-1"}
    begin(host, "run-2")
    host.add_chunk(chunks()[0])
    for process in processes_of(host):
        process.send_signal(signal.SIGKILL)
    for chunk in chunks() * 3:  # nobody takes them any more
        host.add_chunk(chunk)
    with pytest.raises(ServerGone, match=r"^node-b: http"):
        host.finish_update()


def test_what_a_node_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_vllm = host_server(API, launch(tmp_path, tmp_path / "none/bin/python"), 120, "node-b")
    with pytest.raises(ValueError, match=r"^node-b: has no vLLM at .*/none/bin/python, .* Run tether setup there"):
        no_vllm.wait_ready()
    there = launch(tmp_path, stand_in(tmp_path))
    elsewhere = host_server(API, launch_vllm(there.python, tmp_path / "run/vllm.log", {}, {}), 120, "node-b")
    with pytest.raises(ValueError, match=r"^node-b: has no folder .*/run\. The folder of the run .* on all machines"):
        elsewhere.wait_ready()
    old = host_server(API, launch(tmp_path, stand_in(tmp_path, "old")), 120, "node-b")
    try:
        with pytest.raises(ValueError, match=r"^node-b: http.*: runs vLLM 0.9.* tether supports 0.32.x"):
            old.wait_ready()
    finally:
        old.stop()

    def no_port() -> int:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr("tether.text.servers.server._free_port", no_port)
    with pytest.raises(ValueError, match=r"^node-b: the vLLM server cannot be started there: .*Address already in use"):
        host_server(API, there, 120, "node-b").wait_ready()


def test_a_refusal_is_the_same_in_another_process() -> None:
    copy = pickle.loads(pickle.dumps(ServerRefuses("no such route", 404)))
    assert (str(copy), copy.status) == ("no such route", 404)


class Nodes:
    """Ranks on two machines of four GPUs each, which say where companions are started."""

    def __init__(self) -> None:
        self.processes = [Process(0, "", f"host-{rank // 4}", {}, f"node-{rank // 4}", str(4 + rank % 4))
                          for rank in range(8)]  # fmt: skip
        self.started: list[tuple[int, str, str]] = []

    def companion(self, rank: int, threads: int, factory: Any, api: Any, launch: Launch, *more: object) -> None:
        assert (factory, threads, more) == (host_server, 256, (600.0, f"host-{rank // 4}"))
        self.started.append((rank, launch.log.name, launch.environment["CUDA_VISIBLE_DEVICES"]))


def test_servers_start_where_the_ranks_are() -> None:
    words = ["data.train_files=[x]", "actor_rollout_ref.model.path=x", "trainer.n_gpus_per_node=2"]
    words += ["actor_rollout_ref.rollout.name=vllm", "algorithm.adv_estimator=grpo"]

    def hosts(*more: str, machine: str = this_process().machine) -> SamplingRanks | None:
        ranks: Any = Nodes()
        ranks.processes = [replace(this_process(), machine=machine)] * 2
        return roles._hosts(load_config(None, [*words, *more]).config, RankGroups(ranks, {}))

    assert hosts() is None  # they start here, without Ray
    assert hosts("trainer.nnodes=2", "actor_rollout_ref.rollout.server_urls=[http://h:1]") is None
    for found, ranks, train in (
        (hosts(machine="another"), range(2), True),
        (hosts("trainer.nnodes=2"), range(4), True),
        (hosts("actor_rollout_ref.rollout.nnodes=2"), range(2, 6), False),
        (hosts("cluster.component_placement={actor: 0, rollout: 1}"), range(1, 2), False),
    ):
        assert found is not None
        assert (found.ranks, found.train) == (ranks, train)


@pytest.mark.parametrize(
    ("ranks", "split", "servers"),
    [
        (range(8), 4, [(0, "vllm-0.log", "4,5,6,7"), (4, "vllm-4.log", "4,5,6,7")]),
        (range(2, 6), 2, [(2, "vllm-2.log", "6,7"), (4, "vllm-4.log", "4,5")]),
        (range(6, 8), 1, [(6, "vllm-6.log", "6"), (7, "vllm-7.log", "7")]),
        (range(1, 8), 2, "does not divide the 3 devices of a machine that sample"),
    ],
)
def test_each_server_has_devices_of_one_machine(
    ranks: range, split: int, servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TETHER_VLLM", str(stand_in(tmp_path).parent.parent))
    words = ["data.train_files=[x]", "actor_rollout_ref.model.path=x", "actor_rollout_ref.rollout.name=vllm"]
    config = load_config(None, [*words, f"actor_rollout_ref.rollout.tensor_model_parallel_size={split}"]).config
    nodes: Any = Nodes()
    model_specs = ModelSpecs(Path("x"), Path("x"), {}, None, None, torch.device("cuda"), 1, tmp_path)  # type: ignore
    hosts = SamplingRanks(nodes, ranks, train=True)
    policy_info = PolicyInfo.of(tiny_policy())

    def start() -> None:
        build._hosted_servers(config.actor_rollout_ref, hosts, API, policy_info, model_specs, tmp_path / "run")

    if isinstance(servers, str):
        with pytest.raises(ValueError, match=servers):
            start()
    else:
        start()
        assert nodes.started == servers


@pytest.fixture
def cluster() -> Iterator[Any]:
    yield from two_nodes()


def processes_with(word: str) -> list[int]:
    """Processes whose command has this word."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word in process.read_text():
                found.append(int(process.parent.name))
        except OSError:
            continue
    return found


@NEEDS_RAY
@pytest.mark.slow
def test_servers_on_two_nodes_sample_and_are_replaced(
    cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server dies, then a companion, while rows are sampled; then a node, which ends the ranks' work."""
    local = Bench(tmp_path / "local", python=stand_in(tmp_path))
    try:
        expected = rows_of(local.engine.generate(PROMPTS, SAMPLING, KEY))
    finally:
        local.close()
    group: Any = ray_group([Pool(2, 1)], "cpu", 1, tmp_path, options={"address": cluster.address})
    python = stand_in(tmp_path)
    group.build(make)
    servers = []
    for rank in range(2):
        companion = group.companion(rank, 8, host_server, API, launch(tmp_path, python, rank), 120, f"node-{rank}")
        servers.append(HostedServer(API, companion, f"vllm-{rank}", 120))
    assert len({process.node for process in group.processes}) == 2

    def export() -> WeightUpdate:
        return WeightUpdate(0, WeightsOnRanks(group, "policy", None))

    engine = ServedEngine(servers, export, eos_token_ids=EOS, vocabulary=260, context=512, traffic=TRAFFIC,
                          status=tmp_path / SERVERS_STATUS)  # fmt: skip
    sample = partial(engine.generate, PROMPTS, SAMPLING, KEY)
    try:
        assert rows_of(sample()) == expected
        assert group.call("policy", "reads", [(), ()]) == [1, 1]  # once for both servers
        size = sum(value.numel() * 4 for value in tiny_policy().parameters())
        assert engine.transfer_metrics() == {"transfer/weights_bytes": 2.0 * size, "transfer/server_failures": 0.0}
        os.kill(processes_with(str(tmp_path / "config"))[0], signal.SIGKILL)
        assert rows_of(sample()) == expected
        assert engine.transfer_metrics()["transfer/server_failures"] == 1
        (server, *_) = processes_with(str(tmp_path / "config"))
        (companion,) = [one for one in psutil.Process(server).parents() if "ray::" in command_of(one)]
        companion.kill()
        assert rows_of(sample()) == expected
        assert engine.transfer_metrics()["transfer/server_failures"] == 1
        (tmp_path / "metrics.jsonl").touch()
        show_status(tmp_path)
        shown = capsys.readouterr().out
        assert "vllm-0 on" in shown
        assert "idle" in shown
        states = json.loads((tmp_path / SERVERS_STATUS).read_text())["servers"]
        assert sorted(state["failures"] for state in states) in ([0, 2], [1, 1])
        cluster.remove_node(cluster.list_all_nodes()[-1])
        with pytest.raises(RankLost, match=r"died, with its node"):
            sample()
    finally:
        engine.close()
        group.close()
    wait_for(lambda: not processes_with(str(tmp_path / "config")))


@NEEDS_RAY
@pytest.mark.slow
def test_the_other_servers_sample_the_rows_of_a_lost_node(tmp_path: Path) -> None:
    """The node has a rank without components, and is lost while its server samples; then that of the last server."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for cores in (0, 1, 1):
        cluster.add_node(num_cpus=cores, **({} if cores else {"include_dashboard": False}))
    pools, apart = [Pool(1, 1), Pool(1, 1, "rollout")], [range(1), range(1, 2)]
    group: Any = ray_group(pools, "cpu", 1, tmp_path, together=apart, options={"address": cluster.address},
                           deadlines=Deadlines(silence=5.0))  # fmt: skip
    nodes = {node.node_id: node for node in cluster.list_all_nodes()}
    group.some(apart[0]).build(make)
    group.do_without(apart[1])
    servers = []
    for rank, seconds in enumerate(("0", "3")):
        slow = launch(tmp_path, stand_in(tmp_path), rank, STAND_IN_SECONDS=seconds)
        companion = group.companion(rank, 8, host_server, API, slow, 120, f"node-{rank}")
        servers.append(HostedServer(API, companion, f"vllm-{rank}", 120))
    weights = WeightUpdate(0, WeightsOnRanks(group.some(apart[0]), "policy", None))
    engine = ServedEngine(servers, lambda: weights, eos_token_ids=EOS, vocabulary=260, context=512, traffic=TRAFFIC,
                          status=tmp_path / SERVERS_STATUS)  # fmt: skip

    def remove(_: object) -> None:
        if lost := nodes.pop(group.processes[1].node, None):
            cluster.remove_node(lost)

    try:
        expected = rows_of(engine.generate(PROMPTS, SAMPLING, KEY))
        assert rows_of(engine.generate(PROMPTS, SAMPLING, KEY, on_finished=remove)) == expected
        assert engine.servers == servers[:1]
        assert engine.transfer_metrics()["transfer/server_failures"] == 1
        states = json.loads((tmp_path / SERVERS_STATUS).read_text())["servers"]
        assert [state["state"] for state in states] == ["idle", "lost with its machine"]
        group.some(apart[0]).call("policy", "rest", [(8.0,)])  # longer than a rank with components may be silent
        assert rows_of(engine.generate(PROMPTS, SAMPLING, KEY)) == expected
        cluster.remove_node(nodes[group.processes[0].node])
        with pytest.raises(RankLost, match=r"died, with its node"):
            engine.generate(PROMPTS, SAMPLING, KEY)
    finally:
        engine.close()
        group.close()
        cluster.shutdown()
    wait_for(lambda: not processes_with(str(tmp_path / "config")))

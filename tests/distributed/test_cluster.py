"""Several nodes: two raylets on this machine, each with one rank; what is missing or different is said."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.distributed.parts import NEEDS_RAY, Part, make, ray_group, two_nodes
from tests.runs.test_devices import overrides
from tests.runs.tiny_run import measured, write_inputs
from tests.runs.tiny_run import train as one_process
from tests.text.servers.stand_in import environment
from tether.commands.doctor import show_doctor
from tether.commands.train import train
from tether.config import load_config
from tether.distributed.cluster import check_versions
from tether.distributed.worker import this_process
from tether.loop.parts import Callbacks
from tether.runtime.ranks import SERVERS_STATUS, STATUS, Deadlines, Pool, RankFailed, RankLost

pytestmark = NEEDS_RAY
ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0


@pytest.fixture
def cluster() -> Iterator[Any]:
    yield from two_nodes()


def to(cluster: Any) -> dict[str, Any]:
    return {"options": {"address": cluster.address}}


@pytest.mark.slow
def test_ranks_of_two_nodes_work_together(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = ray_group([Pool(2, 1)], "cpu", 1, tmp_path, **to(cluster))
    try:
        group.build(make)
        found = group.call("part", "summed", [(torch.tensor([1.0]),), (torch.tensor([10.0]),)])
        assert [value.tolist() for value in found] == [[11.0]] * 2
        assert len(set(group.call("part", "node", [(), ()]))) == 2
    finally:
        group.close()
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setenv("COLUMNS", "200")
    show_doctor()
    shown = capsys.readouterr().out
    assert f"cluster at {cluster.address}: 2 nodes" in shown
    assert shown.count("0 GPUs, 1 CPUs; versions as here") == 2
    missing = r"^trainer.nnodes=3 with .*=1 each: 1 CPUs are missing; CPUs of the 2 nodes .*: 1, .*: 1; waited 1 s"
    with pytest.raises(RankFailed, match=missing):
        ray_group([Pool(3, 1)], "cpu", 1, tmp_path, deadlines=Deadlines(start=1), **to(cluster))


@pytest.mark.slow
def test_data_that_are_lost_with_a_node_are_a_lost_rank(cluster: Any, tmp_path: Path) -> None:
    """Also where another rank, a companion or this process reads them, before the dead rank is called again."""
    group = ray_group([Pool(2, 1)], "cpu", 1, tmp_path, together=[range(1), range(1, 2)], **to(cluster))
    try:
        _, there = cluster.list_all_nodes()
        lost = next(rank for rank, process in enumerate(group.processes) if process.node == there.node_id)
        storing, other = group.some(range(lost, lost + 1)), group.some(range(1 - lost, 2 - lost))
        group.build(make)
        (weights,) = storing.share_weights("part")
        assert other.call("part", "total", [(weights,)]) == [7.0]
        companion = group.companion(1 - lost, 1, Part)
        companion.start()
        assert companion.call("total", weights, timeout=PATIENCE) == 7.0
        (weights,) = storing.share_weights("part")
        cluster.remove_node(there)
        with pytest.raises(RankLost, match=r"the data of a lost rank are gone"):
            other.read(weights)
        with pytest.raises(RankLost, match=r"the data of a lost rank are gone"):
            companion.call("total", weights, timeout=PATIENCE)
        with pytest.raises(RankLost, match=r"the data of a lost rank are gone"):
            other.call("part", "total", [(weights,)])
    finally:
        group.close()


@pytest.mark.slow
def test_a_wait_for_devices_reports_a_node_that_is_lost_meanwhile(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    class Seen(Exception):
        pass

    def warn(message: str, *arguments: object) -> None:
        lines.append(message % arguments)
        if len(lines) == 2:
            raise Seen
        cluster.remove_node(cluster.list_all_nodes()[-1])

    monkeypatch.setattr("tether.distributed.cluster.LOG_AFTER_SECONDS", 0.0)
    monkeypatch.setattr("tether.distributed.cluster.logger.warning", warn)
    with pytest.raises(Seen):
        ray_group([Pool(3, 1)], "cpu", 1, tmp_path, deadlines=Deadlines(start=PATIENCE), **to(cluster))
    assert "1 CPUs are missing; CPUs of the 2 nodes" in lines[0]
    assert "2 CPUs are missing; CPUs of the 1 nodes" in lines[1]


@pytest.mark.slow
def test_a_run_on_two_nodes_outlives_the_loss_of_one(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = write_inputs(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    on_nodes = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.preflight=False"]

    def run(name: str, *callbacks: object) -> Path:
        given = load_config(None, [*overrides(inputs, tmp_path / name, 1, 2), *on_nodes])
        return train(given, Callbacks(callbacks)).folder

    class Remover:
        """Takes a node away after the first step, and brings another one."""

        left = 1

        def on_step_end(self, step: int, _: object) -> None:
            if step == 1 and self.left:
                self.left = 0
                cluster.remove_node(cluster.list_all_nodes()[-1])
                cluster.add_node(num_cpus=1)

    one = one_process(overrides(inputs, tmp_path / "one", 1, 2))
    two = run("two", Remover())
    assert "That was in step 2. Restart 1 of 3" in capsys.readouterr().out
    for step, metrics in measured(one).items():
        assert measured(two)[step]["actor/grad_norm"] == pytest.approx(metrics["actor/grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_servers_sample_on_both_nodes_and_the_loss_of_one_restarts_the_run(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then on the one of two nodes that does not train, while the policy learns on the other."""
    inputs = write_inputs(tmp_path)
    monkeypatch.setenv("TETHER_VLLM", str(environment(tmp_path / "vllm")))
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    served = ["trainer.preflight=False", "actor_rollout_ref.rollout.name=vllm"]
    names: list[str] = []

    class Remover:
        """Takes a node away after the first step, and brings another one."""

        left = 1

        def on_step_end(self, step: int, _: object) -> None:
            names.extend(servers(tmp_path / "two"))
            if step == 1 and self.left:
                self.left = 0
                cluster.remove_node(cluster.list_all_nodes()[-1])
                cluster.add_node(num_cpus=1)

    def servers(folder: Path) -> list[str]:
        states = json.loads((folder / SERVERS_STATUS).read_text())["servers"]
        return [state["server"].partition(" on ")[0] for state in states]

    def run(name: str, *words: str, callbacks: tuple[object, ...] = ()) -> Path:
        given = load_config(None, [*overrides(inputs, tmp_path / name, 1, 2), *served, *words])
        return train(given, Callbacks(callbacks)).folder

    one = measured(one_process([*overrides(inputs, tmp_path / "one", 1, 2), *served]))
    two = measured(run("two", "trainer.nnodes=2", callbacks=(Remover(),)))
    assert "Restart 1 of 3" in capsys.readouterr().out
    assert {*names} == {"vllm-0", "vllm-1"}
    for step, metrics in one.items():
        assert two[step]["actor/grad_norm"] == pytest.approx(metrics["actor/grad_norm"], rel=1e-3)
    ahead = run("ahead", "actor_rollout_ref.rollout.nnodes=1", "trainer.async_mode=one_step_off")
    assert servers(ahead) == ["vllm-1"]
    assert measured(ahead)[1]["actor/grad_norm"] == pytest.approx(one[1]["actor/grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_a_run_continues_without_a_node_that_only_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One node trains and two sample, one of which is lost after the first step."""
    from ray.cluster_utils import Cluster

    inputs = write_inputs(tmp_path)
    monkeypatch.setenv("TETHER_VLLM", str(environment(tmp_path / "vllm")))
    served = ["trainer.preflight=False", "actor_rollout_ref.rollout.name=vllm"]
    one = measured(one_process([*overrides(inputs, tmp_path / "one", 1, 2), *served]))
    cluster = Cluster()
    for cores in (0, 1, 1, 1):
        cluster.add_node(num_cpus=cores, **({} if cores else {"include_dashboard": False}))
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    folder = tmp_path / "two"

    class Remover:
        def on_step_end(self, step: int, _: object) -> None:
            if step == 1:
                ranks = json.loads((folder / STATUS).read_text())["ranks"]
                raylet = psutil.Process(int(ranks[2]["process"].split()[0])).ppid()
                nodes = {node.all_processes["raylet"][0].process.pid: node for node in cluster.list_all_nodes()}
                cluster.remove_node(nodes[raylet])

    try:
        words = ["actor_rollout_ref.rollout.nnodes=2", "actor_rollout_ref.rollout.n_gpus_per_node=1"]
        train(load_config(None, [*overrides(inputs, folder, 1, 2), *served, *words]), Callbacks((Remover(),)))
    finally:
        cluster.shutdown()
    assert "Restart" not in capsys.readouterr().out
    states = json.loads((folder / SERVERS_STATUS).read_text())["servers"]
    assert [state["state"] for state in states] == ["stopped", "lost with its machine"]
    for step, metrics in one.items():
        assert measured(folder)[step]["actor/grad_norm"] == pytest.approx(metrics["actor/grad_norm"], rel=1e-3)


def test_a_cluster_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(
        RankFailed, match=r"^trainer.nnodes=2: no Ray cluster to join at 127.0.0.1:1 .*ray start --head"
    ):
        ray_group([Pool(2, 1)], "cpu", 1, tmp_path)
    with pytest.raises(
        RankFailed, match=r"^trainer.nnodes=1: .* RAY_ADDRESS=127.0.0.1:1 names it: unset that, and the"
    ):
        ray_group([Pool(1, 1)], "cpu", 1, tmp_path)
    with pytest.raises(RankFailed, match=r"^ray_kwargs.ray_init.num_cpu: .* Did you mean num_cpus"):
        ray_group([Pool(1, 1)], "cpu", 1, tmp_path, options={"num_cpu": 2})


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which a program that is not Ray listens, and says nothing."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_port_that_another_program_has_is_said(taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would wait for minutes, and then end the process."""
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{taken}")
    monkeypatch.setattr("tether.distributed.cluster.CONNECT_SECONDS", 0.5)
    says = rf"^trainer.nnodes=2: no Ray cluster to join at 127.0.0.1:{taken} \(another program listens there; .*--port"
    with pytest.raises(RankFailed, match=says):
        ray_group([Pool(2, 1)], "cpu", 1, tmp_path)


def test_a_cluster_of_this_machine_that_has_ended_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, it leaves its address behind, where Ray would wait for two minutes."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").write_text("127.0.0.1:1")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(
        RankFailed, match=r"^trainer.nnodes=2: no Ray cluster to join at 127.0.0.1:1 .*ray start --head"
    ):
        ray_group([Pool(2, 1)], "cpu", 1, tmp_path)


@pytest.mark.slow
def test_a_cluster_that_asks_for_a_token_says_how_to_give_it(tmp_path: Path) -> None:
    """The first local Ray of a machine writes one; `ray start --head` asks for it from then on."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("0" * 64)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(tmp_path), "RAY_worker_niceness": "0"}
    environment |= {"PYTHONPATH": os.pathsep.join([f"{ROOT}/src", str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    command += ["--num-cpus=1", "--include-dashboard=false"]
    ask = f"from tether.distributed.cluster import nodes_of; print(*nodes_of('127.0.0.1:{port}'))"
    at_once = ask.replace("')", "', 0.001)")
    with (tmp_path / "said").open("w") as said:
        head = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
    try:
        until = time.monotonic() + PATIENCE
        while "ray stop" not in (tmp_path / "said").read_text() and time.monotonic() < until:
            time.sleep(0.2)
        without, given = (
            subprocess.run(
                [sys.executable, "-c", ask], env=environment | more, capture_output=True, text=True, check=False
            )
            for more in ({}, {"RAY_AUTH_MODE": "token"})
        )
        late = subprocess.run(
            [sys.executable, "-c", at_once],
            env=environment | {"RAY_AUTH_MODE": "token"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        head.terminate()
        head.wait()
    assert "it asks for that token: set RAY_AUTH_MODE=token" in without.stderr
    assert "0 GPUs, 1 CPUs; versions as here" in given.stdout, given.stderr
    assert "0 GPUs, 1 CPUs; no answer within 0.001 seconds" in late.stdout, late.stderr


@pytest.mark.slow  # Ray is started three times
def test_a_port_of_a_local_ray_that_is_taken_is_said(taken: int, tmp_path: Path) -> None:
    options = {"include_dashboard": True, "dashboard_port": taken}
    says = rf"Ray does not start on this machine \(.*{taken} .*dashboard_port.*its options are ray_kwargs.ray_init"
    with pytest.raises(RankFailed, match=says):
        ray_group([Pool(1, 1)], "cpu", 1, tmp_path, options=options)


@pytest.mark.slow
def test_the_doctor_says_that_there_is_no_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("COLUMNS", "300")
    show_doctor()
    assert "RAY_ADDRESS=127.0.0.1:1: trainer.nnodes=2: no Ray cluster to join" in capsys.readouterr().out


def test_nodes_with_other_versions_are_named() -> None:
    mine = this_process()
    check_versions(mine, [mine, mine])
    other = replace(mine, host="beside", versions={**mine.versions, "torch": "1.0"})
    with pytest.raises(RankFailed, match=r"^nodes with other versions: beside has torch 1.0, .* has 2"):
        check_versions(mine, [mine, other, other])

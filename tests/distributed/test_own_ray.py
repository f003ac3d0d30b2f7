"""A Ray that the user started, for a sweep or in a notebook, is used and outlives the run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.parts import NEEDS_RAY, make
from tether.runtime.ranks import Pool, RankFailed

pytestmark = NEEDS_RAY


def pid_of_a_rank(logs: Path, **options: Any) -> int:
    """Start a rank, ask it, and end it."""
    from tether.distributed.ray_group import RayGroup, is_local

    assert not is_local(1, {})
    group = RayGroup([Pool(1, 1)], "cpu", 1, logs, options=options)
    try:
        group.build(make)
        found: int = group.call("part", "pid", [()])[0]
        return found
    finally:
        group.close()


@pytest.fixture
def own_ray() -> Iterator[Any]:
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=2**27)
    yield ray
    ray.shutdown()


def test_it_is_used_and_outlives_the_ranks(own_ray: Any, tmp_path: Path) -> None:
    kept = own_ray.put([1, 2, 3])
    assert pid_of_a_rank(tmp_path) > 0
    assert own_ray.get(kept) == [1, 2, 3]
    inside = own_ray.remote(pid_of_a_rank).options(num_cpus=1)  # a task, as a trial of Tune is one
    assert own_ray.get(inside.remote(tmp_path / "task", address="auto")) > 0
    assert own_ray.get(own_ray.remote(lambda: 7).options(num_cpus=1).remote()) == 7
    with pytest.raises(RankFailed, match=r"^ray_kwargs.ray_init.num_cpus=4: .* connected to Ray already"):
        pid_of_a_rank(tmp_path, num_cpus=4)
    assert own_ray.is_initialized()

"""A process of environments that ends while the policy learns, so that the checkpoint is the first to notice."""

import numpy as np
import psutil
import pytest

from tests.control.envs import toys

pytest.importorskip("gymnasium")
NOTHING = np.zeros((3, 1), dtype=np.int64)


def test_a_checkpoint_leaves_out_what_a_dead_process_held():
    """An error here would end the run with nothing saved."""
    from tether.control.envs.make import EnvOptions, make_vector_env

    toys.register()
    options = EnvOptions("tether/Countdown-v0", 3, vectorization="subprocess", num_workers=2)
    env, other = make_vector_env(options), make_vector_env(options)
    try:
        env.reset(0)
        env.step(NOTHING)
        (worker,) = psutil.Process(env._workers[1].process._guard).children()
        worker.kill()
        worker.wait(30)
        state = env.get_state()
        assert [
            reason.startswith("environments 1 to 2, whose process was killed by SIGKILL") for reason in state.left_out
        ] == [True]
        with pytest.warns(RuntimeWarning, match="is replaced"):  # as episodes begin after such a checkpoint
            env.reset(3)
        assert env.step(NOTHING).reward.tolist() == [1, 1, 1]
        other.set_state(state.data)
        other.reset(3)
        assert other.step(NOTHING).reward.tolist() == [1, 1, 1]
    finally:
        env.close()
        other.close()

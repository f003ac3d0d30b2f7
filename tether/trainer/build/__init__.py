"""From a configuration to a run: the only package that reads the configuration.

Everything cheap is checked before anything expensive is loaded: paths, data and rewards (`inputs`), then the weights
(`learners`), then all of it is put together (`run`).
"""

from tether.trainer.build.run import Run, build_run
from tether.trainer.build.standalone import build_critic_pretraining, build_evaluator, build_generator

__all__ = ["Run", "build_critic_pretraining", "build_evaluator", "build_generator", "build_run"]

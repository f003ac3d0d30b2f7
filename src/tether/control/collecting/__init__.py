"""Collects experience from environments, evaluates policies, records demonstrations and videos.

`EnvCollector` plays the steps of a rollout, `evaluate` full episodes.
"""

from tether.control.collecting.collector import EnvCollector, episode_metrics
from tether.control.collecting.evaluation import evaluate

__all__ = ["EnvCollector", "episode_metrics", "evaluate"]

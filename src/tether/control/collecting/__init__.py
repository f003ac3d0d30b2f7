"""Collects experience from environments, evaluates policies and records videos.

`EnvCollector` (`collector`) plays the steps of a rollout, `evaluate` (`evaluation`) complete episodes.
"""

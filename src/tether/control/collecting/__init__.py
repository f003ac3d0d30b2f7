"""Collects experience from environments, evaluates policies, records demonstrations and videos.

`EnvCollector` (`collector`) plays the steps of a rollout, `evaluate` (`evaluation`) full episodes.
"""

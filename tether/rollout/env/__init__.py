"""Collects experience from environments, evaluates policies, records demonstrations and videos."""

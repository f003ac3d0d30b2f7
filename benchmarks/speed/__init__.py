"""Shared by the speed tables: timing, workloads, peers in environments of their own, and how a table looks."""

"""Signals, supervised processes, devices, threads, huge pages and files that users name."""

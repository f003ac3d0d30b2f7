"""Processes, signals, devices, threads, random state, the terminal and files that users name.

The modules are independent of each other and of training: import the one that you need.
"""

__all__ = [
    "cache",
    "channel",
    "deadline",
    "digits",
    "disk",
    "event_loop",
    "file_lock",
    "global_rng",
    "guard",
    "http",
    "hubs",
    "huge_pages",
    "hugging_face",
    "install",
    "interrupt",
    "late_calls",
    "machine",
    "modelscope",
    "objects",
    "package_warnings",
    "printable",
    "profiling",
    "program",
    "ranks",
    "rendezvous",
    "run_lock",
    "standard_streams",
    "supervised",
    "terminal",
    "threads",
    "user_files",
    "worker_pool",
]

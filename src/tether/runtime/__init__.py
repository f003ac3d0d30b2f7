"""Processes, signals, devices, threads, random state, the terminal and files that users name.

A toolbox without a common subject: import the module that you need. None of them knows anything of training.
"""

__all__ = [
    "cache",
    "channel",
    "deadline",
    "digits",
    "disk",
    "event_loop",
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

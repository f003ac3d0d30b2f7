"""How memory reaches a process: in large pages, since a training step allocates and frees gigabytes.

Every activation is a fresh allocation, and the kernel hands it out page by page at first touch. In pages of 4 KiB that
can take longer than the arithmetic, on virtual machines above all. glibc asks for pages of 2 MiB if a tunable says so,
and keeps what a step frees for the next one; it reads its tunables once, when the process starts.
"""

from __future__ import annotations

import os
import sys

TUNABLES = "GLIBC_TUNABLES"
SETTINGS = {
    TUNABLES: ":".join(
        [
            "glibc.malloc.hugetlb=1",
            f"glibc.malloc.mmap_threshold={1 << 25}",  # the most it takes; a larger block is given back when freed
            f"glibc.malloc.trim_threshold={1 << 34}",  # free memory under which none of the rest is given back
        ]
    ),
    "THP_MEM_ALLOC_ENABLE": "1",  # torch's own allocator likewise
}
"""Environment variables, read when a process starts."""


def restart_with_huge_pages() -> None:
    """Start this very command again with the tunable set; does nothing where it is set or where it would not act.

    Call it before anything is loaded. A user's own ``GLIBC_TUNABLES`` is left alone.
    """
    if sys.platform != "linux" or TUNABLES in os.environ:
        return
    os.environ |= SETTINGS
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

"""Memory in pages of 2 MiB, for a training step that allocates and frees gigabytes.

Every activation is a fresh allocation, and the kernel maps it page by page at first touch. With pages of 4 KiB that can
take longer than the arithmetic, on virtual machines above all. glibc asks for pages of 2 MiB if a tunable says so,
and keeps what a step frees for the next one; it reads its tunables once, when the process starts.
"""

from __future__ import annotations

import os
import sys

SWITCH = "TETHER_HUGE_PAGES"
TUNABLES = "GLIBC_TUNABLES"
SETTINGS = {
    TUNABLES: ":".join(
        [
            "glibc.malloc.hugetlb=1",
            f"glibc.malloc.mmap_threshold={1 << 25}",  # the maximum; a larger block is returned when freed
            f"glibc.malloc.trim_threshold={1 << 34}",  # free memory below which nothing else is returned
        ]
    ),
    "THP_MEM_ALLOC_ENABLE": "1",  # the same for torch's own allocator
}
"""Environment variables, read when a process starts."""


def restart_with_huge_pages() -> None:
    """Re-execute this command with the tunable set, if ``TETHER_HUGE_PAGES=1`` asks for it.

    Call it before anything is loaded. A user's own ``GLIBC_TUNABLES`` is left alone.
    """
    if os.environ.get(SWITCH) != "1" or sys.platform != "linux" or TUNABLES in os.environ:
        return
    os.environ |= SETTINGS
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

"""Memory pages of 2 MiB, for training steps that allocate and free gigabytes.

Every activation is a new allocation, which the kernel maps page by page at first touch. With pages of 4 KiB this can
take longer than the arithmetic, especially on virtual machines. Tunables, which glibc reads when the process starts,
make it request pages of 2 MiB and keep freed memory for the next step.
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
            f"glibc.malloc.mmap_threshold={1 << 25}",  # the maximum; larger blocks are unmapped when freed
            f"glibc.malloc.trim_threshold={1 << 34}",  # keep up to this much free memory
        ]
    ),
    "THP_MEM_ALLOC_ENABLE": "1",  # the same for torch's allocator
}
"""Environment variables that are read when a process starts."""


def restart_with_huge_pages() -> None:
    """Re-execute this command with the tunables if ``TETHER_HUGE_PAGES=1`` is set.

    It must be called before other modules are imported. A user's own ``GLIBC_TUNABLES`` is not changed.
    """
    if os.environ.get(SWITCH) != "1" or sys.platform != "linux" or TUNABLES in os.environ:
        return
    os.environ |= SETTINGS
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

"""The seccomp filter of a sandbox, which denies system calls.

Namespaces and limits leave gaps: memory that no process maps (SysV segments, memfd, pages in pipes, access control
lists of files, kernel tables with a size that the program chooses), sockets, nested namespaces, locks and notifications
on files of the machine, and kernel interfaces with a history of exploitable bugs.
"""

from __future__ import annotations

import errno
import platform
import struct

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Numbers on x86_64 and on aarch64. Recent system calls have the same number on all architectures.
_DENIED = {
    "socket": (41, 198), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "kcmp": (312, 272), "unshare": (272, 97),
    "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "open_by_handle_at": (304, 265), "io_setup": (206, 0), "flock": (73, 32), "vmsplice": (278, 75),
    "inotify_init": (253, 26), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
}  # fmt: skip
# These fail as on a kernel without them, for which libc has a fallback. A filter can check clone's flags, but not
# clone3's.
_ABSENT = {"clone3": (435, 435), "io_uring_setup": (425, 425), "landlock_create_ruleset": (444, 444)}
_CLONE = (56, 220)
_NEW_NAMESPACES = 0x7E020000
_FCNTL = (72, 25)
_F_NOTIFY = 1026
_PRCTL = (157, 167)
_PR_FUTEX_HASH = 78  # one call can allocate a gigabyte of kernel memory
_MMAP = (9, 222)
_MAP_HUGETLB = 0x40000  # reserved pages of the machine, which do not count towards the size of a process
_X32 = 0x40000000  # system calls of the x32 ABI, with other numbers

_LOAD, _JUMP_EQUAL, _JUMP_FROM, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCH_AT = 0, 4
_ARGUMENTS_AT = (16, 24, 32, 40)
# System call, index of the argument, comparison, value.
_DENIED_ARGUMENTS = (
    (_CLONE, 0, _JUMP_SET, _NEW_NAMESPACES),
    (_FCNTL, 1, _JUMP_EQUAL, _F_NOTIFY),
    (_PRCTL, 0, _JUMP_EQUAL, _PR_FUTEX_HASH),
    (_MMAP, 3, _JUMP_SET, _MAP_HUGETLB),
)


def is_known_processor() -> bool:
    """Return whether there is a filter for the architecture of this machine."""
    return platform.machine() in _AUDIT_ARCH


def seccomp_filter(machine: str | None = None) -> bytes:
    """Return the filter as ``struct sock_filter[]`` for ``bwrap --seccomp``; by default for this machine."""
    machine = machine or platform.machine()
    column = list(_AUDIT_ARCH).index(machine)
    code = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_FROM, 0, 1, _X32),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
    ]
    for table, error in ((_DENIED, errno.EPERM), (_ABSENT, errno.ENOSYS)):
        for numbers in table.values():
            code += [(_JUMP_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ERROR | error)]
    for numbers, argument, comparison, value in _DENIED_ARGUMENTS:
        code += [
            (_JUMP_EQUAL, 0, 4, numbers[column]),
            (_LOAD, 0, 0, _ARGUMENTS_AT[argument]),
            (comparison, 0, 1, value),
            (_RETURN, 0, 0, _ERROR | errno.EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)

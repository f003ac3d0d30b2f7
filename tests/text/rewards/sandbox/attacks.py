"""Programs that try to get out of the sandbox, or to take more than their share.

Each prints ESCAPED where it succeeds. ``host`` is what `test_attacks.host` knows of the machine outside.
"""

HEAD = """
import ctypes, json, mmap, os, resource, signal, socket, subprocess, sys, threading, time
host = json.loads(sys.stdin.readline())
libc = ctypes.CDLL(None, use_errno=True)
def escaped(what=""):
    print("ESCAPED", what, flush=True)
def syscall(name, *arguments):
    if libc.syscall(host["calls"][name], *arguments) >= 0:
        escaped(name)
"""
EACH = """
import traceback
for name, body in {attacks!r}.items():
    if not (child := os.fork()):
        try:
            exec(body)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    print("over", name, flush=True)
"""
OUTSIDE = {
    "reads_a_file": "print(open(host['secret']).read()); escaped()",
    "reads_the_password_file": "open('/etc/passwd').read(); escaped()",
    "lists_home": "escaped(os.listdir('/root'))",
    "lists_the_work_folder": "escaped(os.listdir(host['folder']))",
    "reads_the_environment": "escaped() if host['mark'] in os.environ or len(os.environ) > 8 else None",
    "reads_the_environment_of_init": """
if host['mark'].encode() in open('/proc/1/environ', 'rb').read():
    escaped()
""",
    "reads_the_environments_of_others": """
for name in os.listdir('/proc'):
    if name.isdigit():
        try:
            if host['mark'].encode() in open(f'/proc/{name}/environ', 'rb').read():
                escaped(name)
        except OSError:
            pass
""",
    "sees_other_processes": "escaped() if len([n for n in os.listdir('/proc') if n.isdigit()]) > 4 else None",
    "goes_through_the_root_of_init": "escaped(os.listdir('/proc/1/root' + host['folder']))",
    "goes_through_its_working_folder": "escaped(os.listdir('/proc/1/cwd/../../..' + host['folder']))",
    "links_to_a_file": "os.symlink(host['secret'], '/tmp/link'); open('/tmp/link').read(); escaped()",
    "links_hard_to_a_file": "os.link('/usr/bin/env', '/tmp/env'); escaped()",
    "climbs_out_of_its_folder": "open('../' * 20 + host['secret']).read(); escaped()",
    "leaves_the_root": """
os.mkdir('/tmp/jail')
os.chroot('/tmp/jail')
os.chdir('../' * 20)
escaped()
""",
    "keeps_a_descriptor": """
for name in os.listdir('/proc/self/fd'):
    place = f'/proc/self/fd/{name}'
    if int(name) > 2 and os.path.exists(place) and not os.readlink(place).startswith('/proc/'):
        escaped(os.readlink(place))
""",
    "reads_a_disk": "os.mknod('/tmp/disk', 0o60600, os.makedev(8, 0)); escaped()",
    "reads_the_kernel_log": "escaped() if libc.klogctl(3, ctypes.create_string_buffer(4096), 4096) > 0 else None",
    "finds_a_folder_in_the_list_of_mounts": """
if host['folder'] in open('/proc/self/mountinfo').read():
    escaped()
""",
    "goes_through_its_own_root": "escaped(os.listdir('/proc/self/root' + host['folder']))",
    "opens_a_device": """
for name in os.listdir('/dev'):
    if name not in ('null', 'zero', 'full', 'random', 'urandom', 'ptmx', 'stdin', 'stdout', 'stderr'):
        try:
            os.close(os.open(f'/dev/{name}', os.O_RDWR | os.O_NONBLOCK))
            escaped(name)
        except OSError:
            pass
""",
    "is_told_what_the_machine_reads": "syscall('inotify_init1', 0)",
    "is_told_that_a_folder_is_read": """
import fcntl
fcntl.fcntl(os.open('/usr/bin', os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_ACCESS)
escaped()
""",
    "learns_the_host_name": "escaped() if socket.gethostname() == host['name'] else None",
}
WRITES = {
    "writes_a_file_outside": "open(host['folder'] + '/written', 'w').write('x'); escaped()",
    "writes_to_usr": "open('/usr/written', 'w').write('x'); escaped()",
    "writes_to_the_root": "open('/written', 'w').write('x'); escaped()",
    "writes_to_dev": "open('/dev/written', 'w').write('x'); escaped()",
    "changes_modes_of_usr": "os.chmod('/usr/bin/env', 0o777); escaped()",
    "remounts_usr": "escaped() if libc.mount(b'none', b'/usr', None, 32 | 4096, None) == 0 else None",
    "mounts_proc": "escaped() if libc.mount(b'proc', b'/tmp', b'proc', 0, None) == 0 else None",
    "unmounts_a_cover": "escaped() if libc.umount2(b'/tmp', 2) == 0 else None",
    "sets_the_core_pattern": "open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x'); escaped()",
    "pulls_the_sysrq_trigger": "open('/proc/sysrq-trigger', 'w').write('h'); escaped()",
    "truncates_a_program": "os.truncate('/usr/bin/env', 0); escaped()",
    "renames_a_program": "os.rename('/usr/bin/env', '/usr/bin/env2'); escaped()",
    "writes_to_its_interpreter": "open('/proc/self/exe', 'r+b'); escaped()",
    "marks_a_file_of_the_machine": "os.setxattr('/usr/bin/env', 'user.x', b'x'); escaped()",
    "spares_itself_when_memory_is_out": "os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-1'); escaped()",
    "sets_the_clock": "time.clock_settime(time.CLOCK_REALTIME, time.time()); escaped()",
    "raises_its_priority": "os.nice(-1); escaped()",
    "raises_its_limits": "resource.setrlimit(resource.RLIMIT_NPROC, (-1, -1)); escaped()",
}
POWERS = {
    "runs_before_all_others": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); escaped()",
    "signals_a_process_outside": "signal.pidfd_send_signal(os.pidfd_open(host['pid']), 9); escaped()",
    "swaps": "open('/tmp/x', 'wb').write(bytes(1 << 20)); escaped() if libc.swapon(b'/tmp/x', 0) == 0 else None",
    "keeps_no_accounts": "escaped() if libc.acct(None) == 0 else None",
    "becomes_root": "os.setuid(0); escaped()",
    "runs_a_setuid_program": "subprocess.run(['/usr/bin/su', '-c', 'true'], check=True, stdin=-3); escaped()",
    "makes_a_user_namespace": "escaped() if libc.unshare(0x10000000) == 0 else None",
    "clones_a_user_namespace": """
if (pid := libc.syscall(host['calls']['clone'], 0x10000000 | 17, 0, 0, 0, 0)) >= 0:
    escaped() if pid else os._exit(0)
""",
    "enters_a_namespace": "escaped() if libc.setns(os.open('/proc/1/ns/user', os.O_RDONLY), 0) == 0 else None",
    "traces_init": "escaped() if libc.ptrace(16, 1, 0, 0) == 0 else None",
    "writes_the_memory_of_init": "open('/proc/1/mem', 'r+b', 0); escaped()",
    "takes_asynchronous_io_of_the_machine": "syscall('io_setup', 1, ctypes.create_string_buffer(8))",
    "pins_pages_in_a_pipe": """
page = ctypes.create_string_buffer(4096)
part = (ctypes.c_size_t * 2)(ctypes.addressof(page), 1)
syscall('vmsplice', os.pipe()[1], part, 1, 0)
""",
    "locks_a_file_of_the_machine": "import fcntl; fcntl.flock(open('/usr/bin/env', 'rb'), fcntl.LOCK_EX); escaped()",
    "loads_a_kernel_program": "syscall('bpf', 0, 0, 0)",
    "asks_for_keys": "syscall('keyctl', 0, -3, 1)",
    "counts_events": "syscall('perf_event_open', ctypes.create_string_buffer(128), 0, -1, -1, 0)",
    "opens_a_ring": "syscall('io_uring_setup', 4, ctypes.create_string_buffer(512))",
    "handles_faults": "syscall('userfaultfd', 0)",
    "makes_rules_for_itself": "syscall('landlock_create_ruleset', (ctypes.c_uint64 * 2)(0, 3), 16, 0)",
    "takes_a_table_for_locks": "escaped() if libc.prctl(78, 1, ctypes.c_ulong(1 << 12), 0, 0) == 0 else None",
    "gives_a_folder_an_access_control_list": """
entries = b''.join(tag.to_bytes(2, 'little') + b'\\7\\0' + b'\\xff' * 4 for tag in (1, 4, 32))
os.setxattr('/tmp', 'system.posix_acl_access', b'\\2\\0\\0\\0' + entries)
escaped()
""",
    "takes_huge_pages": """
try:
    mmap.mmap(-1, 2 << 20, flags=0x40000 | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
except PermissionError:
    sys.exit()
except OSError:  # the machine keeps none
    pass
escaped()
""",
    "kills_a_process_outside": "os.kill(host['pid'], 9); escaped()",
    "opens_a_connection": "socket.create_connection(('127.0.0.1', host['port']), 1); escaped()",
    "opens_a_raw_socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); escaped()",
    "looks_up_a_name": "escaped(socket.gethostbyname('localhost.localdomain'))",
    "connects_to_a_unix_socket": "socket.socket(socket.AF_UNIX).connect('\\0' + host['mark']); escaped()",
}
# Name -> program, reasons that it may end for.
GREED = {
    "forks_without_end": (
        "while True:\n    try: os.fork()\n    except OSError: time.sleep(9)", "time memory"),
    "starts_threads_without_end": (
        "for n in range(200): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\nescaped()", "exit"),
    "sleeps": ("time.sleep(60); escaped()", "time"),
    "stops_itself": ("os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)", "time"),
    "spins": ("while True: pass", "time"),
    "spins_deaf": (
        "for n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "while True: pass", "time exit"),
    "closes_its_output_and_stays": ("os.close(1); os.close(2); time.sleep(60)", "time"),
    "takes_memory": ("x = bytearray(2 << 30); escaped()", "exit memory"),
    "takes_memory_bit_by_bit": ("x = []\nwhile True: x.append(bytearray(1 << 20))", "exit memory"),
    "takes_memory_for_its_stack": (
        "import functools\nf = functools.cache(lambda n: f(n + 1))\nsys.setrecursionlimit(1 << 30)\nf(0)\nescaped()",
        "exit memory"),
    "takes_shared_memory": (
        "m = mmap.mmap(-1, 1 << 30)\nfor n in range(0, 1 << 30, 4096): m[n] = 1\nescaped()", "memory"),
    "holds_shared_memory_that_it_gave_back": (
        "held = []\nfor n in range(128):\n    m = mmap.mmap(-1, 8 << 20)\n    m[:] = b'x' * (8 << 20)\n"
        "    m.madvise(mmap.MADV_DONTNEED)\n    held.append(m)\nescaped()", "memory"),
    "holds_pages_of_dev_zero_that_it_gave_back": (
        "held, zero = [], os.open('/dev/zero', os.O_RDWR)\nfor n in range(128):\n    m = mmap.mmap(zero, 8 << 20)\n"
        "    m[:] = b'x' * (8 << 20)\n    m.madvise(mmap.MADV_DONTNEED)\n    held.append(m)\nescaped()", "memory"),
    "takes_memory_in_many_processes": (
        "for n in range(8):\n    if not os.fork(): x = bytearray(b'x') * (100 << 20); time.sleep(60)\ntime.sleep(60)",
        "memory"),
    "takes_memory_when_its_main_thread_is_gone": (
        "def hog():\n    time.sleep(0.3)\n    m = mmap.mmap(-1, 512 << 20)\n"
        "    for n in range(0, 512 << 20, 4096): m[n] = 1\n"
        "    time.sleep(3)\n    escaped()\n    os._exit(0)\n"
        "threading.Thread(target=hog).start()\nsyscall('exit', 0)", "memory"),
    "takes_memory_in_many_processes_whose_main_threads_are_gone": (
        "def hog():\n    x = bytearray(b'x') * (100 << 20)\n    time.sleep(3)\n    escaped()\n    os._exit(0)\n"
        "for n in range(5):\n    if not os.fork():\n        threading.Thread(target=hog).start()\n"
        "        syscall('exit', 0)\ntime.sleep(5)", "memory"),
    "takes_memory_for_page_tables": (
        "m = mmap.mmap(-1, 1 << 40, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)\n"
        "with __import__('contextlib').suppress(OSError): m.madvise(15)\n"  # no huge pages
        "for at in range(0, 1 << 38, 1 << 21): m[at]\ntime.sleep(1)\nescaped()", "memory"),
    "takes_memory_in_sockets": (
        "held = []\nfor n in range(16):\n    if not os.fork(): break\nfor n in range(100):\n"
        "    held.append(socket.socketpair())\n    held[-1][0].setblocking(False)\n"
        "    try:\n        while True: held[-1][0].send(bytes(1 << 16))\n    except BlockingIOError: pass\n"
        "time.sleep(3)\nescaped()", "memory"),
    "takes_memory_of_the_kernel": ("syscall('shmget', 0, 1 << 20, 0o1600); syscall('memfd_create', b'x', 0)", "exit"),
    "fills_the_disk": ("f = open('/tmp/x', 'wb')\nwhile True: f.write(bytes(1 << 20))", "exit"),
    "fills_the_disk_with_many_files": (
        "for n in range(99): open(f'/tmp/{n}', 'wb').write(bytes(1 << 20))\nescaped()", "exit"),
    "fills_shared_memory_files": (
        "for n in range(99): open(f'/dev/shm/{n}', 'wb').write(bytes(1 << 20))\nescaped()", "exit"),
    "makes_files_without_end": ("n = 0\nwhile True: open(f'/tmp/{n}', 'w'); n += 1", "files"),
    "prints_100_mb": ("os.write(1, b'')\nfor n in range(100): print('x' * (1 << 20))\nescaped()", "output"),
    "prints_100_mb_of_errors": ("for n in range(100): sys.stderr.write('x' * (1 << 20))\nescaped()", "output"),
    "kills_its_parent": ("os.kill(os.getppid(), 9); os.kill(1, 9); time.sleep(60)", "time"),
    "kills_everything": ("os.kill(-1, 9); time.sleep(60)", "exit time"),
    "leaves_a_daemon": (
        "if os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\nos.close(0); os.close(1); os.close(2)\n"
        "time.sleep(60)", "exit"),
    "makes_timers_without_end": (
        "timer = ctypes.c_void_p()\nfor n in range(5000):\n"
        "    if libc.timer_create(1, None, ctypes.byref(timer)) < 0: sys.exit()\nescaped()", "exit"),
    "opens_files_without_end": ("f = [open('/dev/null') for n in range(9999)]; escaped()", "exit"),
}  # fmt: skip

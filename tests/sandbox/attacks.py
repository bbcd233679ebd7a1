"""Programs that attack a box from inside. Each prints or returns something only when it has succeeded."""

from __future__ import annotations

CALLS = r"""
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in arguments])
    return result, ctypes.get_errno()
numbers = dict(ptrace=101, process_vm_readv=310, unshare=272, mount=165, io_uring_setup=425, bpf=321,
    userfaultfd=323, perf_event_open=298, keyctl=250, open_by_handle_at=304, setns=308, kexec_load=246,
    add_key=248, fsopen=430, clone3=435, pidfd_getfd=438, syslog=103, init_module=175, sched_setaffinity=203)
arguments = dict(unshare=(0x10000000,), sched_setaffinity=(0, 0, 0))
if os.uname().machine == "x86_64":
    for name, number in numbers.items():
        result, error = call(number, *arguments.get(name, (0, 0, 0, 0, 0)))
        if error not in (errno.EPERM, errno.ENOSYS):
            print("reached", name, result, error)
"""

SOCKETS = r"""
import socket
for family in (40, 17, 21, 38):
    try:
        socket.socket(family, socket.SOCK_DGRAM)
        print("made", family)
    except OSError as error:
        if error.errno != 97:
            print("not refused by the filter:", family, error)
"""

FORKS = r"""
import os, time
made = 0
for _ in range(150):
    try:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
    except OSError:
        break
    made += 1
print(made)
"""

MEMORY = r"""
import os, mmap
handle = os.memfd_create("bomb")
block = b"x" * (1 << 20)
for number in range(400):
    os.write(handle, block)
print("bomb went off")
"""

ANONYMOUS_MEMORY = r"""
held = [bytearray(b"x" * (1 << 20)) for _ in range(700)]
print("bomb went off")
"""

CONNECT = (
    "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 2); print('connected')"
)

ABSTRACT = (
    "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + sys.argv[1]);"
    " print('connected')"
)

LIAR = "import time; time.time = time.monotonic = time.perf_counter = lambda: 0.0; time.sleep(0.4)"
INSIDE_TIMER = """
import runpy, time
started = time.time()
runpy.run_path("solution.py")
print(max(time.time() - started, 0.0))
"""

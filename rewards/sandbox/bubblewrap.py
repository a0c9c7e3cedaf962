"""The command line that runs Python in a sandbox of bubblewrap; only its output leaves the sandbox.

User, process, network, IPC, host name and mount namespaces of its own; an empty read-only root with the interpreter,
its standard library and the shared libraries that they need; 16 MiB in /tmp; no /proc, no environment; it dies with
the process that has started it. A seccomp filter forbids new processes and the system calls by which memory escapes a
limit or the kernel is attacked.
"""

import contextlib
import functools
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ISOLATED = ("-I", "-S", "-B")
"""Without environment, installed packages, the current folder and written bytecode."""
TMP_BYTES = 16 * 2**20
INSTALL = "install bubblewrap 0.7 or later (Debian, Ubuntu, Fedora: the package bubblewrap)"
UNSAFE = "or type kwargs.sandbox=none for it, to run what a model wrote with all your rights"
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of `FORBIDDEN` and number in seccomp filters (linux/audit.h) by the name of the architecture."""
PROCESSES = {"fork": (57, None), "vfork": (58, None), "execveat": (322, 281), "ptrace": (101, 117)}
PROCESSES |= {"process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438)}
MEMORY = {"shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "memfd_create": (319, 279)}
MEMORY |= {"memfd_secret": (447, 447), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)}
ATTRIBUTES = {"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463)}
MOUNTS = {"unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41)}
MOUNTS |= {"open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430)}
KERNEL = {"bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425)}
FORBIDDEN: dict[str, tuple[int | None, int | None]] = {**PROCESSES, **MEMORY, **ATTRIBUTES, **MOUNTS, **KERNEL}
"""Numbers of system calls on x86_64 and on aarch64, which has no fork of its own (linux/unistd.h)."""
CLONE = (56, 220)
CLONE3 = 435
CLONE_THREAD = 0x10000


@contextlib.contextmanager
def sandboxed(program: str, *arguments: str) -> Iterator[tuple[list[str], int]]:
    """Yield the command line that runs a program of this folder in a sandbox, and a file that it has to inherit."""
    namespaces = ["--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    files = [option for path in needed() for option in ("--ro-bind", path, path)]
    packages = [str(Path(sysconfig.get_path("stdlib"), name)) for name in ("site-packages", "dist-packages")]
    hidden = [option for path in packages if Path(path).is_dir() for option in ("--tmpfs", path, "--remount-ro", path)]
    place = ["--ro-bind", str(HERE), "/sandbox", "--size", str(TMP_BYTES), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    python = [os.path.realpath(sys.executable), *ISOLATED, f"/sandbox/{program}", *arguments]
    with os.fdopen(os.memfd_create("seccomp"), "w+b") as filter_file:
        filter_file.write(seccomp_filter(platform.machine()))
        filter_file.seek(0)
        life = ["--die-with-parent", "--new-session", "--clearenv", "--seccomp", str(filter_file.fileno())]
        line = ["bwrap", *namespaces, *life, *files, *hidden, *place, "--remount-ro", "/", "--", *python]
        yield line, filter_file.fileno()


@functools.cache
def needed() -> list[str]:
    """Return the interpreter, its standard library and the shared libraries that they load."""
    interpreter, library = os.path.realpath(sys.executable), sysconfig.get_path("stdlib")
    extensions = [str(path) for path in Path(library, "lib-dynload").glob("*.so")]
    ldd = shutil.which("ldd", path=os.defpath) or "ldd"
    output = subprocess.run([ldd, interpreter, *extensions], capture_output=True, text=True, check=False).stdout
    libraries = set(re.findall(r"(/\S+) \(0x", output))
    return [interpreter, library, *sorted(path for path in libraries if not path.startswith(library))]


def seccomp_filter(machine: str) -> bytes:
    """Return the filter as the kernel reads it: instructions of 8 bytes (linux/filter.h, seccomp(2))."""
    load, equal, at_least, bits, end = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, deny, unknown, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000  # EPERM, ENOSYS

    def bpf(code: int, if_true: int, if_false: int, value: int) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    column, number = ARCHITECTURES[machine]
    forbidden = [call for numbers in FORBIDDEN.values() if (call := numbers[column]) is not None]
    start = [bpf(load, 0, 0, 4), bpf(equal, 1, 0, number), bpf(end, 0, 0, kill), bpf(load, 0, 0, 0)]
    other_abi = [bpf(at_least, 0, 1, 0x40000000), bpf(end, 0, 0, kill)]  # x32's numbers
    calls = [part for call in forbidden for part in (bpf(equal, 0, 1, call), bpf(end, 0, 0, deny))]
    clone3 = [bpf(equal, 0, 1, CLONE3), bpf(end, 0, 0, unknown)]  # libc then uses clone, whose flags can be read
    clone = [bpf(equal, 0, 3, CLONE[column]), bpf(load, 0, 0, 16), bpf(bits, 1, 0, CLONE_THREAD), bpf(end, 0, 0, deny)]
    return b"".join([*start, *other_abi, *calls, *clone3, *clone, bpf(end, 0, 0, allow)])


def check() -> None:
    """Try the sandbox with a program that does nothing.

    Raises:
        ValueError: it cannot run here; a line with the reason and the remedies.
    """
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ARCHITECTURES:
        raise ValueError(f"no sandbox for {system} on {machine}; use Linux on x86_64 or aarch64, {UNSAFE}")
    if not shutil.which("bwrap"):
        raise ValueError(f"the program bwrap is missing: {INSTALL}, {UNSAFE}")
    with sandboxed("wire.py") as (line, descriptor):
        try:
            done = subprocess.run(line, pass_fds=[descriptor], capture_output=True, text=True, check=False, timeout=60)
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"bubblewrap makes no sandbox within 60 s: {UNSAFE}") from error
    if done.returncode:
        reason = " ".join(done.stderr.split()[-30:]) or f"status {done.returncode}"
        raise ValueError(f"bubblewrap makes no sandbox here ({reason}): {INSTALL}, allow user namespaces, {UNSAFE}")

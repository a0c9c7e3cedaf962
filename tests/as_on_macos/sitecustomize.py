"""Python as on macOS: without the calls of Linux alone, if AS_ON_MACOS is set and this folder is first on the path.

What the standard library and psutil decide by `sys.platform` when they are imported stays Linux's, which runs it.
"""

import contextlib
import multiprocessing.connection
import multiprocessing.reduction  # noqa: F401
import os
import signal
import subprocess  # noqa: F401
import sys
import sysconfig
import urllib.request  # noqa: F401

with contextlib.suppress(ImportError):  # of a sandbox, which has none
    import psutil  # noqa: F401

sysconfig.get_config_vars()  # in a file that Linux has
OF_LINUX = {
    os: ("memfd_create", "pidfd_open", "sched_getaffinity", "sched_setscheduler", "waitid"),
    signal: ("sigtimedwait", "sigwaitinfo", "pidfd_send_signal"),
}
if os.environ.get("AS_ON_MACOS"):
    for module, names in OF_LINUX.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    sys.platform = "darwin"

"""Three machines: network namespaces of this one, which cannot resolve names, on a virtual switch.

Needs root and iproute2.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2", "10.77.0.3")
NODES = [f"grpo{os.getpid()}{letter}" for letter in "abc"]
SWITCH = f"grpo{os.getpid()}s"
CABLE = [f"g{os.getpid()}{letter}" for letter in "abc"]
RENDEZVOUS = f"{ADDRESSES[0]}:29500"


def ip(*words: str) -> bool:
    """Run a command of iproute2; return whether it did it."""
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0


def on(node: int) -> tuple[str, ...]:
    """The command that runs another one on a machine."""
    return ("ip", "netns", "exec", NODES[node])


def plug(node: int) -> bool:
    """Connect a machine with the switch; return whether that is possible here."""
    ends = ["netns", NODES[node], "type", "veth", "peer", f"port{node}", "netns", SWITCH]
    return (
        ip("link", "add", CABLE[node], *ends)
        and ip("-n", SWITCH, "link", "set", f"port{node}", "up", "master", "switch")
        and ip("-n", NODES[node], "addr", "add", f"{ADDRESSES[node]}/24", "dev", CABLE[node])
        and ip("-n", NODES[node], "link", "set", CABLE[node], "up")
    )


@contextmanager
def three_machines() -> Iterator[None]:
    """While inside, there are machines; tests are skipped where they cannot be made."""
    if not (shutil.which("ip") and ip("netns", "add", SWITCH)):
        pytest.skip("no rights to add network namespaces")
    settings = [Path("/etc/netns") / name for name in NODES]
    try:
        if not ip("-n", SWITCH, "link", "add", "switch", "up", "type", "bridge"):
            pytest.skip("no virtual switches")
        for node, (folder, name) in enumerate(zip(settings, NODES, strict=True)):
            ip("netns", "add", name)
            folder.mkdir(parents=True)
            (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # an answer at once: nobody is there
            ip("-n", name, "link", "set", "lo", "up")
            if not plug(node):
                pytest.skip("no virtual cables")
        yield
    finally:
        for folder, name in zip(settings, NODES, strict=True):
            ip("netns", "delete", name)
            shutil.rmtree(folder, ignore_errors=True)
        ip("netns", "delete", SWITCH)

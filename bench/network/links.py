"""Hosts on one Linux machine: network namespaces with rate-limited links to a switch. Needs root, ip and tc.

Names contain the process's id, so that runs do not collide. All links are full duplex and limited at both ends.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Self

HOSTS_FILES = Path("/etc/netns")  # `ip netns exec NAME` shows HOSTS_FILES/NAME/hosts as /etc/hosts
INTERFACE = "v0"  # of every host
# Bytes that pass at once after a pause. With fewer, the kernel splits large packets and the CPU becomes the limit.
BURST = {100: 64 * 1024}
LARGE_BURST = 256 * 1024


def why_not() -> str | None:
    """Why no network can be built here. None if one can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    return f"{' and '.join(missing)} (package iproute2) not found" if missing else None


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


class Network:
    """A context: `hosts` namespaces around a switch, removed on exit."""

    def __init__(self, hosts: int):
        self._switch = f"gcjax-{os.getpid()}-switch"
        self._hosts = [f"gcjax-{os.getpid()}-{i}" for i in range(hosts)]
        self._rate: int | None = None

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for name in (*self._hosts, self._switch):
            remove(name)

    def _build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "name", "switch", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "switch", "up")
        for i, name in enumerate(self._hosts):
            # gloo announces the address of the machine's name: in each namespace this must be its link's address.
            (HOSTS_FILES / name).mkdir(parents=True)
            (HOSTS_FILES / name / "hosts").write_text(f"127.0.0.1 localhost\n{address(i)} {socket.gethostname()}\n")
            _run("ip", "netns", "add", name)
            peer = ("peer", "name", INTERFACE, "netns", name)
            _run("ip", "-n", self._switch, "link", "add", "name", f"port{i}", "type", "veth", *peer)
            _run("ip", "-n", self._switch, "link", "set", f"port{i}", "master", "switch", "up")
            _run("ip", "-n", name, "address", "add", f"{address(i)}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def inside(self, host: int) -> list[str]:
        """The prefix that makes a command run on a host."""
        return ["ip", "netns", "exec", self._hosts[host]]

    def limit(self, mbit: int | None) -> None:
        """Set the rate of all links in both directions, in Mbit/s. None: no limit."""
        for i, name in enumerate(self._hosts):
            for namespace, device in ((name, INTERFACE), (self._switch, f"port{i}")):
                if mbit is not None:
                    bucket = ("rate", f"{mbit}mbit", "burst", str(BURST.get(mbit, LARGE_BURST)), "latency", "400ms")
                    _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *bucket)
                elif self._rate is not None:
                    _run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
        self._rate = mbit


def remove(name: str) -> None:
    """Remove a namespace, its processes and its hosts file, as far as they exist."""
    if (Path("/run/netns") / name).exists():
        for process in _run("ip", "netns", "pids", name).split():
            os.kill(int(process), signal.SIGKILL)
        _run("ip", "netns", "del", name)
    shutil.rmtree(HOSTS_FILES / name, ignore_errors=True)
    if HOSTS_FILES.exists() and not any(HOSTS_FILES.iterdir()):
        HOSTS_FILES.rmdir()


def remove_of(process: int) -> None:
    """Remove what the run with this process id has made."""
    for name, owner in _made().items():
        if owner == process:
            remove(name)


def remove_leftovers() -> list[str]:
    """Remove what dead runs have left, and return the names."""
    left = [name for name, owner in _made().items() if not _runs_benchmark(owner)]
    for name in left:
        remove(name)
    return left


def _made() -> dict[str, int]:
    """Names of this benchmark's namespaces and hosts files, with the ids of the processes that made them."""
    folders = [folder for folder in (Path("/run/netns"), HOSTS_FILES) if folder.exists()]
    names = sorted({entry.name for folder in folders for entry in folder.iterdir()})
    owners = {name: re.fullmatch(r"gcjax-(\d+)-\w+", name) for name in names}
    return {name: int(owner[1]) for name, owner in owners.items() if owner}


def _runs_benchmark(process: int) -> bool:
    """Whether the process is alive and is a benchmark with hosts: ids are reused."""
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False
    return re.search(rb"bench[./]network(/|/__main__\.py)?\0", command) is not None


def _run(*command: str) -> str:
    # In a session of its own: Ctrl-C in a terminal reaches the whole session and must not stop the removal.
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout

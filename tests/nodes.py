"""
Nodes of a cluster on this machine: each a host by its name, which can be killed as a whole.

Where we may make network namespaces, each node has one, with an address of its own on a bridge, and so its own ports
and its own loopback; where we may not, the nodes share this machine's loopback.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import psutil

from tests.prefect_service import started
from virnucpro.this_host import HOST_NAME_VARIABLE

END_LIMIT_S = 20.0


@dataclass(frozen=True)
class Node:
    """A host of a cluster: whatever runs on it has its name in the environment."""

    name: str
    address: str
    enter: tuple[str, ...] = ()
    """What a command starts with to run there."""

    def run(self, command, log, environ, *, sees=()):
        """
        Start a program on the node, as a context manager.

        Args:
            command: Of the program.
            log: File of what it says.
            environ: Its environment.
            sees: Pairs of what its file system differs in: (path, what is seen there instead), or (path, None) for a
                folder that cannot be written.
        """
        enter = list(self.enter)
        if sees:
            enter += ["unshare", "--mount", "sh", "-c", _mounts(sees), "sh"]
        return started([*enter, *command], log, cwd=log.parent, environ={**environ, HOST_NAME_VARIABLE: self.name})

    def processes(self):
        """Return the processes of the node."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(HOST_NAME_VARIABLE) == self.name:
                    found.append(process)
        return found

    def kill(self):
        """End every process of the node, as a power cut would."""
        while processes := self.processes():  # those that were starting others have done so
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=END_LIMIT_S)


@dataclass(frozen=True)
class Network:
    """Where the nodes are, and the address at which they reach the process that started them."""

    address: str
    nodes: tuple[Node, ...]
    is_real: bool
    """Whether each node has a network namespace."""


@contextmanager
def network(*names):
    """Make a node for each name (with our number after it: tests run side by side); kill what is left on them."""
    names = [f"{name}-{os.getpid()}" for name in names]
    with ExitStack() as stack:
        if may_make_namespaces():
            yield stack.enter_context(_namespaces(names))
        else:
            nodes = tuple(Node(name, "127.0.0.1") for name in names)
            yield Network("127.0.0.1", nodes, is_real=False)


def may_make_namespaces():
    """Whether we can make network namespaces: a tool is there, and it is allowed."""
    name = f"vnp-try-{os.getpid()}"
    if shutil.which("ip") is None or _ip("netns", "add", name).returncode:
        return False
    with ExitStack() as stack:
        stack.callback(_ip, "netns", "del", name)
        bridge = f"vt{os.getpid()}"
        if _ip("link", "add", bridge, "type", "bridge").returncode:
            return False
        _ip("link", "del", bridge)
    return True


@contextmanager
def _namespaces(names):
    number = os.getpid()
    subnet, bridge = f"10.{200 + number % 50}.{number // 50 % 250}", f"vb{number}"
    with ExitStack() as stack:
        _must("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _must("addr", "add", f"{subnet}.254/24", "dev", bridge)
        _must("link", "set", bridge, "up")
        nodes = []
        for count, name in enumerate(names, 1):
            space, outer, inner = f"vnp-{name}", f"vo{count}-{number}", f"vi{count}-{number}"
            _must("netns", "add", space)
            stack.callback(_ip, "netns", "del", space)
            _must("link", "add", outer, "type", "veth", "peer", "name", inner)
            _must("link", "set", outer, "master", bridge, "up")
            _must("link", "set", inner, "netns", space)
            address = f"{subnet}.{count}"
            for arguments in (
                ("addr", "add", f"{address}/24", "dev", inner),
                ("link", "set", inner, "up"),
                ("link", "set", "lo", "up"),
                ("route", "add", "default", "via", f"{subnet}.254"),
            ):
                _must("-n", space, *arguments)
            nodes.append(Node(name, address, ("ip", "netns", "exec", space)))
            stack.callback(nodes[-1].kill)
        yield Network(f"{subnet}.254", tuple(nodes), is_real=True)


def _mounts(sees):
    """Return a shell's words that change what it sees, and then become its arguments."""
    lines = ["mount --make-rprivate /"]
    for path, other in sees:
        lines.append(f"mount --bind '{other or path}' '{path}'")
        if other is None:
            lines.append(f"mount -o remount,ro,bind '{path}'")
    return " && ".join([*lines, 'exec "$@"'])


def _ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)


def _must(*arguments):
    done = _ip(*arguments)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"

"""What the machine and this process's place in it allow: limits, NUMA nodes, networks, IOMMU, drivers.

Everything is read from files that any user may read, under a root that a test can make. What isn't there or can't
be read (another system, a container that hides it, no permission) is None or empty; nothing is raised.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

__all__ = ["Network", "Surroundings", "Xid", "read_surroundings"]

_NVIDIA = "0x10de"
_DISPLAYS = ("0x0300", "0x0302")
"""PCI classes of cards that draw, and of those that only compute."""
_ACS = 0x000D
"""The PCIe capability Access Control Services."""
_ACS_REDIRECTS = 0x1C
"""Its bits that send requests between devices through the host: P2P request and completion redirect, upstream
forwarding."""
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): ([0-9]+),?([^\n]*)")
_MOST_MESSAGES = 100_000
_SHADOWING = ("libnccl.so", "libcudnn.so", "libcublas.so", "libcudart.so")
"""Libraries of torch's own that a folder in LD_LIBRARY_PATH can stand in for."""


@dataclass(frozen=True)
class Network:
    """A network interface."""

    name: str
    up: bool
    address: str | None = None
    """Its IPv4 address, or the IPv6 one where it has no other."""
    bridge: bool = False
    """Whether it only joins containers or virtual machines of this host."""

    @property
    def loopback(self) -> bool:
        """Whether it reaches this machine alone."""
        return self.name == "lo" or (self.address or "").startswith("127.")


@dataclass(frozen=True)
class Xid:
    """An error that the driver has written into the kernel's log."""

    code: int
    bus: str
    """The card's place on the PCI bus, such as ``0000:1b:00``."""
    text: str = ""
    """What follows the code."""


@dataclass(frozen=True)
class Surroundings:
    """What limits this process and its cards, beside the cores and memory of `Host`."""

    open_files: int | None = None
    """How many files this process may have open (the soft limit, ``ulimit -n``)."""
    open_files_most: int | None = None
    """How far it may raise that by itself (the hard limit); None for no limit."""
    locked_memory: int | None = None
    """Bytes it may lock in memory; None for no limit."""
    cpus: frozenset[int] = frozenset()
    """Logical cores it may run on."""
    nodes: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """NUMA node -> its logical cores."""
    governor: str | None = None
    """How the host chooses the cores' clocks, such as ``performance`` or ``powersave``."""
    iommu: str | None = None
    """``off``, ``passthrough`` or ``translating``."""
    acs: tuple[str, ...] | None = None
    """PCIe bridges that send traffic between cards through the host; None where that can't be read."""
    virtual: bool | None = None
    """Whether this is a virtual machine."""
    networks: tuple[Network, ...] = ()
    infiniband: tuple[str, ...] = ()
    """InfiniBand or RoCE devices with an active port."""
    name_resolves: bool | None = None
    """Whether the host's own name has an address."""
    cards_on_bus: int = 0
    """NVIDIA cards on the PCI bus, whether or not a driver has them."""
    nccl_files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """NCCL's configuration files that are there -> what they set."""
    xids: tuple[Xid, ...] = ()
    """The driver's errors since the machine started, as far as the kernel's log may be read and still has them."""
    shadowing: tuple[str, ...] = ()
    """Libraries in LD_LIBRARY_PATH or LD_PRELOAD that can stand in for torch's own."""


def read_surroundings(root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> Surroundings:
    """Read what surrounds this process.

    Args:
        root: where ``sys``, ``proc`` and ``etc`` are.
        environment: the process's variables; its own by default.
    """
    environment = os.environ if environment is None else environment
    files, most, locked = _read_limits()
    system = root / "sys"
    return Surroundings(
        open_files=files,
        open_files_most=most,
        locked_memory=locked,
        cpus=frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset(),
        nodes=_read_nodes(system / "devices/system/node"),
        governor=_text(system / "devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        iommu=_read_iommu(root),
        acs=_read_acs(system / "bus/pci/devices"),
        virtual=_read_virtual(root / "proc/cpuinfo"),
        networks=_read_networks(system / "class/net"),
        infiniband=_read_infiniband(system / "class/infiniband"),
        name_resolves=_own_name_resolves(),
        cards_on_bus=_count_cards(system / "bus/pci/devices"),
        nccl_files=_read_nccl_files(root, environment),
        xids=_read_xids(root / "dev/kmsg"),
        shadowing=_find_shadowing(environment),
    )


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read_limits() -> tuple[int | None, int | None, int | None]:
    try:
        import resource
    except ImportError:  # not a Unix
        return None, None, None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]

    def number(value: int) -> int | None:
        return None if value == resource.RLIM_INFINITY else value

    return number(soft), number(hard), number(locked)


def _read_nodes(folder: Path) -> dict[int, frozenset[int]]:
    nodes = {}
    for path in _children(folder):
        if path.name.startswith("node") and path.name[4:].isdecimal():
            nodes[int(path.name[4:])] = _cpu_list(_text(path / "cpulist") or "")
    return nodes


def _cpu_list(text: str) -> frozenset[int]:
    """The cores in a list as the kernel writes it, such as ``0-3,8``."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal():
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _read_iommu(root: Path) -> str | None:
    """How the IOMMU treats devices: by the groups that the kernel made, or by its command line."""
    groups = _children(root / "sys/kernel/iommu_groups")
    kinds = {kind for group in groups if (kind := _text(group / "type"))}
    if groups and kinds:
        return "translating" if any(kind.startswith("DMA") for kind in kinds) else "passthrough"
    words = (_text(root / "proc/cmdline") or "").split()
    if not words:
        return None
    if "iommu=pt" in words or "iommu.passthrough=1" in words:
        return "passthrough"
    if any(word in words for word in ("intel_iommu=on", "amd_iommu=on", "iommu=on")) or groups:
        return "translating"
    return "off"


def _read_acs(devices: Path) -> tuple[str, ...] | None:
    """Bridges that redirect. Beyond its first 64 bytes only root may read a device's configuration."""
    redirecting, read_any = [], False
    for device in _children(devices):
        if not (_text(device / "class") or "").startswith("0x0604"):
            continue
        try:
            config = (device / "config").read_bytes()
        except OSError:
            continue
        control = _acs_control(config)
        read_any = read_any or len(config) > 256
        if control is not None and control & _ACS_REDIRECTS:
            redirecting.append(device.name)
    return tuple(redirecting) if read_any else None


def _acs_control(config: bytes) -> int | None:
    """The control word of Access Control Services in a device's extended configuration."""
    place = 0x100
    for _ in range(64):  # a list that bites its own tail ends here
        if not 0x100 <= place <= len(config) - 8:
            return None
        header = struct.unpack_from("<I", config, place)[0]
        if header & 0xFFFF == _ACS:
            return int(struct.unpack_from("<H", config, place + 6)[0])
        place = header >> 20
    return None


def _read_virtual(cpuinfo: Path) -> bool | None:
    text = _text(cpuinfo)
    if text is None:
        return None
    flags = next((line for line in text.splitlines() if line.startswith("flags")), None)
    return None if flags is None else "hypervisor" in flags.split()


def _read_networks(folder: Path) -> tuple[Network, ...]:
    try:
        addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    except (psutil.Error, OSError):
        return ()
    found = []
    for name, listed in sorted(addresses.items()):
        by_family = {address.family: address.address for address in listed}
        address = by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6)
        bridge = (folder / name / "bridge").is_dir() or name.startswith(("docker", "veth", "virbr", "br-", "cni"))
        state = states.get(name)
        found.append(Network(name, bool(state and state.isup), address, bridge))
    return tuple(found)


def _read_infiniband(folder: Path) -> tuple[str, ...]:
    return tuple(
        device.name
        for device in _children(folder)
        if any("ACTIVE" in (_text(port / "state") or "") for port in _children(device / "ports"))
    )


def _own_name_resolves() -> bool | None:
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return False
    return True


def _count_cards(devices: Path) -> int:
    return sum(
        _text(device / "vendor") == _NVIDIA and (_text(device / "class") or "").startswith(_DISPLAYS)
        for device in _children(devices)
    )


def _read_nccl_files(root: Path, environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """NCCL's files, those first whose settings win."""
    own = environment.get("NCCL_CONF_FILE")
    home = environment.get("HOME")
    places = [Path(own)] if own else [Path(home) / ".nccl.conf"] if home else []
    found = {}
    for place in [*places, root / "etc/nccl.conf"]:
        text = _text(place)
        if text is None:
            continue
        lines = [line.split("#")[0].strip() for line in text.splitlines()]
        pairs = [line.partition("=") for line in lines if "=" in line]
        if pairs:
            found[str(place)] = {name.strip(): value.strip() for name, _, value in pairs}
    return found


def _read_xids(log: Path) -> tuple[Xid, ...]:
    """Each message of the kernel's log is one read; without waiting for the next one."""
    found = []
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ()
    try:
        for _ in range(_MOST_MESSAGES):
            message = os.read(descriptor, 65536)
            if not message:
                break
            found += [
                Xid(int(code), bus, text.strip()[:120])
                for bus, code, text in _XID.findall(message.decode("utf-8", errors="replace"))
            ]
    except OSError:  # there is no further message, or the oldest was overwritten meanwhile
        pass
    finally:
        os.close(descriptor)
    return tuple(found)


def _find_shadowing(environment: Mapping[str, str]) -> tuple[str, ...]:
    preloaded = environment.get("LD_PRELOAD", "").replace(":", " ").split()
    found = [path for path in preloaded if Path(path).name.startswith(_SHADOWING)]
    for folder in environment.get("LD_LIBRARY_PATH", "").split(":"):
        if folder and "site-packages" not in folder:
            found += [str(file) for file in _children(Path(folder)) if file.name.startswith(_SHADOWING)]
    return tuple(found[:8])

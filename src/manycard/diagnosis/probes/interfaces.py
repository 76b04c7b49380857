"""Probe: are the network interfaces there that NCCL and gloo are told to use, and does the host's name lead anywhere?

A wrong name makes NCCL fail with "no socket interface found" and gloo hang or fail at the start of a group.

Forms: NCCL User Guide, "NCCL_SOCKET_IFNAME": a comma-separated list of prefixes; ``=name`` is exact, ``^`` in front
leaves out. Gloo takes exact names.
"""

from __future__ import annotations

from manycard.cards import Network
from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding
from manycard.diagnosis.nccl_variables import nccl_settings

__all__ = ["probe"]

_VARIABLES = ("NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def probe(facts: Facts) -> list[Finding]:
    """Find interface names that fit nothing, or nothing that works."""
    networks = facts.surroundings.networks
    findings = []
    if networks:
        settings = {name: setting.value for name, setting in nccl_settings(facts).items()}
        settings |= {name: facts.environment[name] for name in _VARIABLES if name in facts.environment}
        for name in _VARIABLES:
            if settings.get(name, "").strip():
                findings += _look_at(name, settings[name].strip(), networks, _several_machines(facts))
    return [*findings, *_name(facts)]


def _several_machines(facts: Facts) -> bool:
    """Whether a launcher of several machines has started this process."""
    world, local = facts.environment.get("WORLD_SIZE", ""), facts.environment.get("LOCAL_WORLD_SIZE", "")
    return world.isdecimal() and local.isdecimal() and int(world) > int(local)


def _look_at(name: str, value: str, networks: tuple[Network, ...], several: bool) -> list[Finding]:
    fitting = _fitting(name, value, networks)
    usable = [network for network in networks if network.up and network.address and not network.loopback]
    there = ", ".join(f"{network.name} ({network.address or 'no address'})" for network in networks)
    fix = f"unset {name}, or name one of: " + (", ".join(network.name for network in usable) or "lo")
    if several:
        fix += "; machines with other names each need theirs in the list"
    if not fitting:
        return [
            Finding(
                cause=f"{name} names no network interface of this machine, so groups of processes can't start",
                evidence=f"{name}={value}; there are {there}",
                fix=fix,
                severity="error",
            )
        ]
    if not any(network.up and network.address for network in fitting):
        return [
            Finding(
                cause=f"{name} names a network interface that is down or has no address",
                evidence=f"{name}={value}: "
                + ", ".join(f"{n.name} is {'up' if n.up else 'down'}, {n.address or 'no address'}" for n in fitting),
                fix=fix,
                severity="error",
            )
        ]
    if several and all(network.bridge or network.loopback for network in fitting):
        return [
            Finding(
                cause=f"{name} names a network that doesn't leave this machine, and the run has several",
                evidence=f"{name}={value}: " + ", ".join(f"{n.name} ({n.address})" for n in fitting),
                fix=fix,
                severity="error",
            )
        ]
    return []


def _fitting(name: str, value: str, networks: tuple[Network, ...]) -> list[Network]:
    if not name.startswith("NCCL"):
        names = [part.strip() for part in value.split(",")]
        return [network for network in networks if network.name in names]
    left_out, exact = value.startswith("^"), False
    value = value.removeprefix("^")
    if value.startswith("="):
        exact, value = True, value[1:]
    # A part may carry a port, as in eth0:5000.
    parts = [part.strip().split(":")[0] for part in value.split(",") if part.strip()]

    def fits(network: Network) -> bool:
        return any(network.name == part if exact else network.name.startswith(part) for part in parts)

    return [network for network in networks if fits(network) != left_out]


def _name(facts: Facts) -> list[Finding]:
    if facts.surroundings.name_resolves is not False or "GLOO_SOCKET_IFNAME" in facts.environment:
        return []
    return [
        Finding(
            cause="this host's own name has no address, so gloo groups hang or fail when they start under torchrun",
            evidence=f"looking up {facts.machine.host.name!r} fails",
            fix=f"add '127.0.1.1 {facts.machine.host.name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface; "
            "manycard run does the latter by itself",
            severity="warning",
        )
    ]

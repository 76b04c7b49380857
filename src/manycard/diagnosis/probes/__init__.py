"""The probes: one file each, a pure function from `Facts` to findings; empty where all is well."""

from collections.abc import Callable

from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding
from manycard.diagnosis.probes import (
    allocator,
    card_settings,
    clocks,
    contexts,
    copies,
    driver,
    ecc,
    equal,
    host,
    interfaces,
    isolation,
    launch_environment,
    limits,
    links,
    memory,
    mig,
    nccl_environment,
    nccl_files,
    numa,
    nvlinks,
    pcie,
    reductions,
    torch_environment,
    versions,
    visibility,
    xid,
)

__all__ = ["PROBES"]

PROBES: tuple[Callable[[Facts], list[Finding]], ...] = (
    driver.probe,
    versions.probe,
    visibility.probe,
    memory.probe,
    contexts.probe,
    mig.probe,
    equal.probe,
    card_settings.probe,
    clocks.probe,
    ecc.probe,
    xid.probe,
    pcie.probe,
    nvlinks.probe,
    links.probe,
    copies.probe,
    reductions.probe,
    isolation.probe,
    host.probe,
    numa.probe,
    limits.probe,
    nccl_files.probe,
    nccl_environment.probe,
    interfaces.probe,
    launch_environment.probe,
    allocator.probe,
    torch_environment.probe,
)
"""In the order in which findings of one severity are shown: cards, links, host, environment."""

"""NCCL's environment variables: what each does, and which names there are.

Source: NCCL User Guide, "Environment Variables".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from manycard.diagnosis.facts import Facts

__all__ = ["HARMLESS", "KNOWN", "MEANINGS", "NUMBERS", "Setting", "nccl_settings"]

_NUMBERS = """
NCCL_BUFFSIZE NCCL_NTHREADS NCCL_MIN_NCHANNELS NCCL_MAX_NCHANNELS NCCL_MIN_CTAS NCCL_MAX_CTAS NCCL_P2P_DISABLE
NCCL_SHM_DISABLE NCCL_NVLS_ENABLE NCCL_CUMEM_ENABLE NCCL_IB_DISABLE NCCL_IB_TIMEOUT NCCL_IB_GID_INDEX
NCCL_SOCKET_NTHREADS NCCL_NSOCKS_PERTHREAD NCCL_CROSS_NIC NCCL_IGNORE_CPU_AFFINITY NCCL_CHECK_POINTERS
NCCL_P2P_DIRECT_DISABLE
"""

_OTHERS = """
ALLOC_P2P_NET_LL_BUFFERS CGA_CLUSTER_SIZE COLLNET_ENABLE COLLNET_NODE_THRESHOLD COMM_BLOCKING COMM_ID CTA_POLICY
DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS GDRCOPY_ENABLE GRAPH_DUMP_FILE GRAPH_MIXING_SUPPORT HOSTID
IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY IB_ADDR_RANGE IB_AR_THRESHOLD IB_CUDA_SUPPORT IB_ECE_ENABLE IB_FIFO_TC
IB_MERGE_NICS IB_MERGE_VFS IB_PCI_RELAXED_ORDERING IB_PKEY IB_QPS_PER_CONNECTION IB_RETRY_CNT IB_RETURN_ASYNC_EVENTS
IB_ROCE_VERSION_NUM IB_SL IB_SPLIT_DATA_ON_QPS IB_TC IB_USE_INLINE IPC_USE_ABSTRACT_SOCKET LAUNCH_ORDER_IMPLICIT
LAUNCH_RACE_FATAL LEGACY_CUDA_REGISTER LL128_BUFFSIZE LL128_NTHREADS LL_BUFFSIZE LL_THRESHOLD LOCAL_REGISTER
MAX_NRINGS MAX_P2P_NCHANNELS MIN_NRINGS MIN_P2P_NCHANNELS MNNVL_CLIQUE_ID MNNVL_ENABLE MNNVL_UUID
NCHANNELS_PER_NET_PEER NETDEVS_POLICY NET_GDR_C2C NET_GDR_READ NET_PLUGIN NET_SHARED_BUFFERS NET_SHARED_COMMS
NVB_DISABLE NVLSTREE_MAX_CHUNKSIZE NVLS_CHUNKSIZE NVLS_NCHANNELS OOB_NET_ENABLE OOB_NET_IFNAME P2P_LL_THRESHOLD
P2P_NET_CHUNKSIZE P2P_NVL_CHUNKSIZE P2P_PCI_CHUNKSIZE P2P_PXN_LEVEL P2P_READ_ENABLE P2P_USE_CUDA_MEMCPY PAT_ENABLE
PROFILER_PLUGIN PXN_C2C RAS_ADDR RAS_ENABLE RAS_TIMEOUT_FACTOR RINGS SET_THREAD_NAME SHM_LOCALITY SHM_MEMCPY_MODE
SHM_USE_CUDA_MEMCPY SINGLE_RING_THRESHOLD SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC THREAD_THRESHOLDS TOPO_DUMP_FILE
TREE_THRESHOLD TUNER_PLUGIN UID_STAGGER_RATE UID_STAGGER_THRESHOLD WIN_ENABLE WORK_ARGS_BYTES WORK_FIFO_BYTES
"""

MEANINGS: Mapping[str, str] = {
    "NCCL_ALGO": "restricts the algorithms (Ring, Tree, NVLS) that NCCL chooses among by size",
    "NCCL_PROTO": "restricts the protocols (LL, LL128, Simple) that NCCL chooses among by size",
    "NCCL_BUFFSIZE": "sets the buffer between two cards; 4 MiB by default",
    "NCCL_NTHREADS": "sets the threads of each of NCCL's blocks on a card",
    "NCCL_MIN_NCHANNELS": "makes NCCL use at least so many blocks of a card, which computing then lacks",
    "NCCL_MAX_NCHANNELS": "lets NCCL use at most so many blocks of a card",
    "NCCL_MIN_CTAS": "makes NCCL use at least so many blocks of a card, which computing then lacks",
    "NCCL_MAX_CTAS": "lets NCCL use at most so many blocks of a card",
    "NCCL_P2P_DISABLE": "1 sends everything between cards through the host's memory",
    "NCCL_P2P_LEVEL": "sets how far apart cards may be to reach each other's memory directly",
    "NCCL_P2P_DIRECT_DISABLE": "1 forbids direct access between cards of one process",
    "NCCL_SHM_DISABLE": "1 forbids the way through shared memory and leaves the network, even within one machine",
    "NCCL_NVLS_ENABLE": "switches NVLink SHARP, sums made in the NVSwitches, on or off",
    "NCCL_CUMEM_ENABLE": "switches allocation by cuMem, which NVLink SHARP and buffer registration need",
    "NCCL_CUMEM_HOST_ENABLE": "switches shared host memory by cuMem in place of /dev/shm",
    "NCCL_NET": "chooses the network between machines (IB, Socket, or a plugin)",
    "NCCL_IB_DISABLE": "1 leaves InfiniBand and RoCE unused, so machines talk over TCP",
    "NCCL_IB_HCA": "chooses InfiniBand devices",
    "NCCL_IB_GID_INDEX": "chooses the address that RoCE uses",
    "NCCL_IB_TIMEOUT": "sets how long InfiniBand waits before it sends again",
    "NCCL_SOCKET_IFNAME": "chooses the network interface by which machines meet and talk over TCP",
    "NCCL_SOCKET_FAMILY": "chooses IPv4 or IPv6",
    "NCCL_SOCKET_NTHREADS": "sets the threads that TCP uses between machines",
    "NCCL_NSOCKS_PERTHREAD": "sets the TCP connections of each of those threads",
    "NCCL_NET_GDR_LEVEL": "sets how far a network card may be from a card to read its memory directly",
    "NCCL_CROSS_NIC": "lets rings leave and enter a machine by different network cards",
    "NCCL_LAUNCH_MODE": "sets how a process that drives several cards launches NCCL's kernels",
    "NCCL_TOPO_FILE": "replaces the topology that NCCL finds by a file",
    "NCCL_GRAPH_FILE": "replaces the rings that NCCL finds by a file",
    "NCCL_IGNORE_CPU_AFFINITY": "1 lets NCCL's threads leave the cores that the process was given",
    "NCCL_DEBUG": "prints what NCCL does",
    "NCCL_DEBUG_SUBSYS": "chooses which parts of NCCL print",
    "NCCL_DEBUG_FILE": "sends what NCCL prints to a file",
    "NCCL_CHECKS_DISABLE": "1 leaves out checks of arguments; old, and without effect today",
    "NCCL_CHECK_POINTERS": "1 checks every pointer of every call, which costs time",
    "NCCL_RUNTIME_CONNECT": "0 makes all connections at the start",
    "NCCL_GRAPH_REGISTER": "registers buffers that CUDA graphs capture",
    "NCCL_DMABUF_ENABLE": "switches DMA-BUF for network cards that read a card's memory",
    "NCCL_PXN_DISABLE": "1 forbids the way to a network card by another card",
}
"""Variable -> what it does."""

NUMBERS = frozenset(_NUMBERS.split())
"""Those that hold a whole number; NCCL says nothing of a word there and goes on with its default."""

HARMLESS = frozenset({"NCCL_VERSION", "NCCL_ROOT", "NCCL_HOME", "NCCL_INCLUDE_DIR", "NCCL_LIB_DIR", "NCCL_CONF_FILE"})
"""Set by container images and build systems; NCCL reads none of them but the last, which has its own finding."""

KNOWN = frozenset(MEANINGS) | HARMLESS | frozenset(f"NCCL_{name}" for name in _OTHERS.split())
"""Every name that NCCL is known to read."""


@dataclass(frozen=True)
class Setting:
    """A variable that is set."""

    value: str
    where: str
    """``the environment``, or the file that sets it."""

    def __str__(self) -> str:
        return self.value if self.where == "the environment" else f"{self.value} (in {self.where})"


def nccl_settings(facts: Facts) -> dict[str, Setting]:
    """NCCL's variables as it will see them: the environment first, then its files."""
    found = {
        name: Setting(value, "the environment")
        for name, value in sorted(facts.environment.items())
        if name.startswith("NCCL_")
    }
    for where, pairs in facts.surroundings.nccl_files.items():
        for name, value in pairs.items():
            found.setdefault(name, Setting(value, where))
    return found

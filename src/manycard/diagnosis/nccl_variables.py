"""NCCL's environment variables: what each does, and which names there are.

Source: NCCL User Guide, "Environment Variables"; names that the guide leaves out: the library itself, 2.30.
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
ALLGATHERV_ENABLE ALLOC_P2P_NET_LL_BUFFERS CGA_CLUSTER_SIZE CHECK_MODE CHUNK_SIZE COLLNET_ENABLE
COLLNET_NODE_THRESHOLD COMM_BLOCKING COMM_ID CONNECT_ROUND_MAX_PEERS CTA_POLICY DEBUG_TIMESTAMP_FORMAT
DEBUG_TIMESTAMP_LEVELS DEV_API_JIT DISABLE_MEM_MANAGER ELASTIC_BUFFER_REGISTER ENABLE_VERSION_CHECK ENV_PLUGIN
GDAKI_USE_RELIABLE_DB GDRCOPY_ENABLE GDRCOPY_FIFO_ENABLE GDRCOPY_FLUSH_ENABLE GDRCOPY_SYNC_ENABLE GDR_FLUSH_DISABLE
GIN_ENABLE GIN_ERROR_QUERY_SEC GIN_GDAKI_GPU_CONTEXT_MAX_SIZE GIN_GDAKI_MAX_DEST_RD_ATOMIC
GIN_GDAKI_MAX_QP_RD_ATOMIC GIN_GDAKI_NIC_HANDLER GIN_GDAKI_QP_DEPTH GIN_IB_TC GIN_NCONNECTIONS GIN_PLUGIN
GIN_PROXY_GPU_CONTEXT_MAX_SIZE GIN_PROXY_QUEUE_SIZE GIN_TYPE GRAPH_DUMP_FILE GRAPH_DUMP_FILE_RANK
GRAPH_HELPER_DISABLE GRAPH_MIXING_SUPPORT GRAPH_STREAM_ORDERING GROUP_CUDA_STREAM HOSTID IBVERBS_LIB
IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY IB_ADDR_RANGE IB_AR_THRESHOLD IB_CUDA_SUPPORT IB_DATA_DIRECT IB_DEVICE_PCI_ORDER
IB_ECE_ENABLE IB_FIFO_TC IB_MAX_DEVS_PER_NIC IB_MERGE_NICS IB_MERGE_VFS IB_MQP_RETRY_ALL IB_MQP_RETRY_CNT
IB_MQP_RETRY_SLEEP_MSEC IB_OOO_RQ IB_PCI_RELAXED_ORDERING IB_PKEY IB_PREPOST_RECEIVE_WORK_REQUESTS
IB_QPS_PER_CONNECTION IB_QUERY_PORT_SPEED IB_RECEIVER_SIDE_MATCHING_SCHEME IB_RESILIENCY_PORT_FAILOVER
IB_RESILIENCY_PORT_FAILOVER_MAX_ATTEMPTS IB_RESILIENCY_PORT_FAILOVER_PROBE_DELAY IB_RESILIENCY_PORT_RECOVERY
IB_RESILIENCY_PORT_RECOVERY_ACK_TIMEOUT IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_INTERVAL
IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_SIZE IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_SEQUENCE_SIZE
IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_TIMEOUT IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX
IB_RESILIENCY_PORT_RECOVERY_START_DELAY IB_RETRY_CNT IB_RETURN_ASYNC_EVENTS IB_ROCE_VERSION_NUM
IB_ROUTABLE_FLID_GID_INDEX IB_SL IB_SPLIT_DATA_ON_QPS IB_SUBNET_AWARE_ROUTING IB_SUBNET_PREFIX_LEN IB_TC
IB_USE_INLINE IB_WARN_RAIL_LOCAL IGNORE_COLLNET_MISMATCH IGNORE_DISABLED_P2P IGNORE_NET_MISMATCH
IPC_USE_ABSTRACT_SOCKET L1_SHARED_MEMORY_CARVEOUT LAUNCH_ORDER_IMPLICIT LAUNCH_RACE_FATAL LEGACY_CUDA_REGISTER
LL128_BUFFSIZE LL128_C2C LL128_NTHREADS LL_BUFFSIZE LL_THRESHOLD LOCAL_REGISTER LSA_TEAM_SIZE MAX_NRINGS
MAX_P2P_NCHANNELS MEM_SYNC_DOMAIN MIN_NRINGS MIN_P2P_NCHANNELS MLOPART_RDMA_ENABLE MNNVL_CLIQUE_ID
MNNVL_CROSS_CLIQUE MNNVL_ENABLE MNNVL_RAIL_PER_HOST MNNVL_SCATTER_NETS_ENABLE MNNVL_UUID MULTI_RANK_GPU_ENABLE
MULTI_SEGMENT_REGISTER NCHANNELS_PER_NET_PEER NETDEVS_POLICY NET_DISABLE_INTRA NET_FORCE_FLUSH NET_FORCE_MERGE
NET_GDR_C2C NET_GDR_MLOPART NET_GDR_READ NET_MERGE_LEVEL NET_MERGE_POLICY NET_OPTIONAL_RECV_COMPLETION NET_OVERHEAD
NET_PLUGIN NET_SHARED_BUFFERS NET_SHARED_COMMS NO_CACHE NUM_RMA_CTX NVB_DISABLE NVB_PRECONNECT
NVLINK_UTIL_CENTRIC_SCHED_ENABLE NVLSTREE_MAX_CHUNKSIZE NVLS_CHUNKSIZE NVLS_NCHANNELS NVTX_DISABLE OOB_NET_ENABLE
OOB_NET_IFNAME P2P_EPOCH_ENABLE P2P_LL_THRESHOLD P2P_MAX_PEERS P2P_NET_CHUNKSIZE P2P_NVL_CHUNKSIZE P2P_PCI_CHUNKSIZE
P2P_PER_CHANNEL_NET_BW P2P_PXN_LEVEL P2P_READ_ENABLE P2P_SCHEDULE_GROUP_SIZE P2P_USE_CUDA_MEMCPY PARAM_DUMP_ALL
PAT_ENABLE PROFILER_PLUGIN PROGRESS_APPENDOP_FREQ PROXY_APPEND_BATCH_SIZE PROXY_CPUSET PROXY_DUMP_SIGNAL PXN_C2C
RAS_ADDR RAS_ENABLE RAS_TIMEOUT_FACTOR REPORT_CONNECT_PROGRESS RINGS RMA_DISABLE RMA_PLUGIN RMA_PROXY_DUMP_SIGNAL
RMA_PROXY_QUEUE_SIZE SET_CPU_STACK_SIZE SET_STACK_SIZE SET_THREAD_NAME SHADOW_MEMPOOL_MAX_SIZE SHM_LOCALITY
SHM_MEMCPY_MODE SHM_USE_CUDA_MEMCPY SINGLE_PROC_MEM_REG_ENABLE SINGLE_RING_THRESHOLD SOCKET_INLINE
SOCKET_MIN_TASKSIZE SOCKET_POLL_TIMEOUT_MSEC SOCKET_RCVBUF SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC SOCKET_SNDBUF
SYM_CE_THRESHOLD SYM_CTAS SYM_GIN_KERNELS_ENABLE SYM_KERNEL SYM_NOWIN_ENABLE SYM_REUSE_SYSMEM_HANDLES
SYM_RS_GIN_CHUNK_SIZE SYM_TMA_ENABLE THREAD_THRESHOLDS TOPO_DUMP_FILE TOPO_DUMP_FILE_RANK TOPO_SPLIT_MLOPART
TREE_THRESHOLD TUNER_PLUGIN UID_STAGGER_RATE UID_STAGGER_THRESHOLD UNPACK_DOUBLE_NCHANNELS WARN_ENABLE_DEBUG_INFO
WIN_ENABLE WIN_STRIDE WORK_ARGS_BYTES WORK_FIFO_BYTES
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

"""What surrounds a process, read from a made-up system; and this machine's own, whatever it hides."""

from __future__ import annotations

import resource
import struct
from pathlib import Path

import pytest

from manycard.cards import Network, Xid, read_surroundings


def put(root: Path, path: str, content: str | bytes) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


def configuration(control: int | None) -> bytes:
    """A PCIe device's 4 KiB, with another capability first and Access Control Services second."""
    config = bytearray(4096)
    struct.pack_into("<I", config, 0x100, (0x140 << 20) | (1 << 16) | 0x0001)
    if control is not None:
        struct.pack_into("<IHH", config, 0x140, (1 << 16) | 0x000D, 0x5F, control)
    return bytes(config)


def test_this_machine_s_own_limits():
    around = read_surroundings()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert around.open_files == (None if soft == resource.RLIM_INFINITY else soft)
    assert around.open_files_most == (None if hard == resource.RLIM_INFINITY else hard)
    assert any(network.loopback for network in around.networks) or not around.networks
    assert around.cpus


def test_an_empty_system_is_unknown_and_no_error(tmp_path: Path):
    around = read_surroundings(tmp_path, {})
    assert (around.nodes, around.governor, around.iommu, around.acs, around.virtual) == ({}, None, None, None, None)
    assert (around.infiniband, around.cards_on_bus, around.nccl_files, around.shadowing) == ((), 0, {}, ())


def test_nodes_and_governor(tmp_path: Path):
    put(tmp_path, "sys/devices/system/node/node0/cpulist", "0-3,8\n")
    put(tmp_path, "sys/devices/system/node/node1/cpulist", "4-7\n")
    put(tmp_path, "sys/devices/system/node/online", "0-1\n")
    put(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n")
    around = read_surroundings(tmp_path, {})
    assert around.nodes == {0: frozenset({0, 1, 2, 3, 8}), 1: frozenset({4, 5, 6, 7})}
    assert around.governor == "powersave"


@pytest.mark.parametrize(
    ("line", "mode"),
    [
        ("quiet intel_iommu=on", "translating"),
        ("quiet intel_iommu=on iommu=pt", "passthrough"),
        ("quiet", "off"),
        ("", None),
    ],
)
def test_the_iommu_by_the_kernel_s_command_line(tmp_path: Path, line: str, mode: str | None):
    put(tmp_path, "proc/cmdline", line)
    assert read_surroundings(tmp_path, {}).iommu == mode


@pytest.mark.parametrize(("kind", "mode"), [("DMA-FQ", "translating"), ("identity", "passthrough")])
def test_the_iommu_by_its_groups(tmp_path: Path, kind: str, mode: str):
    put(tmp_path, "sys/kernel/iommu_groups/0/type", kind)
    assert read_surroundings(tmp_path, {}).iommu == mode


def test_acs_that_redirects(tmp_path: Path):
    bridges = {"0000:00:01.0": 0x1D, "0000:00:02.0": 0x01, "0000:00:03.0": None}
    for name, control in bridges.items():
        put(tmp_path, f"sys/bus/pci/devices/{name}/class", "0x060400")
        put(tmp_path, f"sys/bus/pci/devices/{name}/config", configuration(control))
    put(tmp_path, "sys/bus/pci/devices/0000:01:00.0/class", "0x030200")
    put(tmp_path, "sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de")
    around = read_surroundings(tmp_path, {})
    assert around.acs == ("0000:00:01.0",)
    assert around.cards_on_bus == 1


def test_acs_that_only_root_may_read_is_unknown(tmp_path: Path):
    put(tmp_path, "sys/bus/pci/devices/0000:00:01.0/class", "0x060400")
    put(tmp_path, "sys/bus/pci/devices/0000:00:01.0/config", configuration(0x1D)[:64])
    assert read_surroundings(tmp_path, {}).acs is None


def test_infiniband_with_an_active_port(tmp_path: Path):
    put(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")
    put(tmp_path, "sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN\n")
    assert read_surroundings(tmp_path, {}).infiniband == ("mlx5_0",)


def test_files_of_nccl_the_user_s_first(tmp_path: Path):
    put(tmp_path, "etc/nccl.conf", "# for all\nNCCL_DEBUG=WARN\n")
    put(tmp_path, "home/.nccl.conf", "NCCL_SOCKET_IFNAME = eth0 # mine\n\n")
    found = read_surroundings(tmp_path, {"HOME": str(tmp_path / "home")}).nccl_files
    assert list(found.values()) == [{"NCCL_SOCKET_IFNAME": "eth0"}, {"NCCL_DEBUG": "WARN"}]


def test_libraries_that_stand_in(tmp_path: Path):
    put(tmp_path, "lib/libnccl.so.2", "")
    put(tmp_path, "lib/libother.so", "")
    environment = {"LD_LIBRARY_PATH": f"{tmp_path / 'lib'}:/nowhere", "LD_PRELOAD": "/x/libcudnn.so.8 /y/libz.so"}
    assert read_surroundings(tmp_path, environment).shadowing == (
        "/x/libcudnn.so.8",
        str(tmp_path / "lib" / "libnccl.so.2"),
    )


def test_errors_of_the_driver_in_the_kernel_s_log(tmp_path: Path):
    put(
        tmp_path,
        "dev/kmsg",
        "6,1,2,-;NVRM: loading\n3,2,3,-;NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.\n"
        "3,3,4,-;NVRM: Xid (PCI:0000:1c:00): 31\n",
    )
    assert read_surroundings(tmp_path, {}).xids == (
        Xid(79, "0000:1b:00", "pid=1, GPU has fallen off the bus."),
        Xid(31, "0000:1c:00"),
    )


def test_a_virtual_machine(tmp_path: Path):
    put(tmp_path, "proc/cpuinfo", "flags\t\t: fpu hypervisor\n")
    assert read_surroundings(tmp_path, {}).virtual is True
    put(tmp_path, "proc/cpuinfo", "flags\t\t: fpu\n")
    assert read_surroundings(tmp_path, {}).virtual is False


def test_loopback_by_name_and_address():
    assert Network("lo", True).loopback
    assert Network("lo0", True, "127.0.0.1").loopback
    assert not Network("eth0", True, "10.0.0.1").loopback

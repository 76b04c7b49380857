"""The inventory, the numbering, the links and the choice against a real driver and a real torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
import torch

import manycard
from manycard.cards import (
    CardInfo,
    choose,
    choose_cards,
    inventory,
    links,
    map_visible,
    own_pids,
    parse_spec,
    read_machine,
    visible_now,
)
from manycard.cards.choose import others_on
from manycard.errors import CardsError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]

GIB = 1024**3

# What the driver shows a process: cuInit reads the environment once a process, so each value needs one of its own.
ASK_THE_DRIVER = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
uuids = []
if cuda.cuInit(0) == 0:
    count = ctypes.c_int()
    assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
    ask = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
    for index in range(count.value):
        device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        assert cuda.cuDeviceGet(ctypes.byref(device), index) == 0
        assert ask(ctypes.byref(uuid), device) == 0
        uuids.append(bytes(uuid).hex())
print(json.dumps(uuids))
"""
ASK_TORCH = """
import json, torch
from manycard.cards import inventory, visible_now
seen = visible_now(inventory())
print(json.dumps([torch.cuda.device_count(), [info.uuid for info in seen.cards], list(seen.said)]))
"""


def run(program: str, **environment: str | None) -> list:
    """Run a program in a process of its own and read the JSON it prints; None unsets a variable."""
    source = str(Path(manycard.__file__).parents[1])
    whole = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]), **environment}
    whole = {name: value for name, value in whole.items() if value is not None}
    done = subprocess.run([sys.executable, "-c", program], env=whole, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").removeprefix("MIG-").replace("-", "").lower()


def lists_of(infos: list[CardInfo]) -> dict[str, str]:
    """Values of CUDA_VISIBLE_DEVICES, by what they are."""
    first, last = infos[0], infos[-1]
    short = next(first.uuid[:n] for n in range(5, 41) if sum(i.uuid.startswith(first.uuid[:n]) for i in infos) == 1)
    return {
        "one": "0",
        "none": "",
        "minus one": "-1",
        "reversed": ",".join(str(info.index) for info in reversed(infos)),
        "beyond the last": f"0,{len(infos)}",
        "beyond the last, first": f"{len(infos)},0",
        "cut by minus one": "0,-1",
        "UUID": last.uuid,
        "short UUID": short,
        "unknown UUID": f"{first.uuid},GPU-ffffffff",
    }


@pytest.fixture(scope="module")
def infos() -> list[CardInfo]:
    found = inventory()
    assert found, read_machine().why_none
    if any(info.mig for info in found):
        pytest.skip("a card is in MIG mode, and these tests are for whole cards")
    return found


def test_the_inventory_is_what_torch_sees(infos: list[CardInfo]):
    visible = visible_now(infos)
    assert len(visible.cards) == torch.cuda.device_count()
    for index, info in enumerate(visible.cards):
        properties = torch.cuda.get_device_properties(index)
        assert info.name == properties.name
        assert bare(info.uuid) == bare(str(properties.uuid))
        assert info.memory_total == pytest.approx(properties.total_memory, rel=0.05)
        assert info.capability == (properties.major, properties.minor)
        assert info.pci_bus_id.count(":") == 2


def test_every_figure_of_a_data_centre_card_is_read(infos: list[CardInfo]):
    for info in infos:
        assert 0 < (info.memory_free or 0) <= (info.memory_total or 0)
        assert 0 <= (info.utilisation or 0) <= 100
        assert info.temperature is None or 5 < info.temperature < 120
        assert info.power is None or 0 < info.power < 3000
    machine = read_machine()
    assert machine.driver
    assert machine.driver_cuda


def test_free_memory_falls_with_what_we_take_and_we_are_no_stranger_to_ourselves(infos: list[CardInfo]):
    before = visible_now(inventory()).cards[0]
    held = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda:0")
    after = visible_now(inventory()).cards[0]
    assert (before.memory_free or 0) - (after.memory_free or 0) > 1.5 * GIB
    ours = [process for process in after.processes or () if process.pid == os.getpid()]
    if ours:
        assert ours[0].command is not None
        assert not any(process.pid == os.getpid() for process in others_on(after, own_pids()))
    if not others_on(after, own_pids()):
        assert 0 in [item.device.index for item in choose_cards("0,").cards]
        assert "in use" not in choose_cards("0,").describe()
    del held
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    "kind",
    [
        "one",
        "none",
        "minus one",
        "reversed",
        "beyond the last",
        "beyond the last, first",
        "cut by minus one",
        "UUID",
        "short UUID",
        "unknown UUID",
    ],
)
def test_the_mapping_is_the_driver_s(infos: list[CardInfo], kind: str):
    value = lists_of(infos)[kind]
    shown = run(ASK_THE_DRIVER, CUDA_VISIBLE_DEVICES=value, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    expected = map_visible(value, infos, order="PCI_BUS_ID")
    assert shown == [bare(info.uuid) for info in expected.cards], (value, expected.said)


def test_unset_the_mapping_is_the_driver_s(infos: list[CardInfo]):
    shown = run(ASK_THE_DRIVER, CUDA_VISIBLE_DEVICES=None, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert shown == [bare(info.uuid) for info in map_visible(None, infos, order="PCI_BUS_ID").cards]


@pytest.mark.parametrize("kind", ["twice", "reversed", "minus one"])
def test_the_mapping_is_torch_s(infos: list[CardInfo], kind: str):
    value = {**lists_of(infos), "twice": "0,0"}[kind]
    count, uuids, said = run(ASK_TORCH, CUDA_VISIBLE_DEVICES=value, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    expected = map_visible(value, infos, order="PCI_BUS_ID")
    assert count == len(expected.cards)
    assert uuids == [info.uuid for info in expected.cards]
    if not uuids:
        assert value in said[0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA cards")
def test_links_agree_with_torch(infos: list[CardInfo]):
    cards = visible_now(infos).cards
    found = links(cards)
    for one, other in combinations(range(len(cards)), 2):
        link = found.between(cards[one], cards[other])
        assert link == found.between(cards[other], cards[one])
        if link.p2p is not None:
            assert link.p2p == torch.cuda.can_device_access_peer(one, other), link
        if link.nvlinks:
            assert link.gb_per_s is None or 10 < link.gb_per_s < 10_000


def test_every_chosen_card_computes():
    choice = choose_cards("all")
    assert len(choice.cards) + len(choice.left_out) == torch.cuda.device_count()
    for position, item in enumerate(choice.cards):
        assert item.position == position
        assert not item.simulated
        assert torch.ones(3, device=item.device).sum().item() == 3
        assert item.model == torch.cuda.get_device_name(item.device)
    assert [item.device.index for item in choose_cards("0,").cards] == [0]


def test_bad_input_lists_what_is_there():
    with pytest.raises(CardsError, match=r"cards='0,99': there is no card 99; torch sees 0: .*Fix: "):
        choose_cards("0,99")
    with pytest.raises(CardsError, match="500 cards are asked for"):
        choose_cards(500)


@pytest.fixture
def stranger() -> Iterator[int]:
    """A process of another family that holds 1 GiB on cuda:0; its pid."""
    program = (
        "import time, torch; held = torch.zeros(2**30, dtype=torch.uint8, device='cuda:0'); "
        "torch.cuda.synchronize(); print('held', flush=True); time.sleep(90)"
    )
    # The shell ends at once, so that the process is nobody's child.
    shell = subprocess.Popen(
        ["sh", "-c", '"$0" -c "$1" & echo $!', sys.executable, program],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert shell.stdout is not None
    pid = int(shell.stdout.readline())
    assert shell.wait(30) == 0
    assert shell.stdout.readline().strip() == "held"
    yield pid
    os.kill(pid, signal.SIGKILL)
    shell.stdout.close()
    for _ in range(100):  # until the driver has let go of it
        if not any(process.pid == pid for info in inventory() for process in info.processes or ()):
            break
        time.sleep(0.1)


def test_auto_leaves_out_a_card_that_a_stranger_computes_on(infos: list[CardInfo], stranger: int):
    cards = visible_now(inventory()).cards
    listed = [process for process in cards[0].processes or () if process.pid == stranger]
    if not listed:
        pytest.skip("the driver doesn't tell which processes are on a card here")
    assert "python" in (listed[0].command or "")
    assert stranger not in own_pids()
    try:
        choice = choose(parse_spec("auto"), cards, links(cards), own_pids=own_pids())
    except CardsError as refused:
        words = str(refused)
    else:
        assert all(item.device.index != 0 for item in choice.cards)
        words = choice.describe()
    assert f"pid {stranger}" in words
    assert f"pid {stranger}" in choose_cards("0,").describe(), "a list takes the card, with a warning"


def test_the_doctor_sees_the_cards(infos: list[CardInfo], capsys: pytest.CaptureFixture[str]):
    from manycard.cli import main

    assert main(["doctor", "--quick", "--json"]) in (0, 1)
    document = json.loads(capsys.readouterr().out)
    assert [row["uuid"] for row in document["cards"]][: torch.cuda.device_count()] == [
        info.uuid for info in visible_now(infos).cards
    ]
    pairs = len(document["cards"]) * (len(document["cards"]) - 1) // 2
    assert len(document["links"]) == pairs
    assert document["machine"]["nccl"]

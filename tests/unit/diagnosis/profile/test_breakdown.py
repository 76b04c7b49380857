"""Where time goes, from traces that were made up: GPUs with streams, NCCL beside computing, and waits of the host."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from manycard.diagnosis.profile import Profile, split_by_card
from manycard.diagnosis.profile.breakdown import PARTS, CardTime, break_down
from manycard.diagnosis.profile.findings import Setup, find_opportunities
from manycard.diagnosis.profile.intervals import intersection, length, minus, union
from manycard.diagnosis.profile.trace import read_trace

Event = dict[str, Any]


def span(name: str, start: float, end: float, thread: int = 1, kind: str = "user_annotation") -> Event:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": end - start, "tid": thread, "pid": 1}


class Maker:
    """Makes events; each kernel has the CUDA call that launched it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._count = 0

    def span(self, name: str, start: float, end: float, thread: int = 1) -> None:
        self.events.append(span(f"manycard/{name}", start, end, thread))

    def kernel(
        self, start: float, end: float, launched: float, name: str = "gemm", device: int = 0, **more: Any
    ) -> None:
        self._count += 1
        number = {"correlation": self._count}
        launch = span("cudaLaunchKernel", launched, launched + 5, more.get("thread", 1), "cuda_runtime")
        self.events.append({**launch, "args": number})
        kind = more.get("kind", "kernel")
        made = span(name, start, end, 7, kind)
        self.events.append({**made, "pid": device, "args": {**number, "device": device, "stream": 7}})

    def cards(self, *names: str) -> list[CardTime]:
        return break_down(read_trace({"traceEvents": self.events}), names)


def one_step(loader: float = 0.0, reduce: tuple[float, float] = (700, 800), cards: int = 1) -> Maker:
    """A step of 1,000 µs: copy 50, forward 250, backward 400, reduce, update 100; `loader` µs before it."""
    made = Maker()
    made.span("beat", -1, 0)
    made.span("loader", 0, loader)
    at = loader
    made.span("step", at, at + 900)
    made.span("forward@cuda:0", at + 10, at + 100)
    made.span("backward@cuda:0", at + 100, at + 200)
    made.span("update@cuda:0", at + 200, at + 250)
    for device in range(cards):
        more = {"device": device}
        made.kernel(at + 0, at + 50, at + 5, "Memcpy HtoD (Pinned -> Device)", kind="gpu_memcpy", **more)
        made.kernel(at + 50, at + 300, at + 50, **more)
        made.kernel(at + 300, at + 700, at + 150, **more)
        made.kernel(at + reduce[0], at + reduce[1], at + 190, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", **more)
        made.kernel(at + 800, at + 900, at + 220, "multi_tensor_apply_kernel", **more)
    made.span("beat", at + 999, at + 1000)
    return made


def test_parts_of_a_step_on_a_gpu_add_up_to_it() -> None:
    (card,) = one_step().cards("cuda:0")
    expected = {"copy": 0.05, "forward": 0.25, "backward": 0.4, "reduce": 0.1, "update": 0.1, "host": 0.1}
    for name in PARTS:
        assert getattr(card, name) == pytest.approx(expected.get(name, 0.0)), name
    assert sum(getattr(card, name) for name in PARTS) == pytest.approx(card.step) == pytest.approx(1.0)
    assert card.kernels == 3
    assert not card.simulated


def test_reducing_beside_backward_costs_nothing() -> None:
    (card,) = one_step(reduce=(400, 750)).cards("cuda:0")
    assert card.reduce == pytest.approx(0.05)
    assert card.reduce_hidden == pytest.approx(0.3)
    assert card.backward == pytest.approx(0.4)


def test_waiting_for_data_is_told_from_a_slow_host() -> None:
    (card,) = one_step(loader=500).cards("cuda:0")
    assert card.input == pytest.approx(0.5)
    assert card.host == pytest.approx(0.1)
    first = find_opportunities([card], Setup(workers=2, cores=9))[0]
    assert first.finding.cause == "the cards wait for data"
    assert first.finding.evidence.startswith("0.5 of 1.5 ms a step")
    assert "raise num_workers from 2 to 4" in first.finding.fix
    assert first.gain == pytest.approx(1.5)


def test_a_wait_of_the_recording_is_none_of_the_scripts() -> None:
    made = one_step()
    made.span("drain", 900, 998)
    made.events.append(span("cudaDeviceSynchronize", 901, 997, 1, "cuda_runtime"))
    (card,) = made.cards("cuda:0")
    assert (card.waits, card.waiting) == (0, 0)
    made.events.append(span("cudaStreamSynchronize", 300, 400, 1, "cuda_runtime"))
    (card,) = made.cards("cuda:0")
    assert (card.waits, card.waiting) == (1, pytest.approx(0.1))


def test_backward_of_autograds_own_thread_is_backward() -> None:
    made = Maker()
    made.span("beat", -1, 0)
    made.events.append(span("autograd::engine::evaluate_function: MmBackward0", 40, 60, 9, "cpu_op"))
    made.events.append(span("Optimizer.step#SGD.step", 70, 80))
    made.events.append(span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 10))
    made.kernel(20, 40, 15)
    made.kernel(60, 80, 50, thread=9)
    made.kernel(80, 90, 75, "sgd")
    made.span("beat", 99, 100)
    (card,) = made.cards("cuda:0")
    times = {name: round(1e3 * getattr(card, name)) for name in PARTS}
    assert times == {
        "input": 10,
        "copy": 0,
        "forward": 20,
        "backward": 20,
        "reduce": 0,
        "update": 10,
        "host": 40,
        "idle": 0,
    }


def test_a_host_that_launches_too_slowly() -> None:
    made = Maker()
    made.span("beat", -1, 0)
    made.span("step", 0, 1000)
    for number in range(100):
        made.kernel(10 * number + 8, 10 * number + 10, 10 * number)
    made.span("beat", 1000, 1000)
    (card,) = made.cards("cuda:0")
    assert card.host == pytest.approx(0.8)
    first = find_opportunities([card], Setup())[0]
    assert first.finding.cause == "the host can't launch kernels fast enough"
    assert "100 kernels a step of 2 µs" in first.finding.evidence
    assert "graphs='auto'" in first.finding.fix
    assert first.gain == pytest.approx(5.0)


def test_waits_of_the_host_are_counted() -> None:
    made = one_step()
    made.events.append(span("cudaStreamSynchronize", 250, 900, 1, "cuda_runtime"))
    (card,) = made.cards("cuda:0")
    assert (card.waits, card.waiting) == (1, pytest.approx(0.65))
    causes = [each.finding.cause for each in find_opportunities([card], Setup())]
    assert "the script waits for the card in each step, and the card then for the script" in causes


def card(name: str, **parts: float) -> CardTime:
    known = {**dict.fromkeys(PARTS, 0.0), **parts}
    step = sum(known[part] for part in PARTS)
    return CardTime(name, step, **known, kernels=100, simulated=False)


def test_a_first_card_that_has_the_loss_to_itself() -> None:
    cards = [card("cuda:0", forward=6, backward=9), card("cuda:1", forward=4, backward=6, idle=5)]
    first = find_opportunities(cards, Setup(gathers=True))[0]
    assert first.finding.cause == "cuda:0 holds the other cards back"
    assert "the loss outside of the model runs on that card alone" in first.finding.evidence
    assert first.gain == pytest.approx(15 / 12.5)
    other = find_opportunities(cards[::-1], Setup())[0]
    assert "manycard doctor" in other.finding.fix
    stage = find_opportunities(cards, Setup(strategy="pipeline"))[0]
    assert "its stage takes longer than the others" in stage.finding.evidence
    assert "stages='auto'" in stage.finding.fix


def test_a_card_on_which_somebody_else_computes() -> None:
    cards = [card("cuda:0", forward=4, backward=6, idle=5), card("cuda:1", forward=6, backward=9)]
    shared = Setup(shared=(("cuda:1", "python other.py (pid 17)"),))
    first = find_opportunities(cards, shared)[0]
    assert first.finding.cause == "cuda:1 holds the other cards back"
    assert "another process computes there too (python other.py (pid 17))" in first.finding.evidence
    assert "--cards" in first.finding.fix
    even = [card(f"cuda:{index}", forward=4, backward=6) for index in range(2)]
    assert find_opportunities(even, shared) == []
    profile = Profile((cards[0],), 1, shared)
    assert Profile.of(json.loads(json.dumps(profile.as_dict()))).setup == shared


def test_nn_data_parallel_that_sends_its_model_in_each_step() -> None:
    cards = [card(f"cuda:{index}", forward=3, backward=5, reduce=4) for index in range(2)]
    (found,) = find_opportunities(cards, Setup(strategy="torch_dp"))
    assert found.finding.cause.startswith("nn.DataParallel sends the model to every card in each step")
    assert "mc.DataParallel(model)" in found.finding.fix
    assert found.part == "reduce"


def test_reducing_that_nothing_hides_and_an_unfused_optimizer() -> None:
    cards = [card(f"cuda:{index}", forward=3, backward=5, reduce=4, update=3) for index in range(2)]
    found = find_opportunities(cards, Setup(strategy="ddp", unfused=("AdamW",)))
    assert [each.finding.cause for each in found] == [
        "adding up gradients holds the cards up",
        "the optimizer takes more time than its fused kernels would",
    ]
    assert found[0].gain == pytest.approx(15 / 11)
    assert "AdamW(..., fused=True)" in found[1].finding.fix


def test_copies_that_hold_computing_up() -> None:
    (found,) = find_opportunities([card("cuda:0", copy=3, forward=3, backward=6)], Setup(strategy="single"))
    assert (found.finding.cause, found.part) == ("copies to the cards hold computing up", "copy")
    assert found.finding.evidence == "3 of 12 ms a step on cuda:0"
    assert found.gain == pytest.approx(12 / 9)


def test_code_between_steps_that_leaves_a_gpu_without_work() -> None:
    (found,) = find_opportunities([card("cuda:0", forward=3, backward=6, host=4, own=3.5)], Setup())
    assert found.finding.cause == "the cards wait for the script's own code between steps"
    assert "3.5 ms of it between steps" in found.finding.evidence


def test_forward_passes_that_no_span_names_are_not_called_the_scripts_own_code() -> None:
    seen = {"backward": 2.0, "host": 8.0, "own": 8.0}
    parts = {**dict.fromkeys(PARTS, 0.0), **seen}
    assert find_opportunities([CardTime("cpu:0", 10.0, **parts)], Setup()) == []
    parts = {**parts, "forward": 1.0}
    (found,) = find_opportunities([CardTime("cpu:0", 11.0, **parts)], Setup())
    assert found.finding.cause.startswith("the script's own code")


def test_nothing_is_said_of_cards_that_compute() -> None:
    cards = [
        card(f"cuda:{index}", forward=10, backward=20, update=1, reduce=0.5, host=0.5, input=0.3) for index in range(4)
    ]
    assert find_opportunities(cards, Setup(strategy="dp", workers=8, cores=16)) == []
    assert find_opportunities([], Setup()) == []


def test_a_trace_of_no_whole_step() -> None:
    assert Maker().cards("cuda:0") == []


def test_traces_are_read_from_files(tmp_path: Path) -> None:
    document = {"traceEvents": one_step().events}
    (tmp_path / "trace.json").write_text(json.dumps(document))
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump(document, file)
    expected = read_trace(document)
    assert len(expected.kernels) == 5
    assert read_trace(tmp_path / "trace.json") == read_trace(tmp_path / "trace.json.gz") == expected


def test_a_trace_is_split_into_one_a_card_as_other_tools_take_them(tmp_path: Path) -> None:
    """What HolisticTraceAnalysis asks of a file: a rank, and kernels with category, stream and correlation."""
    made = one_step(cards=2)
    made.kernel(705, 790, 191, "only_on_the_second", device=1)
    document = {"schemaVersion": 1, "distributedInfo": {"rank": 0}, "traceEvents": made.events}
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump(document, file)
    files = split_by_card(tmp_path / "trace.json.gz", tmp_path / "cards")
    assert [path.name for path in files] == ["rank0.json.gz", "rank1.json.gz"]
    whole = {card.card: card for card in made.cards("cuda:0", "cuda:1")}
    for place, path in enumerate(files):
        with gzip.open(path, "rt") as file:
            text = file.read()
        assert re.findall(r'"rank":\s+(\d+)', text) == [str(place)]
        events = json.loads(text)["traceEvents"]
        kernels = [event for event in events if event["cat"] in ("kernel", "gpu_memcpy")]
        assert {event["args"]["device"] for event in kernels} == {place}
        assert len(kernels) == 5 + place
        assert all({"ts", "dur", "pid", "tid"} <= set(event) for event in kernels)
        assert all("stream" in event["args"] and "correlation" in event["args"] for event in kernels)
        (card,) = break_down(read_trace(path), [f"cuda:{place}"])
        assert card.as_dict() == whole[f"cuda:{place}"].as_dict()
    with gzip.open(tmp_path / "host.json.gz", "wt") as file:
        json.dump({"traceEvents": [span("aten::mm", 0, 1)]}, file)
    assert split_by_card(tmp_path / "host.json.gz", tmp_path / "none") == []


def test_sums_over_intervals() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 3)]) == [(0, 3), (5, 6)]
    assert intersection([(0, 3), (5, 6)], [(2, 5.5)]) == [(2, 3), (5, 5.5)]
    assert minus([(0, 10)], [(1, 2), (4, 12)]) == [(0, 1), (2, 4)]
    assert length([(0, 1), (2, 4)]) == 3

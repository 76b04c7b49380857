"""The sweep's decision, with made-up times: a real gain is found, noise is not, and failures stay failures."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise

import pytest

from manycard.diagnosis.tuning import TrialFailed, candidates_for, sizes_for, sweep, trial_runner
from manycard.diagnosis.tuning.sweep import Times
from tests.unit.cards.machines import HOST as HOST_BRIDGE
from tests.unit.cards.machines import card, joined
from tests.unit.diagnosis.made import made_facts, well

MIB = 1 << 20
DEFAULT = {MIB: 50e-6, 100 * MIB: 400e-6}
RING, TREE, SIMPLE, MANY = (
    {"NCCL_ALGO": "Ring"},
    {"NCCL_ALGO": "Tree"},
    {"NCCL_PROTO": "Simple"},
    {"NCCL_MIN_NCHANNELS": "32"},
)
ALL = [RING, TREE, SIMPLE, MANY]


class Machine:
    """Stands in for cards: each setting multiplies speed by a factor, with noise and a drift that all share."""

    def __init__(self, gains: Mapping[str, float], noise: float = 0.002, drift: float = 0.0) -> None:
        self.gains, self.noise, self.drift = gains, noise, drift
        self.draws = random.Random(3)
        self.ran: list[dict[str, str]] = []

    def __call__(self, settings: Mapping[str, str]) -> Times:
        self.ran.append(dict(settings))
        speed = (1 - self.drift) ** len(self.ran)
        for name, value in settings.items():
            speed *= self.gains.get(f"{name}={value}", 1.0)
        return {
            size: seconds / speed * (1 + self.draws.uniform(-self.noise, self.noise))
            for size, seconds in DEFAULT.items()
        }


def test_a_real_gain_wins_with_its_size():
    found = sweep(Machine({"NCCL_ALGO=Ring": 1.2}), ALL)
    assert found.best is not None
    assert found.best.settings["NCCL_ALGO"] == "Ring"
    assert found.best.gain == pytest.approx(1.2, rel=0.02)
    assert found.noise < 0.01
    assert found.default[MIB] == pytest.approx(50e-6, rel=0.01)


def test_gains_that_add_up_win_together():
    found = sweep(Machine({"NCCL_ALGO=Ring": 1.1, "NCCL_PROTO=Simple": 1.1}), ALL)
    assert found.best is not None
    assert {**RING, **SIMPLE}.items() <= found.best.settings.items()
    assert found.best.gain == pytest.approx(1.21, rel=0.02)


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_gain(seed: int):
    machine = Machine({}, noise=0.1)
    machine.draws = random.Random(seed)
    assert sweep(machine, ALL).best is None


def test_a_gain_within_the_noise_is_none():
    assert sweep(Machine({"NCCL_ALGO=Ring": 1.04}, noise=0.15), ALL).best is None


def test_a_gain_under_two_percent_is_not_worth_it():
    assert sweep(Machine({"NCCL_ALGO=Ring": 1.01}, noise=0.0), ALL).best is None


def test_a_machine_that_slows_down_favours_nobody():
    found = sweep(Machine({}, noise=0.0, drift=0.01), ALL)
    assert found.best is None
    assert all(trial.gain == pytest.approx(1.0, abs=0.03) for trial in found.trials)


def test_a_gain_that_makes_one_size_much_slower_does_not_win():
    def run(settings: Mapping[str, str]) -> Times:
        return {MIB: 100e-6, 100 * MIB: 100e-6} if settings == RING else dict(DEFAULT)

    found = sweep(run, [RING])
    assert found.trials[0].gain == pytest.approx(2**0.5)
    assert found.best is None


def test_failures_are_kept_with_their_reason_and_the_rest_goes_on():
    machine = Machine({"NCCL_ALGO=Ring": 1.2})

    def run(settings: Mapping[str, str]) -> Times:
        if settings.get("NCCL_ALGO") == "Tree":
            raise TrialFailed("hangs at: starting NCCL")
        return machine(settings)

    found = sweep(run, ALL)
    assert found.best is not None
    assert found.trials[-1].settings == TREE
    assert found.trials[-1].failure == "hangs at: starting NCCL"


def test_a_winner_that_fails_in_the_final_is_out():
    rounds = []

    def run(settings: Mapping[str, str]) -> Times:
        rounds.append(settings)
        if settings == RING and rounds.count(RING) > 1:
            raise TrialFailed("wrong sums")
        return {size: seconds / (1.5 if settings == RING else 1) for size, seconds in DEFAULT.items()}

    found = sweep(run, [RING])
    assert found.best is None
    assert found.trials[0].failure == "wrong sums"


def test_a_default_that_fails_ends_it():
    def run(settings: Mapping[str, str]) -> Times:
        raise TrialFailed("system error")

    with pytest.raises(TrialFailed, match="system error"):
        sweep(run, ALL)


def test_the_default_runs_in_between_and_progress_is_told():
    machine, told = Machine({"NCCL_ALGO=Ring": 1.2}), []
    sweep(machine, ALL, lambda settings, done, total: told.append((done, total)))
    defaults = [place for place, settings in enumerate(machine.ran) if not settings]
    assert max(after - before for before, after in pairwise(defaults)) <= 4
    assert defaults[0] == 0
    assert [done for done, _ in told] == list(range(len(machine.ran)))
    assert all(done < total for done, total in told)


def test_without_candidates_the_default_is_best():
    assert sweep(Machine({}), []).best is None


class TestCandidates:
    def test_a_variable_of_the_user_s_is_not_tried(self):
        assert any("NCCL_ALGO" in settings for settings in candidates_for(well(2)))
        tried = candidates_for(well(2, environment={"NCCL_ALGO": "Ring"}))
        assert tried
        assert not any("NCCL_ALGO" in settings for settings in tried)

    def test_cards_on_pcie_try_levels_of_p2p_and_those_on_nvlink_sums_in_switches(self):
        pcie = candidates_for(made_facts([card(0), card(1)], links=joined([range(2)], HOST_BRIDGE)))
        assert {"NCCL_P2P_LEVEL": "SYS"} in pcie
        assert {"NCCL_ALGO": "NVLS"} not in pcie
        assert {"NCCL_ALGO": "NVLS"} in candidates_for(well(8))
        assert not any("NCCL_P2P_LEVEL" in settings for settings in candidates_for(well(8)))

    def test_sizes_fit(self):
        assert sizes_for(well(2)) == (MIB, 25 * MIB, 100 * MIB, 500 * MIB)
        assert sizes_for(made_facts([card(0, free=1), card(1)])) == (MIB, 25 * MIB, 100 * MIB)


def test_a_trial_is_a_process_of_its_own_with_the_variables(monkeypatch: pytest.MonkeyPatch):
    from manycard.diagnosis.measuring.stages import StagedRun
    from manycard.diagnosis.tuning import runner

    asked = []

    def run(request: object, environment: Mapping[str, str]) -> StagedRun:
        asked.append((request, environment))
        if environment.get("NCCL_PROTO") == "Simple":
            return StagedRun(hung_at="starting NCCL")
        right = environment.get("NCCL_ALGO") != "Tree"
        return StagedRun([{"kind": "all_reduce", "size": MIB, "us": 50.0, "bus_gb_per_s": 1.0, "right": right}])

    monkeypatch.setattr(runner, "run_request", run)
    trial = trial_runner(well(2, environment={"HOME": "/x"}), (MIB,))
    assert trial(RING) == {MIB: pytest.approx(50e-6)}
    request, environment = asked[0]
    assert environment == {"HOME": "/x", "NCCL_ALGO": "Ring"}
    assert (request.stages, request.reduced) == (("nccl",), (MIB,))
    with pytest.raises(TrialFailed, match="wrong sums"):
        trial(TREE)
    with pytest.raises(TrialFailed, match="hangs at: starting NCCL"):
        trial(SIMPLE)

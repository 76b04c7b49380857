from __future__ import annotations

import pickle
import signal

import torch.distributed as dist

from manycard.launch.failures import first_failure, follows_from_a_peer, rank_failed
from manycard.launch.folder import Failure


def _reported(time: float, *, follows: bool = False) -> Failure:
    return Failure(time, 1, "trace", follows)


def test_the_earliest_report_is_shown() -> None:
    found = first_failure({0: _reported(2.0), 1: _reported(1.0)}, {0: 1, 1: 1}, {}, killed=False)
    assert found is not None
    assert found[0] == 1


def test_an_own_failure_comes_before_an_earlier_one_that_follows_from_a_peer() -> None:
    found = first_failure({0: _reported(1.0, follows=True), 1: _reported(2.0)}, {0: 1, 1: 1}, {}, killed=False)
    assert found is not None
    assert found[0] == 1


def test_a_rank_killed_from_outside_comes_before_the_closed_connections_it_caused() -> None:
    codes = {0: 1, 1: -signal.SIGKILL}
    found = first_failure({0: _reported(1.0, follows=True)}, codes, {1: 1.1}, killed=False)
    assert found is not None
    assert (found[0], found[1].exit_code) == (1, -signal.SIGKILL)


def test_ranks_that_the_launcher_stopped_are_not_the_failure() -> None:
    codes = {1: 7, 0: -signal.SIGTERM, 2: -signal.SIGKILL}
    found = first_failure({}, codes, {1: 5.0, 0: 1.0, 2: 1.0}, killed=True)
    assert found is not None
    assert (found[0], found[1].exit_code) == (1, 7)


def test_a_rank_terminated_from_outside_is_the_failure_when_it_was_noticed_first() -> None:
    found = first_failure({}, {2: -signal.SIGTERM, 0: -signal.SIGTERM}, {}, killed=False)
    assert found is not None
    assert found[0] == 2


def test_nothing_known() -> None:
    assert first_failure({}, {}, {}, killed=False) is None


def test_what_follows_from_a_peer() -> None:
    gone = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
    wrapped = ValueError("the epoch failed")
    wrapped.__cause__ = gone
    assert follows_from_a_peer(gone)
    assert follows_from_a_peer(wrapped)
    assert follows_from_a_peer(dist.DistBackendError("NCCL error"))
    assert not follows_from_a_peer(ValueError("Connection closed by peer"))
    assert not follows_from_a_peer(RuntimeError("CUDA out of memory"))


def test_a_killed_rank_comes_with_a_hint_and_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(rank_failed(3, Failure(0.0, -signal.SIGKILL, "", False), "the tail")))
    assert "memory" in str(error)
    assert (error.rank, error.exit_code, error.trace) == (3, -9, "the tail")

"""CUDA graphs of a module's spread calls: what is graphed, and when.

Behaviour:
    * The first calls run eager and warm up. The last of them is watched: what a graph can't repeat is named once, and
      calls stay eager (see `manycard.engine.recording.unrepeatable`).
    * A kind of call (shapes, strides, dtypes, plain values, modes of the module, autocast, which parameters train) is
      recorded when it comes for the second time, once the first has had its backward pass: that shows of which outputs
      there are gradients. There are graphs for at most 8 kinds; others run eager.
    * Eager run: calls without gradients, or with inputs that require them; calls that leave a card without samples, run
      inside a backward pass, under hooks for saved tensors, other function modes or anomaly detection.
    * A graph's activations live from its forward to its backward replay. Calls that come between run eager. They are
      free once backward has run, or when the script drops the call's outputs and all that was computed from them.
    * A backward pass that is to be repeated (``retain_graph=True``), or has gradients of other outputs than was
      recorded, runs forward again, eager, with the same draws. A kind of which that is asked often stays eager.
    * Parameters that the script writes in place between forward and backward raise what PyTorch raises, where backward
      reads them.
    * Replays 1, 2, 8, 64, 512 and every 4096th are compared with an eager run, of which the script gets the results. A
      difference ends the graphs, in words.
    * What changes the module (structure, attributes) leads to other graphs.

Recording runs nothing on the cards, so one that fails leaves the call to run eager.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manycard.engine.batches.batch import tensors_in
from manycard.engine.calls.recorded_call import RecordedCall
from manycard.engine.calls.ways import Way
from manycard.engine.recording.comparing import MOST_NOISE, TOLERANCE, Moment, due, relative_gap
from manycard.engine.recording.kinds import MOST_KINDS, WARM_UP, Kinds, UnrepeatableError, output_signature, signature
from manycard.engine.recording.recorder import Recorder
from manycard.engine.recording.unrepeatable import Looking, describe_error, unrepeatable_part

if TYPE_CHECKING:
    from manycard.engine.calls.boundary import SpreadCall

__all__ = ["CallGraphs"]

_EAGER = Way()
_MOST_TROUBLE = 3
"""Backward passes that a graph can't serve, after which a kind of call stays eager."""


@dataclass
class _Kind:
    seen: int = 0
    pattern: tuple[bool, ...] | None = None
    """Of which outputs the last backward pass had gradients; None where none has been."""
    trouble: int = 0
    """How many backward passes a graph could not serve."""
    recorded: RecordedCall | None = None


class CallGraphs:
    """The graphs of one module's calls.

    Args:
        recorders: one a card.
        give_up: called with the reason, once each, when calls stay eager from now on.
    """

    def __init__(self, recorders: Sequence[Recorder], give_up: Callable[[str], None]) -> None:
        self._recorders = recorders
        self._say = give_up
        self._said: set[str] = set()
        self._off = False
        self.replays = 0
        """How many calls were replayed."""
        self._passes = 0
        self._looked = False
        self._kinds = Kinds(_Kind, self.give_up)
        self._awaits: weakref.ref[SpreadCall] | None = None
        """The call whose activations are in the graphs' memory."""
        self._begun: weakref.WeakKeyDictionary[SpreadCall, int] = weakref.WeakKeyDictionary()
        """The calls with gradients that there are, and the thread of the script's that made each."""

    def way(self, call: SpreadCall) -> Way:
        """How a call with gradients is to run."""
        if self._off:
            return _EAGER
        self._begun[call] = threading.get_ident()
        if call.whole or not all(call.sizes) or _surrounded(call):
            return _EAGER
        shards = call.shards()
        kind = self._kind(call, shards)
        if kind is None or kind.trouble >= _MOST_TROUBLE:
            return _EAGER
        if kind.recorded is None:
            self._passes += 1
            kind.seen += 1
            if self._passes >= WARM_UP and not self._looked:
                return _Watched(self, kind)
        if self._awaits is not None and self._awaits() is not None:
            return _Learning(self, kind)
        if kind.recorded is None and (not self._looked or kind.seen < 2 or not self._record(call, shards, kind)):
            return _Learning(self, kind)
        assert kind.recorded is not None, "recorded just now, or before"
        compared = due(kind.recorded.number + 1)
        return (_Compared if compared else _Replayed)(self, kind, kind.recorded, shards)

    def _kind(self, call: SpreadCall, shards: Sequence[Any]) -> _Kind | None:
        replicas = call.engine.replicas
        made_for = replicas.generation, replicas.changes, replicas.addresses()
        trains = tuple(parameter.requires_grad for parameter in replicas.parameters[0])
        flags = torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()
        try:
            key = replicas.modes, trains, call.context.autocast, flags, tuple(map(signature, shards))
        except UnrepeatableError as error:
            self.give_up(str(error))
            return None
        kind = self._kinds.find(made_for, key)
        if kind is None and not self._off:
            self._say_once(f"there are more than {MOST_KINDS} kinds of them, which is all that is recorded")
        return kind

    def _record(self, call: SpreadCall, shards: Sequence[Any], kind: _Kind) -> bool:
        if kind.pattern is None or not any(kind.pattern) or self._other_thread_may_be_in_backward():
            return False
        try:
            kind.recorded = RecordedCall(self._recorders, call, shards, kind.pattern)
        except UnrepeatableError as error:
            self.give_up(str(error))
        except Exception as error:
            self.give_up(describe_error(error))
        return kind.recorded is not None

    def _other_thread_may_be_in_backward(self) -> bool:
        """Whether a backward pass of another thread's may hold the autograd thread that a recording needs.

        It would wait for the cards' threads, which the recording holds, and the recording for it.
        """
        own = threading.get_ident()
        return any(thread != own and not call.spent for call, thread in list(self._begun.items()))

    # ---- what ways tell ------------------------------------------------------------------------------------

    def give_up(self, reason: str) -> None:
        """Run every call eager from now on."""
        self._off = True
        self._kinds.clear()
        self._say_once(reason)

    def _say_once(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            self._say(reason)

    def looked(self, reason: str) -> None:
        """A call has been watched; `reason` says what in it can't be repeated, if anything."""
        self._looked = True
        if reason:
            self.give_up(reason)

    def hold(self, call: SpreadCall) -> None:
        """A call is replayed: the graphs' memory holds what it needs until it ends, or `release`."""
        self._awaits = weakref.ref(call)
        self.replays += 1

    def release(self) -> None:
        """The graphs' memory is free."""
        self._awaits = None

    def trouble(self, kind: _Kind, reason: str) -> None:
        """A backward pass came that a graph can't serve: there is to be another, or none."""
        kind.trouble += 1
        kind.recorded = None
        if kind.trouble >= _MOST_TROUBLE:
            self._say_once(reason)


def _surrounded(call: SpreadCall) -> bool:
    """Whether something around the call wants to see what a graph doesn't show."""
    context = call.context
    return (
        context.shared_modes
        or context.saved_tensor_hooks is not None
        or torch.is_anomaly_enabled()
        or torch._C._current_graph_task_id() != -1
    )


class _Learning(Way):
    """Eager; shows of which outputs backward has gradients."""

    def __init__(self, graphs: CallGraphs, kind: _Kind) -> None:
        self._graphs = graphs
        self._kind = kind

    def backward(self, call: SpreadCall, gradients: Sequence[Tensor | None], *, keep: bool) -> list[Tensor | None]:
        self._kind.pattern = _pattern(gradients)
        if keep:
            self._graphs.trouble(self._kind, _KEPT)
        found = super().backward(call, gradients, keep=keep)
        sparse = [index for index, gradient in enumerate(found) if gradient is not None and gradient.is_sparse]
        if sparse:
            self._graphs.give_up(f"the gradient of {_name(call, sparse[0])} is sparse")
        return found

    def differentiated(self) -> None:
        self._graphs.trouble(self._kind, _KEPT)


class _Watched(_Learning):
    """Eager, and looked at for what can't be repeated."""

    def forward(self, call: SpreadCall) -> list[Any]:
        replicas = call.engine.replicas
        before = _versions(call)
        looking = Looking(replicas.module, call.engine.device)
        with looking:
            values = super().forward(call)
        written = replicas.absorb()
        reason = unrepeatable_part(replicas.module) or looking.reason
        if not reason and written:
            reason = f"forward writes {written[0]}"
        if not reason and _versions(call) != before:
            reason = "forward writes into its input in place"
        if not reason and call.recomputes:
            reason = "a checkpoint with use_reentrant=True runs forward inside backward"
        self._graphs.looked(reason)
        return values


class _Replayed(_Learning):
    """Both passes are replays."""

    lends = True

    def __init__(self, graphs: CallGraphs, kind: _Kind, recorded: RecordedCall, shards: Sequence[Any]) -> None:
        super().__init__(graphs, kind)
        self._recorded = recorded
        self._shards: Sequence[Any] = shards

    def forward(self, call: SpreadCall) -> list[Any]:
        self._graphs.hold(call)
        self._versions = self._recorded.versions
        self._before = _versions(call), [parameter._version for parameter in call.parameters[0]]
        values = self._recorded.forward(call.engine, self._shards)
        self._shards = ()
        return values

    def backward(self, call: SpreadCall, gradients: Sequence[Tensor | None], *, keep: bool) -> list[Tensor | None]:
        self._recorded.check_unchanged(self._versions)
        if keep or _pattern(gradients) != self._recorded.pattern:
            if self._before != (_versions(call), [parameter._version for parameter in call.parameters[0]]):
                raise RuntimeError(
                    "an input or a parameter of the module has been modified by an inplace operation since its forward"
                    " pass, which has to run again for this backward pass"
                )
            self._kind.pattern = _pattern(gradients)
            self._graphs.trouble(self._kind, _KEPT if keep else _OTHERS)
            call.forward_again()
            call.way = _EAGER
            self._graphs.release()
            return _EAGER.backward(call, gradients, keep=keep)
        found = self._recorded.backward(call, gradients)
        self._graphs.release()
        return found


class _Compared(_Replayed):
    """Eager, and compared with replays of both passes."""

    lends = False

    def forward(self, call: SpreadCall) -> list[Any]:
        self._alike = False
        engine = call.engine
        before = Moment(engine.replicas.modules, engine.generators)
        values: list[Any] | None = None
        with contextlib.suppress(torch.OutOfMemoryError):  # there is no room for both: the script gets the replay's
            values = call.forward_eager()
        if values is None:
            before.restore()
            call.way = _Replayed(self._graphs, self._kind, self._recorded, self._shards)
            return call.way.forward(call)
        after = Moment(engine.replicas.modules, engine.generators)
        before.restore()
        replayed = super().forward(call)
        self._alike = self._outputs_alike(call, values, replayed, before, after)
        after.restore()
        if not self._alike:
            self._graphs.release()
        return values

    def _outputs_alike(
        self, call: SpreadCall, values: Sequence[Any], replayed: Sequence[Any], before: Moment, after: Moment
    ) -> bool:
        try:
            found = [output_signature(value) for value in values]
        except UnrepeatableError as error:
            self._graphs.give_up(str(error))
            return False
        if found != self._recorded.outputs:
            self._graphs.give_up("outputs differ in structure, or in what is no tensor, from call to call")
            return False
        gap = max(relative_gap(list(tensors_in(values)), list(tensors_in(replayed))), after.gap())
        if gap <= TOLERANCE:
            return True
        before.restore()
        again = call.forward_eager()
        noise = max(relative_gap(list(tensors_in(values)), list(tensors_in(again))), after.gap())
        return self._judge(gap, noise, "outputs")

    def backward(self, call: SpreadCall, gradients: Sequence[Tensor | None], *, keep: bool) -> list[Tensor | None]:
        alike = self._alike and not keep and _pattern(gradients) == self._recorded.pattern
        found: list[Tensor | None] = []
        try:
            found = _Learning.backward(self, call, gradients, keep=keep)
        except torch.OutOfMemoryError:
            if not alike:
                raise
        if alike:
            replayed = self._recorded.backward(call, gradients)
            if found:
                self._compare(call, gradients, found, replayed)
            else:
                found = replayed  # there was no room for an eager pass beside the graphs
        self._alike = False
        self._graphs.release()
        return found

    def _compare(
        self,
        call: SpreadCall,
        gradients: Sequence[Tensor | None],
        found: list[Tensor | None],
        replayed: list[Tensor | None],
    ) -> None:
        """Compare the eager call's gradients with the replay's."""
        gap = relative_gap(found, replayed)
        if gap > TOLERANCE:
            call.forward_again()
            noise = relative_gap(found, call.backward_eager(gradients, keep=False))
            self._judge(gap, noise, "gradients")

    def _judge(self, gap: float, noise: float, what: str) -> bool:
        alike = gap <= TOLERANCE + min(4 * noise, MOST_NOISE)
        if not alike:
            self._graphs.give_up(
                f"a replay gives {what} that lie {gap:.1e} from an eager call's: forward depends on something in Python"
                " that changes from call to call"
            )
        return alike


_KEPT = "the script keeps a call's graph for another backward pass (retain_graph=True or create_graph=True)"
_OTHERS = "the script differentiates now these outputs of a call and now others"


def _pattern(gradients: Sequence[Tensor | None]) -> tuple[bool, ...]:
    return tuple(gradient is not None for gradient in gradients)


def _name(call: SpreadCall, index: int) -> str:
    """The name of a parameter that the call trains."""
    wanted = call.parameters[0][index]
    return next(name for name, own in call.engine.replicas.module.named_parameters() if own is wanted)


def _versions(call: SpreadCall) -> list[int]:
    """How often each tensor of the call's batch was written in place."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors_in(call.batch)]

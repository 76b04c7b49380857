"""The forks of the decision tree, in the order in which they are asked.

Each looks at a `State`, answers its question with a number, strikes out the candidates that the answer excludes, and
returns the `Fork` for the drawing; None where the question doesn't arise. A fork may settle the plan, and then the
ones after it are not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from manycard.planner.candidates import Candidate
from manycard.planner.facts import Facts
from manycard.planner.memory import capacity_mib, fixed_mib
from manycard.planner.plan import Branch, Fork, Prediction
from manycard.planner.reducing import all_reduce_ms

__all__ = ["FORKS", "State", "pace", "simplest_of_the_fastest"]

NOISE = 0.03
"""Times that differ by less are equal."""
GAIN = 1.1
"""Several cards must be faster than one by this factor to be worth their keep."""
HOST_BOUND = 0.9
"""From this part of the cards' time on, the host sets the pace, or will whenever it is a little busier."""
_SIMPLICITY = ("single", "dp", "manual", "ddp", "fsdp")


@dataclass
class State:
    """What is still open."""

    facts: Facts
    rows: dict[Candidate, Prediction] = field(default_factory=dict)
    struck: dict[Candidate, str] = field(default_factory=dict)
    """Candidates that are out, with the reason."""
    too_large: list[Candidate] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    settled: bool = False

    @property
    def left(self) -> list[Candidate]:
        """Candidates that are not struck out."""
        return [candidate for candidate in self.rows if candidate not in self.struck]

    def strike(self, candidate: Candidate, why: str) -> None:
        """Take a candidate out; the first reason stays."""
        self.struck.setdefault(candidate, why)

    def keep(self, wanted: Callable[[Candidate], bool], why: str) -> bool:
        """Strike out all that are not wanted, unless that would leave nothing that can be run."""
        kept = [c for c in self.left if wanted(c)]
        if not kept:
            return False
        for candidate in self.left:
            if not wanted(candidate):
                self.strike(candidate, why)
        return True


def pace(row: Prediction) -> float:
    """A row's step time; infinite where it isn't known."""
    return float("inf") if row.step_ms is None else row.step_ms


def simplest_of_the_fastest(state: State, left: Sequence[Candidate]) -> Candidate:
    """Of the candidates within noise of the fastest, the simplest to run."""
    best = min(pace(state.rows[candidate]) for candidate in left)

    def order(candidate: Candidate) -> tuple[float, ...]:
        own = pace(state.rows[candidate])
        even = own <= best * (1 + NOISE) or own == best
        return (
            not even,
            0 if even else own,
            _SIMPLICITY.index(candidate.strategy),
            candidate.cards,
            candidate.compile,
            # Graphs fall back to eager steps by themselves, and take the host out of the way.
            not candidate.graphs,
        )

    return min(left, key=order)


# ---- the questions, in order -------------------------------------------------------------------------------


def how_many_cards(state: State) -> Fork:
    """One card leaves nothing to spread."""
    facts, count = state.facts, state.facts.all_cards
    models = ", ".join(sorted({card.model for card in facts.cards}))
    several = count > 1
    if not several:
        state.reasons.append("there is one card")
    return Fork(
        "cards",
        "How many cards are there?",
        f"{count} x {models}",
        "several" if several else "one",
        (Branch("one", "single, with CUDA graphs where the host is slow"), Branch("several", "look at memory")),
    )


def do_they_compute(state: State) -> Fork | None:
    """Simulated cards tell nothing of speed: the strategy that simulates best is taken."""
    facts = state.facts
    if not facts.simulated or facts.all_cards == 1:
        return None
    wanted = "ddp" if facts.written == "ranks" else "dp"
    count = facts.all_cards
    state.keep(
        lambda c: c.strategy == wanted and c.cards == count,
        "on simulated cards speed can't choose, and this one isn't needed",
    )
    state.reasons.append(f"the cards are simulated, so nothing speaks for another strategy than {wanted}")
    state.settled = True
    return Fork(
        "simulated",
        "Are the cards real?",
        f"{len(facts.cards)} simulated cards on {facts.cores} cores",
        "no",
        (Branch("yes", "measure, and choose by speed"), Branch("no", f"{wanted}, and no word on speed")),
    )


def does_it_fit(state: State) -> Fork | None:
    """Whether the model, its optimizer and activations fit: whole, in parts of a batch, or only when sharded."""
    room = capacity_mib(state.facts)
    replicated = [c for c in state.rows if c.strategy != "fsdp"]
    # A single card has the whole batch; what all cards can do together is what counts here.
    widest = max(replicated, key=lambda c: (c.cards, c not in state.too_large, not c.drop_in))
    needed = state.rows[widest].memory_mib
    if room is None or needed is None:
        return None
    if widest in state.too_large:
        taken = "no"
        state.keep(lambda c: c.strategy == "fsdp", "the training doesn't fit on one card")
        state.reasons.append(
            f"parameters, gradients and optimizer state need {fixed_mib(state.facts):,.0f} MiB, and a card has"
            f" {room:,.0f}: they must be sharded"
        )
    elif widest.accumulate > 1:
        taken = "in parts"
        state.reasons.append(f"a batch fits in {widest.accumulate} parts of {needed:,.0f} MiB a card")
    else:
        taken = "yes"
        state.keep(lambda c: c.strategy != "fsdp", "the training fits on one card, so that sharding only costs")
    return Fork(
        "memory",
        "Does the training fit on one card?",
        f"{needed:,.0f} of {room:,.0f} MiB a card",
        taken,
        (
            Branch("yes", "each card holds the whole model"),
            Branch("in parts", "accumulate: the same global batch in parts"),
            Branch("no", "fsdp: shard parameters and optimizer state"),
        ),
    )


def how_many_machines(state: State) -> Fork | None:
    """One process drives the cards of one machine; several machines need ranks."""
    machines = state.facts.machines
    if state.facts.all_cards == 1:
        return None
    if machines > 1:
        state.keep(lambda c: c.ranks, "one process can't drive the cards of several machines")
        state.reasons.append(f"{machines} machines need one process a card")
    network = state.facts.links.network_gb_per_s
    return Fork(
        "machines",
        "How many machines?",
        f"{machines}" + (f", {network:g} GB/s between them" if machines > 1 and network else ""),
        "several" if machines > 1 else "one",
        (Branch("one", "one process can drive all cards"), Branch("several", "ranks: ddp or fsdp")),
    )


def how_is_it_written(state: State) -> Fork | None:
    """A notebook has one process; a script of ranks brings its own."""
    facts = state.facts
    if facts.all_cards == 1:
        return None
    words = {
        "workload": ("api", "a built-in workload"),
        "api": ("api", "it uses Parallel"),
        "loop": ("loop", "an own loop, whose calls are spread"),
        "notebook": ("notebook", "a notebook has one process"),
        "ranks": ("ranks", "it starts or expects ranks"),
    }
    taken, number = words[facts.written]
    if facts.one_process:
        number += ", in a process that runs already"
        state.keep(lambda c: not c.ranks, "a process that runs already can't become ranks; manycard run starts them")
    if taken == "notebook" and state.keep(lambda c: not c.ranks, "a notebook has one process"):
        state.reasons.append("a notebook has one process")
    if taken == "ranks" and state.keep(
        lambda c: c.ranks or c.cards == 1, "the script deals with ranks itself; written with Parallel it could have it"
    ):
        state.reasons.append("the script deals with ranks itself")
    return Fork(
        "script",
        "How is the script written?",
        number,
        taken,
        (
            Branch("api", "every strategy"),
            Branch("loop", "dp by spreading its calls, or ranks that run it in lockstep"),
            Branch("notebook", "one process: dp or single"),
            Branch("ranks", "ddp, as it is"),
        ),
    )


def are_they_equal(state: State) -> Fork | None:
    """The slowest card sets the pace of even shards."""
    facts = state.facts
    if facts.all_cards == 1:
        return None
    speeds = [card.speed for card in facts.cards]
    manual = [c for c in state.left if c.strategy == "manual"]
    taken = "yes"
    if manual:
        taken = "no"
        even = [c for c in state.left if c.strategy == "dp" and c.cards == manual[0].cards]
        best = min((pace(state.rows[c]) for c in even), default=float("inf"))
        own = pace(state.rows[manual[0]])
        state.reasons.append(
            f"the slowest card has {min(speeds) / max(speeds):.0%} of the fastest one's speed, so shares of a batch"
            f" by speed take {own:.2f} ms a step instead of {best:.2f}"
        )
    return Fork(
        "equal",
        "Are the cards equally fast?",
        f"the slowest has {100 * min(speeds) / max(speeds):.0f} % of the fastest one's speed",
        taken,
        (Branch("yes", "even shards"), Branch("no", "manual: shares of a batch by speed, or the equal cards alone")),
    )


def do_they_reach_each_other(state: State) -> Fork | None:
    """Without peer-to-peer access, gradients go through the host's memory."""
    facts = state.facts
    cost = all_reduce_ms(facts.links, facts.model.gradients_mib, len(facts.cards), facts.machines)
    if facts.all_cards == 1 or (facts.links.p2p is None and cost is None):
        return None
    taken = "no" if facts.links.p2p is False else "yes" if facts.links.p2p else "not known"
    number = "the all-reduce's time isn't known" if cost is None else f"one all-reduce of gradients takes {cost:.2f} ms"
    if taken == "no":
        state.reasons.append(f"without peer-to-peer access {number}, which ddp hides behind its backward pass in part")
    return Fork(
        "p2p",
        "Can cards read each other's memory?",
        f"{facts.links.kind}: {number}",
        taken,
        (
            Branch("yes", "reductions are cheap beside a step"),
            Branch("no", "reductions count: overlapped ones first"),
            Branch("not known", "as the trial says"),
        ),
    )


def is_there_a_gain(state: State) -> Fork | None:
    """Several cards must beat one on the same global batch."""
    ones = [pace(state.rows[c]) for c in state.left if c.cards == 1]
    many = [pace(state.rows[c]) for c in state.left if c.cards > 1 and c.strategy in state.facts.built]
    if not ones or not many or min(many) == float("inf") or min(ones) == float("inf"):
        return None
    gain = min(ones) / min(many)
    # A slow loader makes all equally fast; that is the next fork's to say.
    if state.facts.input_rate and min(ones) <= 1e3 * state.facts.batch / state.facts.input_rate:
        return None
    if gain < GAIN:
        state.keep(lambda c: c.cards == 1, f"all cards together are {gain:.2f} times as fast as one")
        state.reasons.append(f"all cards together are {gain:.2f} times as fast as one: the work is too small to spread")
    return Fork(
        "gain",
        "Are all cards faster than one, on the same global batch?",
        f"{gain:.2f} times",
        "yes" if gain >= GAIN else "no",
        (Branch("yes", "all cards"), Branch("no", "one card: too small to gain, unless the batch grows")),
    )


def does_the_input_keep_up(state: State) -> Fork | None:
    """A loader that is slower than the cards decides how many of them are of use."""
    facts = state.facts
    if facts.input_rate is None:
        return None
    loading = 1e3 * facts.batch / facts.input_rate
    computing = min((_own_ms(state.rows[c]) for c in state.left), default=0.0)
    bound = loading > computing
    if bound:
        enough = [c for c in state.left if _own_ms(state.rows[c]) <= loading * (1 + NOISE)]
        fewest = min((c.cards for c in enough), default=0)
        state.keep(lambda c: c.cards == fewest, f"the loader gives {facts.input_rate:,.0f} samples/s, more cards wait")
        state.reasons.append(
            f"loading a batch takes {loading:.1f} ms and computing it {computing:.1f}: the loader holds it back, and"
            f" {fewest} card{'s' if fewest != 1 else ''} can use all that it gives"
        )
    return Fork(
        "input",
        "Does the loader keep up?",
        f"{loading:.1f} ms to load a global batch, {computing:.1f} ms to compute it",
        "no" if bound else "yes",
        (Branch("yes", "the cards set the pace"), Branch("no", "mend the loader first; use as few cards as it feeds")),
    )


def is_the_host_the_limit(state: State) -> Fork | None:
    """Where launching takes as long as computing, steps must be replayed, or launched by more processes."""
    eager = [c for c in state.left if not c.graphs and not c.compile and not c.ranks and state.rows[c].parts]
    if not eager or state.facts.step.host_ms is None:
        return None
    row = state.rows[max(eager, key=lambda c: c.cards)]
    host, cards = row.parts["host_ms"], row.parts["cards_ms"]
    if state.facts.step.graphed:
        # Eager steps on one card already contain the host's time.
        replayed = [
            state.rows[c].parts["cards_ms"] for c in state.left if c.graphs and not c.compile and state.rows[c].parts
        ]
        cards = min([cards, *replayed])
    bound = host > HOST_BOUND * cards
    if bound:
        way = "CUDA graphs replay a step without it" if any(c.graphs for c in state.left) else "ranks share its work"
        state.reasons.append(f"the host needs {host:.2f} ms to launch what the cards compute in {cards:.2f}; {way}")
    each = state.facts.step.launch_us
    per_launch = f" ({state.facts.step.launches:,} launches x {each:.1f} us)" if each else ""
    return Fork(
        "host",
        "Is the host the limit?",
        f"{host:.2f} ms to launch{per_launch}, {cards:.2f} ms to compute",
        "yes" if bound else "no",
        (Branch("yes", "CUDA graphs; ranks where they can't be recorded"), Branch("no", "the fastest as measured")),
    )


def _own_ms(row: Prediction) -> float:
    """A row's step without its loader."""
    if not row.parts:
        return pace(row)
    return max(row.parts["cards_ms"], row.parts["host_ms"]) + row.parts["exposed_ms"] + row.parts["copies_ms"]


FORKS: tuple[Callable[[State], Fork | None], ...] = (
    how_many_cards,
    do_they_compute,
    does_it_fit,
    how_many_machines,
    how_is_it_written,
    are_they_equal,
    do_they_reach_each_other,
    is_there_a_gain,
    does_the_input_keep_up,
    is_the_host_the_limit,
)

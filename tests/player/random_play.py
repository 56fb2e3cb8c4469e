"""A play in which anything may happen in any order that a driver allows; and what must hold after every event."""

import random
from dataclasses import dataclass, field

from kvabr.abr import Ladder
from kvabr.abr.estimators import HarmonicMean
from kvabr.abr.plugins import load_policy
from kvabr.player.session import Session
from kvabr.player.session_types import (
    Action,
    Cancel,
    Decode,
    Deliver,
    FetchGroup,
    GiveUp,
    PlayerConfig,
    Recompute,
)
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.cost import PrefillCost
from tests.catalogs import catalog

_MAX_EVENTS = 600
_STEPS_S = (0.0, 0.0, 1e-4, 1e-3, 0.01, 0.05, 0.2)


@dataclass
class World:
    """A driver whose network, decoders and engine do what the dice say."""

    dice: random.Random
    play: Session
    now: float = 0.0
    reading: dict[int, FetchGroup] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    decoding: list[Decode] = field(default_factory=list)
    computing: Recompute | None = None
    ended: Action | None = None
    arrived: int = 0
    """Bytes of all requests."""
    bad: float = 0.3
    """Share of what ends that fails."""

    def run(self) -> Session:
        self.play.start(0.0)
        self.obey()
        for _ in range(_MAX_EVENTS):
            if self.ended is not None:
                break
            self.step()
        self.bad = 0.0
        for _ in range(20_000):
            if self.ended is not None:
                break
            self.step()
        assert self.ended is not None, "the play does not end"
        self.balance()
        return self.play

    def balance(self) -> None:
        """Check that every byte was of use or wasted, and that no cache with a hole is delivered."""
        record = self.play.record
        assert record.bytes_fetched == self.arrived
        assert 0 <= record.bytes_wasted <= self.arrived
        if isinstance(self.ended, Deliver):
            assert all(group.track is not None and group.ready_s is not None for group in record.groups)
            assert sum(group.bytes for group in record.groups) + record.bytes_wasted == self.arrived
        else:
            assert record.gave_up

    def obey(self) -> None:
        for action in self.play.actions():
            match action:
                case FetchGroup():
                    self.reading[action.request] = action
                case Cancel():
                    self.reading.pop(action.request, None)
                case Decode():
                    self.decoding.append(action)
                case Recompute():
                    assert self.computing is None
                    self.computing = action
                case Deliver() | GiveUp():
                    self.ended = action
        check(self.play)

    def step(self) -> None:
        dice, play = self.dice, self.play
        self.now += dice.choice(_STEPS_S)
        due_s = play.next_timer()
        kinds = [self.wait]
        kinds += [self.read] * 3 if self.reading else []
        kinds += [self.decode] * 3 if self.decoding else []
        kinds += [self.compute] if self.computing is not None else []
        if due_s is not None and due_s <= self.now:
            play.timer(self.now)
        else:
            dice.choice(kinds)()
        self.obey()

    def wait(self) -> None:
        due_s = self.play.next_timer()
        if self.dice.random() < 0.1:
            self.play.waited(self.now)
        elif due_s is not None:
            self.now = max(self.now, due_s)
            self.play.timer(self.now)

    def read(self) -> None:
        dice, play = self.dice, self.play
        request = dice.choice(list(self.reading))
        fetch, what = self.reading[request], dice.random()
        if what < self.bad / 2:
            del self.reading[request]
            play.failed(request, "broken off", self.now, busy=dice.random() < 0.2)
        elif what < 0.3:
            before = self.received.get(request, 0)
            self.received[request] = dice.randrange(before, fetch.bytes)
            self.arrived += self.received[request] - before
            play.progress(request, self.received[request], self.now)
        else:
            del self.reading[request]
            self.arrived += fetch.bytes - self.received.get(request, 0)
            play.done(request, self.now, dice.choice(["network", "network", "cpu", "kept"]))

    def decode(self) -> None:
        job = self.decoding.pop(self.dice.randrange(len(self.decoding)))
        if self.dice.random() < self.bad:
            self.play.refused(self.dice.choice([job.request, *job.below]), "corrupt", self.now)
        else:
            self.play.decoded(job.request, self.now, self.dice.choice([None, 1e-4, 1e-3, 0.02]))

    def compute(self) -> None:
        job, self.computing = self.computing, None
        if self.dice.random() < self.bad / 4:
            self.play.compute_failed("out of memory", self.now)
        else:
            self.play.computed(job.first, job.last, self.now)


def check(play: Session) -> None:
    """Compare what is added up and kept in order with what it is made of."""
    view, queue = play.view, play.engine
    if play.over:
        return
    flying = {transfer.group for transfer in view.in_flight.values()}
    hidden = [group for group in range(view.groups) if queue is not None and queue.takes(group)]
    missing = [
        group for group in play.groups.absent if group not in flying and group < view.edge and group not in hidden
    ]
    assert list(view.missing) == missing
    assert view.floor_bytes() == sum(view.ladder.tracks[0].bytes[group] for group in missing)
    assert view.outstanding_bytes == sum(transfer.remaining for transfer in view.in_flight.values())
    required = [transfer for transfer in view.in_flight.values() if not transfer.upgrade]
    assert sorted(view.in_flight.required) == sorted(transfer.request for transfer in required)
    assert view.in_flight.required_bytes == sum(transfer.remaining for transfer in required)
    assert set(view.in_flight.groups) == flying
    receiving = sum(one.first_byte_s is not None for one in view.in_flight.values())
    assert sum(view.in_flight.receiving.values()) == receiving
    assert sum(view.in_flight.requests_by_source.values()) == len(view.in_flight)
    counted = [track for tops in play._decoders._counted for track in tops]
    assert abs(view.decode_backlog_s * view.decoders - sum(map(view.decode_s, counted))) < 1e-9
    for group in range(view.groups):
        progress = play.groups[group]
        stacked = progress.decodable(play.record.groups[group].track)
        if progress.decoding:  # what it replaces is kept, and counted again only if it fails
            assert progress.decoding[-1].track in play._decoders._counted[group]
        else:
            assert play._decoders._counted[group] == ((stacked[-1].track,) if stacked else ())
            assert (group in view.undecoded) == bool(stacked)
        if view.track_of[group] is None:
            assert group in play.groups.absent or group in hidden
    if queue is not None:
        assert list(queue.left) == [group for group in play.groups.absent if group not in queue.chosen]
        here = range(*(queue.computing or (0, 0)))
        waiting = [group for group in queue.chosen if group not in here]
        assert abs(queue._waiting_s - sum(queue._seconds(group, group + 1) for group in waiting)) < 1e-9
        assert queue._waiting == len(waiting)


def world(dice: random.Random, policy: str, *, groups: int | None = None) -> World:
    """Return a play of a policy, with or without an engine, on some asset."""
    offer = catalog(groups or dice.choice([1, 2, 3, 5, 9]), layered=dice.random() < 0.7, short=dice.choice([0, 40]))
    mode, deadline_s = dice.choice([None, "hole", "hole", "suffix"]), dice.choice([0.3, 1.0, 3.0])
    cost = None if mode is None else PrefillCost.from_rate(offer.tokens / (deadline_s * dice.choice([0.2, 0.8, 3.0])))
    config = PlayerConfig(
        decoders=dice.choice([1, 2]),
        time_price=dice.choice([0.0, 1e-3, 0.1]),
        gpu_price=dice.choice([0.0, 1e-3]),
        chunked=dice.random() < 0.5,
        stalled_after=dice.choice([None, 0.2]),
        silent_after=dice.choice([None, 0.25]),
        give_up_after=dice.choice([1.0, 3.0]),
        decode_ahead_s=dice.choice([0.0, 0.005]),
    )
    play = Session(
        Ladder(offer), deadline_s, load_policy(policy)(), HarmonicMean(), cost=cost, mode=mode or "hole", config=config
    )
    return World(dice, play)


def complete(play: Session) -> bool:
    """Return whether the play has ended with every group in place."""
    return all(record.ready_s is not None or record.track == RECOMPUTED for record in play.record.groups)

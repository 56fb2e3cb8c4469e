"""Runs rounds of plays under faults, judges every play, and looks whether everything works again afterwards."""

import heapq
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from tests.chaos.facts import Order, Report
from tests.chaos.judge import judge
from tests.chaos.nodes import Sample, partial_files
from tests.chaos.plan import PLAYS, Fault, Round, plan
from tests.chaos.player import Player
from tests.chaos.published import KINDS, build
from tests.chaos.tally import BAD, Tally
from tests.chaos.world import Undo, World

HANG_S = 60.0
"""A play that takes longer than this hangs, unless a run says otherwise."""
_PATIENCE = 3
"""Times that, after which a player that says nothing is given up."""
_STALE_S = 7200.0
"""How old half-written files are made before servers start again, which sweep those of more than an hour."""


@dataclass(frozen=True, slots=True)
class Options:
    seed: int = 1
    """Of the first round; each further round has the next."""
    plays: int = 10_000
    """Least number; rounds are not cut."""
    plays_per_round: int = PLAYS
    prompts: int = len(KINDS)
    versions: int = 2
    hang_s: float = HANG_S
    quiet: Path | None = None
    """No round begins while this file exists."""
    minutes: float | None = None
    """Begin no round after this time."""
    faults: tuple[str, ...] = ()
    """Only faults whose kind begins with one of these."""


class Laboratory:
    def __init__(
        self, folder: Path, options: Options, progress: Callable[[Tally, int], None] = lambda _tally, _seed: None
    ) -> None:
        """Work in an empty folder; ``progress`` is called after every round with the seed."""
        self._folder, self._options, self._progress = folder, options, progress
        self.tally = Tally()
        self._pids: dict[str, int] = {}

    def run(self) -> Tally:
        """Run to the end; Ctrl-C ends it early."""
        options = self._options
        (self._folder / "library").mkdir()
        self._library = build(self._folder / "library", prompts=options.prompts, versions=options.versions)
        begun_s = time.monotonic()
        with World(self._folder, self._library, players=2, hang_s=options.hang_s) as world:
            self._world = world
            for seed in count(options.seed):
                made = plan(seed, prompts=options.prompts, versions=options.versions, plays=options.plays_per_round)
                if options.faults:
                    wanted = tuple(fault for fault in made.faults if fault.kind.startswith(options.faults))
                    made = replace(made, faults=wanted)
                while options.quiet is not None and options.quiet.exists():
                    time.sleep(1)
                try:
                    self._round(made)
                except KeyboardInterrupt:
                    break
                self._progress(self.tally, seed)
                if self.tally.plays >= options.plays:
                    break
                if options.minutes is not None and time.monotonic() - begun_s > 60 * options.minutes:
                    break
            self._end(seed)
        return self.tally

    # ----------------------------------------------------------------- a round

    def _round(self, made: Round) -> None:
        world = self._world
        world.begin(made)
        begin_s = time.monotonic() + 0.05
        waiting: dict[int, dict[int, Order]] = {}
        for number, orders in enumerate(made.orders):
            world.players[number].begin(made.seed, begin_s, list(orders))
            waiting[number] = {order.number: order for order in orders}
        numbers = count()
        todo: list[tuple[float, int, Fault | Undo]] = [(f.at_s, next(numbers), f) for f in made.faults]
        heapq.heapify(todo)
        killed = any(fault.kind == "kill player" for fault in made.faults)
        while todo:
            at_s, _, act = heapq.heappop(todo)
            while (left := begin_s + at_s - time.monotonic()) > 0:
                self._collect(made.seed, waiting, min(left, 0.02), killed=killed)
            try:
                if not isinstance(act, Fault):
                    act()
                elif (undo := world.inflict(act)) is not None:
                    heapq.heappush(todo, (at_s + act.for_s, next(numbers), undo))
            except Exception as error:  # noqa: BLE001  # the laboratory's own: it is not to end thousands of plays
                self.tally.note(made.seed, "crash", f"the laboratory itself: {act}: {error!r}")
        end_s = time.monotonic() + _PATIENCE * self._options.hang_s
        while any(waiting.values()) and time.monotonic() < end_s:
            self._collect(made.seed, waiting, 0.02, killed=killed)
        self._give_up(made.seed, waiting)
        world.heal()
        self._recover(made.seed)
        self._look(made.seed)
        self.tally.rounds += 1

    def _collect(self, seed: int, waiting: dict[int, dict[int, Order]], within_s: float, *, killed: bool) -> None:
        """Wait a moment for reports, and judge them."""
        players = {number: self._world.players[number] for number, orders in waiting.items() if orders}
        for number, player in players.items():
            if player.gone:
                if killed and number == len(waiting) - 1:
                    self.tally.lost += len(waiting[number])
                else:
                    self.tally.note(seed, "crash", f"player {number} died")
                waiting[number].clear()
                return
        if not players:
            time.sleep(within_s)
        for player in Player.ready(players.values(), within_s):
            of, what = player.told()
            number = self._world.players.index(player)
            if isinstance(what, str):
                self.tally.note(of, "crash", what)
            elif of == seed and what.number in waiting[number]:
                self._judge(seed, what, waiting[number].pop(what.number))

    def _judge(self, seed: int, report: Report, order: Order) -> None:
        failures = judge(report, order, self._library)
        self.tally.play(seed, report, order, [replace(f, text=f"{f.text}\n    {order}") for f in failures])

    def _give_up(self, seed: int, waiting: dict[int, dict[int, Order]]) -> None:
        """A player that does not answer is frozen: all of its plays hang."""
        for number, orders in waiting.items():
            if orders:
                player = self._world.players[number]
                os.kill(player.pid, signal.SIGUSR1)  # stacks into its log
                time.sleep(1)
                for order in orders.values():
                    self.tally.note(seed, "hang", f"player {number} is frozen; {order}")
                player.kill()

    def _recover(self, seed: int) -> None:
        """Play until a play is complete: with all faults over, everything works again by itself."""
        begun_s = time.monotonic()
        for number in count(1000):
            order = Order(number, 0.0, 0, KINDS[0][0], 2.0, quic="qh3")
            report = self._asked(seed, order)
            if report is None:
                self.tally.note(seed, "crash", "player 0 died or froze while nothing was wrong")
                self._world.revive()
                return
            for failure in judge(report, order, self._library):
                if failure.kind in BAD:
                    self.tally.note(seed, failure.kind, f"recovering: {failure.text}")
            if report.outcome == "complete":
                self.tally.recovered_s.append(time.monotonic() - begun_s)
                return
            if time.monotonic() - begun_s > self._options.hang_s:
                self.tally.note(seed, "stuck", f"nothing can be played although all faults are over: {report}")
                return

    def _asked(self, seed: int, order: Order) -> Report | None:
        """Have the first player play once; None if it does not answer."""
        player, end_s = self._world.players[0], time.monotonic() + _PATIENCE * self._options.hang_s
        player.begin(seed, 0.0, [order])
        while time.monotonic() < end_s and not player.gone:
            for one in Player.ready([player], 0.5):
                of, what = one.told()
                if isinstance(what, str):
                    self.tally.note(of, "crash", what)
                elif what.number == order.number:
                    return what
        return None

    def _look(self, seed: int) -> None:
        """Look at all processes, and into their logs."""
        world, tally = self._world, self.tally
        for number, player in enumerate(world.players):
            tally.sample(f"player {number}", player.pid, Sample.of(player.pid), self._pids)
        for name, node in world.nodes.items():
            tally.sample(name, node.pid or 0, node.sample(), self._pids)
        self._blame(seed)

    def _blame(self, seed: int) -> None:
        """Note servers that died by themselves, and log lines that must not appear."""
        for name, node in self._world.nodes.items():
            node.check()
            for text in node.deaths:
                self.tally.note(seed, "crash", f"{name} {text}")
            node.deaths.clear()
            for text in node.bugs():
                self.tally.note(seed, "crash", f"{name} logs: {text}")

    # ----------------------------------------------------------------- the end

    def _end(self, seed: int) -> None:
        """End all servers as an operator does, and look for their remains."""
        world = self._world
        for player in world.players:
            player.close()
        for node in world.nodes.values():
            node.end()
        self._blame(seed)
        # What killed processes left goes when the next one opens the folder, once it is old enough.
        for path in partial_files(*world.folders):
            os.utime(path, (time.time() - _STALE_S,) * 2)
        world.reopen()
        self.tally.partial = len(partial_files(*world.folders))

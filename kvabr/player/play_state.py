"""The state of a play: each group's progress, transfers in flight, wasted bytes. `Session` decides what to do next."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvabr.abr.estimator import Estimator
from kvabr.abr.ladder import Ladder
from kvabr.abr.view import Transfer, View
from kvabr.player.compute_queue import ComputeQueue
from kvabr.player.event_log import EventLog
from kvabr.player.retry_tracker import RetryTracker
from kvabr.player.session_types import Action, Cancel, GroupRecord, PlayerConfig, PlayRecord
from kvabr.player.throughput_sampler import ChunkedThroughputSampler, ThroughputSampler
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.cost import PrefillCost
from kvabr.types.engine import EngineMode
from kvabr.types.events import Log, RequestCancelled, RequestFailed


class PlayState:
    """What a play knows about its groups, and the operations that change it."""

    def __init__(
        self,
        ladder: Ladder,
        deadline_s: float,
        estimator: Estimator,
        *,
        cost: PrefillCost | None,
        mode: EngineMode,
        config: PlayerConfig,
        oracle: Callable[[float], float] | None,
        log: Log | None,
    ) -> None:
        """Begin with every group absent."""
        self.view = View(
            ladder,
            deadline_s,
            cost=cost,
            front_first=cost is not None and mode == "suffix",
            gpu_price=config.gpu_price,
            oracle=oracle,
        )
        self._catalog = ladder.catalog
        self._config = config
        self._tick_s = deadline_s / config.ticks
        self._events = EventLog(log, self.view)
        meter = ChunkedThroughputSampler if config.chunked else ThroughputSampler
        self._sampler = meter(estimator, deadline_s, self._events.limited)
        self._compute = None if cost is None else ComputeQueue(cost, mode, self.view, self._tick_s)
        groups = self._catalog.groups
        self.record = PlayRecord([GroupRecord(group) for group in range(groups)])
        self._absent: dict[int, None] = dict.fromkeys(range(groups))
        """Groups that have not arrived and are not being computed, ascending; includes those in flight."""
        self._in_place = 0
        self._decoding: dict[int, Transfer] = {}
        self._retries = RetryTracker(ladder, config.attempts)
        self._actions: list[Action] = []
        self.over = False
        """True once the play has been delivered or given up."""

    def _idle(self) -> bool:
        """Return whether no request is receiving bytes."""
        return not any(transfer.first_byte_s is not None for transfer in self.view.in_flight.values())

    def _end_decoding(self, request: int) -> Transfer | None:
        """Remove a group that is decoded, or cannot be, from the decoder's queue; None if it is no longer wanted."""
        if self.over:
            return None  # too late: the cache is handed over, and the record is closed
        transfer = self._decoding.pop(request, None)
        if transfer is not None:
            left = self.view.decode_backlog_s - self.view.decode_s(transfer.track)
            self.view.decode_backlog_s = max(0.0, left)
        return transfer

    def _place(self, transfer: Transfer, record: GroupRecord, now: float) -> None:
        """Record that a group is in place."""
        layered = self._catalog.by_name[transfer.track].refines is not None
        if record.ready_s is None:
            self._in_place += 1
        elif not layered:
            self.record.bytes_wasted += record.bytes
        record.bytes = transfer.bytes + (record.bytes if layered else 0)
        record.requested_s, record.first_byte_s = transfer.requested_s, transfer.first_byte_s
        record.done_s, record.ready_s = transfer.done_s, now
        record.source = "upgraded" if transfer.upgrade else "fetched"
        record.track = self.view.track_of[transfer.group] = transfer.track
        self.view.settled.add(transfer.group)
        self.record.steps.append(("fetch", transfer.group, transfer.track))

    def _lost(self, transfer: Transfer, event: type[RequestFailed | RequestCancelled], reason: str, now: float) -> None:
        """Return a group whose transfer failed or was cancelled to its previous state."""
        view, group = self.view, transfer.group
        self.record.bytes_wasted += transfer.received
        self._events.emit(event, now, transfer.request, group, transfer.track, transfer.received, reason)
        if event is RequestFailed:
            self._retries.failed(group, transfer.track, reason)
        record = self.record.groups[group]
        if transfer.upgrade:
            view.track_of[group] = record.track
            # A group whose upgrade failed too often keeps its track.
            if record.track != RECOMPUTED and not self._retries.spent(group, transfer.track):
                view.settled.add(group)
        elif record.track is None:
            view.track_of[group] = None
            self._absent[group] = None
            self._absent = dict.fromkeys(sorted(self._absent))
            self._sync_missing()

    def _take_back(self, groups: Iterable[int]) -> None:
        """Return groups that were left to an engine that failed to their previous state."""
        view = self.view
        flying = {transfer.group for transfer in view.in_flight.values()}
        decoding = {transfer.group: transfer.track for transfer in self._decoding.values()}
        for group in groups:
            record = self.record.groups[group]
            if group in flying:
                continue
            if record.ready_s is not None:
                view.track_of[group] = record.track
                if group not in decoding:
                    view.settled.add(group)
            else:
                view.track_of[group] = decoding.get(group)
                if group not in decoding:
                    self._absent[group] = None
        self._absent = dict.fromkeys(sorted(self._absent))
        self._sync_missing()

    def _sync_missing(self) -> None:
        """Work out anew what the policy sees as missing."""
        flying = {transfer.group for transfer in self.view.in_flight.values()}
        lane = self._compute
        self.view.missing_groups = {
            group: None for group in self._absent if group not in flying and (lane is None or not lane.takes(group))
        }

    def _cancel(self, transfer: Transfer, reason: str, now: float, *, failed: bool = False) -> None:
        """Cancel a transfer in flight."""
        del self.view.in_flight[transfer.request]
        self.view.outstanding_bytes -= transfer.remaining
        self._actions.append(Cancel(transfer.request))
        self._sampler.settle(now, idle=self._idle())
        self._lost(transfer, RequestFailed if failed else RequestCancelled, reason, now)

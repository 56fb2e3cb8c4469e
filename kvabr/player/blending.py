"""Plays of prompts that are joined from passages: tokens of them are computed again before the cache is delivered.

Theory of operation. The cache is fetched like any other, to a deadline that leaves time for the tokens (`BlendPlan`):
at every event, layers and tokens compete for what is left at one price. Once every group is in place, the engine
chooses the tokens by what the question attends to, while layers still come: the choice on the cheapest track is as good
as on the best. When the play would deliver, it has the tokens computed over the cache as it is then, and delivers.

On a slow link the engine is idle meanwhile. Then the tokens that their publisher ranks highest are computed, passage by
passage, as soon as everything before is in place. Their part in the expected loss is not counted.

If the engine fails or does not end, the cache is delivered as it was joined. If its expected loss exceeds the goal's
limit, the play is given up instead.
"""

from __future__ import annotations

from dataclasses import replace

from kvabr.player.blend_plan import BlendOption, BlendPlan
from kvabr.player.session import Session
from kvabr.player.session_types import BlendGoal, BlendRecord, ChooseTokens, Goal, RecomputeTokens
from kvabr.types.errors import UsageError
from kvabr.types.events import TokensChosen, TokensDone, TokensFailed, TokensStarted
from kvabr.types.loss import played_loss

_AHEAD_SHARE = 0.5
"""Share of the time that the rest of the base takes which tokens may take that are computed ahead."""


class BlendSession(Session):
    """One play of a joined prompt."""

    def _begin(self, goal: Goal) -> None:
        if not isinstance(goal, BlendGoal):
            raise UsageError("the goal of a prompt joined from passages is a BlendGoal")
        view, config = self.view, self._config
        self._max_loss = goal.max_loss
        self._full_s = view.deadline_s
        """The deadline; that of the view leaves time for the tokens."""
        self._plan = BlendPlan(view.ladder, view.cost, goal, time_price=config.time_price, gpu_price=config.gpu_price)
        view.in_order = any(self._plan.ahead(number) for number in range(len(self._plan.passages)))
        self._question = goal.question
        self._choosing = self._settled = False
        """Whether tokens are being chosen or have been; and whether it is settled what is computed."""
        self._computing: BlendOption | None = None
        self._ahead: BlendOption | None = None
        """What is being computed in a publisher's order."""
        self._ahead_s = self._choosing_s = 0.0
        """When that began, and when choosing did."""
        self._next = 0
        """The first passage of which no tokens have been computed ahead, or passed over."""
        self._engine_s, self._failed = 0.0, False
        """When the engine last finished something; and whether it failed at the end, and is asked for nothing more."""
        self.record.blend = self._blend = BlendRecord(fusion_loss=self._plan.fusion([""] * view.groups, 0.0))
        self._reserve(0.0)

    # ------------------------------------------------------------------ events

    def start(self, now: float = 0.0) -> None:
        """Begin the play, unless its loss is bound to exceed the limit; otherwise as `Session.start`."""
        if (least := self._plan.least_loss) > self._max_loss:
            self._give_up(now, self._too_lossy(least))
        else:
            super().start(now)

    def tokens_chosen(self, now: float) -> None:
        """Take that the tokens are chosen."""
        if self.over or self._blend.chosen_s is not None:
            return
        self._blend.chosen_s = now
        self._engine_done(self._choosing_s, now)
        self._events.emit(TokensChosen, now)
        self._advance(now)

    def tokens_recomputed(self, now: float, *, ahead: bool = False) -> None:
        """Take that the tokens are computed, and in place; or kept apart, if it was done ahead of the others."""
        option = self._ahead if ahead else self._computing
        if self.over or option is None:
            return
        blend = self._blend
        self.record.tokens_recomputed += option.tokens
        self._events.emit(TokensDone, now, option.tokens)
        if ahead:
            self._engine_done(self._ahead_s, now)
            self._ahead = None
            blend.ahead += option.tokens
            self._advance(now)
        else:
            self._engine_done(blend.begun_s or 0.0, now)
            blend.share, blend.tokens, blend.done_s = option.share, option.tokens, now
            self._finish(now)

    def tokens_failed(self, reason: str, now: float, *, ahead: bool = False) -> None:
        """Take a failure of the engine: to choose tokens, or to compute them, ``ahead`` of the others or not."""
        if self.over:
            return
        self._events.emit(TokensFailed, now, reason)
        self._plan.options = self._plan.options[:1]
        if ahead:
            self._engine_done(self._ahead_s, now)
            self._ahead = None
        if self._computing is None:
            self._advance(now)
        elif not ahead:
            self._engine_done(self._blend.begun_s or 0.0, now)
            self._computing, self._settled, self._failed = None, False, True
            self._deliver(now)

    def computed(self, first: int, last: int, now: float) -> None:
        """Take computed groups; see `Session.computed`. Once tokens are computed, only the engine's time counts."""
        lane = self._compute
        if self._computing is None:
            super().computed(first, last, now)
        elif not self.over and lane is not None and lane.computing == (first, last):
            lane.finish(now)
            self._engine_done(lane.started_s, now)
            self.record.tokens_recomputed += self._catalog.tokens_before(last) - self._catalog.tokens_before(first)

    def compute_failed(self, reason: str, now: float) -> None:
        """Take that groups could not be computed; see `Session.compute_failed`."""
        if self._computing is None:
            super().compute_failed(reason, now)

    def decoded(self, request: int, now: float, seconds: float | None = None) -> None:
        """Take a group that is decoded and in place: too late once tokens are being computed over what is there."""
        if self._computing is None:
            super().decoded(request, now, seconds)

    def refused(self, request: int, reason: str, now: float) -> None:
        """Take a frame that could not be decoded; see `Session.refused`."""
        if self._computing is None:
            super().refused(request, reason, now)

    def timer(self, now: float) -> None:
        """Take the tick that `next_timer` asked for."""
        if self._computing is None:
            super().timer(now)
        elif not self.over:
            self._next_tick_s = now + self._tick_s
            if now >= self._patience_s():
                self.tokens_failed(f"they were not computed within {now - (self._blend.begun_s or 0.0):.1f} s", now)

    def next_timer(self) -> float | None:
        """Return when the driver must call `timer`; see `Session.next_timer`."""
        return super().next_timer() if self.over or self._computing is None else self._next_tick_s

    # --------------------------------------------------------------- internals

    def _patience_s(self) -> float:
        patience_s = super()._patience_s()
        return patience_s + self._config.give_up_after * (self._full_s - self.view.deadline_s)

    def _ended(self, now: float) -> bool:
        return super()._ended(now) or self._computing is not None

    def _refresh(self, now: float) -> None:
        super()._refresh(now)
        if not self._settled:
            self._reserve(now)

    def _reserve(self, now: float) -> None:
        """Leave as much time for tokens as they are worth."""
        view, left_s = self.view, self._full_s - now
        tokens_s = self._plan.reserve_s(left_s, self.record.bytes_fetched, view.lower_bound)
        if self._blend.chosen_s is not None and tokens_s:
            tokens_s -= self._plan.look_s
        view.deadline_s = self._full_s - tokens_s

    def _advance(self, now: float) -> None:
        if self._computing is not None:
            return
        super()._advance(now)
        if self.over or self._choosing or self._computing is not None or len(self._plan.options) < 2:
            return
        if self._in_place < self._catalog.groups:
            self._compute_ahead(now)
        elif self._compute is not None:
            self._choosing, self._choosing_s = True, now
            self._actions.append(ChooseTokens(self._question))

    def _compute_ahead(self, now: float) -> None:
        """Have an idle engine compute a passage's tokens while the rest of the prompt is still to come."""
        lane, view, passages = self._compute, self.view, self._plan.passages
        if lane is None or lane.computing is not None or self._ahead is not None or view.rate <= 0:
            return
        while self._next < len(passages):
            passage, option = passages[self._next], self._plan.ahead(self._next)
            if any(self.record.groups[group].ready_s is None for group in range(passage.groups.stop)):
                return
            rest_s = (view.outstanding_bytes + view.floor_bytes()) / view.rate
            self._next += 1
            if option is None or option.seconds > _AHEAD_SHARE * rest_s:
                continue
            self._ahead, self._ahead_s = option, now
            self._actions.append(RecomputeTokens(option.share, option.tokens, passage=self._next - 1))
            reason = f"by their publisher's order, while {rest_s:.2f} s of the base are still to come"
            self._events.emit(TokensStarted, now, option.tokens, option.share, reason)
            return

    def _deliver(self, now: float, *, cut: str | None = None) -> None:
        if self._settled or cut is not None:
            self._finish(now, cut=cut)
            return
        self._settled = True
        if self._compute is None:
            self._plan.options = self._plan.options[:1]
        coverage = [record.track or "" for record in self.record.groups]
        joined = self._plan.fusion(coverage, 0.0)
        codec = played_loss(self._catalog, self.record.steps) - (joined or 0.0)
        left_s, chosen = self._full_s - now, self._blend.chosen_s is not None
        option = self._plan.best(left_s, coverage, codec, chosen=chosen)
        if option is None:
            least = min(self._plan.fusion(coverage, one.share) or 0.0 for one in self._plan.options)
            self._give_up(now, self._too_lossy(codec + least))
            return
        if self._failed or (not option.tokens and not self._blend.ahead and self._ahead is None):
            self._finish(now)
            return
        for transfer in list(self.view.in_flight.values()):
            self._cancel(transfer, "tokens are computed again over what is in place", now)
        # Of groups that were computed no token is left; as many others are computed instead.
        option = replace(option, tokens=min(option.tokens, self._plan.tokens_left(coverage)))
        self._computing, self._blend.begun_s = option, now
        self._next_tick_s = now + self._tick_s
        self._actions.append(RecomputeTokens(option.share, option.tokens, 0 if self._choosing else self._question))
        saved = (joined or 0.0) - (self._plan.fusion(coverage, option.share) or 0.0)
        reason = f"saves {saved:.4f} nats per token in {option.seconds:.2f} s, of {left_s:.2f} s left"
        self._events.emit(TokensStarted, now, option.tokens, option.share, reason)

    def _engine_done(self, begun_s: float, now: float) -> None:
        """Count what the engine has done, which does one thing after the other."""
        self.record.recompute_s += now - max(begun_s, self._engine_s)
        self._engine_s = now

    def _finish(self, now: float, *, cut: str | None = None) -> None:
        self._computing, self._settled, self.view.deadline_s = None, True, self._full_s
        coverage = [record.track or "" for record in self.record.groups]
        self._blend.fusion_loss = self._plan.fusion(coverage, self._blend.share)
        super()._deliver(now, cut=cut)

    def _too_lossy(self, loss: float) -> str:
        return (
            f"joined from passages it is expected to lose {loss:.3g} nats per token, and max_loss is {self._max_loss:g}"
        )

"""Plays of prompts joined from passages: some tokens are recomputed before the cache is delivered.

Fetching layers and recomputing tokens compete for the time before the deadline (`BlendPlan`). Once every group is in
place, the engine chooses the tokens that the question attends to (the cheapest track is as good for this as the best),
and computes them over the cache. On a slow link, the otherwise idle engine first computes the tokens that their
publisher ranks highest; the expected loss ignores these savings.

If the engine fails, or does not finish by the deadline and within twice the expected time, the joined cache is
delivered unchanged. Above the loss limit, the play waits for the engine until its patience ends, and is then given up.
"""

from __future__ import annotations

import math
from dataclasses import replace

from kvabr.player.blend_plan import BlendOption, BlendPlan
from kvabr.player.goals.whole import Playing, WholeAim
from kvabr.player.session_types import ENGINE_PATIENCE, BlendGoal, BlendRecord, ChooseTokens, RecomputeTokens
from kvabr.types.events import TokensChosen, TokensDone, TokensFailed, TokensStarted
from kvabr.types.loss import played_loss

_AHEAD_SHARE = 0.5
"""Maximum engine time for tokens computed ahead, as a fraction of the time that the base still needs."""


class BlendAim(WholeAim):
    """Delivers the cache of a joined prompt."""

    def __init__(self, play: Playing, goal: BlendGoal) -> None:
        super().__init__(play)
        view, config = play.view, play.config
        self._max_loss = goal.max_loss
        self._full_s = view.deadline_s
        """The whole deadline in seconds; that of the view leaves time for the tokens."""
        self._plan = BlendPlan(view.ladder, view.cost, goal, time_price=config.time_price, gpu_price=config.gpu_price)
        view.in_order = any(self._plan.ahead(number) for number in range(len(self._plan.passages)))
        self._question = goal.question
        self._choosing = self._settled = False
        self._computing: BlendOption | None = None
        self._ahead: BlendOption | None = None
        self._ahead_s = self._choosing_s = 0.0
        self._next = 0
        """First passage that was neither computed ahead nor skipped."""
        self._failed = False
        self._wait_s = math.inf
        """When to deliver without waiting longer for the tokens, if the loss allows it."""
        play.record.blend = self._blend = BlendRecord(fusion_loss=self._plan.fusion([""] * view.groups, 0.0))
        self._reserve(0.0)

    # ------------------------------------------------------------------ events

    def start(self, now: float) -> bool:
        """Give up if even the lowest loss exceeds the limit."""
        if (least := self._plan.least_loss) > self._max_loss:
            self.play.give_up(now, self._too_lossy(least))
        return not self.play.over

    def tokens_chosen(self, now: float) -> None:
        """Handle the end of the choice of tokens."""
        if self.play.over or self._blend.chosen_s is not None:
            return
        self._blend.chosen_s = now
        self.play.engine_done(self._choosing_s, now)
        self.play.events.emit(TokensChosen, now)
        self.play.advance(now)

    def tokens_recomputed(self, now: float, *, ahead: bool = False) -> None:
        """Handle recomputed tokens, which are in place or, if ``ahead``, stored separately."""
        option = self._ahead if ahead else self._computing
        if self.play.over or option is None:
            return
        blend = self._blend
        self.play.record.tokens_recomputed += option.tokens
        self.play.events.emit(TokensDone, now, option.tokens)
        if ahead:
            self.play.engine_done(self._ahead_s, now)
            self._ahead = None
            blend.ahead += option.tokens
            self.play.advance(now)
        else:
            self.play.engine_done(blend.begun_s or 0.0, now)
            blend.share, blend.tokens, blend.done_s = option.share, option.tokens, now
            self._finish(now)

    def tokens_failed(self, reason: str, now: float, *, ahead: bool = False) -> None:
        """Handle a failure of the engine while choosing or computing tokens."""
        if self.play.over:
            return
        self.play.events.emit(TokensFailed, now, reason)
        self._plan.options = self._plan.options[:1]
        if ahead:
            self.play.engine_done(self._ahead_s, now)
            self._ahead = None
        if self._computing is None:
            self.play.advance(now)
        elif not ahead:
            self.play.engine_done(self._blend.begun_s or 0.0, now)
            self._computing, self._settled, self._failed = None, False, True
            self.deliver(now)

    def timer(self, now: float) -> bool:
        play = self.play
        if self._computing is None:
            return False
        play.next_tick_s = now + play.tick_s
        if now >= min(self._wait_s, self.patience_s()):
            self.tokens_failed(f"the tokens were not recomputed within {now - (self._blend.begun_s or 0.0):.1f} s", now)
        return True

    def next_timer(self, soonest_s: float) -> float:
        return soonest_s if self._computing is None else min(self.play.next_tick_s, self._wait_s)

    # --------------------------------------------------------------- internals

    def patience_s(self) -> float:
        return super().patience_s() + self.play.config.give_up_after * (self._full_s - self.play.view.deadline_s)

    def look(self, now: float) -> None:
        if not self._settled:
            self._reserve(now)

    def _reserve(self, now: float) -> None:
        view, left_s = self.play.view, self._full_s - now
        tokens_s = self._plan.reserve_s(left_s, self.play.record.bytes_fetched, view.lower_bound)
        if self._blend.chosen_s is not None and tokens_s:
            tokens_s -= self._plan.look_s
        view.deadline_s = self._full_s - tokens_s

    def advanced(self, now: float) -> None:
        play = self.play
        if play.closed or self._choosing or len(self._plan.options) < 2:
            return
        if not play.groups.complete:
            self._compute_ahead(now)
        elif play.engine is not None:
            self._choosing, self._choosing_s = True, now
            play.act(ChooseTokens(self._question))

    def _compute_ahead(self, now: float) -> None:
        engine, view, passages = self.play.engine, self.play.view, self._plan.passages
        if engine is None or engine.computing is not None or self._ahead is not None or view.rate <= 0:
            return
        while self._next < len(passages):
            passage, option = passages[self._next], self._plan.ahead(self._next)
            if any(self.play.record.groups[group].ready_s is None for group in range(passage.groups.stop)):
                return
            rest_s = (view.outstanding_bytes + view.floor_bytes()) / view.rate
            self._next += 1
            if option is None or option.seconds > _AHEAD_SHARE * rest_s:
                continue
            self._ahead, self._ahead_s = option, now
            self.play.act(RecomputeTokens(option.share, option.tokens, passage=self._next - 1))
            reason = f"in the publisher's order, while the base still needs {rest_s:.2f} s"
            self.play.events.emit(TokensStarted, now, option.tokens, option.share, reason)
            return

    def deliver(self, now: float, *, cut: str | None = None) -> None:
        if self._settled or cut is not None:
            self._finish(now, cut=cut)
            return
        self._settled = True
        if self.play.engine is None:
            self._plan.options = self._plan.options[:1]
        coverage = [record.track or "" for record in self.play.record.groups]
        joined = self._plan.fusion(coverage, 0.0)
        codec = played_loss(self.play.catalog, self.play.record.steps) - (joined or 0.0)
        left_s, chosen = self._full_s - now, self._blend.chosen_s is not None
        option = self._plan.best(left_s, coverage, codec, chosen=chosen)
        if option is None:
            least = min(self._plan.loss(coverage, codec, one.share) for one in self._plan.options)
            self.play.give_up(now, self._too_lossy(least))
            return
        if self._failed or (not option.tokens and not self._blend.ahead and self._ahead is None):
            self._finish(now)
            return
        for transfer in list(self.play.view.in_flight.values()):
            self.play.cancel(transfer, "tokens are recomputed over the groups in place", now)
        # Computed groups have no tokens to recompute, so others get a larger share.
        option = replace(option, tokens=min(option.tokens, self._plan.tokens_left(coverage)))
        self._computing, self._blend.begun_s, self.play.closed = option, now, True
        if codec + (joined or 0.0) <= self._max_loss:
            needed_s = 0.0 if self._ahead is None else self._ahead.seconds
            if option.tokens:
                needed_s += option.seconds + (0.0 if chosen else self._plan.look_s)
            self._wait_s = max(self._full_s, now + max(self.play.tick_s, ENGINE_PATIENCE * needed_s))
        self.play.next_tick_s = now + self.play.tick_s
        self.play.act(RecomputeTokens(option.share, option.tokens, 0 if self._choosing else self._question))
        saved = (joined or 0.0) - (self._plan.fusion(coverage, option.share) or 0.0)
        reason = f"saves {saved:.4f} nats per token in {option.seconds:.2f} s, of {left_s:.2f} s left"
        self.play.events.emit(TokensStarted, now, option.tokens, option.share, reason)

    def _finish(self, now: float, *, cut: str | None = None) -> None:
        self._computing, self._settled, self.play.view.deadline_s = None, True, self._full_s
        coverage = [record.track or "" for record in self.play.record.groups]
        self._blend.fusion_loss = self._plan.fusion(coverage, self._blend.share)
        self.play.hand_over(now, cut)

    def _too_lossy(self, loss: float) -> str:
        return f"the joined passages would lose {loss:.3g} nats per token, more than max_loss ({self._max_loss:g})"

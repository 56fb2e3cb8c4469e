"""Sessions by hand, and what to do with their actions."""

from kvabr.abr import Ladder
from kvabr.abr.estimators import Tracking
from kvabr.abr.plugins import load_policy
from kvabr.player.session import Session
from kvabr.player.session_types import Decode
from tests.catalogs import catalog


def session(groups=4, policy="fixed:Int4", deadline=1.0, **options):
    made = load_policy(policy)() if isinstance(policy, str) else policy
    return Session(Ladder(catalog(groups)), deadline, made, Tracking(), **options)


def of(actions, kind):
    return [action for action in actions if isinstance(action, kind)]


def bring(play, fetch, now):
    """One request: first byte, all bytes, decoded."""
    play.first_byte(fetch.request, now - 0.001)
    play.done(fetch.request, now)
    return decode_all(play, play.actions(), now)


def decode_all(play, actions, now):
    """Decode what the actions ask for, and what is asked for then; return all actions."""
    seen = list(actions)
    while decoding := of(actions, Decode):
        for decode in decoding:
            play.decoded(decode.request, now + 0.001)
        actions = play.actions()
        seen += actions
    return seen


def wait_for(play, kind, until_s=100.0):
    """Let time pass until a play acts so, or is over; return when that is, and these actions."""
    now, found = play.view.now, []
    while not found and not play.over and now < until_s:
        now = play.next_timer()
        play.timer(now)
        found = of(play.actions(), kind)
    return now, found

"""Which assets stay: pins, leases, grace, expiry and quotas, with no clock but the one that is given."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.store.admin.rules import (
    Holding,
    Rules,
    date,
    duration,
    evictions,
    is_expired,
    model_durations,
    size,
    total_bytes,
)
from kvabr.store.eviction import Part
from kvabr.types.errors import UsageError

DAY = 86400.0
NOW = 100 * DAY


def holding(name="one", created=50.0, used=None, **more):
    """An asset that was published and used some days after the beginning of time."""
    used = created if used is None else used
    what = {"model": "m", "tokens": 256, "bytes": 100, "own_bytes": 100, **more}
    return Holding(name=name, created_s=created * DAY, used_s=used * DAY, **what)


def gone(*holdings, now_s=NOW, expired=None, **rules):
    return {each.holding.name: each.reason for each in evictions(holdings, Rules(**rules), now_s, expired)}


def test_without_rules_all_leases_live():
    assert gone(holding(), holding("old", 0.0)) == {}


@pytest.mark.parametrize(
    ("asset", "reason"),
    [
        (holding(used=99.0), None),
        (holding(used=92.9), "unused"),
        (holding(used=93.0), "unused"),
        (holding(used=93.1), None),
        (holding(used=92.9, pinned_until_s=NOW + 1), None),
        (holding(used=92.9, pinned_until_s=NOW), "unused"),
        (holding(used=92.9, measured=True), None),
        (holding(created=9.0, used=99.9), "too old"),
        (holding(created=9.0, used=99.9, pinned_until_s=NOW + 1), None),
        (holding(used=50.0, model="rare"), None),
    ],
)
def test_a_lease_is_renewed_by_use_but_not_for_ever(asset, reason):
    rules = {"ttl_s": 7 * DAY, "max_age_s": 90 * DAY, "model_ttl_s": {"rare": 60 * DAY}}
    assert gone(asset, **rules).get("one") == reason


def test_what_is_new_stays_for_its_grace():
    fresh = holding(created=100.0 - 0.5 / 24)
    assert gone(fresh, ttl_s=0.0) == {}
    assert gone(fresh, ttl_s=0.0, grace_s=60.0) == {"one": "unused"}
    assert gone(holding(created=101.0), ttl_s=0.0) == {}, "the store's time went back"


def test_an_expired_model_keeps_nothing_not_even_pins():
    old, new = holding("old", 10.0, pinned_until_s=math.inf, measured=True), holding("new", 30.0)
    stale = holding("stale", 30.0, oldest_s=10 * DAY)
    expired = {"m": 20 * DAY}
    assert gone(old, new, stale, expired=expired) == {"old": "expired", "stale": "expired"}
    assert not is_expired(holding(created=10.0, model="other"), expired)


def test_shared_parts_count_once_for_a_quota():
    parts = (Part("a", 500, 256), Part("b", 500, 256))
    first = holding("first", 10.0, parts=parts)
    second = holding("second", 20.0, parts=(*parts, Part("c", 500, 256)))
    other = holding("other", 5.0, parts=(Part("d", 500, 256),))
    assert total_bytes([first, second]) == 200 + 1500
    assert gone(first, second, max_bytes=1700) == {}
    assert gone(first, second, other, max_bytes=1700, order="lru") == {"other": "over the quota"}


def test_a_quota_spares_what_must_stay():
    pinned = holding("pinned", 1.0, pinned_until_s=NOW + 1)
    assets = [pinned, holding("measured", 1.0, measured=True), holding("fresh", 100.0), holding("old", 2.0)]
    assert gone(*assets, max_bytes=0) == {"old": "over the quota"}
    assert gone(*assets, max_bytes=0, keep_measured=False).keys() == {"old", "measured"}


@given(
    st.lists(
        st.tuples(st.floats(0, 120), st.floats(0, 120), st.none() | st.floats(0, 200), st.integers(0, 3)), max_size=6
    ),
    st.floats(0, 60),
    st.integers(0, 600),
    st.sampled_from(["value", "lru", "lfu"]),
)
def test_no_pin_is_ever_lost_and_quotas_hold_where_they_can(assets, ttl, quota, order):
    held = [
        holding(
            str(number),
            created,
            used,
            pinned_until_s=None if pin is None else pin * DAY,
            parts=(Part(f"part {part}", 50, 256),),
        )
        for number, (created, used, pin, part) in enumerate(assets)
    ]
    rules = Rules(ttl_s=ttl * DAY, max_bytes=quota, order=order)
    names = {each.holding.name for each in evictions(held, rules, NOW)}
    assert not any(each.is_pinned(NOW) for each in held if each.name in names)
    left = [each for each in held if each.name not in names]
    must_stay = [each for each in left if each.is_pinned(NOW) or each.created_s + rules.grace_s > NOW]
    assert total_bytes(left) <= quota or left == must_stay
    assert all(rules.kept_until_s(each) > NOW for each in left)


def test_times_sizes_and_dates_are_read():
    assert [duration(text) for text in ("90", "1.5h", "30m", "2d", "1w", "5s")] == [90, 5400, 1800, 172800, 604800, 5]
    assert [size(text) for text in ("500", "1.5k", "20M", "2TB", "1G")] == [500, 1500, 20 * 10**6, 2 * 10**12, 10**9]
    assert date("1970-01-02") == DAY
    assert date("1970-01-02T01:00+01:00") == DAY
    assert model_durations(["a/b=7d", "c=x=1h"]) == {"a/b": 7 * DAY, "c=x": 3600.0}


@pytest.mark.parametrize("text", ["", "-1", "1y", "nan", "inf", "soon"])
def test_strange_times_are_refused(text):
    with pytest.raises(UsageError, match="is not a time; write seconds"):
        duration(text)


def test_other_strange_options_are_refused():
    with pytest.raises(UsageError, match="not a number of bytes"):
        size("many")
    with pytest.raises(UsageError, match="not a date"):
        date("tomorrow")
    with pytest.raises(UsageError, match="write MODEL=TIME"):
        model_durations(["7d"])
    with pytest.raises(UsageError, match="the grace must be"):
        Rules(grace_s=-1.0)
    with pytest.raises(UsageError, match="a quota is"):
        Rules(max_bytes=-1)

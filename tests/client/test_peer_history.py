"""What is known of peers: kept, bounded, and never believed when it cannot be true."""

import json
import math
import multiprocessing
import time
import warnings

import pytest

from kvabr.abr.estimators import Prior
from kvabr.client.memory import MAX_BYTES, MAX_PEERS, SCHEMA, PeerHistory, digest, this_host

NOW = 1.8e9


def written(path, peers=None, **changes):
    """A file as `PeerHistory.save` would have it, but for ``changes``."""
    if peers is None:
        peers = {"a:443": {"rate": 1e6, "ttfb_s": 0.02, "at": NOW}}
    whole = {"schema": SCHEMA, "host": this_host(), "sha256": digest(peers), "peers": peers, **changes}
    path.write_text(json.dumps(whole))
    return path


def test_what_was_heard_is_there_in_the_next_process(tmp_path):
    path = tmp_path / "deeper" / "priors.json"
    first = PeerHistory(path)
    first.record("a:443", 1e6, 0.02, NOW)
    first.record("a:443", 4e6, 0.04, NOW + 1)
    first.save()
    prior = PeerHistory(path).of("a:443", NOW + 1)
    assert prior.rate == pytest.approx(2e6)  # a mean of logarithms
    assert prior.ttfb_s == pytest.approx(0.03)
    assert prior.weight == pytest.approx(1.0)
    assert PeerHistory(path).of("b:443", NOW) is None
    assert [each.name for each in path.parent.iterdir() if each.suffix == ".partial"] == []
    assert [each.stat().st_mode & 0o777 for each in (path.parent, path)] == [0o700, 0o600]


def test_it_counts_less_as_it_grows_old(tmp_path):
    priors = PeerHistory(written(tmp_path / "p.json"))
    assert priors.of("a:443", NOW + 3600).weight == pytest.approx(0.5)
    assert priors.of("a:443", NOW + 8 * 86400) is None
    assert priors.of("a:443", NOW - 1e6) is None  # from the future
    priors.record("a:443", 9e6, 0.1, NOW + 30 * 86400)
    assert priors.of("a:443", NOW + 30 * 86400).rate == 9e6


@pytest.mark.parametrize(
    ("rate", "ttfb_s"), [(0.0, 0.1), (-1.0, 0.1), (math.nan, 0.1), (math.inf, 0.1), (1e6, -1.0), (1e6, 1e9), (1e30, 0)]
)
def test_what_cannot_be_is_not_kept(rate, ttfb_s):
    priors = PeerHistory()
    priors.record("a:1", rate, ttfb_s, NOW)
    priors.record("", 1e6, 0.0, NOW)
    assert priors.of("a:1", NOW) is None
    assert priors.of("", NOW) is None


def known(**changes):
    return {"a:443": {"rate": 1e6, "ttfb_s": 0.02, "at": NOW, **changes}}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b"\xff\x00" * 50),
        lambda path: path.write_text(""),
        lambda path: path.write_text("[" * 50_000),
        lambda path: path.write_text('{"schema": "kvabr.machine/1"}'),
        lambda path: path.write_bytes(path.read_bytes()[:-20]),
        lambda path: path.write_text(path.read_text().replace("1000000.0", "9000000.0")),
        lambda path: path.write_text(" " * (MAX_BYTES + 1)),
        lambda path: written(path, schema="kvabr.machine/2"),
        lambda path: written(path, host="0123456789abcdef"),
        lambda path: written(path, known(rate=math.inf)),
        lambda path: written(path, known(rate=-5)),
        lambda path: written(path, known(rate="fast")),
        lambda path: written(path, known(rate=True)),
        lambda path: written(path, known(ttfb_s=1e9)),
        lambda path: written(path, known(more=1)),
        lambda path: written(path, {"a:443": [1, 2]}),
        lambda path: written(path, {"x" * 5000: known()["a:443"]}),
        lambda path: written(path, {f"h{i}:1": known()["a:443"] for i in range(MAX_PEERS + 1)}),
        lambda path: written(path, [1, 2, 3]),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
def test_a_file_that_is_not_ours_or_damaged_is_told_once_and_ignored(tmp_path, spoil):
    path = written(tmp_path / "p.json")
    spoil(path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        priors = PeerHistory(path)
        assert priors.of("a:443", NOW) is None
        priors.record("b:443", 2e6, 0.01, NOW)
        priors.save()
        priors.save()
    (own,) = [str(each.message) for each in told if each.category is RuntimeWarning]  # garbage may warn, too
    assert "p.json" in own
    if path.is_file():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert PeerHistory(path).of("b:443", NOW).rate == 2e6


def test_no_more_peers_than_it_may_hold(tmp_path):
    path = tmp_path / "p.json"
    priors = PeerHistory(path)
    for index in range(MAX_PEERS + 40):
        priors.record(f"{'h' * 200}{index}:443", 1e6, 0.01, NOW + index)
    priors.save()
    assert path.stat().st_size <= MAX_BYTES
    again = PeerHistory(path)
    assert again.of(f"{'h' * 200}{MAX_PEERS + 39}:443", NOW + 600) is not None
    assert again.of(f"{'h' * 200}0:443", NOW + 600) is None


def _writes(path, name, times):
    priors = PeerHistory(path)
    for index in range(times):
        priors.record(f"{name}{index}:1", 1e6, 0.01, NOW + index)
        priors.save()


def test_several_processes_write_and_the_file_stays_whole(tmp_path):
    path = tmp_path / "p.json"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_writes, args=(path, name, 10)) for name in "abc"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
        assert worker.exitcode == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        priors = PeerHistory(path)
    # Of two that write at once one may win; it has all of its own.
    found = {name: all(priors.of(f"{name}{index}:1", NOW + 20) for index in range(10)) for name in "abc"}
    assert any(found.values())


def test_a_writer_keeps_what_others_wrote_and_repeats_what_they_overwrote(tmp_path):
    path = tmp_path / "p.json"
    one, other = PeerHistory(path), PeerHistory(path)
    one.record("a:1", 1e6, 0.01, NOW)
    one.save()
    other.record("b:1", 1e6, 0.01, NOW)
    other.save()
    assert all(PeerHistory(path).of(name, NOW) for name in ("a:1", "b:1"))
    written(path, {})
    one.record("c:1", 1e6, 0.01, NOW)
    one.save()
    assert all(PeerHistory(path).of(name, NOW) for name in ("a:1", "c:1"))


def test_what_a_server_announces_is_a_prior_until_there_is_a_recent_play_of_ones_own():
    priors, now, names = PeerHistory(), time.time(), ("a:443",)
    silent, announced, weak = Prior(0.0, 0.01), Prior(5e6, 0.01), Prior(5e6, 0.01, 0.5)
    assert priors.before(names, silent) is None
    assert priors.link(names, silent).rate == 0.0
    assert priors.before(names, announced) == weak
    assert priors.link(names, announced) == Prior(4e6, 0.01)  # as cautious as with one's own
    priors.record("a:443", 1e6, 0.02, now - 2 * 3600)
    assert priors.before(names, announced) == weak
    assert priors.before(names, silent).rate == 1e6
    priors.record("a:443", 1e6, 0.02, now - 60)
    assert priors.before(names, announced).rate == pytest.approx(1e6)
    assert priors.link(names, announced).rate == pytest.approx(0.8e6)

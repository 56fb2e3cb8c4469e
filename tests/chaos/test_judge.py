"""The judge of the chaos laboratory detects every kind of failure."""

import socket
from dataclasses import replace

import pytest
import torch

from kvabr.store.locations import open_asset
from kvabr.types.catalog import RECOMPUTED
from tests.chaos import published
from tests.chaos.facts import Order, Report, facts_of
from tests.chaos.judge import judge
from tests.chaos.nodes import Sample
from tests.chaos.plan import plan
from tests.chaos.player import Player, Seat
from tests.chaos.published import G, KnownEngine
from tests.chaos.tally import Tally

TRACKS = ("FP16", "AC-L3", "Int4", "recomputed", "AC-L0", "Int8")
ORDER = Order(1, 0.0, 0, 192, 1.0)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return published.build(tmp_path_factory.mktemp("library"), prompts=1)


def decoded(library, version, tracks=TRACKS):
    """A cache as a play assembles it, by the player's own code."""
    from kvabr.codec.profile import Profile
    from kvabr.player.assembler import Assembler, Layer

    prompt = library.prompts[0]
    asset = open_asset(prompt.versions[version])
    assembler = Assembler(asset.catalog, Profile.from_bytes(library.profile.read_bytes()))
    for group, track in enumerate(tracks):
        if track == RECOMPUTED:
            assembler.put_computed(group, group + 1, prompt.exact[:, :, :, group * G : group * G + G])
            continue
        names = published.LAYERS[: published.LAYERS.index(track) + 1] if "AC-L" in track else (track,)
        *below, top = [Layer(name, asset.frame(group, name)) for name in names]
        assembler.put(group, track, top.frame, below=below)
    return assembler.take()


def report(kv, tracks=TRACKS, **changes):
    return replace(Report(1, "complete", 0.5, 1.0, cache=facts_of(kv, G, tracks)), **changes)


def kinds(library, kv, tracks=TRACKS, **changes):
    return [failure.kind for failure in judge(report(kv, tracks, **changes), ORDER, library)]


def test_what_is_right_is_right(library):
    for version in (0, 1):
        kv = decoded(library, version)
        assert kinds(library, kv) == []
        assert kinds(library, kv[:, :, :, : 2 * G], TRACKS[:2], outcome="incomplete", missing=(2, 5)) == []
        assert kinds(library, kv, later=facts_of(kv, G, TRACKS)) == []


def test_one_wrong_number_a_hole_and_an_empty_place_are_noticed(library):
    kv = decoded(library, 0)
    for group in range(6):
        wrong, hole, zeros = kv.clone(), kv.clone(), kv.clone()
        wrong[1, 1, 3, group * G + 5, 63] += 0.25
        hole[0, 0, 0, group * G, 0] = float("nan")
        zeros[:, :, :, group * G : group * G + G] = 0
        assert kinds(library, wrong) == ["wrong"]
        assert kinds(library, hole) == ["hole"]
        assert kinds(library, zeros) == ["wrong"]
    assert kinds(library, kv, TRACKS[:5]) == ["hole"]
    assert kinds(library, kv, (*TRACKS[:5], "")) == ["hole"]
    assert kinds(library, kv, ("Int8", *TRACKS[1:])) == ["wrong"], "not on the track that it says"


def test_groups_of_another_place_or_of_two_versions_are_noticed(library):
    old, new = decoded(library, 0), decoded(library, 1)
    swapped = old.clone()
    swapped[:, :, :, :G] = old[:, :, :, G : 2 * G]
    assert kinds(library, swapped) == ["wrong"]
    mixed = torch.cat([old[:, :, :, : 2 * G], new[:, :, :, 2 * G :]], dim=3)
    assert kinds(library, mixed) == ["wrong"]
    (catalog,) = [sha256 for sha256, which in library.catalogs.items() if which == (0, 1)]
    assert kinds(library, old, cache=facts_of(old, G, TRACKS, catalog)) == ["wrong"], "not what its catalog says"


def test_what_changes_after_it_was_handed_over_is_noticed(library):
    kv = decoded(library, 0)
    changed = kv.clone()
    changed[0, 0, 0, 0, 0] = 1.0
    assert kinds(library, kv, later=facts_of(changed, G, TRACKS)) == ["wrong"]
    assert kinds(library, kv, later=facts_of(changed, G, TRACKS), upgraded=True) == ["wrong"]


def test_an_engine_that_gets_a_hole_is_noticed(library):
    kv = decoded(library, 0)
    hole = kv[:, :, :, : 3 * G].clone()
    hole[:, :, :, G : 2 * G] = float("nan")
    base, empty, shifted = (facts_of(one, G) for one in (kv[:, :, :, : 3 * G], hole, kv[:, :, :, G : 2 * G]))
    assert kinds(library, kv, bases=((base, base),)) == []
    assert kinds(library, kv, bases=((empty, base),)) == ["hole"]
    assert kinds(library, kv, bases=((shifted, shifted),)) == ["wrong"]
    engine = KnownEngine(library.prompts[0], 0.0, "hole")
    engine.prefill(library.prompts[0].tokens[G : 2 * G], kv[:, :, :, :G])
    assert not engine.misled
    engine.prefill(library.prompts[0].tokens[:G], kv[:, :, :, :G])
    assert engine.misled


@pytest.mark.parametrize(
    ("missing", "groups"), [((), 2), ((3,), 2), ((2, 2), 2), ((5, 2), 2), ((0,), 2)]
)  # fmt: skip
def test_an_error_that_names_the_wrong_groups_is_noticed(library, missing, groups):
    kv = decoded(library, 0)[:, :, :, : groups * G]
    assert kinds(library, kv, TRACKS[:groups], outcome="incomplete", missing=missing) == ["hole"]


def test_late_hanging_and_crashing_plays_are_told_apart(library):
    kv = decoded(library, 0)
    assert kinds(library, kv, elapsed_s=1.09) == []
    assert kinds(library, kv, elapsed_s=1.11) == ["late"]
    assert kinds(library, kv, outcome="hang", elapsed_s=60.0) == ["hang"]
    assert kinds(library, kv, outcome="crash") == ["crash"]


def test_a_seed_makes_the_same_round_each_time():
    made = [plan(seed, prompts=4, versions=2) for seed in range(300)]
    assert made == [plan(seed, prompts=4, versions=2) for seed in range(300)]
    assert len({repr(one) for one in made}) == 300
    killing = {one.seed % 100 for one in made if any(fault.kind.startswith("kill") for fault in one.faults)}
    assert killing
    assert max(killing) < 60, "the last forty of a hundred kill nobody"


@pytest.mark.process
def test_a_play_that_does_not_end_is_noticed(library, tmp_path):
    """Its deadline is far away, and no peer answers."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
        deaf.bind(("127.0.0.1", 0))
        url = f"moqt://127.0.0.1:{deaf.getsockname()[1]}/"
        seat = Seat(url, "token", "0" * 64, tmp_path, library.prompts, 0.2, tmp_path / "log")
        with Player(seat) as player:
            player.begin(7, 0.0, [replace(ORDER, deadline_s=3600.0)])
            assert Player.ready([player], 300.0) == [player]
            number, told = player.told()
    assert number == 7
    assert told.outcome == "hang"
    assert [failure.kind for failure in judge(told, ORDER, library)] == ["hang"]


MIB = 1 << 20


@pytest.mark.parametrize(
    ("memory", "found"),
    [
        (lambda index: 300 + min(index, 40), []),  # it settles
        (lambda index: 300 + index, ["origin: memory"]),
        (lambda index: 300 + index / 20, []),  # less than allocators need
        (lambda index: 300 + 100 * (index == 95), []),  # a moment is no trend
        (lambda index: 20 + index / 20, []),
    ],
)
def test_memory_is_flat_if_the_later_half_of_a_life_is(memory, found):
    tally = Tally()
    tally.lives["origin"] = [[], [Sample(int(memory(index) * MIB), 10, 5) for index in range(100)]]
    assert tally.growing() == found
    assert f"growing: {', '.join(found) or 'nothing'}" in tally.table()


def test_files_and_threads_count_too_and_short_lives_say_nothing():
    tally = Tally()
    tally.lives["relay"] = [[Sample(MIB, 10 + index, 5 + index) for index in range(100)]]
    assert tally.growing() == ["relay: files", "relay: threads"]
    tally.lives["relay"] = [[Sample(MIB * index, 10, 5) for index in range(15)]]
    assert tally.growing() == []

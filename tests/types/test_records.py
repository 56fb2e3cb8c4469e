"""Records, and the roads that the fields of a catalog and of its tracks take."""

import json
from dataclasses import dataclass, fields, replace
from typing import Annotated, ClassVar

import pytest
from msgspec import Meta

from kvabr.store.pages import Page, pages_of, with_pages
from kvabr.types.catalog import Catalog, CommonFacts, Level, Mix, Quality, Track
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import FormatError, VersionError
from kvabr.types.live import LiveCatalog
from kvabr.types.passage import PassageNotes
from kvabr.types.records import IN_MEMORY, MAX_SKIPPED_BYTES, check, read, to_json
from kvabr.types.tails import TailLoss
from tests.catalogs import catalog


@dataclass(frozen=True)
class WiderTrack(Track):
    """A track with one more field, of which nothing else knows."""

    rank: Annotated[int, Meta(ge=0, le=9)] = 0


@dataclass(frozen=True)
class WiderCatalog(Catalog):
    """A catalog with one more field, of which nothing else knows."""

    tracks: Annotated[tuple[WiderTrack, ...], Meta(min_length=1)]
    priority: Annotated[int, Meta(ge=0, le=9)] = 0


def wider():
    made = full()
    tracks = tuple(WiderTrack(**vars(track), rank=3) for track in made.tracks)
    own = {each.name: getattr(made, each.name) for each in fields(made)}
    return WiderCatalog(**own | {"tracks": tracks, "priority": 7})


def test_a_field_that_is_added_to_the_definition_is_written_read_and_checked():
    made = wider()
    assert WiderCatalog.loads(made.dumps()) == made
    assert WiderCatalog.loads(catalog(2).dumps()).priority == 0  # an older asset has its default
    assert [track.rank for track in made.prefix(1).tracks] == [3] * len(made.tracks)
    assert made.suffix(1).priority == 7
    value = json.loads(made.dumps())
    value["tracks"][1]["rank"] = 10
    with pytest.raises(FormatError, match=r"<= 9, at tracks\[1\].rank"):
        WiderCatalog.loads(json.dumps(value))
    with pytest.raises(FormatError, match="<= 9, at priority"):
        replace(made, priority=10)
    # A version that does not know the fields reads the rest.
    assert Catalog.loads(made.dumps()) == full()


def full(groups=2):
    """A catalog in which no field that is published has its default."""
    made = catalog(groups)
    tails = TailLoss(16, 0.3, 0.1), TailLoss(128, 1e-05)
    tracks = tuple(
        replace(track, decode_s=0.25, packs=(2,), tails=tails, measured=Quality(1.5e-05, -0.25, 1.0, 2e-7, 0.1))
        for track in made.tracks
    )
    refined = replace(tracks[-1], name="finer", refines=tracks[-1].name)
    return replace(
        made,
        tracks=(*tracks, refined),
        mixes=(Mix((tracks[0].name,) * groups, 0.1, 1e-7),),
        asked=(0.25,) * groups,
        source="a text",
        position=640,
        **FACTS,
    )


FACTS = {
    "profile": "ab" * 32,
    "profile_bytes": 12345,
    "prefill": PrefillCost(0.25, 1e-05, 1e-09),
    "loss_method": "of another asset",
    "estimated": True,
}
NOTES = PassageNotes("mean", 32, bytes(range(256)), ((0.0, 0.25), (0.5, 1e-05)), "behind 8 contexts")


def published(kind):
    return {each.name: each for each in fields(kind) if each.metadata != IN_MEMORY}


def test_the_fields_that_are_tried_here_are_all_that_there_are():
    made = full()
    plain = {name for name, each in published(Catalog).items() if getattr(made, name) == each.default}
    assert plain == {"passage"}  # a passage has no position
    assert not [name for name, each in published(Track).items() if getattr(made.tracks[-1], name) == each.default]
    assert FACTS.keys() == published(CommonFacts).keys()


def test_the_road_of_the_json_and_of_a_live_record():
    made = full()
    assert Catalog.loads(made.dumps()) == made
    passage = replace(made, position=0, passage=NOTES)
    assert Catalog.loads(passage.dumps()) == passage
    live = LiveCatalog(made, (0.5, 1.25), "0123456789abcdef")
    assert LiveCatalog.loads(live.dumps().encode()) == live


def test_the_road_of_pages():
    """What a prompt finds by its pages is what was published, but for what is true of one asset as a whole."""
    made = full()
    pages = [Page.loads(page.dumps()) for page in pages_of(made)]
    assert pages == pages_of(made)
    (found,) = pages
    assert {name: getattr(found, name) for name in FACTS} == FACTS
    assert (found.spec, found.chunks, found.tokens, found.position) == (made.spec, made.chunks, made.tokens, 640)
    levels = [{name: getattr(track, name) for name in published(Level)} for track in made.tracks]
    assert [{name: getattr(level, name) for name in published(Level)} for level in found.levels] == levels
    assert with_pages(made, pages) == made


@dataclass(frozen=True)
class Sample:
    """A record of a test."""

    count: Annotated[int, Meta(ge=1, le=5)]
    names: tuple[str, ...] = ()
    inner: Quality | None = None
    away: int = 0

    made: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check(self, "sample")


def test_a_record_is_read_with_its_defaults_and_null():
    assert read(b'{"count": 3, "inner": null, "new": [1]}', Sample, "sample") == Sample(3)
    assert to_json(Sample(3), "away", last=("count",)) == {"away": 0, "count": 3}
    assert read(json.dumps(to_json(Sample(3, ("a",), Quality(1, 2, 3)))).encode(), Sample, "sample") == Sample(
        3, ("a",), Quality(1.0, 2.0, 3.0)
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"names": []}', "sample: a field is missing, count"),
        (b'{"count": 0}', "sample: Expected `int` >= 1, at count"),
        (b'{"count": 1.0}', "sample: Expected `int`, got `float`, at count"),
        (b'{"count": true}', "sample: Expected `int`, got `bool`, at count"),
        (b'{"count": 1, "names": ["a", 2]}', "sample: Expected `str`, got `int`, at names[1]"),
        (b'{"count": 1, "inner": {"kl": "x"}}', "sample: Expected `float`, got `str`, at inner.kl"),
        (b'{"count": 1, "inner": {"kl": 1, "dnll": 1, "top1": NaN}}', "sample: not JSON"),
        (b'{"count": 1e999}', "sample: Number out of range, at count"),
        (b'{"count": 1', "sample: not JSON"),
        (b'{"count": 1} 2', "sample: not JSON"),
        (b"\xff", "sample: not JSON"),
        (b'{"count": 1, "names": ["\xff"]}', "sample: not JSON"),
        (b"[]", "sample: Expected `object`, got `array`"),
        (b"[" * 100_000, "sample:"),
        (b'{"names":' + b"[" * 100_000, "values are nested too deeply"),
        (b'{"count": 1' + b" " * MAX_SKIPPED_BYTES + b"}", "bytes of what this version does not know"),
        (b'{"count": 1, "new": [' + b"1," * 9000 + b"1]}", "nothing but small values"),
        (b'{"count": 1, "new": [' + b'{"abcdefgh":12345678},' * 5000 + b"1]}", "nothing but small values"),
    ],
)
def test_what_is_no_such_record_is_refused_with_the_place(text, says):
    with pytest.raises(FormatError) as told:
        read(text, Sample, "sample")
    assert says in str(told.value)


def test_the_schema_is_looked_at_before_what_another_version_may_have_changed():
    with pytest.raises(VersionError, match="upgrade kvabr"):
        read(b'{"schema": "kvabr.sample/2", "count": "many"}', Sample, "sample", "kvabr.sample/1")
    with pytest.raises(FormatError, match="is this a sample"):
        read(b'{"count": 1}', Sample, "sample", "kvabr.sample/1")
    assert read(b'{"schema": "kvabr.sample/1", "count": 1}', Sample, "sample", "kvabr.sample/1") == Sample(1)

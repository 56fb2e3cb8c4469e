"""Pages: read as they were written, and nothing else is believed."""

import json
import zlib
from dataclasses import replace

import pytest

from kvabr.store.names import pack_name, place
from kvabr.store.pages import MAX_PAGE_BYTES, Page, pages_of, placed, with_pages
from kvabr.types.errors import FormatError
from tests.client.classes import HYBRID, SLIDING
from tests.store.publishing import PLAIN, put

TOKENS = list(range(700))


@pytest.fixture(params=[PLAIN, SLIDING, HYBRID], ids=lambda spec: spec.model[5:])
def catalog(request, tmp_path):
    return put(tmp_path, request.param, TOKENS[:600])[0]


def test_pages_say_what_the_catalog_says(catalog):
    pages = pages_of(catalog)
    assert [page.first for page in pages] == [0, 16, 32]
    assert [chunk for page in pages for chunk in page.chunks] == list(catalog.chunks)
    assert with_pages(catalog, pages) == catalog
    for page in pages:
        again = Page.loads(page.dumps())
        assert again == page
        assert again.kind == pages[0].kind
        assert len(page.dumps()) < MAX_PAGE_BYTES
        assert page.shared(catalog.chunks) == len(page.chunks)
        assert page.shared([digest[:16] for digest in catalog.chunks]) == len(page.chunks)
        assert page.shared(catalog.chunks[: page.first + 2]) == 2
    for name, track in catalog.published.items():
        for group in range(len(track.bytes)):
            where = placed(catalog, name, group)
            assert where.digest == track.digests[group]
            assert where.last - where.first == track.bytes[group]
            assert where in [page.place(name, group) for page in pages]


def test_a_pack_is_its_frames_one_after_the_other():
    sizes, digests = [5, 6, 7, 8, 9], [f"{number:064x}" for number in range(5)]
    found = [place(8, sizes, digests, 4, group) for group in range(7, 14)]
    assert found[0] is found[-1] is None
    assert [one[1:3] for one in found[1:-1]] == [(0, 5), (5, 11), (11, 18), (18, 26), (0, 9)]
    assert {one.name for one in found[1:5]} == {pack_name(digests[:4])}
    assert found[5].name == f"g/{digests[4]}"  # alone, it is named by its own digest


def packed(text):
    return zlib.compress(text)


def test_mutilated_pages_are_refused(catalog):
    page = pages_of(catalog)[0]
    data = page.dumps()
    value = json.loads(zlib.decompress(data))

    def changed(**fields):
        return packed(json.dumps(value | fields).encode())

    track, level = value["tracks"][0], value["levels"][0]
    wrong = [
        b"",
        data[:-1],
        data + b"x",
        b"<html>",
        packed(b"[" * 5000),
        packed(b" " * (5 << 20)),
        changed(schema="kvabr.page/2"),
        changed(first=8),
        changed(chunks=value["chunks"][:3]),
        changed(chunks=[value["chunks"][0][:-1]] * 16),
        changed(tokens=10**6),
        changed(tracks=[]),
        changed(tracks=[*value["tracks"], track]),
        changed(tracks=value["tracks"][1:]),
        changed(tracks=[track | {"name": "Other"}, *value["tracks"][1:]]),
        changed(tracks=[track | {"name": "../x"}, *value["tracks"][1:]]),
        changed(tracks=[track | {"bytes": track["bytes"][1:]}, *value["tracks"][1:]]),
        changed(tracks=[track | {"bytes": [0, *track["bytes"][1:]]}, *value["tracks"][1:]]),
        changed(
            tracks=[track | {"digests": ["b3-" + track["digests"][0], *track["digests"][1:]]}, *value["tracks"][1:]]
        ),
        changed(tracks=[track | {"first": 3}, *value["tracks"][1:]]),
        changed(levels=[level | {"packs": [3]}, *value["levels"][1:]]),
        changed(levels=[level | {"packs": [1024]}, *value["levels"][1:]]),
        changed(levels=[level | {"refines": "nothing"}, *value["levels"][1:]]),
        changed(levels=value["levels"] * 2),
    ]
    for one in wrong:
        with pytest.raises(FormatError):
            Page.loads(one)


def test_snapshots_of_states_are_stored_alone(tmp_path):
    catalog = put(tmp_path, HYBRID, TOKENS[:600])[0]
    (page, *_) = pages_of(catalog)
    assert all(level.pack(2) == 1 for level in page.levels)
    with pytest.raises(FormatError):
        replace(page, levels=tuple(replace(level, packs=(4, 4, 4)) for level in page.levels))

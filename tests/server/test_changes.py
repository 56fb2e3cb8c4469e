"""The log of what a server took back."""

import gc
import json
import shutil
import threading

import pytest

from kvabr.server import changes
from kvabr.server.changes import ChangeLog, Changes, mark_of
from kvabr.server.grants import Grant, Grants
from kvabr.server.published_assets import PublishedAssets
from kvabr.server.seen_prompts import SeenPrompts
from kvabr.telemetry.kv_events.wire import KVBlocksStored
from kvabr.types.errors import FormatError
from kvabr.types.naming import TrackNamespace
from tests.assets import make_asset
from tests.server.relays import until

ONE, TWO, THREE = ("1" * 64, "2" * 64, "3" * 64)


def test_what_was_taken_back_since():
    log = ChangeLog()
    begin = log.since(0).position
    assert log.since(begin) is None
    log.add([])
    assert log.since(begin) is None
    log.add([ONE, TWO])
    log.add([ONE])
    found = log.since(begin)
    assert (set(found.marks), found.everything) == ({ONE, TWO}, False)
    assert log.since(found.position) is None
    log.add([THREE])
    assert log.since(found.position).marks == (THREE,)
    log.add(everything=True)
    assert log.since(found.position).everything
    assert log.since(log.since(0).position) is None


def test_a_position_of_another_log_means_everything():
    log = ChangeLog()
    position = log.since(0).position
    for other in (0, 1, position - 1, position + 1, (1 << 63) - 1):
        assert log.since(other) == Changes(position, everything=True)
    assert ChangeLog().since(position).everything


def test_a_log_is_bounded(monkeypatch):
    monkeypatch.setattr(changes, "_MAX_MARKS", 10)
    log = ChangeLog()
    begin = log.since(0).position
    log.add(f"{number:064x}" for number in range(10))
    assert len(log.since(begin).marks) == 10
    log.add([ONE])
    assert log.since(begin).everything
    assert len(log.since(begin + 1).marks) == 10
    assert len(log._marks) == 10


async def test_who_waits_is_told_from_any_thread():
    log = ChangeLog()
    position = log.since(0).position
    following = [log.follow(position) for _ in range(3)]
    assert len(log) == 3
    following.pop()
    gc.collect()
    assert len(log) == 2
    thread = threading.Thread(target=log.add, args=([ONE],))
    thread.start()
    await until(lambda: not any(track.growing for track in following))
    thread.join()
    assert [Changes.loads(bytes(track.open(0).data)).marks for track in following] == [(ONE,)] * 2
    assert len(log) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"position": -1}, {"position": 1.5}, {"position": True}, {"position": 1 << 63}, {"marks": "ab"}, {"marks": [1]},
        {"marks": ["ab"]}, {"marks": [ONE] * 4097}, {"everything": 1}, {"schema": "kvabr.changes/2"},
    ],
)  # fmt: skip
def test_what_is_no_answer(change):
    value = {**json.loads(Changes(5, (ONE,)).dumps()), **change}
    with pytest.raises(FormatError, match=r"changes: (Expected|schema)"):
        Changes.loads(json.dumps(value).encode())


def test_each_grant_is_told_of_what_it_opened_alone(tmp_path):
    for team, start in (("one", 0), ("two", 100)):
        make_asset(tmp_path / team, range(start, start + 8))
    a, b, both = (Grant(name, folders, token_sha256=name * 32) for name, folders in (
        ("aa", ("one/*",)), ("bb", ("two/*",)), ("cc", ("*",)),
    ))  # fmt: skip
    library = PublishedAssets(tmp_path, Grants([a, b, both]))
    marks = {one.name.partition("/")[0]: mark_of(one.catalog.namespace) for one in library.assets}
    logs = {grant.name: library._readers[grant.token_sha256].log for grant in (a, b, both)}
    begin = {name: log.since(0).position for name, log in logs.items()}

    def told():
        found = {name: log.since(begin[name]) for name, log in logs.items()}
        return {name: set(one.marks) for name, one in found.items() if one is not None}

    new = make_asset(tmp_path / "new", range(200, 208))
    library.refresh()
    assert told() == {}
    shutil.rmtree(tmp_path / "one")
    library.refresh()
    assert told() == {"aa": {marks["one"]}, "cc": {marks["one"]}}
    library.regrant(Grants([a, b, Grant("cc", ("one/*",), token_sha256=both.token_sha256)]))
    gone = {marks["one"], marks["two"], mark_of(TrackNamespace("test/model", new.name))}
    assert told() == {"aa": {marks["one"]}, "cc": gone}


def test_a_mark_tells_no_name():
    namespace = TrackNamespace("model", "a" * 64)
    assert len(mark_of(namespace)) == 64
    assert namespace.prompt not in mark_of(namespace)
    assert mark_of(namespace) != mark_of(TrackNamespace("model2", "a" * 64))


ASSET, ANOTHER = TrackNamespace("m", "a" * 64), TrackNamespace("m", "b" * 64)


def part(number, tokens, parent=None, asset=ASSET):
    return KVBlocksStored([number], parent, tokens, len(tokens), kvabr_asset=asset.prompt)


def test_parts_of_a_long_prompt_are_joined_and_one_without_end_is_forgotten():
    prompts = SeenPrompts(max_bytes=1 << 16)
    prompts.saw(ASSET)
    prompts.receive("t", [part(0, [1] * 1000), part(1, [2] * 1000, parent=0)])
    (told,) = prompts.assets().values()
    assert list(told.tokens) == [1] * 1000 + [2] * 1000
    prompts.receive("t", [part(at, [3] * 1000, parent=at - 1) for at in range(2, 40)])
    assert prompts._parts.currsize + prompts._tokens.currsize <= 5 << 14
    prompts.receive("t", [part(40, [3] * 1000, parent=39)])
    (told,) = prompts.assets().values()
    assert len(told.tokens) == 5000  # it begins like that


def test_what_is_known_is_not_told_again_and_what_goes_is_found_by_its_mark():
    prompts, told = SeenPrompts(), []
    prompts.listen(lambda: told.append(sorted(prompts.assets())))
    for asset, tokens in ((ASSET, [1, 2]), (ANOTHER, [3, 4])):
        prompts.saw(asset)
        prompts.receive("t", [part(0, tokens, asset=asset)])
    count = len(told)
    for _ in range(3):
        prompts.saw(ASSET)
        prompts.receive("t", [part(0, [3, 4], asset=ANOTHER)])
    prompts.remove(["0" * 64])
    assert len(told) == count
    assert told[-1] == [ASSET.prompt, ANOTHER.prompt]
    prompts.remove([mark_of(ASSET)])
    assert told[-1] == [ANOTHER.prompt]
    prompts.saw(ASSET)
    assert told[-1] == [ASSET.prompt, ANOTHER.prompt]

"""What a relay remembers of prompts for KV events: within bounds, and without holding up lookups."""

from __future__ import annotations

from kvabr.server.changes import mark_of
from kvabr.server.seen_prompts import SeenPrompts
from kvabr.telemetry.kv_events.wire import KVBlocksStored
from kvabr.types.naming import TrackNamespace

ONE, OTHER = TrackNamespace("m", "a" * 64), TrackNamespace("m", "b" * 64)


def part(number, tokens, parent=None, asset=ONE):
    return KVBlocksStored([number], parent, tokens, len(tokens), kvabr_asset=asset.prompt)


def test_parts_of_a_long_prompt_are_joined_and_one_without_end_is_forgotten():
    prompts = SeenPrompts(max_bytes=1 << 16)
    prompts.saw(ONE)
    prompts.hear("t", [part(0, [1] * 1000), part(1, [2] * 1000, parent=0)])
    ((_, told),) = prompts.assets().values()
    assert list(told.tokens) == [1] * 1000 + [2] * 1000
    prompts.hear("t", [part(at, [3] * 1000, parent=at - 1) for at in range(2, 40)])
    assert prompts._parts.currsize + prompts._tokens.currsize <= 5 << 14
    prompts.hear("t", [part(40, [3] * 1000, parent=39)])
    ((_, told),) = prompts.assets().values()
    assert len(told.tokens) == 5000  # it begins like that


def test_what_is_known_is_not_told_again_and_what_goes_is_found_by_its_mark():
    prompts, told = SeenPrompts(), []
    prompts.listen(lambda: told.append(sorted(prompts.assets())))
    for asset, tokens in ((ONE, [1, 2]), (OTHER, [3, 4])):
        prompts.saw(asset)
        prompts.hear("t", [part(0, tokens, asset=asset)])
    count = len(told)
    for _ in range(3):
        prompts.saw(ONE)
        prompts.hear("t", [part(0, [3, 4], asset=OTHER)])
    prompts.take_back(["0" * 64])
    assert len(told) == count
    assert told[-1] == [ONE.prompt, OTHER.prompt]
    prompts.take_back([mark_of(ONE)])
    assert told[-1] == [OTHER.prompt]
    prompts.saw(ONE)
    assert told[-1] == [ONE.prompt, OTHER.prompt]

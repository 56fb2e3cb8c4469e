"""What holders have of a prompt, by what they tell."""

from kvabr.telemetry.kv_events.wire import KVBlocksCleared, KVBlocksRemoved, KVBlocksStored
from kvabr_lab.route import HeldPrefixes, PrefixHolder

A, B = PrefixHolder("a", "kv@a@model"), PrefixHolder("b")
TOKENS = list(range(40))


def stored(names, tokens=TOKENS, parent=None, size=4, **more):
    return KVBlocksStored(names, parent, list(tokens[: size * len(names)]), size, **more)


def test_the_longest_beginning_that_a_holder_has_counts():
    held = HeldPrefixes()
    held.apply(A, [stored([1, 2, 3])])
    held.apply(B, [stored([b"x"], size=8), stored([b"y"], TOKENS[8:], b"x", 8)])
    assert held.cached(TOKENS) == {A: 12, B: 16}
    assert held.cached([*TOKENS[:6], 99, 99, 99]) == {A: 4}
    assert held.cached([99, *TOKENS]) == {}
    held.apply(A, [KVBlocksRemoved([2])])
    assert held.cached(TOKENS) == {A: 4, B: 16}
    held.apply(B, [KVBlocksCleared()])
    assert held.cached(TOKENS) == {A: 4}
    assert held.holders == (A,)


def test_a_block_on_two_media_is_there_until_it_is_on_neither():
    held = HeldPrefixes()
    held.apply(A, [stored([1], medium="GPU"), stored([1], medium="STORAGE"), KVBlocksRemoved([1], "GPU")])
    assert held.cached(TOKENS) == {A: 4}
    held.apply(A, [KVBlocksRemoved([1], "STORAGE"), KVBlocksRemoved([1], "STORAGE"), KVBlocksRemoved([7])])
    assert held.cached(TOKENS) == {}
    assert len(held) == 0


def test_what_begins_no_prompt_of_text_alone_is_left_out():
    held = HeldPrefixes(max_blocks=3)
    for event in (
        stored([1], lora_name="x"),
        stored([1], lora_id=1),
        stored([1], extra_keys=[["salt"]]),
        stored([1], kv_cache_spec_sliding_window=128),
        stored([1], parent=9),
        KVBlocksStored([1], None, [1, 2], 4),
        KVBlocksStored([1], None, [], 0),
        stored([1, 2, 3, 4]),
    ):
        held.apply(A, [event])
    assert (held.cached(TOKENS), held.skipped) == ({}, 11)
    held.apply(A, [stored([1], extra_keys=[None])])
    held.apply(A, [stored([at], [at] * 40, size=at, medium=str(at)) for at in range(5, 40)])
    assert len(held) == 3


def test_sizes_and_media_are_bounded():
    held = HeldPrefixes()
    held.apply(A, [stored([at], [at] * 40, size=at) for at in range(1, 40)])
    held.apply(B, [stored([at], [at] * 40, medium=str(at)) for at in range(1, 40)])
    assert len(held) == 8 + 15  # no medium is one, too


def test_names_that_are_given_again_and_topics_without_end_fill_no_memory():
    held = HeldPrefixes()
    for first in range(0, 4000, 4):
        held.apply(A, [stored([1], range(first, first + 4))])
    assert len(held) == 1
    assert held.cached(range(3996, 4000)) == {A: 4}
    assert held.cached(range(4)) == {}
    for topic in range(1000):
        held.apply(PrefixHolder("b", str(topic)), [stored([1])])
    assert len(held.holders) == 257

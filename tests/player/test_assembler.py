"""Groups in any order, any track, from anyone: what comes out is whole, or nothing was changed."""

import dataclasses
import hashlib
import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvabr.codec import base as registry
from kvabr.codec.base import Codec, GroupContext
from kvabr.codec.block_slots import BlockSlots
from kvabr.codec.group import encode_group, payload_of
from kvabr.codec.payload import PayloadReader, raw
from kvabr.codec.rope import rotate
from kvabr.player.assembler import Assembler, Layer, Placement
from kvabr.types.catalog import Catalog, Track
from kvabr.types.errors import ForeignError, FormatError, HoleError, UsageError
from kvabr.types.naming import LEVELS, TrackNamespace, chain
from kvabr.types.passage import PassageNotes, passage_chain
from tests.examples import examples
from tests.kvdata import cache, profile, spec

SHAPE = spec(2, 2, 32)
TOKENS = 4 * 128 - 50
SIDE = profile(SHAPE)
KV = cache(SHAPE, TOKENS)
LOSS = {"FP16": 0.0, "BF16": 1e-5, "Int8": 3e-5, "FP8": 2e-3, "AC-5x": 8e-3, "Int4": 1e-2, "FP4": 3e-2}


class Residual(Codec):
    """A layer: what Int4 left, in half precision. A real codec, if not a good one."""

    name = "residual"
    refines = "Int4"

    def encode(self, group, context, below=()):
        return raw((group - self._base(context, below)).half())

    def decode(self, payload, context, out, below=()):
        reader = PayloadReader(payload, self.name)
        reader.expect(2 * out.numel())
        rest = reader.tensor(torch.float16, context.spec.shape(context.tokens))
        out.copy_(self._base(context, below) + rest.float())

    def _base(self, context, below):
        from kvabr.codec.affine import Int4

        base = torch.empty(context.spec.shape(context.tokens))
        Int4().decode(memoryview(below[0]), context, base)
        return base


def publish(kv=KV, salt=b"", *, passage=False):
    """A catalog and its frames, as a publisher makes them; of a passage, ``kv`` has keys before rotation."""
    named = passage_chain if passage else chain
    chunks = named(list(range(TOKENS)), model=SHAPE.model, tokenizer=SHAPE.tokenizer, salt=salt)
    frames = {}
    for group, chunk in enumerate(chunks):
        first, last = SHAPE.group_range(group, TOKENS)
        context = GroupContext(SHAPE, first, last - first, SIDE, free=passage)
        for track in LEVELS:
            frames[group, track] = encode_group(kv[:, :, :, first:last], track, context, chunk, group)
        below = [bytes(payload_of(frames[group, "Int4"]))]
        frames[group, "residual"] = encode_group(kv[:, :, :, first:last], "residual", context, chunk, group, below)
    tracks = []
    for name in (*LEVELS, "residual"):
        mine = [frames[group, name] for group in range(4)]
        loss = LOSS.get(name, 1e-6)
        refines = "Int4" if name == "residual" else None
        tracks.append(
            Track(
                name,
                tuple(map(len, mine)),
                (loss,) * 4,
                tuple(hashlib.sha256(f).hexdigest() for f in mine),
                refines=refines,
            )
        )
    notes = PassageNotes("alone") if passage else None
    name = TrackNamespace(SHAPE.model, chunks[-1])
    return Catalog(name, SHAPE, TOKENS, tuple(chunks), tuple(tracks), passage=notes), frames


with pytest.MonkeyPatch.context() as patch:
    patch.setitem(registry._registered, "residual", Residual())
    CATALOG, FRAMES = publish()
    FOREIGN, FOREIGN_FRAMES = publish(salt=b"another prompt")


@pytest.fixture(autouse=True)
def _residual(monkeypatch):
    monkeypatch.setitem(registry._registered, "residual", Residual())


def fresh(**options):
    return Assembler(CATALOG, SIDE, dtype=torch.float32, **options)


@examples(40)
@given(st.permutations(range(4)), st.lists(st.sampled_from(LEVELS), min_size=4, max_size=4))
def test_any_order_any_track_gives_one_contiguous_cache(order, tracks):
    play = fresh()
    for group in order:
        assert play.put(group, tracks[group], FRAMES[group, tracks[group]]) is Placement.PLACED
    kv = play.take()
    assert kv.is_contiguous()
    assert tuple(kv.shape) == SHAPE.shape(TOKENS)
    assert play.coverage == tuple(tracks)
    for group, track in enumerate(tracks):
        first, last = SHAPE.group_range(group, TOKENS)
        piece, exact = kv[:, :, :, first:last], KV[:, :, :, first:last]
        assert float((piece - exact).norm() / exact.norm()) < {"FP4": 0.14, "Int4": 0.13, "AC-5x": 0.3}.get(track, 0.05)


@pytest.mark.parametrize("at", [0, 1000, 999_983])
def test_a_passage_is_placed_as_its_position_in_the_prompt_asks_for(at):
    bare = cache(SHAPE.changed(rope=None), TOKENS)
    asset, frames = publish(bare, passage=True)
    tracks = ("Int4", "FP16", "AC-5x", "residual")
    play = Assembler(asset.at(at), SIDE, dtype=torch.float32)
    assert play.put(3, "Int4", frames[3, "Int4"]) is Placement.PLACED
    for group, track in enumerate(tracks):
        play.put(group, track, frames[group, track])
    kv = play.take()
    wanted = bare.clone()
    wanted[:, 0] = rotate(bare[:, 0], SHAPE.rope, at)
    for group, limit in enumerate((0.13, 0.001, 0.3, 0.001)):
        first, last = SHAPE.group_range(group, TOKENS)
        piece, exact = kv[:, :, :, first:last], wanted[:, :, :, first:last]
        assert float((piece - exact).norm() / exact.norm()) < limit


def test_neither_a_passages_frame_nor_a_prompts_is_taken_for_the_other():
    asset, frames = publish(passage=True)
    for catalog, foreign in ((CATALOG, frames), (asset.at(0), FRAMES)):
        play = Assembler(catalog, SIDE, dtype=torch.float32)
        offer = catalog.track("FP16")
        same = dataclasses.replace(offer, bytes=tuple(len(foreign[g, "FP16"]) for g in range(4)))
        play._catalog = dataclasses.replace(catalog, tracks=(same,))
        with pytest.raises(ForeignError, match="prompt"):
            play.put(0, "FP16", foreign[0, "FP16"])


def test_better_replaces_worse_and_nothing_else_does():
    play = fresh()
    assert play.put(1, "Int4", FRAMES[1, "Int4"]) is Placement.PLACED
    assert play.put(1, "Int4", FRAMES[1, "Int4"]) is Placement.STALE
    assert play.put(1, "FP4", FRAMES[1, "FP4"]) is Placement.STALE
    assert play.put(1, "Int8", FRAMES[1, "Int8"]) is Placement.REPLACED
    assert play.put(1, "AC-5x", FRAMES[1, "AC-5x"]) is Placement.STALE
    assert play.coverage == (None, "Int8", None, None)


def test_a_layer_that_loses_more_than_the_one_below_is_taken_for_the_sake_of_those_above():
    tracks = [dataclasses.replace(each, loss=(0.1,) * 4) if each.refines else each for each in CATALOG.tracks]
    play = Assembler(dataclasses.replace(CATALOG, tracks=tuple(tracks)), SIDE, dtype=torch.float32)
    assert play.put(1, "Int4", FRAMES[1, "Int4"]) is Placement.PLACED
    assert play.put(1, "residual", FRAMES[1, "residual"]) is Placement.REPLACED
    assert play.put(1, "residual", FRAMES[1, "residual"]) is Placement.STALE
    assert play.coverage == (None, "residual", None, None)


def mutilated():
    frame = FRAMES[1, "Int8"]
    flipped = bytearray(frame)
    flipped[-5] ^= 4
    first, last = SHAPE.group_range(1, TOKENS)
    context = GroupContext(SHAPE, first, last - first, SIDE)
    return {
        "truncated": frame[:-1],
        "padded": frame + b"\0",
        "flipped": bytes(flipped),
        "empty": b"",
        "noise": bytes(len(frame)),
        "another group": FRAMES[2, "Int8"],
        "another prompt": FOREIGN_FRAMES[1, "Int8"],
        "a well-formed lie": encode_group(KV[:, :, :, first:last] * 2, "Int8", context, CATALOG.chunks[1], 1),
    }


MUTILATED = mutilated()


@pytest.mark.parametrize("what", MUTILATED)
def test_what_does_not_belong_is_refused_and_changes_nothing(what):
    play = fresh()
    play.put(1, "Int4", FRAMES[1, "Int4"])
    before = play._to.parts[0].clone()
    with pytest.raises(FormatError):
        play.put(1, "Int8", MUTILATED[what])
    assert torch.equal(play._to.parts[0], before)
    assert play.coverage == (None, "Int4", None, None)
    assert play.put(1, "Int8", FRAMES[1, "Int8"]) is Placement.REPLACED


def test_a_cache_with_a_hole_cannot_be_taken():
    play = fresh()
    for group in (0, 3):
        play.put(group, "Int8", FRAMES[group, "Int8"])
    with pytest.raises(HoleError, match="1, 2"):
        play.take()
    with pytest.raises(HoleError, match="1"):
        play.before(2)
    assert play.before(1).shape[3] == 128
    play.put_computed(1, 3, KV[:, :, :, 128:384])
    assert play.coverage == ("Int8", "recomputed", "recomputed", "Int8")
    assert torch.equal(play.take()[:, :, :, 128:384], KV[:, :, :, 128:384])


def test_nothing_is_accepted_after_the_cache_was_handed_over():
    play = fresh()
    for group in range(4):
        play.put(group, "Int4", FRAMES[group, "Int4"])
    kv = play.take()
    before = kv.clone()
    assert play.put(0, "FP16", FRAMES[0, "FP16"]) is Placement.LATE
    assert play.put_computed(0, 1, KV[:, :, :, :128]) is Placement.LATE
    assert torch.equal(kv, before)


def test_layers_need_what_they_refine_and_a_replaced_base_takes_them_along():
    play = fresh()
    with pytest.raises(FormatError, match="refines Int4"):
        play.put(0, "residual", FRAMES[0, "residual"])
    play.put(0, "Int4", FRAMES[0, "Int4"])
    assert play.put(0, "residual", FRAMES[0, "residual"]) is Placement.REPLACED
    exact = KV[:, :, :, :128]
    assert float((play.before(1) - exact).norm() / exact.norm()) < 1e-3
    play.put(1, "Int4", FRAMES[1, "Int4"])
    play.put(1, "FP8", FRAMES[1, "FP8"])
    with pytest.raises(FormatError, match="refines Int4"):
        play.put(1, "residual", FRAMES[1, "residual"])


def test_into_the_callers_tensor_of_any_strides():
    wide = torch.zeros(2, 2, 2, 32, TOKENS + 5, dtype=torch.bfloat16).transpose(3, 4)
    play = Assembler(CATALOG, SIDE, out=wide[:, :, :, :TOKENS])
    for group in range(4):
        play.put(group, "FP16", FRAMES[group, "FP16"])
    assert torch.allclose(play.take().float(), KV, rtol=0.01, atol=0.01)
    assert not wide[:, :, :, TOKENS:].any()
    with pytest.raises(UsageError, match="must be floats"):
        Assembler(CATALOG, SIDE, out=wide)


def test_what_the_engine_returns_is_checked():
    play = fresh()
    with pytest.raises(UsageError, match="must have the shapes"):
        play.put_computed(0, 1, KV[:, :, :, :100])
    with pytest.raises(UsageError, match="NaN"):
        play.put_computed(0, 1, KV[:, :, :, :128] * float("nan"))


def test_a_profile_of_another_model_is_refused():
    with pytest.raises(ForeignError, match="calibrated for"):
        Assembler(CATALOG, profile(spec(1, 1, 32)))
    without = dataclasses.replace(CATALOG)
    with pytest.raises(FormatError, match="profile"):
        Assembler(without, None).put(0, "AC-5x", FRAMES[0, "AC-5x"])


def test_many_threads_end_with_the_best_of_what_they_brought():
    play = fresh()
    work = [(group, track) for group in range(4) for track in LEVELS] * 2
    random.Random(3).shuffle(work)

    def bring(part):
        for group, track in part:
            play.put(group, track, FRAMES[group, track])

    threads = [threading.Thread(target=bring, args=(work[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert play.coverage == ("FP16",) * 4
    assert torch.equal(play.take(), KV.half().float())


class Paused:
    """Compares a digest, but not before it is allowed to."""

    def __init__(self):
        self.asked, self.allowed = threading.Event(), threading.Event()

    def __call__(self, digest):
        self.asked.set()
        assert self.allowed.wait(300)
        return True


def in_thread(work):
    """Start a thread; return it, and a list that gets what the work returns."""
    returned = []
    thread = threading.Thread(target=lambda: returned.append(work()), daemon=True)
    thread.start()
    return thread, returned


def test_nobody_writes_into_a_place_that_is_being_decoded_into():
    play, paused = fresh(), Paused()
    slow, slow_verdict = in_thread(lambda: play.put(1, "Int8", FRAMES[1, "Int8"], has_digest=paused))
    assert paused.asked.wait(300)
    fast, fast_verdict = in_thread(lambda: play.put(1, "FP16", FRAMES[1, "FP16"]))
    computed, computed_verdict = in_thread(lambda: play.put_computed(0, 2, KV[:, :, :, :256]))
    assert play.put(2, "FP16", FRAMES[2, "FP16"]) is Placement.PLACED  # others go on
    assert play.coverage == (None, None, "FP16", None)
    paused.allowed.set()
    for thread in (slow, fast, computed):
        thread.join(300)
    assert slow_verdict == [Placement.PLACED]
    assert fast_verdict in ([Placement.REPLACED], [Placement.STALE])
    assert play.coverage[:2] == ("recomputed", "recomputed")
    assert computed_verdict in ([Placement.PLACED], [Placement.REPLACED])
    assert torch.equal(play.before(2), KV[:, :, :, :256])


def test_a_sealed_cache_does_not_change():
    whole = torch.zeros(SHAPE.shape(TOKENS))
    play, paused = Assembler(CATALOG, SIDE, out=whole), Paused()
    putting, verdict = in_thread(lambda: play.put(1, "Int8", FRAMES[1, "Int8"], has_digest=paused))
    assert paused.asked.wait(300)
    sealing, sealed = in_thread(lambda: (play.seal(), whole.clone())[1])
    while not play._taken:
        sealing.join(0.001)
    assert not sealed
    paused.allowed.set()
    for thread in (putting, sealing):
        thread.join(300)
    assert verdict == [Placement.LATE]
    assert torch.equal(whole, sealed[0])
    assert play.coverage == (None,) * 4


BLOCK = 16
BLOCKS = list(np.random.default_rng(1).permutation(40)[: -(-TOKENS // BLOCK)])


class Paged:
    """A destination: blocks of a paged cache, [block, head, token, dim] of keys and of values in each layer."""

    device = torch.device("cpu")

    def __init__(self):
        shape = (40, SHAPE.kv_heads, BLOCK, SHAPE.head_dim)
        self.layers = [[torch.full(shape, torch.nan) for _ in range(2)] for _ in range(SHAPE.layers)]

    def place(self, unit):
        tokens = np.arange(unit.first, unit.first + unit.tokens)
        return BlockSlots(self.layers, np.array(BLOCKS)[tokens // BLOCK] * BLOCK + tokens % BLOCK)

    def whole(self):
        blocks = torch.tensor(BLOCKS)
        halves = [[half[blocks].transpose(0, 1).flatten(1, 2) for half in layer] for layer in self.layers]
        return torch.stack([torch.stack(layer) for layer in halves])[:, :, :, :TOKENS]


def test_what_is_in_blocks_is_what_would_be_in_a_tensor():
    paged, plain, tracks = Paged(), torch.empty(SHAPE.shape(TOKENS)), ("Int8", "Int4", "AC-5x", "Int8")
    for out in (paged, plain):
        made = Assembler(CATALOG, SIDE, out=out)
        came = [(group, [Layer(track, FRAMES[group, track])]) for group, track in enumerate(tracks)]
        assert made.put_many(came) == [Placement.PLACED] * 4
        assert made.put(0, "FP16", FRAMES[0, "FP16"]) is Placement.REPLACED
        assert made.put(3, "Int4", FRAMES[3, "Int4"]) is Placement.STALE
        assert made.put_computed(1, 2, KV[:, :, :, 128:256].contiguous()) is Placement.REPLACED
        assert made.take_classes(upgrades=True) == ((plain,) if out is plain else ())
        write = made.prepare(3, "FP16", FRAMES[3, "FP16"])
        assert write() is Placement.REPLACED
        assert made.coverage == ("FP16", "recomputed", "AC-5x", "FP16")
    assert torch.equal(paged.whole(), plain)


@pytest.mark.parametrize("blocks", [False, True])
def test_a_frame_that_proves_bad_half_way_leaves_a_place_as_it_was(blocks):
    first, last = SHAPE.group_range(1, TOKENS)
    context = GroupContext(SHAPE, first, last - first, SIDE)
    bad = bytearray(encode_group(KV[:, :, :, first:last], "FP16", context, CATALOG.chunks[1], 1))
    bad[-1] = 0x7C  # infinity, the last of all elements: everything before it is written
    out = Paged() if blocks else torch.zeros(SHAPE.shape(TOKENS))
    play = Assembler(CATALOG, SIDE, out=out)

    def there():
        return (out.whole() if blocks else out)[:, :, :, first:last].clone()

    with pytest.raises(FormatError):
        play.put(1, "FP16", bytes(bad), has_digest=lambda _: True)
    assert play.coverage == (None,) * 4
    assert play.put(1, "Int8", FRAMES[1, "Int8"]) is Placement.PLACED
    before = there()
    with pytest.raises(FormatError):
        play.put(1, "FP16", bytes(bad), has_digest=lambda _: True)
    assert torch.equal(there(), before)
    assert play.put(1, "FP16", FRAMES[1, "FP16"]) is Placement.REPLACED
    assert torch.equal(there(), KV[:, :, :, first:last].half().float())

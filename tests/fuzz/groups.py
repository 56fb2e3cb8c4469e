"""Groups and profiles: frames, payloads of all codecs, and the tables that AC payloads are decoded with."""

import struct
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import torch

from kvabr.codec import container, unusual
from kvabr.codec.base import GroupContext, codec
from kvabr.codec.builtin import BUILTIN
from kvabr.codec.centred import CENTRED
from kvabr.codec.container import FrameHeader, object_spans, pack, unpack
from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import DTYPES, CoderModel, max_streams
from kvabr.codec.native.references import pack_references, references_size
from kvabr.codec.native.streams import gathered_places
from kvabr.codec.profile import ClassProfile, Depth, Profile
from kvabr.codec.referring import MARK
from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec, LayerClass
from kvabr.types.naming import LAYERS
from tests.codec.native import oracle
from tests.codec.native.models import base_indices, case, coder_model, spread_out
from tests.fuzz.target import SEPARATOR, Target, family, refused

_SPEC = KVSpec.uniform("test/model", "tokenizer", 2, 2, 16, "float16", None, 128)
_SPECS = (
    _SPEC, KVSpec.uniform("test/model", "tokenizer", 1, 3, 5, "bfloat16", None, 16),
    KVSpec.uniform("test/model", "tokenizer", 1, 1, 33, "float32", None, 40),
    KVSpec.uniform("m", "t", 1, 4, 64, "float16", None, 128),
    KVSpec("m", "t", (LayerClass("latent", (0, 1), 1, 40, 0, "bfloat16"),), 128),
    KVSpec("m", "t", (LayerClass("full", (0,), 3, 24, 7, "float8_e4m3fn", scales=(0.5, 3.0)),), 128),
    KVSpec("m", "t", (LayerClass("latent", (0,), 1, 19, 0, "float8_e5m2", scales=(2.0**32,)),), 128),
)  # fmt: skip
_TOKENS = (1, 2, 7, 16, 31, 32, 33, 64)
_SEPARABLE = tuple(name for name, known in BUILTIN.items() if known.layout is not None)
_CASES, _CHAIN = 12, LAYERS[:3]
_STEP = 0.5
_FIRST = 5
"""First token of a group behind the sinks."""
_NOTHING_LISTED = struct.pack("<I", 0)
_HEAD = struct.Struct("<II")
_STATES_BYTES = 256


def _alike(paths: Sequence[str], decode: Callable[[], torch.Tensor]) -> bool:
    """Decode on every path: all must refuse the payload, or all give the same, which is finite."""
    outcomes = []
    for path in paths:
        with oracle.taking(path):
            outcomes.append(refused(decode, FormatError))
    first = outcomes[0]
    for path, other in zip(paths, outcomes, strict=True):
        same = other is first if first is None or other is None else torch.equal(first, other)
        assert same, f"{paths[0]} and {path} disagree"
    assert first is None or bool(torch.isfinite(first).all())
    return first is not None


def _frame(data: bytes) -> bool:
    """A frame. If the first byte is odd, its checksums and lengths are set right: else no input would pass them."""
    frame = _sound(data[1:]) if data[:1] and data[0] & 1 else data[1:]
    found = refused(lambda: unpack(frame), FormatError)
    if found is None:
        return False
    header, payload = found
    assert pack(payload, header) == frame
    refused(lambda: unpack(frame, FrameHeader("Int4", bytes(16), "0" * 64, 0, 0, 1)), FormatError)
    assert refused(lambda: unpack(frame, digest="0" * 64), FormatError) is None
    for size in (len(frame), header.tokens):
        spans = object_spans(_SPEC, header.track, header.first_token, header.tokens % 1000 + 1, size)
        assert spans[0].begin == 0
        assert spans[-1].end == size
        assert all(one.end == other.begin and one.object_id < other.object_id for one, other in pairwise(spans))
    return True


def _sound(data: bytes) -> bytes:
    fixed = container._FIXED
    _, _, name_bytes, *fields = fixed.unpack(data[: fixed.size].ljust(fixed.size, b"\0"))
    name, payload = data[fixed.size :][:name_bytes], data[fixed.size + name_bytes :]
    fields[-2:] = len(payload), zlib.crc32(payload)
    head = fixed.pack(container.MAGIC, container.VERSION, len(name), *fields) + name
    return head + struct.pack("<I", zlib.crc32(head)) + payload


def _valid_frames() -> list[bytes]:
    frames = []
    for payload in (b"", b"payload"):
        frame = pack(payload, FrameHeader("Int4", bytes(16), "ab" * 32, 3, 384, 128))
        head = len(frame) - len(payload)
        frames += [b"\0" + frame, b"\1" + frame[: head - 4] + payload]  # without the header's checksum
    return frames


def _separable(data: bytes) -> bool:
    """A payload of any codec but AC: track 1, spec 1, tokens 1, type and strides 1 | payload, to be repeated if odd."""
    which, shape, length, kind, *_ = (*data[:4], 0, 0, 0, 0)
    track, spec = _SEPARABLE[which % len(_SEPARABLE)], _SPECS[shape % len(_SPECS)]
    tokens = min(_TOKENS[length % len(_TOKENS)], spec.group_tokens)
    context, payload = GroupContext(spec, 0, tokens), data[4:]
    if kind & 1 and payload:
        layout = codec(track).layout(spec, tokens)
        assert layout is not None
        payload = (payload * (layout.payload_bytes // len(payload) + 1))[: layout.payload_bytes]

    def decode() -> torch.Tensor:
        out = spread_out(spec.shape(tokens), (*DTYPES,)[kind // 2 % len(DTYPES)], kind // 8)
        codec(track).decode(memoryview(payload), context, out)
        return out

    return _alike(("", "portable", oracle.ORACLE), decode)


def _valid_separable() -> list[bytes]:
    out = []
    for which, track in enumerate(_SEPARABLE):
        for shape, spec in enumerate(_SPECS[:3]):
            tokens = min(_TOKENS[5], spec.group_tokens)
            cache = torch.linspace(-4.0, 4.0, spec.elements_per_token * tokens).reshape(spec.shape(tokens))
            payload = codec(track).encode(cache, GroupContext(spec, 0, tokens))
            if len(payload) < 2000:
                out.append(bytes([which, shape, 5, 2 * which]) + payload)
        out.append(bytes([which, which % 4, which, 8 * which + 1]) + bytes(range(0, 120, 7)))
    return out


@cache
def _profile(seed: int) -> tuple[ClassProfile, tuple[bytes, ...], int]:
    """Return a profile of odd tables and matrices, the same on every machine, payloads for it, and their tokens."""
    it = case(seed, small=True, depths=len(_CHAIN))
    steps = [_STEP / 3**depth for depth in range(len(_CHAIN))]
    depths = {name: Depth(step, 0.0, model) for name, step, model in zip(_CHAIN, steps, it.models, strict=True)}
    spec = it.transform.structure.spec
    coded = [_NOTHING_LISTED + part for part in it.encode(oracle.encode_indices)]
    tokens = it.indices[0].shape[1]
    if it.references is not None and references_size(tokens):
        coded[0] = MARK + pack_references(it.references) + coded[0]
    return ClassProfile(spec, 1, it.transform, depths), tuple(coded), tokens


def _layers(data: bytes) -> bool:
    """A chain of AC payloads: case 1, type and strides 1, place 1 | payload ... with `SEPARATOR` in between.

    A payload begins with how it is meant: 0: raw; 1: the valid one, changed by (place 2, xor 1) ...; 2: number of
    escapes 1, states, words and escapes, to which the lengths are set right. One that is missing is the valid one.
    """
    seed, kind, place, *_ = (*data[:3], 0, 0, 0)
    profile, valid, tokens = _profile(seed % _CASES)
    given = data[3:].split(SEPARATOR) if len(data) > 3 else []
    tokens = place // 4 + 1 if place & 2 else tokens
    context = GroupContext(profile.spec, 0 if place & 1 else _FIRST, tokens, profile)
    depth = min(max(1, len(given)), len(_CHAIN))
    payloads = [_meant(part, good) for part, good in zip((*given, b"", b"", b""), valid, strict=False)][:depth]

    def decode() -> torch.Tensor:
        out = spread_out(profile.spec.shape(tokens), (*DTYPES,)[kind % len(DTYPES)], kind // 4)
        *below, top = map(memoryview, payloads)
        codec(_CHAIN[depth - 1]).decode(top, context, out, below)
        return out

    return _alike(coder.available_paths(), decode)


def _meant(part: bytes, valid: bytes) -> bytes:
    mode, rest = part[:1], part[1:]
    if mode == b"\0":
        return rest
    if mode == b"\2":
        body = rest[1:].ljust(_STATES_BYTES, b"\0")
        words = (len(body) - _STATES_BYTES) // 2
        escapes = min(words, rest[0] if rest else 0)
        return _NOTHING_LISTED + _HEAD.pack(words - escapes, escapes) + body[: _STATES_BYTES + 2 * words]
    changed = bytearray(valid)
    for at in range(0, len(rest) - 2, 3):
        changed[int.from_bytes(rest[at : at + 2], "little") % len(changed)] ^= rest[at + 2]
    return bytes(changed)


def _valid_layers() -> list[bytes]:
    out = []
    for seed in range(_CASES):
        _, valid, _ = _profile(seed)
        head = bytes([seed, seed % 20, 0])
        out.append(head + SEPARATOR.join([b"\1"] * (seed % 3 + 1)))
        coded = valid[0].removeprefix(_NOTHING_LISTED)
        escapes = _HEAD.unpack_from(coded)[1]
        if len(coded) < 1500 and escapes < 256 and not valid[0].startswith(MARK):
            out += [head + b"\0" + _NOTHING_LISTED + coded, head + b"\2" + bytes([escapes]) + coded[_HEAD.size :]]
        out += [head + b"\0" + part for part in _by_others(seed) if len(part) < 1500]
    return out


_STREAM_ROWS, _STREAM_TOKENS = 200, 3


@cache
def _streamed() -> tuple[CoderModel, tuple[bytes, ...]]:
    """Return a model, and payloads of one to as many streams as its rows can be cut into."""
    dice = np.random.default_rng(11)
    model = coder_model(dice, _STREAM_ROWS, refines=False)
    index = base_indices(dice, _STREAM_ROWS, _STREAM_TOKENS)
    most = max_streams(_STREAM_ROWS)
    return model, tuple(coder.encode_indices(model, index, streams=streams) for streams in range(1, most + 1))


def _streams(data: bytes) -> bool:
    """A coded part: a valid one that the first byte chooses, changed by (place 2, xor 1) ..., or the rest."""
    model, valid = _streamed()
    kind = data[0] if data else 0
    payload = data[1:] if kind & 128 else _meant(b"\1" + data[1:], valid[kind % len(valid)])
    room = np.zeros(gathered_places([payload])[-1], np.uint8)

    def read() -> bool:
        streams = refused(lambda: oracle.directory(payload, _STREAM_ROWS, _STREAM_TOKENS), FormatError)
        parts = refused(lambda: coder.gather([payload], [_STREAM_TOKENS], [7], _STREAM_ROWS, room), FormatError)
        assert (parts is None) == (streams is None), "the native coder and the oracle disagree"
        if parts is None or streams is None:
            return False
        assert bool((parts[:, 3] + parts[:, 5] <= len(room) // 2).all())
        assert (parts[:, 4] == streams.words).all()
        assert (parts[:, 5] == streams.escapes).all()
        return True

    def decode() -> torch.Tensor:
        return torch.from_numpy(coder.decode_indices(model, payload, _STREAM_TOKENS))

    read_at_all = read()
    return _alike(oracle.PATHS, decode) and read_at_all


def _valid_streams() -> list[bytes]:
    valid = _streamed()[1]
    return [*(bytes([kind]) for kind in range(len(valid))), *(b"\xff" + payload for payload in valid)]


def _by_others(seed: int) -> list[bytes]:
    """Return payloads of a group that other codecs encoded."""
    profile, _, tokens = _profile(seed)
    context = GroupContext(profile.spec, _FIRST, tokens, profile)
    cache = torch.linspace(-4.0, 4.0, profile.spec.elements_per_token * tokens).reshape(profile.spec.shape(tokens))
    fitting = (name for name in unusual.OTHERS if profile.spec.only.split[1] or not name.endswith(CENTRED))
    return [unusual.other(name, unusual.other_codec(name).encode(cache, context)) for name in fitting]


def _profile_file(data: bytes) -> bool:
    """The file of a profile; its tables and matrices then decode noise on every path."""
    found = refused(lambda: Profile.from_bytes(data), FormatError)
    if found is None:
        return False
    assert found.to_bytes() == data
    del found.__dict__["_file"]
    written = found.to_bytes()
    again = Profile.from_bytes(written)
    del again.__dict__["_file"]
    assert again.to_bytes() == written
    for each in map(found.of, found.spec.parts):
        if each.transform.structure.rows <= 4096:
            for depth in each.depths.values():
                _decodes_noise(each, depth.coder, depth.step)
    return True


def _decodes_noise(profile: ClassProfile, model: CoderModel, step: float) -> None:
    tokens, dice = 9, np.random.default_rng(0)
    payload = _HEAD.pack(900, 40) + dice.bytes(_STATES_BYTES + 1880)
    z = dice.integers(-3000, 3000, (model.rows, tokens)).astype(np.int16)
    below = None if not model.refines else (z // 1000).astype(np.int16)

    def decode() -> torch.Tensor:
        refused(lambda: coder.decode_indices(model, payload, tokens, below), FormatError)
        out = torch.empty(profile.spec.shape(tokens))
        coder.synthesise(profile.transform, z, step, _FIRST, out)
        return out

    _alike(coder.available_paths(), decode)


def _valid_profiles() -> list[bytes]:
    return sorted((_profile(seed)[0].to_bytes() for seed in range(_CASES)), key=len)[:3]


GROUPS = family(
    Target(_frame, _valid_frames),
    Target(_separable, _valid_separable, native=True),
    Target(_layers, _valid_layers, native=True),
    Target(_streams, _valid_streams, native=True),
)
PROFILES = Target(_profile_file, _valid_profiles, most_bytes=1 << 14, native=True)

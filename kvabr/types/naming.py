"""Names according to draft-shi-moq-kvcache-00 (track namespace and track), and the chained prompt digest.

A prompt may exceed the 4,096 bytes of a full track name (moq-transport, section 2.4.1), so the namespace has a digest
that is chained group by group: equal prefixes have equal digests, and one lookup finds the longest cached prefix.

A model's name identifies its caches: everything that changes KV is part of the name, except defaults. If the readable
part is not sufficient, a tilde and 16 hex digits follow: a digest of the raw name if characters were replaced, or of
facts such as adapters, quantisation and ranks. See `docs/guides/engines.md` for the contents of a name and
`kvabr.engines.weights` for the digest of weights.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvabr.types.errors import FormatError, UsageError
from kvabr.types.kv import GROUP_TOKENS
from kvabr.types.media import MediaTokens, media_bytes

ROOT = "moq://kvcache.moq.arpa/v1/"
"""First field of every track namespace."""
LEVELS = ("FP16", "BF16", "FP8", "Int8", "FP4", "Int4", "AC-5x")
"""The draft's compression levels, used as track names."""
LAYERS = ("AC-L0", "AC-L1", "AC-L2", "AC-L3")
"""The AC layers, base first; each refines its predecessor."""
CATALOG_TRACK = "kvabr.catalog"
"""Track with one group: the catalog of the namespace's prompt. Not ``catalog``, which moq-rs servers reserve."""
PROFILE_TRACK = "profile"
"""Track with one group: a codec profile. The prompt field of its namespace is the profile's SHA-256."""
MAX_FULL_TRACK_NAME = 4096
"""Maximum bytes of namespace fields and track name together (moq-transport, section 2.4.1)."""
PREFIX_TRACK = "prefix."
"""Prefix of a lookup's track name, see `prefix_track`."""
LIVE_TRACK = "kvabr.live"
"""Track with one group: the live catalog of a cache during prefill, see `kvabr.types.live`."""
EDGE_TRACK = "kvabr.edge"
"""Track with the edge messages of a cache during prefill, one per group."""
LIVE_PREFIX_TRACK = "live."
"""Prefix of a lookup's track name among caches during prefill; see `prefix_track`."""
MAX_PREFIX_DIGESTS = 320
"""Maximum digests in a lookup's name."""
LOOKUP_RUN = 16
"""Groups per page in a store. Lookups of long prompts name the last group of each page."""
PROPERTY_GROUP_BYTES = 0x38
"""Object property of a group's first object: bytes of the group (an application code point, moq-transport)."""
PROPERTY_GROUP_DIGEST = 0x39
"""Object property of a group's first object: SHA-256 of the whole group."""
PROPERTY_GROUP_BLAKE3 = 0x3B
"""Object property of a group's first object: BLAKE3 of the whole group."""
PROPERTY_RATE = 0x3A
"""Object property of a catalog's first object: the rate in kbit/s that recent transfers to the client's block of
addresses reached. As it describes one connection, relays must not pass it on.
"""
MAX_RATE_KBPS = 10**9
"""Maximum rate in `PROPERTY_RATE`; higher values are ignored."""
_KEY_BYTES = 8
"""Bytes per digest in a lookup's name. The client compares whole digests, so collisions are harmless."""
_TRACK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def check_track_name(name: str) -> str:
    """Return ``name`` if it is a valid track name: 1 to 64 letters, digits and ``._+-``, safe as a file name."""
    if not isinstance(name, str) or not _TRACK_NAME.fullmatch(name):
        raise FormatError(f"{name!r} cannot be a track name: use 1 to 64 letters, digits and . _ + -")
    return name


@dataclass(frozen=True, slots=True)
class TrackNamespace:
    """The namespace of all tracks of one prompt under one model."""

    model: str
    prompt: str
    """Last digest of the prompt's chain, hex; see `chain`."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model or "\0" in self.model:
            raise FormatError(f"track namespace: {self.model!r} cannot be a model's name")
        try:
            self.model.encode()
        except UnicodeEncodeError as error:
            raise FormatError(f"track namespace: {self.model!r} cannot be written as UTF-8") from error
        if not isinstance(self.prompt, str) or not _DIGEST.fullmatch(self.prompt):
            raise FormatError(f"track namespace: the prompt field must be 64 hex digits, got {str(self.prompt)[:80]!r}")

    def fields(self) -> tuple[bytes, ...]:
        """Return the draft's namespace tuple: (root, model, prompt)."""
        return (ROOT.encode(), self.model.encode(), self.prompt.encode())

    def split_fields(self) -> tuple[bytes, ...]:
        """Return the namespace split at slashes, for peers that do not allow ``/`` inside a field."""
        joined = f"{ROOT}{self.model}/{self.prompt}"
        return tuple(part.encode() for part in joined.split("/") if part)

    @classmethod
    def from_fields(cls, fields: Sequence[bytes]) -> TrackNamespace:
        """Parse either form of a namespace; raise `FormatError` if the fields are not a namespace of this draft."""
        try:
            text = [bytes(field).decode() for field in fields]
        except UnicodeDecodeError as error:
            raise FormatError("track namespace: a field is not UTF-8") from error
        if len(text) == 3 and text[0] == ROOT:
            return cls(text[1], text[2])
        # Some peers join and split fields at slashes, or drop empty fields, so compare the parts.
        root = [part for part in ROOT.split("/") if part]
        parts = [part for part in "/".join(text).split("/") if part]
        if len(parts) > len(root) + 1 and parts[: len(root)] == root:
            return cls("/".join(parts[len(root) : -1]), parts[-1])
        raise FormatError(f"track namespace: {text[:4]} does not start with {ROOT}")

    def full_name_bytes(self, track: str) -> int:
        """Return the number of bytes of the full track name; peers reject more than `MAX_FULL_TRACK_NAME`."""
        return sum(map(len, self.fields())) + len(track.encode())


MODELS_TRACK = "kvabr.models"
"""Track with one group: the specs of the models that a player may read, as JSON ``{"models": [...]}``."""

MODELS_NAMESPACE = TrackNamespace("kvabr", "0" * 64)
"""Namespace of `MODELS_TRACK`; no prompt has this digest."""


def chain(
    tokens: Sequence[int],
    *,
    model: str,
    tokenizer: str,
    group_tokens: int = GROUP_TOKENS,
    salt: bytes = b"",
) -> list[str]:
    """Return the chained digest, 64 hex digits, of every group of a prompt; the last one is the prompt's name.

    Each digest covers model, tokenizer, salt and all tokens (ids from 0 to 2**32 - 1) up to the end of its group; a
    short last group has another digest than the full group. The salt is a tenant's secret that prevents guessing
    digests. With `MediaTokens`, a digest also covers the media up to its group.
    """
    return chained(b"kvabr.chain/1", tokens, model, tokenizer, group_tokens, salt)


def chained(
    domain: bytes, tokens: Sequence[int], model: str, tokenizer: str, group_tokens: int, salt: bytes
) -> list[str]:
    """Return chained digests like `chain`, in a domain of their own: prompts, or passages (`kvabr.types.passage`)."""
    head = [model.encode(), tokenizer.encode(), salt, struct.pack("<I", group_tokens)]
    state = hashlib.sha256(domain + b"\0" + b"".join(struct.pack("<Q", len(part)) + part for part in head)).digest()
    digests = []
    for first in range(0, len(tokens), group_tokens):
        state = _link(state, tokens[first : first + group_tokens])
        digests.append(state.hex())
    return digests


def next_digest(digest: str, tokens: Sequence[int]) -> str:
    """Return the chained digest of the group that has these tokens and follows the group of ``digest``."""
    return _link(bytes.fromhex(digest), tokens).hex()


def _link(state: bytes, tokens: Sequence[int]) -> bytes:
    try:
        packed = struct.pack(f"<I{len(tokens)}I", len(tokens), *tokens)
    except (struct.error, TypeError, ValueError) as error:
        raise UsageError(f"token ids must be whole numbers from 0 to 2**32 - 1 ({error})") from error
    media = media_bytes(tokens) if isinstance(tokens, MediaTokens) else b""
    return hashlib.sha256(state + packed + media).digest()


def prefix_key(digest: str) -> bytes:
    """Return the first 8 bytes of a digest, which are used in a lookup's name."""
    if not _DIGEST.fullmatch(digest):
        raise FormatError(f"a prompt digest must have 64 hex digits, got {digest[:80]!r}")
    return bytes.fromhex(digest[: 2 * _KEY_BYTES])


def prefix_positions(first: int, end: int, *, evenly: bool = False) -> Sequence[int]:
    """Return the groups of ``range(first, end)`` that a lookup names, including the last group.

    At most `MAX_PREFIX_DIGESTS` groups are all named. Of more groups, evenly spaced ones are named if ``evenly``.
    Otherwise these are the last group of each page of `LOOKUP_RUN` groups (the names in object stores), or of every
    second, third, ... page, and all groups after the last full page.
    """
    if end - first <= MAX_PREFIX_DIGESTS:
        return range(first, end)
    if evenly:
        stride = -(-(end - first) // MAX_PREFIX_DIGESTS)
        return range(first + (end - first - 1) % stride, end, stride)
    rest = range(end - end % LOOKUP_RUN, end)
    ends = range(first + -(first + 1) % LOOKUP_RUN, rest.start, LOOKUP_RUN)
    stride = -(-len(ends) // (MAX_PREFIX_DIGESTS - len(rest)))
    return [*ends[(len(ends) - 1) % stride :: stride], *rest]


def prefix_track(digests: Sequence[str], first: int = 1, end: int | None = None, *, evenly: bool = False) -> str:
    """Return the track name of a lookup for the longest cached prefix of a prompt, given its chained digests.

    The track is in ``TrackNamespace(model, digests[0])``. Its group 0 is the catalog of the readable asset with the
    longest named prefix; of several, the newest, or with recurrent states the one with the longest playable prefix. The
    client counts the matching groups.

    A name has at most `MAX_PREFIX_DIGESTS` digests. For a longer prompt it has some of the digests
    (`prefix_positions`); a second lookup, ``prefix_track(digests, gap.start, gap.stop)``, has those between two of them
    (`prefix_gap`). One round trip suffices for up to 321 groups, two for up to 102,400 (4,880 with object stores). For
    recurrent states the digests are spaced ``evenly``, since a longer match may have no playable snapshot.
    """
    end = len(digests) if end is None else end
    keys = b"".join(prefix_key(digests[group]) for group in prefix_positions(first, end, evenly=evenly))
    return PREFIX_TRACK + base64.urlsafe_b64encode(keys).rstrip(b"=").decode()


def prefix_gap(shared: int, groups: int, *, evenly: bool = False) -> range:
    """Return the groups for a second lookup, if the first found an asset with ``shared`` (at least 1) equal groups.

    They follow the last equal group. Empty if no longer prefix is possible.
    """
    refused = next((group for group in prefix_positions(1, groups, evenly=evenly) if group >= shared), groups)
    return range(shared - 1, refused) if refused > shared else range(0)


def is_lookup(track: str) -> bool:
    """Return True for the track of a prefix lookup, live or not."""
    return track.startswith((PREFIX_TRACK, LIVE_PREFIX_TRACK))


def is_catalog(track: str) -> bool:
    """Return True for the track of a catalog or of a lookup, live or not."""
    return track in {CATALOG_TRACK, LIVE_TRACK} or is_lookup(track)


def is_live(track: str) -> bool:
    """Return True for a track of a cache during prefill that is not a level."""
    return track in {LIVE_TRACK, EDGE_TRACK} or track.startswith(LIVE_PREFIX_TRACK)


def parse_prefix_track(name: str) -> list[bytes]:
    """Return the digest prefixes (8 bytes each) in an untrusted lookup name, live or not."""
    text = name.removeprefix(LIVE_PREFIX_TRACK if name.startswith(LIVE_PREFIX_TRACK) else PREFIX_TRACK)
    if text == name or len(text) > MAX_FULL_TRACK_NAME:
        raise FormatError(f"not the name of a prefix lookup: {name[:80]!r}")
    try:
        # Accept only the canonical form, so that relays can cache a lookup's answer by name.
        keys = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise FormatError(f"prefix lookup: not base64 ({error})") from error
    if len(keys) % _KEY_BYTES or len(keys) > MAX_PREFIX_DIGESTS * _KEY_BYTES:
        raise FormatError(
            f"prefix lookup: must have 0 to {MAX_PREFIX_DIGESTS} digests of {_KEY_BYTES} bytes, got {len(keys)} bytes"
        )
    if base64.urlsafe_b64encode(keys).rstrip(b"=").decode() != text:
        raise FormatError("prefix lookup: not in its canonical form")
    return [keys[at : at + _KEY_BYTES] for at in range(0, len(keys), _KEY_BYTES)]


MARK = "~"
DIGITS = 16
MAX_READABLE = 180
"""Maximum characters of the readable part; with digests and ranks a name has at most 256."""
STRICT = re.compile(r"[^A-Za-z0-9._/-]")
"""Characters that are not allowed in names from an engine."""
LOOSE = re.compile(r"[\x00-\x1f\x7f~\ud800-\udfff]")
"""Characters that are not allowed in names from a folder: unprintable ones, and the tilde."""

_DIGESTS = re.compile(r"(-[0-9a-f]{16})?(~[0-9a-f]{16})*$")


def safe_name(raw: str, unsafe: re.Pattern[str] = STRICT) -> str:
    """Return ``raw`` if it is safe in a track namespace, otherwise a readable part and a distinguishing digest."""
    readable = re.sub("/+", "/", unsafe.sub("-", raw)).strip("/")[-MAX_READABLE:].strip("/") or "model"
    return raw if readable == raw else _marked(readable, b"kvabr.raw-name/1", raw)


def with_facts(name: str, facts: Mapping[str, Any]) -> str:
    """Return a model's name with a digest of further facts; ``name`` itself if all facts are empty.

    Facts are JSON values by name; None, "", and empty lists or objects are ignored. Raise `UsageError` for other
    values.
    """
    given = {key: value for key, value in facts.items() if value is not None and value not in ("", [], {}, ())}
    if not given:
        return name
    try:
        text = json.dumps([name, given], sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: the properties of this model cannot be encoded in its name ({error})") from error
    return _marked(name[:MAX_READABLE], b"kvabr.facts/1", text)


def akin(one: str, other: str) -> bool:
    """Return True if two names may belong to fine-tuned versions of one model: their readable parts are equal.

    Such models never share caches, but may share codec profiles and measured losses.
    """
    return _DIGESTS.sub("", one) == _DIGESTS.sub("", other)


def _marked(readable: str, domain: bytes, text: str) -> str:
    digest = hashlib.sha256(domain + b"\0" + text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]
    return f"{readable}{MARK}{digest}"

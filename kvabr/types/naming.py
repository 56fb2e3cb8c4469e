"""Names of draft-shi-moq-kvcache-00 (track namespace and track) and the chained prompt digest.

A prompt may be far longer than the 4,096 bytes of a full track name (moq-transport, section 2.4.1). The prompt field of
the namespace is therefore a digest, chained group by group: equal prefixes have equal digests, and one lookup finds the
longest cached prefix.

The model's name tells caches apart: what changes KV is in it, and what is usual adds nothing to it. It has a readable
part. Where that does not tell everything, a tilde and 16 hex digits follow: a digest of the raw name, if characters of
it had to be replaced, or of facts such as adapters, quantisation and ranks. `docs/guides/engines.md` lists
what is in a name, and `kvabr.engines.weights` computes the digest of a model's weights.
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
from kvabr.types.media import media_bytes

ROOT = "moq://kvcache.moq.arpa/v1/"
"""First field of every track namespace (draft-shi-moq-kvcache-00)."""
LEVELS = ("FP16", "BF16", "FP8", "Int8", "FP4", "Int4", "AC-5x")
"""The draft's compression levels, which are the track names."""
LAYERS = ("AC-L0", "AC-L1", "AC-L2", "AC-L3")
"""The layers, base first; each of the others refines the one before it."""
CATALOG_TRACK = "kvabr.catalog"
"""Track whose only group is the catalog of the prompt in the namespace. Plain ``catalog`` is reserved for media: moq-rs
servers have a track of that name in every namespace and serve no other under it."""
PROFILE_TRACK = "profile"
"""Track whose only group is a codec profile; the prompt field of its namespace is the profile's SHA-256."""
MAX_FULL_TRACK_NAME = 4096
"""Maximum bytes of namespace fields and track name together (moq-transport, section 2.4.1)."""
PREFIX_TRACK = "prefix."
"""Prefix of the name of a lookup, see `prefix_track`."""
LIVE_TRACK = "kvabr.live"
"""Track whose only group is the live catalog of a cache that is being prefilled, see `kvabr.types.live`."""
EDGE_TRACK = "kvabr.edge"
"""Track of the news of such a cache, a group each."""
LIVE_PREFIX_TRACK = "live."
"""Prefix of the name of a lookup among caches that are being prefilled; the rest is that of a `prefix_track`."""
MAX_PREFIX_DIGESTS = 320
"""Maximum number of digests in the name of one lookup; they leave 584 bytes for the model's name."""
LOOKUP_RUN = 16
"""Groups of which lookups of long prompts name the last one: those of a page in a store."""
PROPERTY_GROUP_BYTES = 0x38
"""Object property of a group's first object: bytes of the whole group (an application's code point, moq-transport)."""
PROPERTY_GROUP_DIGEST = 0x39
"""Object property of a group's first object: SHA-256 of the whole group."""
PROPERTY_GROUP_BLAKE3 = 0x3B
"""The same of an asset whose groups have BLAKE3 digests."""
_KEY_BYTES = 8
"""Bytes of a digest in the name of a lookup. The client compares whole digests, so collisions are harmless."""
_TRACK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def check_track_name(name: str) -> str:
    """Return ``name`` if it can name a track: 1 to 64 letters, digits and ``._+-``, safe as a file name."""
    if not isinstance(name, str) or not _TRACK_NAME.fullmatch(name):
        raise FormatError(f"{name!r} cannot be a track name: use 1 to 64 letters, digits and . _ + -")
    return name


@dataclass(frozen=True, slots=True)
class TrackNamespace:
    """The namespace of all tracks of one prompt under one model."""

    model: str
    prompt: str
    """The prompt's last chained digest, hex; see `chain`."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model or "\0" in self.model:
            raise FormatError(f"track namespace: {self.model!r} cannot be a model's name")
        try:
            self.model.encode()
        except UnicodeEncodeError as error:
            raise FormatError(f"track namespace: {self.model!r} cannot be written as UTF-8") from error
        if not isinstance(self.prompt, str) or not _DIGEST.fullmatch(self.prompt):
            raise FormatError(f"track namespace: the prompt field must be 64 hex digits, not {str(self.prompt)[:80]!r}")

    def fields(self) -> tuple[bytes, ...]:
        """Return the namespace tuple as in the draft: (root, model, prompt)."""
        return (ROOT.encode(), self.model.encode(), self.prompt.encode())

    def split_fields(self) -> tuple[bytes, ...]:
        """Return the same name split at the slashes, for peers that cannot carry ``/`` inside a field."""
        joined = f"{ROOT}{self.model}/{self.prompt}"
        return tuple(part.encode() for part in joined.split("/") if part)

    @classmethod
    def from_fields(cls, fields: Sequence[bytes]) -> TrackNamespace:
        """Parse either form; raise a `FormatError` if the fields are not a namespace of this draft."""
        try:
            text = [bytes(field).decode() for field in fields]
        except UnicodeDecodeError as error:
            raise FormatError("track namespace: a field is not UTF-8") from error
        if len(text) == 3 and text[0] == ROOT:
            return cls(text[1], text[2])
        # Some peers join fields with slashes and split them again, or drop empty ones: only the parts count.
        root = [part for part in ROOT.split("/") if part]
        parts = [part for part in "/".join(text).split("/") if part]
        if len(parts) > len(root) + 1 and parts[: len(root)] == root:
            return cls("/".join(parts[len(root) : -1]), parts[-1])
        raise FormatError(f"track namespace: {text[:4]} does not start with {ROOT}")

    def full_name_bytes(self, track: str) -> int:
        """Return the bytes of the full track name; peers refuse more than `MAX_FULL_TRACK_NAME`."""
        return sum(map(len, self.fields())) + len(track.encode())


MODELS_TRACK = "kvabr.models"
"""Track whose only group lists the specs of the models whose assets a player may read: ``{"models": [...]}``, JSON."""

MODELS_NAMESPACE = TrackNamespace("kvabr", "0" * 64)
"""Namespace of `MODELS_TRACK` and `CHANGES_TRACK`; no prompt has this digest."""

CHANGES_TRACK = "kvabr.changes."
"""Prefix of the name of a track that is answered once the publisher has taken something back, with what that is: a
relay keeps a request for it open, see `kvabr.server.changes`. A position follows it."""


def chain(
    tokens: Sequence[int],
    *,
    model: str,
    tokenizer: str,
    group_tokens: int = GROUP_TOKENS,
    salt: bytes = b"",
) -> list[str]:
    """Return the chained digest, 64 hex digits, of every group of a prompt; the last one names the prompt.

    Each digest covers the model, the tokenizer, the salt and all tokens (ids from 0 to 2**32 - 1) up to the end of its
    group. The last group may be short, and its digest then differs from that of the full group. The salt is a tenant's
    secret; it keeps tenants from guessing each other's digests. Of `MediaTokens` a digest covers the media, too, that
    touch its group or one before it.
    """
    return chained(b"kvabr.chain/1", tokens, model, tokenizer, group_tokens, salt)


def chained(
    domain: bytes, tokens: Sequence[int], model: str, tokenizer: str, group_tokens: int, salt: bytes
) -> list[str]:
    """Return the chained digests of a sequence of tokens, see `chain`.

    Digests of two domains never agree. ``domain`` says what the tokens are: a prompt from its beginning, or a passage
    (`kvabr.types.passage`).
    """
    head = [model.encode(), tokenizer.encode(), salt, struct.pack("<I", group_tokens)]
    state = hashlib.sha256(domain + b"\0" + b"".join(struct.pack("<Q", len(part)) + part for part in head)).digest()
    digests = []
    for first in range(0, len(tokens), group_tokens):
        state = _link(state, tokens[first : first + group_tokens])
        digests.append(state.hex())
    return digests


def next_digest(digest: str, tokens: Sequence[int]) -> str:
    """Return the chained digest of the group with these tokens behind the one with this digest."""
    return _link(bytes.fromhex(digest), tokens).hex()


def _link(state: bytes, tokens: Sequence[int]) -> bytes:
    try:
        packed = struct.pack(f"<I{len(tokens)}I", len(tokens), *tokens)
    except (struct.error, TypeError, ValueError) as error:
        raise UsageError(f"token ids are whole numbers from 0 to 2**32 - 1 ({error})") from error
    return hashlib.sha256(state + packed + media_bytes(tokens)).digest()


def prefix_key(digest: str) -> bytes:
    """Return the part of a digest that the name of a lookup carries: its first 8 bytes."""
    if not _DIGEST.fullmatch(digest):
        raise FormatError(f"a prompt digest has 64 hex digits, not {digest[:80]!r}")
    return bytes.fromhex(digest[: 2 * _KEY_BYTES])


def prefix_positions(first: int, end: int, *, evenly: bool = False) -> Sequence[int]:
    """Return the groups of ``range(first, end)`` that a lookup names, including the last.

    All; or, of more than `MAX_PREFIX_DIGESTS`, evenly spaced ones if ``evenly`` is true. Otherwise those that end a run
    of `LOOKUP_RUN` groups (by which object stores name them), or every second, third ... of those, and all groups
    behind the last whole run.
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
    """Return the name of the track that looks up the longest cached prefix of a prompt, given its chained digests.

    The track lives under ``TrackNamespace(model, digests[0])``. Its group 0 is the catalog of the visible asset that
    contains the latest of the named digests; of several, the newest. Where recurrent states limit what can be played,
    it is the one of which most can be played. The asset shares at least the groups up to the matching digest; the
    client counts the groups that really match.

    A name has room for `MAX_PREFIX_DIGESTS`. For a longer prompt the digests are thinned (`prefix_positions`), which
    leaves the groups between two neighbours open. `prefix_gap` returns them, and a second lookup of
    ``prefix_track(digests, gap.start, gap.stop)`` settles them. One round trip serves prompts of up to 321 groups, two
    serve up to 102,400; relays over object stores, two serve up to 4,880. Of models with recurrent states they are
    thinned ``evenly``: what shares more may have no snapshot that can be played, so more lengths must be told apart at
    once.
    """
    end = len(digests) if end is None else end
    keys = b"".join(prefix_key(digests[group]) for group in prefix_positions(first, end, evenly=evenly))
    return PREFIX_TRACK + base64.urlsafe_b64encode(keys).rstrip(b"=").decode()


def prefix_gap(shared: int, groups: int, *, evenly: bool = False) -> range:
    """Return the groups that a first lookup leaves open, given how many (at least 1) the answering asset shares.

    Those are the groups not named in the first lookup, after the last one known to be shared, so a second answer is
    never worse. Empty if no longer prefix is possible.
    """
    refused = next((group for group in prefix_positions(1, groups, evenly=evenly) if group >= shared), groups)
    return range(shared - 1, refused) if refused > shared else range(0)


def is_lookup(track: str) -> bool:
    """Return whether a track is the lookup of a prefix, among all caches or those that are being prefilled."""
    return track.startswith((PREFIX_TRACK, LIVE_PREFIX_TRACK))


def is_live(track: str) -> bool:
    """Return whether a track is one of a cache that is being prefilled, besides its levels."""
    return track in {LIVE_TRACK, EDGE_TRACK} or track.startswith(LIVE_PREFIX_TRACK)


def parse_prefix_track(name: str) -> list[bytes]:
    """Return the digest prefixes in a lookup's untrusted name: the first 8 bytes of each digest.

    The lookup may be one among caches that are being prefilled.
    """
    text = name.removeprefix(LIVE_PREFIX_TRACK if name.startswith(LIVE_PREFIX_TRACK) else PREFIX_TRACK)
    if text == name or len(text) > MAX_FULL_TRACK_NAME:
        raise FormatError(f"not the name of a prefix lookup: {name[:80]!r}")
    try:
        # Accept only what `prefix_track` writes: one lookup has one name, so relays can cache its answer.
        keys = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise FormatError(f"prefix lookup: not base64 ({error})") from error
    if len(keys) % _KEY_BYTES or len(keys) > MAX_PREFIX_DIGESTS * _KEY_BYTES:
        raise FormatError(f"prefix lookup: {len(keys)} bytes are not 0 to {MAX_PREFIX_DIGESTS} digests of {_KEY_BYTES}")
    if base64.urlsafe_b64encode(keys).rstrip(b"=").decode() != text:
        raise FormatError("prefix lookup: not written in the one way that there is")
    return [keys[at : at + _KEY_BYTES] for at in range(0, len(keys), _KEY_BYTES)]


MARK = "~"
"""Stands before a digest in a name."""
DIGITS = 16
"""Hex digits of a digest in a name: 64 bits."""
MAX_READABLE = 180
"""Characters of the readable part: with digests and the parts of ranks a name has at most 256."""
STRICT = re.compile(r"[^A-Za-z0-9._/-]")
"""What names that an engine gives must not have."""
LOOSE = re.compile(r"[\x00-\x1f\x7f~\ud800-\udfff]")
"""What names that a folder gives must not have: everything that can be written and shown may stay."""

_DIGESTS = re.compile(r"(-[0-9a-f]{16})?(~[0-9a-f]{16})*$")


def safe_name(raw: str, unsafe: re.Pattern[str] = STRICT) -> str:
    """Return a name for the track namespace: ``raw`` itself if it is one, else its readable part and a digest.

    Different texts have different names.
    """
    readable = re.sub("/+", "/", unsafe.sub("-", raw)).strip("/")[-MAX_READABLE:].strip("/") or "model"
    return raw if readable == raw else _marked(readable, b"kvabr.raw-name/1", raw)


def with_facts(name: str, facts: Mapping[str, Any]) -> str:
    """Return the name of a model of which more is to be told: ``name`` itself if all facts are None or empty.

    Args:
        name: its name without them.
        facts: by their names; values that JSON can express. Those that are None, "", or an empty list or table are
            what is usual.

    Raises:
        UsageError: JSON cannot express a fact.
    """
    told = {key: value for key, value in facts.items() if value is not None and value not in ("", [], {}, ())}
    if not told:
        return name
    try:
        text = json.dumps([name, told], sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{name}: what is special of this model cannot be put into the name of its caches ({error})"
        ) from error
    return _marked(name[:MAX_READABLE], b"kvabr.facts/1", text)


def akin(one: str, other: str) -> bool:
    """Return whether two names may be those of one model that was tuned further.

    Their readable parts are equal. Caches are never shared by that; codec profiles and measured losses may be.
    """
    return _DIGESTS.sub("", one) == _DIGESTS.sub("", other)


def _marked(readable: str, domain: bytes, text: str) -> str:
    digest = hashlib.sha256(domain + b"\0" + text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]
    return f"{readable}{MARK}{digest}"

"""Catalogs, lists of models, names, certificates: what an origin, a relay or a client sends once it is connected."""

import hashlib
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache

from kvabr.client import lookup
from kvabr.link.moqt.options import check_pinned, fingerprint_of, untrusted
from kvabr.server.grants import token_in_path
from kvabr.server.relay_catalogs import check_small
from kvabr.store.asset_index import check_names
from kvabr.types.catalog import RECOMPUTED, Catalog, Mix, Quality
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import FormatError, TransportError, UsageError
from kvabr.types.kv import KVSpec, LayerClass, RopeSpec, specs_from_json
from kvabr.types.loss import predicted_loss
from kvabr.types.naming import (
    CATALOG_TRACK,
    MODELS_TRACK,
    TrackNamespace,
    check_track_name,
    parse_prefix_track,
    prefix_key,
    prefix_track,
)
from kvabr.types.passage import PassageNotes
from kvabr.types.tails import TailLoss
from tests.catalogs import SPEC, catalog
from tests.fuzz.target import Target, family, refused


def _catalog(data: bytes) -> bool:
    found = refused(lambda: Catalog.loads(data), FormatError)
    if found is None:
        return False
    assert Catalog.loads(found.dumps()) == found
    if found.passage is not None:
        assert found.at(7).unit(0).first == 7
        assert not found.passage.order or len(found.passage.order) == found.tokens
        assert (found.passage.fusion_loss(0.2) or 0.0) >= 0
    for groups in () if found.passage is not None else {1, found.groups}:
        assert found.prefix(groups).groups == groups
        assert found.suffix(groups - 1).groups == found.groups - groups + 1
    for track in found.tracks:
        assert predicted_loss(found, [track.name] * found.groups) >= 0
        assert predicted_loss(found, [*[track.name] * (found.groups - 1), RECOMPUTED]) >= 0
        if found.passage is None:
            assert found.with_tail(len(found.chunks), 20).track(track.name).total_loss >= 0
    # What a client, an origin and a relay do next.
    refused(lambda: lookup.playable(lookup._parse(data).catalog, profile=True), FormatError)
    refused(lambda: check_names(found), FormatError)
    refused(lambda: [prefix_key(chunk) for chunk in found.chunks], FormatError)
    facts = refused(lambda: check_small(found.namespace, CATALOG_TRACK, data), FormatError)
    assert facts is None or sum(map(len, facts.sizes.values())) <= found.groups * len(found.tracks)
    return True


@cache
def _valid_catalogs() -> tuple[bytes, ...]:
    small = catalog(2)
    few = replace(small, tracks=small.tracks[3:5], prefill=PrefillCost(0.1, 0.001, 1e-7), profile="1" * 64)
    few = replace(few, profile_bytes=1000, loss_method="measured", source="a text")
    tails = (TailLoss(25, 0.4, 0.5), TailLoss(152, 0.2))
    measured = replace(few.tracks[0], measured=Quality(0.1, 0.2, 0.9), tails=tails)
    most = replace(few, tracks=(measured,), asked=(0.25, 0.75), mixes=(Mix((measured.name,) * 2, 0.1, 0.2),))
    layered = catalog(2, layered=True)
    base = replace(layered, tracks=layered.tracks[-3:-1])
    short = catalog(1, short=123)
    notes = PassageNotes("mean", 3, bytes((0, 255, 9, 7, 7)), ((0.0, 0.15), (0.15, 0.02)), "as it was measured")
    passage = replace(short, tracks=short.tracks[:1], passage=notes)
    return tuple(json.dumps(json.loads(each.dumps())).encode() for each in (few, most, base, passage))


def _models(data: bytes) -> bool:
    found = refused(lambda: specs_from_json(data), FormatError)
    for spec in found or ():
        assert KVSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
        assert len(spec.digest()) == 16
    refused(lambda: check_small(TrackNamespace("m", "0" * 64), MODELS_TRACK, data), FormatError)
    return found is not None


def _valid_models() -> list[bytes]:
    rope = RopeSpec(10000.0, 4, "interleaved", (0.5, 0.25), 1.5)
    classes = (
        LayerClass("full", (0, 3), 2, 8, 8, "bfloat16", rope), LayerClass("window", (1,), 1, 8, 4, "float16", window=9),
        LayerClass("latent", (2,), 1, 12, 0, "float16"), LayerClass("state", (4,), 2, 6, 5, "float32", interval=32),
        LayerClass("full", (0, 3), 2, 4, 4, "float8_e4m3fn", role="indexer", scales=(0.5, 1.0, 2.0, 0.1)),
    )  # fmt: skip
    several = KVSpec("test/several", "tokenizer", classes, 16)
    specs = [SPEC, SPEC.changed(rope=rope), replace(SPEC.changed(rope=None), group_tokens=16), several, *several.parts]
    return [json.dumps({"models": [spec.to_json() for spec in part]}).encode() for part in (specs, specs[:1])]


def _name(data: bytes) -> bool:
    """A name as a peer writes it: namespace fields and a track, with zero bytes between them."""
    *fields, track = data.split(b"\0")
    space = refused(lambda: TrackNamespace.from_fields(fields), FormatError)
    if space is not None:
        assert TrackNamespace.from_fields(space.fields()) == space
        assert space.full_name_bytes("") == sum(map(len, space.fields()))
    text = track.decode("utf-8", "surrogateescape")
    name = refused(lambda: check_track_name(text), FormatError)
    assert name is None or name.isascii()
    keys = refused(lambda: parse_prefix_track(text), FormatError)
    assert keys is None or all(len(key) == 8 for key in keys)
    token = token_in_path(data)
    assert token is None or len(token) <= 3 * len(data)
    refused(lambda: fingerprint_of(text), UsageError)
    return any(each is not None for each in (space, name, keys, token))


def _valid_names() -> list[bytes]:
    space = TrackNamespace("test/model", "ab" * 32)
    names = [prefix_track([f"{n:064x}" for n in range(9)]), "prefix.", "AC-L0"]
    forms = space.fields(), space.split_fields()
    return [b"\0".join((*form, name.encode())) for form in forms for name in names] + [b"/path?a=b&token=secret%20x"]


def _certificate(data: bytes) -> bool:
    """A peer's certificate, which is looked at before the peer is trusted."""
    assert untrusted("why", data)
    return refused(lambda: check_pinned(data, hashlib.sha256(data).hexdigest()) or True, TransportError) is not None


@cache
def _valid_certificates() -> tuple[bytes, ...]:
    """Certificates that never expire: what is valid must not depend on the day, nor do the bytes on anything."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding

    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "origin.example")])
    begin = datetime(2020, 1, 1, tzinfo=UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(7)
    made = made.not_valid_before(begin).not_valid_after(begin + timedelta(days=365 * 900))
    names = x509.SubjectAlternativeName([x509.DNSName("*.example"), x509.DNSName("origin.example")])
    return tuple(
        each.sign(key, None).public_bytes(Encoding.DER) for each in (made, made.add_extension(names, critical=False))
    )


CATALOGS = Target(_catalog, _valid_catalogs, most_bytes=8192)
NAMES = family(
    Target(_models, _valid_models),
    Target(_name, _valid_names),
    Target(_certificate, _valid_certificates),
)

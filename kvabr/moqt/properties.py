"""Checks on the properties of tracks and objects (draft 18, sections 2.5 and 12). Unknown ones are ignored."""

from __future__ import annotations

from kvabr.moqt.codes import MANDATORY_TRACK_PROPERTIES, Property, RequestCode, SessionFault
from kvabr.moqt.wire import KeyValue, Reader, read_pairs


class MalformedTrack(Exception):  # noqa: N818  # the track's fault; the session continues
    """A track violates the data model; its requests must be cancelled (draft 18, section 2.4.2)."""


def unfold(properties: tuple[KeyValue, ...]) -> tuple[KeyValue, ...]:
    """Return the properties together with those inside IMMUTABLE_PROPERTIES, or raise MalformedTrack."""
    out = list(properties)
    for kind, value in properties:
        if kind == Property.IMMUTABLE_PROPERTIES and isinstance(value, bytes):
            try:
                inner = read_pairs(Reader(value))
            except SessionFault as fault:
                raise MalformedTrack(f"cannot parse the immutable properties: {fault}") from fault
            if any(each == Property.IMMUTABLE_PROPERTIES for each, _ in inner):
                raise MalformedTrack("nested immutable properties")
            out += inner
    return tuple(out)


def check_track(properties: tuple[KeyValue, ...]) -> None:
    """Raise SessionFault for a property of a track for whose value the draft requires closing the session."""
    try:
        every = unfold(properties)
    except MalformedTrack:
        every = properties  # `unusable` refuses the track later; the session continues
    for kind, value in every:
        wrong = isinstance(value, int) and (
            (kind == Property.DEFAULT_PUBLISHER_PRIORITY and value > 0xFF)
            or (kind == Property.DEFAULT_PUBLISHER_GROUP_ORDER and value not in (1, 2))
            or (kind == Property.DYNAMIC_GROUPS and value > 1)
        )
        if wrong:
            raise SessionFault(f"track property {Property(kind).name} has the invalid value {value!r}")


def unusable(properties: tuple[KeyValue, ...]) -> tuple[RequestCode, str] | None:
    """Return why a track must not be used, as an error code and a reason, or None if it may be.

    A receiver must not touch a track with a mandatory property that it does not know (draft 18, section 2.5.1).
    """
    try:
        every = unfold(properties)
    except MalformedTrack as error:
        return RequestCode.MALFORMED_TRACK, f"malformed track: {error}"
    for kind, _ in every:
        if kind in MANDATORY_TRACK_PROPERTIES:
            return RequestCode.UNSUPPORTED_EXTENSION, f"the track has the unknown mandatory property 0x{kind:x}"
    return None


def check_object(properties: tuple[KeyValue, ...], group: int, number: int) -> None:
    """Raise MalformedTrack if the properties of an object are invalid."""
    if not properties:
        return
    if sum(kind == Property.IMMUTABLE_PROPERTIES for kind, _ in properties) > 1:
        raise MalformedTrack("object with two IMMUTABLE_PROPERTIES")
    seen: set[int] = set()
    for kind, value in unfold(properties):
        if kind in MANDATORY_TRACK_PROPERTIES:
            raise MalformedTrack(f"object with property 0x{kind:x}, which only tracks may have")
        if kind in (Property.PRIOR_GROUP_ID_GAP, Property.PRIOR_OBJECT_ID_GAP):
            largest = group if kind == Property.PRIOR_GROUP_ID_GAP else number
            if kind in seen or not isinstance(value, int) or value > largest:
                raise MalformedTrack(f"object with a repeated or impossible {Property(kind).name}")
            seen.add(kind)

"""What the draft demands of the properties of tracks and objects (draft 18, sections 2.5 and 12).

Drafts up to 16 call them extension headers. Unknown ones mean nothing here, and are ignored.
"""

from __future__ import annotations

from kvabr.moqt.codes import MANDATORY_TRACK_PROPERTIES, Property, SessionFault
from kvabr.moqt.wire import Draft, KeyValue, Reader, read_pairs


class MalformedTrack(Exception):  # noqa: N818  # the track's fault; the session goes on without it
    """A track breaks the data model; what was asked of it must be cancelled (draft 18, section 2.4.2)."""


def unfold(properties: tuple[KeyValue, ...], draft: Draft) -> tuple[KeyValue, ...]:
    """The properties, and those inside IMMUTABLE_PROPERTIES.

    Raises:
        MalformedTrack: the latter cannot be read, or hold another IMMUTABLE_PROPERTIES.
    """
    out = list(properties)
    for kind, value in properties:
        if kind == Property.IMMUTABLE_PROPERTIES and isinstance(value, bytes):
            try:
                inner = read_pairs(Reader(value, draft.varint))
            except SessionFault as fault:
                raise MalformedTrack(f"its immutable properties cannot be read: {fault}") from fault
            if any(each == Property.IMMUTABLE_PROPERTIES for each, _ in inner):
                raise MalformedTrack("immutable properties within immutable properties")
            out += inner
    return tuple(out)


def check_track(properties: tuple[KeyValue, ...], draft: Draft) -> None:
    """Check the properties of a track, as far as the session depends on it.

    Raises:
        SessionFault: a value that the draft wants the session closed for.
    """
    try:
        every = unfold(properties, draft)
    except MalformedTrack:
        every = properties  # the track is refused later, the session goes on
    for kind, value in every:
        wrong = isinstance(value, int) and (
            (kind == Property.DEFAULT_PUBLISHER_PRIORITY and value > 0xFF)
            or (kind == Property.DEFAULT_PUBLISHER_GROUP_ORDER and value not in (1, 2))
            or (kind == Property.DYNAMIC_GROUPS and value > 1)
            or (kind == Property.OBJECT_DELIVERY_TIMEOUT and value == 0 and draft.number < 17)
        )
        if wrong:
            raise SessionFault(f"a track whose property {Property(kind).name} is {value!r}")


def unknown_mandatory(properties: tuple[KeyValue, ...], draft: Draft) -> int | None:
    """A property without which a track must not be touched, and which nobody knows here; None if there is none.

    Raises:
        MalformedTrack: the properties cannot be read.
    """
    every = unfold(properties, draft)
    return next((kind for kind, _ in every if draft.number >= 17 and kind in MANDATORY_TRACK_PROPERTIES), None)


def check_object(properties: tuple[KeyValue, ...], group: int, number: int, draft: Draft) -> None:
    """Check the properties of an object.

    Raises:
        MalformedTrack: they make its track malformed.
    """
    if not properties:
        return
    if sum(kind == Property.IMMUTABLE_PROPERTIES for kind, _ in properties) > 1:
        raise MalformedTrack("an object with two sets of immutable properties")
    seen: set[int] = set()
    for kind, value in unfold(properties, draft):
        if draft.number >= 17 and kind in MANDATORY_TRACK_PROPERTIES:
            raise MalformedTrack(f"an object with the property 0x{kind:x}, which only tracks may have")
        if kind in (Property.PRIOR_GROUP_ID_GAP, Property.PRIOR_OBJECT_ID_GAP):
            largest = group if kind == Property.PRIOR_GROUP_ID_GAP else number
            if kind in seen or not isinstance(value, int) or value > largest:
                raise MalformedTrack(f"an object whose {Property(kind).name} cannot be")
            seen.add(kind)

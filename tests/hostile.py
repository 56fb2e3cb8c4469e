"""JSON that a hostile peer may send in place of a catalog, of any size."""

from tests.catalogs import catalog

_HEAD, _TAIL = catalog(2).dumps()[:-2].encode(), b"}\n"


def _filled(parts: bytes, part: bytes, size: int) -> bytes:
    """A good catalog and one more member of about ``size`` bytes: ``parts`` has a % where copies of ``part`` go."""
    before, after = parts.split(b"%")
    return _HEAD + b',\n "junk":' + before + part * (size // len(part)) + after + _TAIL


def _of_track(member: bytes, part: bytes, size: int) -> bytes:
    """A catalog whose first track has a list that is far too long."""
    list_of = b'"%b": [' % member
    return _HEAD.replace(list_of, list_of + part * (size // len(part)), 1) + _TAIL


DOCUMENTS = {
    "lists": lambda size: _filled(b"[%[]]", b"[],", size),
    "objects": lambda size: _filled(b"[%{}]", b'{"a":{}},', size),
    "nested": lambda size: _filled(b"%", b"[", size),
    "nested objects": lambda size: _filled(b"%", b'{"a":', size),
    "numbers": lambda size: _filled(b"[%0]", b"1e5,", size),
    "a huge number": lambda size: _filled(b"%0", b"7", size),
    "a long string": lambda size: _filled(b'"%"', b"x", size),
    "escapes": lambda size: _filled(b'"%"', b"\\ud800", size),
    "members": lambda size: _HEAD + b"".join(b',"%07d":0' % number for number in range(size // 12)) + _TAIL,
    "duplicates": lambda size: _HEAD + b',"source":""' * (size // 12) + _TAIL,
    "white space": lambda size: _HEAD + b" " * size + _TAIL,
    "tracks": lambda size: _HEAD.replace(b'"tracks": [', b'"tracks": [' + b"{}," * (size // 3), 1) + _TAIL,
    "mixes": lambda size: _HEAD.replace(b'"mixes": [', b'"mixes": [' + b"{}," * (size // 3) + b"{}", 1) + _TAIL,
    "sizes": lambda size: _of_track(b"bytes", b"1,", size),
    "large sizes": lambda size: _of_track(b"bytes", b"1099511627776,", size),
    "losses": lambda size: _of_track(b"loss", b"0.123456789,", size),
    "digests": lambda size: _of_track(b"digests", b'"' + b"0" * 64 + b'",', size),
    "lists of sizes": lambda size: _of_track(b"bytes", b"[],", size),
    "no JSON": lambda size: b"\xff" * size,
    "a list": lambda size: b"[" + b"1," * (size // 2) + b"1]",
    "bytes of a string": lambda size: _filled(b'"%"', "\N{SNOWMAN}".encode(), size),
}
"""By what there is too much of; each takes the number of bytes."""

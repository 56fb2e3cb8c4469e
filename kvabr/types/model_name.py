"""Names of models that tell caches apart: what changes KV is in the name, and what is usual adds nothing to it.

A name has a readable part. Where that does not tell everything, a tilde and 16 hex digits follow: a digest of the raw
name, if characters of it had to be replaced, or of facts such as adapters, quantisation and ranks. Names to which
nothing had to be added are those of earlier versions of kvabr. `docs/guides/engines.md` lists what is in a name.

Pure: no files, no engines. `kvabr.engines.weights` computes the digest of a model's weights.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from kvabr.types.errors import UsageError

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

_OLD, _NEW = re.compile(r"(.+)-[0-9a-f]{8}"), re.compile(r"(.+)-[0-9a-f]{16}")
_DIGESTS = re.compile(r"(-[0-9a-f]{8}|-[0-9a-f]{16})?(~[0-9a-f]{16})*$")


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
    """Return whether two names may be those of one model that was tuned further, or named by another version of kvabr.

    Their readable parts are equal. Caches are never shared by that; codec profiles and measured losses may be.
    """
    return _DIGESTS.sub("", one) == _DIGESTS.sub("", other)


def was_named(old: str, new: str) -> bool:
    """Return whether ``old`` may be what earlier versions of kvabr called the model in a folder that is now ``new``."""
    before, now = _OLD.fullmatch(old), _NEW.fullmatch(new)
    return before is not None and now is not None and before[1] == now[1]


def _marked(readable: str, domain: bytes, text: str) -> str:
    digest = hashlib.sha256(domain + b"\0" + text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]
    return f"{readable}{MARK}{digest}"

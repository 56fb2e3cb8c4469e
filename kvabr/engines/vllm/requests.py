"""Parameters in requests' ``kv_transfer_params``, and the identity of their caches; untrusted."""

from __future__ import annotations

import difflib
import hashlib
import math
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

OWN = "kvabr"
"""Key of the served losses in ``kv_transfer_params`` of a response."""
_SWITCHES = frozenset({"play", "publish", "live", "back"})
_KEYS = _SWITCHES | {"deadline_s", "keep_s", "max_loss", OWN}
_FOREIGN_PREFIXES = ("do_remote_", "remote_")
"""Prefixes of keys that vLLM's own connectors use."""
_MAX_KEYS = 64


def params(request: Any) -> dict[str, Any]:
    """Return a request's own parameters, see `VllmSettings.deadline_s`."""
    given = getattr(request, "kv_transfer_params", None)
    return given if isinstance(given, dict) else {}


def allows(request: Any, key: str) -> bool:
    """Return False if a request disables ``play``, ``publish`` or ``live``, given as ``key``."""
    given = params(request).get(key)
    return given is None or given is True


def expects_return(request: Any) -> bool:
    """Return True if a request announces a further turn, see `kvabr.engines.vllm.hints`."""
    return params(request).get("back") is True


def requested_max_loss(request: Any) -> float | None:
    """Return a request's limit of expected loss, infinite without one; None if invalid."""
    given = params(request).get("max_loss")
    if given is None:
        return math.inf
    if isinstance(given, bool) or not isinstance(given, int | float) or not given >= 0:
        return None
    return float(given) if given <= sys.float_info.max else math.inf


def faults(request: Any) -> Iterator[tuple[str, str]]:
    """Yield faults in a request's first `_MAX_KEYS` parameters, each with its consequence."""
    for key, value in islice(params(request).items(), _MAX_KEYS):
        if key in _SWITCHES and not (value is None or isinstance(value, bool)):
            yield f"{key} must be true or false", f"{str(value)[:80]!r} counts as false"
        elif key not in _KEYS and not str(key).startswith(_FOREIGN_PREFIXES):
            close = difflib.get_close_matches(str(key)[:80], _KEYS, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(sorted(_KEYS - {OWN}))}"
            yield "unknown key", f"{str(key)[:80]!r}; {hint}"


def unfit(request: Any) -> str | None:
    """Return the part of a request's cache key that kvabr cannot name, or None."""
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return "embeddings instead of tokens"
    return None


def apart(request: Any) -> tuple[object, ...]:
    """Return the key of a request's blocks in vLLM's prefix cache, in addition to tokens and media."""
    lora = getattr(request, "lora_request", None)
    return getattr(request, "cache_salt", None), lora and (lora.lora_name, lora.lora_path)


def media_of(request: Any) -> tuple[tuple[object, int], ...]:
    """Return vLLM's identifiers of a request's media, each with its first token."""
    features = getattr(request, "mm_features", None) or ()
    return tuple((each.identifier, each.mm_position.offset) for each in features)


def salt_of(request: Any, salt: bytes) -> bytes:
    """Return the salt for a request's caches, from the engine's salt and the request's ``cache_salt``."""
    own = str(getattr(request, "cache_salt", None) or "")
    if not own:
        return salt
    return hashlib.sha256(b"kvabr.vllm.salt/1\0" + salt + b"\0" + own.encode("utf-8", "surrogatepass")).digest()

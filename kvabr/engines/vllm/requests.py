"""What requests say in their ``kv_transfer_params``, and what their caches depend on: checked like any input."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

OWN = "kvabr"
"""The key of what a request was served with, in the ``kv_transfer_params`` of its answer."""
_SWITCHES = frozenset({"play", "publish", "live", "back"})
_KEYS = _SWITCHES | {"deadline_s", "keep_s", OWN}
_OTHERS = ("do_remote_", "remote_")
"""How keys of vLLM's own connectors begin, which may be beside this one."""
_MOST_KEYS = 64


def params(request: Any) -> dict[str, Any]:
    """Return a request's own parameters, see `VllmSettings.deadline_s`."""
    given = getattr(request, "kv_transfer_params", None)
    return given if isinstance(given, dict) else {}


def wants(request: Any, key: str) -> bool:
    """Return whether a request has ``play``, ``publish`` or ``live`` as usual: true, or nothing is said."""
    given = params(request).get(key)
    return given is None or given is True


def wants_back(request: Any) -> bool:
    """Return whether a request says that its session goes on, see `kvabr.engines.vllm.hints`."""
    return params(request).get("back") is True


def faults(request: Any) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a request's parameters, and in which way that matters.

    Only the first parameters are looked at: there may be any number, and an engine's step waits for this.
    """
    for key, value in islice(params(request).items(), _MOST_KEYS):
        if key in _SWITCHES and not (value is None or isinstance(value, bool)):
            yield f"{key} is neither true nor false", f"{str(value)[:80]!r} counts as false"
        elif key not in _KEYS and not str(key).startswith(_OTHERS):
            close = difflib.get_close_matches(str(key)[:80], _KEYS, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(_KEYS - {OWN}))}"
            yield "there is no such key", f"{str(key)[:80]!r}; {hint}"


def unfit(request: Any) -> str | None:
    """Return what a request's cache depends on that no name tells; None: nothing."""
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return "embeddings instead of tokens"
    return None


def apart(request: Any) -> tuple[object, ...]:
    """Return by what vLLM's prefix cache tells a request apart from others with the same tokens."""
    lora = getattr(request, "lora_request", None)
    return getattr(request, "cache_salt", None), lora and (lora.lora_name, lora.lora_path)


def media_of(request: Any) -> tuple[tuple[object, int], ...]:
    """Return by what vLLM's prefix cache knows the pictures, sound and films of a request, and where they begin."""
    features = getattr(request, "mm_features", None) or ()
    return tuple((each.identifier, each.mm_position.offset) for each in features)


def salt_of(request: Any, salt: bytes) -> bytes:
    """Return the salt that a request's caches are named with, given the engine's.

    Its own ``cache_salt`` separates its cache from all others, as in vLLM's prefix cache.
    """
    own = str(getattr(request, "cache_salt", None) or "")
    if not own:
        return salt
    return hashlib.sha256(b"kvabr.vllm.salt/1\0" + salt + b"\0" + own.encode("utf-8", "surrogatepass")).digest()

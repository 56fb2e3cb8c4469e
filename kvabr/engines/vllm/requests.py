"""What requests say in their ``kv_transfer_params``, and what their caches depend on: checked like any input.

A prompt made of passages says where these are, ``{"passages": [[first, end], ...]}``. They are loaded as if they were
its prefix, and vLLM computes the rest behind them, so that its blocks are no longer those of the tokens alone. Its own
prefix cache would take them for exact. So such a request needs a ``cache_salt`` that says so (`BLENDED`), unless
prefix caching is off; nothing under such a salt is published, whatever the request asks for.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

from kvabr.engines.settings import TroubleLog
from kvabr.engines.vllm.config import ServedModel
from kvabr.types.errors import FormatError, UsageError
from kvabr.types.passage import MAX_PARTS, MAX_PASSAGE_TOKENS, Exact, Part, Passage, check_movable

BLENDED = "blended"
"""The ``cache_salt`` under which caches may be joined from passages. A tenant's own may follow, behind a colon."""
OWN = "kvabr"
"""The key of what a request was served with, in the ``kv_transfer_params`` of its answer."""
_SWITCHES = frozenset({"play", "publish", "live", "back"})
_KEYS = _SWITCHES | {"deadline_s", "keep_s", "passages", "publish_passage", OWN}
_OTHERS = ("do_remote_", "remote_")
"""How keys of vLLM's own connectors begin, which may be beside this one."""
_MOST_KEYS = 64
_MAX_PASSAGES = MAX_PARTS // 2 - 1


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
    """Yield what is wrong with a request's parameters, and in which way that matters; not with their passages.

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


def blended(request: Any) -> bool:
    """Return whether blocks of a request may be joined from passages, its own or those of one with the same salt."""
    return "passages" in params(request) or _marked(request)


def wants_passage(request: Any) -> bool:
    """Return whether a request wants a passage published, and not its prompt."""
    given = params(request).get("publish_passage")
    return given is not None and given is not False


def unplayed(request: Any) -> bool:
    """Return whether a request wants everything computed."""
    return not wants(request, "play") or wants_passage(request)


def salt_of(request: Any, salt: bytes) -> bytes:
    """Return the salt that a request's caches are named with, given the engine's.

    Its own ``cache_salt`` separates its cache from all others, as in vLLM's prefix cache. That it may be joined from
    passages is no part of it: these and exact prefixes are found under the tenant's names.
    """
    own = str(getattr(request, "cache_salt", None) or "")
    own = own[len(BLENDED) + 1 :] if _marked(request) else own
    if not own:
        return salt
    return hashlib.sha256(b"kvabr.vllm.salt/1\0" + salt + b"\0" + own.encode("utf-8", "surrogatepass")).digest()


class PassageRequests:
    """Requests whose prompts are made of passages, or are to be published as one."""

    def __init__(self, model: ServedModel, trouble: TroubleLog) -> None:
        """Start; ``trouble`` is told of requests that cannot have what they ask for."""
        self._model, self._trouble = model, trouble
        self._unmovable: str | None = None
        """Why this model has no passages."""
        try:
            check_movable(model.spec)
        except FormatError as error:
            self._unmovable = str(error)
        if model.quantised:
            self._unmovable = f"{model.spec.model}: keys of a quantised cache cannot be moved"

    def parts(self, request: Any) -> tuple[Part, ...] | None:
        """Return the parts of a prompt that says where its passages are; None: it does not, or they are not played."""
        given = params(request).get("passages")
        if given is None:
            return None
        if self._unmovable is not None:
            self._trouble.tell("passages of this model are not played, but computed", self._unmovable)
            return None
        if self._model.prefix_caching and not _marked(request):
            self._trouble.tell(
                f'passages of requests without the cache_salt "{BLENDED}" are not played, but computed',
                "vLLM would take their blocks for exact, and use them for others; or turn its prefix caching off",
            )
            return None
        if getattr(request, "mm_features", None):
            self._trouble.tell("passages of a request are not played, but computed", "it has pictures, sound or films")
            return None
        try:
            return _parts(tuple(request.prompt_token_ids), given)
        except UsageError as error:
            self._trouble.tell("passages of a request are not played, but computed: kv_transfer_params", error)
            return None

    def passage(self, request: Any) -> int | None:
        """Return the token with which the passage begins that a request wants published; None: it wants none."""
        if not wants_passage(request):
            return None
        given, tokens = params(request)["publish_passage"], int(request.num_prompt_tokens)
        first = 0 if given is True else given
        why = self._unmovable
        if why is None and self._model.apart:
            why = "each rank has a part of the model only; `kvabr encode --passage` publishes passages"
        if why is None and blended(request):
            why = "its own cache may be joined from passages, or was to be"
        if type(first) is not int or not 0 <= first < tokens or tokens - first > MAX_PASSAGE_TOKENS:
            why = why or (
                "kv_transfer_params: publish_passage is true, or the place of the passage's first token in its prompt "
                f"of {tokens} tokens; at most {MAX_PASSAGE_TOKENS} come from there on"
            )
        if why is not None:
            self._trouble.tell("a passage is not published", why)
            return None
        return first


def _marked(request: Any) -> bool:
    """Return whether the salt of a request says that its cache may be joined."""
    return f"{getattr(request, 'cache_salt', None) or ''}:".startswith(f"{BLENDED}:")


def _parts(tokens: tuple[int, ...], given: object) -> tuple[Part, ...]:
    """Return the parts of a prompt, given the ``[first, end]`` of each passage; `UsageError` if it has no such ones."""
    if not isinstance(given, list | tuple) or not 0 < len(given) <= _MAX_PASSAGES:
        raise UsageError(f"passages is a list of 1 to {_MAX_PASSAGES} pairs [first, end]")
    parts: list[Part] = []
    place = 0
    for pair in given:
        whole = isinstance(pair, list | tuple) and len(pair) == 2 and all(type(each) is int for each in pair)
        if not whole or not place <= pair[0] < pair[1] <= len(tokens):
            raise UsageError(
                f"passages has {str(pair)[:80]}, not a pair [first, end] of tokens from {place} to "
                f"{len(tokens)}: they are places in the prompt, ascending, and do not overlap"
            )
        if pair[0] > place:
            parts.append(Exact(tokens[place : pair[0]]))
        parts.append(Passage(tokens[pair[0] : pair[1]]))
        place = pair[1]
    return (*parts, Exact(tokens[place:])) if place < len(tokens) else tuple(parts)

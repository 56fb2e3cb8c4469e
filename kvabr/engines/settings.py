"""Settings in an engine's configuration: keys shared by all adapters, read and checked.

Adapters subclass `EngineSettings`. Needs the extra ``engines`` (pydantic), which vLLM, LMCache and SGLang include.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from platformdirs import user_cache_path
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from kvabr.abr.plugins import load_estimator, load_policy
from kvabr.abr.policies import DEFAULT
from kvabr.abr.tail import DEFAULT_MAX_TAIL
from kvabr.client.origins import check_url
from kvabr.engines.generation import Generation, VersionFile
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import KvabrError, UsageError
from kvabr.types.fields import docstrings, option_fields
from kvabr.types.kv import MAX_GROUP_TOKENS, KVSpec
from kvabr.types.naming import TrackNamespace
from kvabr.types.peer import PeerOptions

_TROUBLE_EVERY_S = 60.0
_TROUBLE_LOCK = threading.Lock()
"""Held during a fork, so that no child process inherits it locked."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_TROUBLE_LOCK.acquire, after_in_parent=_TROUBLE_LOCK.release, after_in_child=_TROUBLE_LOCK.release
    )
INSIDE, OWN = "inside", "process"
"""Where plays run: in the engine's process, or in a process that this user's engines share and start."""


def _checked(check: Callable[[str], object]) -> AfterValidator:
    """Return a validator that converts kvabr's errors to pydantic's."""

    def validate(value: str) -> str:
        try:
            check(value)
        except KvabrError as error:
            raise ValueError(str(error)) from error
        return value

    return AfterValidator(validate)


def _path(value: object) -> object:
    return Path(value).expanduser() if isinstance(value, str) and value else value


def _location(value: object) -> object:
    if isinstance(value, str) and "://" in value:
        return value
    found = _path(value)
    if not isinstance(found, Path):
        raise ValueError("it must be a path or a URL")  # noqa: TRY004  # pydantic reports ValueErrors
    return found


def _tuple(value: object) -> object:
    if not isinstance(value, list | tuple):
        raise ValueError("it must be a list of names")  # noqa: TRY004  # pydantic reports ValueErrors
    return tuple(value)


Text = Annotated[str, Field(min_length=1)]
FilePath = Annotated[Path, BeforeValidator(_path)]
StoreLocation = Annotated[Path | str, BeforeValidator(_location)]
Names = Annotated[tuple[Text, ...], Field(min_length=1), BeforeValidator(_tuple)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Url = Annotated[Text, _checked(check_url)]
ModelName = Annotated[Text, _checked(lambda name: TrackNamespace(name, "0" * 64))]
PolicyName = Annotated[Text, _checked(load_policy)]
EstimatorName = Annotated[Text, _checked(load_estimator)]


PEER_KEYS = {name: field for name, field in option_fields(PeerOptions).items() if field.shown and field.shown.engines}
"""Fields of `PeerOptions` that are keys of every adapter."""
_PEER = TypeAdapter(PeerOptions)


class SettingsTable(BaseModel):
    """A table in an engine's configuration."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    elsewhere: ClassVar[Mapping[str, str]] = {
        "token": "engines log their settings, so set KVABR_TOKEN in the environment, or set token_file"
    }
    """Keys that the adapter refuses, and why."""

    @classmethod
    def read(cls, given: Mapping[str, object], where: str) -> Self:
        """Return the settings of a table; ``where`` is its name in the engine's configuration.

        Raises:
            UsageError: a key is unknown (the message has the nearest one) or has a wrong value.
        """
        try:
            return cls.model_validate(dict(given))
        except ValidationError as error:
            raise UsageError(f"{where}: {cls._explain(error.errors()[0])}") from None
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None

    @classmethod
    def keys(cls) -> dict[str, tuple[object, str]]:
        """Return the default and the documentation of each key."""
        return {name: (field.default, field.description or "") for name, field in cls.model_fields.items()}

    @classmethod
    def _explain(cls, error: ErrorDetails) -> str:
        key = str(error["loc"][0])
        if error["type"] == "extra_forbidden":
            if key in cls.elsewhere:
                return f"unknown key {key!r}: {cls.elsewhere[key]}"
            close = difflib.get_close_matches(key, cls.keys(), n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(cls.keys())}"
            return f"unknown key {key!r}; {hint}"
        cause = error.get("ctx", {}).get("error")
        why = str(cause) if cause is not None else error["msg"].replace("Input should", "it must", 1)
        return f"{key} is {error['input']!r}: {why}"


class EngineSettings(SettingsTable):
    """Keys that every adapter understands."""

    plays: ClassVar[int] = 256
    """Maximum concurrent plays."""
    queue: ClassVar[int] = 64
    """Caches that may wait to be published; more are dropped and counted."""
    tail: ClassVar[int] = DEFAULT_MAX_TAIL
    """Maximum tokens at the end of a cached prefix for the engine to compute with the question, on the coded cache, if
    that is worth its time: they have most of the loss. They are whole blocks, pages or chunks, and fit into a step
    together with those of other waiting requests.
    """

    url: Url | None = None
    """Origin of caches: ``moqt://host:port/`` of an origin or a relay, or an object store such as
    ``s3://bucket/prefix``. None: nothing is fetched.
    """
    sources: Annotated[tuple[Url, ...], BeforeValidator(_tuple)] = ()
    """Further origins, relays and stores of the same caches: plays use all of them, and continue if some fail. Token
    and trust are those of ``url``.
    """
    publish: StoreLocation | None = None
    """Store to publish computed caches in, for `kvabr serve`: a folder or a URL. None: nothing is published."""
    deadline_s: Seconds = 1.0
    """Deadline for the cache of a request, seconds."""
    policy: PolicyName = DEFAULT
    """ABR policy, see `kvabr policies`."""
    prefill_rate: Seconds | None = None
    """Tokens per second that the engine prefills, for choosing tails. None: vLLM's prefills are measured while it
    serves; for others catalogs may have a cost, and without one there is no tail.
    """
    keep_loss: Annotated[float, Field(ge=0)] = math.inf
    """Maximum expected loss of a cache for the engine, nats per generated token: the engine keeps it for all later
    requests. AC-L3 loses about 0.001.
    """
    model: ModelName | None = None
    """Name of the model in the track namespace, which stands for its weights. None: derived from the engine's model,
    with the digest of its folder, if there is one.
    """
    version_file: FilePath | None = None
    """File with the version of the weights in memory, written by the tool that replaces them; read again after changes,
    see `kvabr.engines.generation`. None: after an engine's signal that weights may have changed, it shares no caches.
    """
    group_tokens: Annotated[int | None, Field(ge=1, le=MAX_GROUP_TOKENS)] = None
    """Tokens per group of published and requested caches; both sides need the same. None: kvabr's default."""
    profile: FilePath | None = None
    """Codec profile of the model, for publishing the AC tracks. None: the shipped one, if it fits."""
    prior: FilePath | None = None
    """Catalog of the same model with measured losses, as an estimate for published caches: the file ``a/DIGEST`` in a
    store, of any asset made by `kvabr encode`. None: the shipped one.
    """
    tracks: Names | None = None
    """Tracks to publish. None: the adapter's default."""
    peer: PeerOptions = PeerOptions()
    """Connection to ``url`` and ``sources``; `read` makes it from its own keys."""
    store_mib: Annotated[int, Field(ge=0)] = 256
    """Memory for encoded groups that later requests may use, MiB."""
    disk: StoreLocation | None = None
    """Folder for the same, of one process: other ranks use memory only. Or the URL of an object store, which all hosts
    may share. None: memory only.
    """
    disk_mib: Annotated[int, Field(ge=0)] = 16384
    """Size of the folder ``disk``, MiB."""
    cache: FilePath | None = Field(default_factory=lambda: user_cache_path("kvabr", appauthor=False))
    """Folder that keeps codec profiles, the speed of the origin's link and prefill times between processes, as `kvabr
    fetch` does. By default the user's cache folder, such as ``~/.cache/kvabr``; null keeps nothing.
    """
    player: Text = INSIDE
    """Where plays run: ``inside`` the engine's process, in a ``process`` that engines share, or at a socket's path."""
    publish_mib: Count | None = None
    """Size limit of engines' caches in ``publish``, an unencrypted folder, MiB: prefixes of longer caches are removed
    first, then the least recently used. None: unlimited.
    """

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Collect the keys of `PeerOptions`."""
        if isinstance(given.get("peer"), PeerOptions):
            return given
        if "peer" in given:
            raise UsageError(f"unknown key 'peer'; choose from {', '.join(PEER_KEYS)}")
        peer = {
            key: _path(value) if PEER_KEYS[key].kind is Path else value
            for key, value in given.items()
            if key in PEER_KEYS
        }
        if empty := next((key for key, value in peer.items() if value == ""), None):
            raise UsageError(f"{empty} is '': it must not be empty")
        try:
            how = _PEER.validate_python(peer)
        except ValidationError as error:
            raise UsageError(cls._explain(error.errors()[0])) from None
        return {key: value for key, value in given.items() if key not in PEER_KEYS} | {"peer": how}

    @classmethod
    def keys(cls) -> dict[str, tuple[object, str]]:
        """Return the default and the documentation of each key."""
        found = super().keys()
        docs = docstrings(PeerOptions)
        peer = {name: (field.default, docs[name]) for name, field in PEER_KEYS.items()}
        return {
            key: value
            for name, own in found.items()
            for key, value in (peer if name == "peer" else {name: own}).items()
        }

    @field_validator("sources")
    @classmethod
    def _check_sources(cls, sources: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if sources and info.data.get("url") is None:
            raise ValueError("sources need a first origin, url")
        return sources

    def grouped(self, spec: KVSpec) -> KVSpec:
        """Return ``spec`` with the configured group size, if any."""
        return spec if self.group_tokens is None else replace(spec, group_tokens=self.group_tokens)

    def generation(self, declared: Callable[[], str | None] = lambda: None) -> Generation:
        """Return the generation of the weights, given the engine's declared version.

        Raise `UsageError` if the version file cannot be read.
        """
        return Generation(declared if self.version_file is None else VersionFile(self.version_file))

    @property
    def prefill_cost(self) -> PrefillCost | None:
        """Cost of a prefill at ``prefill_rate``, if set."""
        return None if self.prefill_rate is None else PrefillCost.from_rate(self.prefill_rate)

    @property
    def publish_bytes(self) -> int | None:
        """``publish_mib`` in bytes."""
        return None if self.publish_mib is None else self.publish_mib << 20


class TroubleLog:
    """Logs the first problem of each kind immediately, and repetitions as one line per minute. Thread-safe."""

    def __init__(self, log: logging.Logger, every_s: float = _TROUBLE_EVERY_S) -> None:
        """Create a log without problems; repetitions are summarised every ``every_s`` seconds."""
        self._log, self._every_s = log, every_s
        self._again: dict[str, tuple[int, str]] = {}
        """By kind: number of repetitions since the last line, and the latest reason."""
        self._timer: threading.Timer | None = None

    def warn(self, what: str, why: object) -> None:
        """Log a problem that makes the engine compute tokens.

        ``what`` is one of few kinds, ``why`` an exception or a text.
        """
        text = str(why) or repr(why)
        with _TROUBLE_LOCK:
            first = what not in self._again
            self._again[what] = (0 if first else self._again[what][0] + 1, text)
            # A timer does not survive a fork: its thread is not alive in the child.
            if self._timer is None or not self._timer.is_alive():
                self._begin()
        if first:
            self._log.warning("kvabr: %s: %s", what, text)

    def _begin(self) -> None:
        self._timer = threading.Timer(self._every_s, self.flush)
        self._timer.daemon = True
        self._timer.start()

    def flush(self) -> None:
        """Log repeated problems, and reset the kinds without repetitions."""
        with _TROUBLE_LOCK:
            again = [f"{kind}: {n} more, the last: {last}" for kind, (n, last) in self._again.items() if n]
            self._again = {kind: (0, last) for kind, (n, last) in self._again.items() if n}
            self._timer = None  # this thread is still alive
            if self._again:
                self._begin()
        if again:
            self._log.warning("kvabr: within %.0f s: %s", self._every_s, "; ".join(again))

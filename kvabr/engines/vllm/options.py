"""What a user may set: the keys of ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from kvabr.abr.plugins import load_estimator, load_policy
from kvabr.abr.policies import DEFAULT
from kvabr.engines import settings
from kvabr.quic.connect import parse_url
from kvabr.quic.library import Quic
from kvabr.store.files import read_salt
from kvabr.types.errors import UsageError

WHERE = "kv_connector_extra_config"
"""What vLLM calls the table."""


@dataclass(frozen=True, slots=True)
class Options:
    """The keys, and what they mean."""

    url: str | None = None
    """Where caches are fetched: ``moqt://host:port/``. A consumer needs it."""
    publish: Path | None = None
    """Folder that computed caches are written to, for `kvabr serve`. A producer needs it."""
    deadline_s: float = 2.0
    """TTFT deadline of a request, seconds. A request may have its own: ``kv_transfer_params={"deadline_s": 0.5}``; the
    other keys there are ``play`` (false: compute everything) and ``publish`` (false: do not publish it)."""
    policy: str = DEFAULT
    """ABR policy, see `kvabr policies`."""
    estimator: str | None = None
    """Bandwidth estimator; None: the policy's own."""
    model: str | None = None
    """Name of the model, as in the track namespace; None: as `kvabr encode --model DIR` names it."""
    tokenizer: str | None = None
    """Digest of the tokenizer; None: as `kvabr encode --model DIR` takes it."""
    asset_dtype: str | None = None
    """Element type that the assets say they were made from; None: as `kvabr encode` chooses it."""
    prefill_rate: float | None = None
    """Tokens per second that the engine prefills, for deciding what to leave to it; None: it is watched."""
    lookup_share: float = 0.25
    """Share of the deadline that a lookup may take."""
    token: str | None = None
    """What the origin's operator gave out; None: the environment's ``KVABR_TOKEN``."""
    ca: Path | None = None
    """Certificates to trust instead of the system's, PEM."""
    fingerprint: str | None = None
    """SHA-256 of the only certificate to trust."""
    insecure: bool = False
    """Trust any certificate."""
    quic: Quic = "auto"
    """QUIC library."""
    salt_file: Path | None = None
    """A tenant's secret, see `kvabr.types.naming.chain`."""
    store_mib: int = 1024
    """Encoded groups that are kept in memory for requests to come, MiB; 0: none."""
    profiles: Path | None = None
    """Folder where codec profiles are kept from one process to the next."""
    priors: Path | None = None
    """File where what is known of the origin's link is kept from one process to the next."""
    profile: Path | None = None
    """Codec profile of the model, for publishing the AC tracks; None: the one that comes along, if it is its."""
    tracks: tuple[str, ...] | None = None
    """Tracks to publish; None: FP16, Int8, Int4, and with a profile the AC layers."""
    prior: Path | None = None
    """A catalog of the same model with measured losses, for those of what is published; None: the one that comes
    along."""
    queue: int = 4
    """Caches that may wait to be published; what comes while they do is dropped, and counted."""
    publish_mib: int | None = None
    """MiB that what engines publish in ``publish`` takes at most: what was computed longest ago goes first. None: no
    bound."""

    def __post_init__(self) -> None:
        if self.url is not None:
            parse_url(self.url)
        load_policy(self.policy)
        if load_policy(self.policy)().computes:
            raise UsageError(f"{WHERE}: policy {self.policy} has the engine compute from the front; vLLM cannot")
        if self.estimator is not None:
            load_estimator(self.estimator)
        if self.lookup_share >= 1:
            raise UsageError(f"{WHERE}: lookup_share is {self.lookup_share:g}; it must be below 1")

    @property
    def salt(self) -> bytes:
        """The tenant's secret.

        Raises:
            UsageError: the file cannot be read, or is no secret.
        """
        return read_salt(self.salt_file)

    def dial(self) -> dict[str, Any]:
        """What `kvabr.connect` takes."""
        return {
            "token": self.token,
            "ca": self.ca,
            "fingerprint": self.fingerprint,
            "insecure": self.insecure,
            "quic": self.quic,
        }


def _share(value: Any) -> float:
    share = settings.seconds(value)
    if share > 1:
        raise ValueError("a number from 0 to 1")
    return share


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("a whole number, 0 or more")
    return value


def _quic(value: Any) -> str:
    if value not in get_args(Quic):
        raise ValueError(f"one of {', '.join(get_args(Quic))}")
    return str(value)


_READERS: dict[str, settings.Reader] = {
    "url": settings.text,
    "publish": settings.path,
    "publish_mib": settings.count,
    "deadline_s": settings.seconds,
    "policy": settings.text,
    "estimator": settings.text,
    "model": settings.text,
    "tokenizer": settings.text,
    "asset_dtype": settings.text,
    "prefill_rate": settings.seconds,
    "lookup_share": _share,
    "token": settings.text,
    "ca": settings.path,
    "fingerprint": settings.text,
    "insecure": settings.flag,
    "quic": _quic,
    "salt_file": settings.path,
    "store_mib": _whole,
    "profiles": settings.path,
    "priors": settings.path,
    "profile": settings.path,
    "tracks": settings.names,
    "prior": settings.path,
    "queue": settings.count,
}


def read_options(given: Mapping[str, Any], *, consumes: bool, produces: bool) -> Options:
    """The options that a user gave.

    Args:
        given: ``kv_connector_extra_config``.
        consumes: whether this engine fetches.
        produces: whether it publishes.

    Raises:
        UsageError: a key that there is not (the nearest is named), a value that is none, or one that is missing.
        PolicyError: no such policy or estimator.
    """
    options = settings.read_settings(Options, given, _READERS, WHERE)
    if consumes and options.url is None:
        raise UsageError(
            f'{WHERE}: a consumer needs "url", where caches are fetched, as in moqt://origin.example:4443/'
        )
    if produces and options.publish is None:
        raise UsageError(f'{WHERE}: a producer needs "publish", the folder that caches are written to')
    return options

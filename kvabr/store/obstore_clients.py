"""Clients of obstore: settings, time limits, and credentials."""

from __future__ import annotations

import atexit
import configparser
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvabr.store.failures import Failure
from kvabr.store.url import CLOUDS, WEB, StoreUrl, check_endpoint
from kvabr.types.errors import ConnectionLostError, UsageError
from kvabr.types.installing import WHERE, extra
from kvabr.types.once import once

if TYPE_CHECKING:
    from obstore.store import AzureStore, ClientConfig, GCSStore, HTTPStore, S3Store

    ObstoreClient = AzureStore | GCSStore | HTTPStore | S3Store


_LEAVE_S = 0.02
"""Seconds that a process waits for obstore's threads before it ends."""


@once
def _leave_at_exit() -> None:
    """Give obstore's threads time to leave Python before it ends; otherwise a process may abort after its last request.

    A thread that has just woken an event loop needs the interpreter's lock to return, and Python ends threads that ask
    for it during shutdown. Rust aborts the process then.
    """
    atexit.register(time.sleep, _LEAVE_S)


def load_obstore() -> Any:
    """Return the module obstore; raise `UsageError` if it is not installed."""
    try:
        import zoneinfo  # noqa: F401, PLC0415  # obstore panics if it cannot load this later

        import obstore  # noqa: PLC0415  # an extra, which loads a library
    except ImportError as error:
        raise UsageError(f"object stores need the package obstore: {extra('stores')} ({WHERE})") from error
    return obstore


def make_client(where: StoreUrl, limits: ClientConfig) -> ObstoreClient:
    """Return obstore's client for a URL."""
    from obstore import store as kinds  # noqa: PLC0415

    _leave_at_exit()
    scheme, bucket, never = where.scheme, where.bucket, {"max_retries": 0}
    endpoint = endpoint_of(where)
    if endpoint.startswith("http:") or scheme == "http":
        limits["allow_http"] = True
    common: dict[str, Any] = {"client_options": limits, "retry_config": never}
    if scheme in WEB:
        return kinds.HTTPStore(f"{scheme}://{bucket}", **common)
    settings: Mapping[str, Mapping[str, Any]] = {
        "s3": {
            "endpoint": endpoint or None,
            "region": where.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION", "us-east-1"),
            "virtual_hosted_style_request": False if endpoint else None,
            **_aws_profile(where),
        },
        "gs": {"base_url": endpoint or None},
        "az": {"endpoint": endpoint or None, "account_name": where.account or None},
    }
    options = {name: value for name, value in settings[scheme].items() if value is not None}
    if where.anonymous:
        options["skip_signature"] = True
    make = partial(getattr(kinds, f"{CLOUDS[scheme]}Store"), **common)
    try:
        made: ObstoreClient = make(bucket, config=options)
    except Exception as error:
        if (failure := Failure.of(error)).exhausted:
            raise failure.error(str(where), "cannot be opened") from error
        if "No CA certificates" in str(error):
            raise ConnectionLostError(
                f"{where}: the system's CA certificates cannot be read; are they installed, and are file descriptors "
                "left?"
            ) from error
        raise UsageError(f"{where}: the package obstore rejects these settings ({type(error).__name__})") from error
    return made


def endpoint_of(where: StoreUrl) -> str:
    """Return the endpoint in a URL, or for S3 in the environment; empty for the cloud's own endpoint.

    Raise `UsageError` for malformed environment variables.
    """
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT") if where.scheme == "s3" else ()
    if where.endpoint or not (name := next(filter(os.environ.get, names), "")):
        return where.endpoint
    check_endpoint(os.environ[name], name)
    return os.environ[name]


def _aws_profile(where: StoreUrl) -> dict[str, str]:
    wanted = os.environ.get("AWS_PROFILE")
    if where.anonymous or "AWS_ACCESS_KEY_ID" in os.environ:
        return {}
    path = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()
    found = configparser.ConfigParser(interpolation=None)
    try:
        found.read(path, encoding="utf-8")
        section = dict(found[wanted or "default"])
    except (KeyError, OSError, ValueError, configparser.Error) as error:
        if wanted:
            raise UsageError(f"{path}: has no usable profile {wanted!r} (AWS_PROFILE)") from error
        return {}
    names = {"aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key"}
    names["aws_session_token"] = "session_token"  # noqa: S105 - a name
    return {ours: section[theirs] for theirs, ours in names.items() if theirs in section}

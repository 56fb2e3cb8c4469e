"""URLs of object stores. They have no credentials; these are read from the environment."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from kvabr.types.errors import UsageError, did_you_mean

CLOUDS = {"s3": "S3", "gs": "GCS", "az": "Azure"}
"""Schemes of URLs with a bucket, each with obstore's name for its stores."""
WEB = ("http", "https")
"""Schemes of read-only caches in front of a store."""
SCHEMES = {
    "s3": {"endpoint", "region", "anonymous"},
    "gs": {"endpoint", "anonymous"},
    "az": {"endpoint", "anonymous", "account"},
    "http": set[str](),
    "https": set[str](),
}
"""Schemes of object stores, each with its options."""
_MAX_URL = 2048
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}[A-Za-z0-9]")
_PART = re.compile(r"[A-Za-z0-9._=@+-]{1,128}")
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]+")
_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
_SECRET = re.compile(r"key|secret|token|password|sas|sig|credential")


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """Location of objects. It contains no secrets, so it may be logged."""

    scheme: str
    bucket: str
    """Bucket or container, or host and port of an HTTP cache."""
    prefix: str = ""
    """Prefix of every object's name, without slashes at its ends."""
    endpoint: str = ""
    region: str = ""
    account: str = ""
    anonymous: bool = False

    @classmethod
    def parse(cls, url: str) -> StoreUrl:
        """Parse a URL; raise `UsageError` if it is malformed, or has credentials or unknown options."""
        shown = _shown(url)
        try:
            parts = urlsplit(url)
            host = parts.netloc
            _ = parts.port
        except ValueError as error:
            raise UsageError(f"{shown}: not a URL ({error})") from error
        if parts.scheme not in SCHEMES or len(url) > _MAX_URL:
            raise UsageError(f"{shown}: not the URL of an object store, such as s3://BUCKET/PREFIX")
        if "@" in host:
            raise UsageError(f"{shown}: a URL must not have credentials; {CREDENTIALS}")
        if parts.fragment:
            raise UsageError(f"{shown}: the URL of a store must not have a #fragment")
        options = _options(shown, parts.scheme, parts.query)
        prefix = unquote(parts.path).strip("/")
        if prefix and not all(_PART.fullmatch(part) and part.strip(".") for part in prefix.split("/")):
            raise UsageError(f"{shown}: a prefix may have only letters, digits and . _ = @ + - between its slashes")
        if not (_HOST if parts.scheme in WEB else _BUCKET).fullmatch(host):
            raise UsageError(f"{shown}: {host[:80]!r} cannot be the name of a bucket or host")
        anonymous = options.pop("anonymous", "") == "true"
        made = cls(parts.scheme, host, prefix, anonymous=anonymous, **options)
        if len(str(made)) > _MAX_URL:
            raise UsageError(f"{shown}: more than the {_MAX_URL} characters allowed, when quoted")
        return made

    @property
    def root(self) -> str:
        """Prefix of every object's name, with a final slash."""
        return f"{self.prefix}/" if self.prefix else ""

    def __str__(self) -> str:
        options = {
            "endpoint": self.endpoint,
            "region": self.region,
            "account": self.account,
            "anonymous": "true" if self.anonymous else "",
        }
        query = urlencode({name: value for name, value in options.items() if value}, safe="/:")
        path = f"{self.bucket}/{self.prefix}".rstrip("/")
        return f"{self.scheme}://{path}" + (f"?{query}" if query else "")


CREDENTIALS = (
    "they come from the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, "
    "GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY ...) or from the machine's role"
)


def _options(shown: str, scheme: str, query: str) -> dict[str, str]:
    known, options = SCHEMES[scheme], dict[str, str]()
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=16)
    except ValueError as error:
        raise UsageError(f"{shown}: options must be written as ?NAME=VALUE&NAME=VALUE") from error
    for name, value in pairs:
        if name not in known and _SECRET.search(name.lower()):
            raise UsageError(f"{shown}: a URL must not have credentials ({name[:40]}); {CREDENTIALS}")
        if name not in known:
            hint = did_you_mean(name, known)
            raise UsageError(
                f"{shown}: unknown option {name[:40]!r}{hint}; for {scheme}:// choose from {', '.join(sorted(known))}"
            )
        if name in options:
            raise UsageError(f"{shown}: option {name} is given twice")
        options[name] = value
    if options.get("anonymous", "false") not in ("true", "false"):
        raise UsageError(f"{shown}: anonymous must be true or false")
    for name in ("region", "account"):
        if options.get(name) and not _NAME.fullmatch(options[name]):
            raise UsageError(f"{shown}: {name} must have at most 64 letters, digits and -")
    if endpoint := options.get("endpoint", ""):
        check_endpoint(endpoint, f"{shown}: endpoint")
    return options


def _shown(url: str) -> str:
    before, _, rest = url[:200].partition("://")
    path = rest.partition("?")[0].partition("#")[0]
    host, slash, tail = path.partition("/")
    return f"{before}://{host.rpartition('@')[2]}{slash}{tail}" if rest else before


def check_endpoint(endpoint: str, name: str) -> None:
    """Raise `UsageError` unless this is a valid endpoint of a store; ``name`` starts the message."""
    try:
        parts = urlsplit(endpoint)
        known = parts.scheme in WEB and bool(_HOST.fullmatch(parts.netloc) and parts.hostname) and parts.port != 0
    except ValueError:  # brackets without an address, or an invalid port
        known = False
    if not known or not endpoint.isascii() or not endpoint.isprintable():
        raise UsageError(f"{name} must be http://HOST:PORT or https://HOST, without credentials")

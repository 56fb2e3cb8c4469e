"""URLs of object stores. They say where the objects are, and never who asks: credentials come from the environment."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from kvabr.types.errors import UsageError, did_you_mean

DEFAULT_TENANT = "default"
LAYOUT = "v1"
"""First part of every key behind the prefix: the version of `kvabr.store.objects.layout`."""
CLOUDS = {"s3": "S3", "gs": "GCS", "az": "Azure"}
"""Schemes with a bucket, and what obstore calls their stores."""
WEB = ("http", "https")
"""Schemes of caches in front of a store, which are only read."""
SCHEMES = {
    "s3": {"tenant", "endpoint", "region", "anonymous"},
    "gs": {"tenant", "endpoint", "anonymous"},
    "az": {"tenant", "endpoint", "anonymous", "account"},
    "file": {"tenant", "layout"},
    "memory": {"tenant"},
    "http": {"tenant"},
    "https": {"tenant"},
}
"""Schemes of object stores, and the options that their URLs may have. What is here is served, managed and played from;
`kvabr.store.objects.bucket.OPENED_BY` says by which class if obstore does not speak it."""
_MAX_URL = 2048
_TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}[A-Za-z0-9]")
_PART = re.compile(r"[A-Za-z0-9._=@+-]{1,128}")
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]+")
_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
"""A region, or an account."""
_SECRET = re.compile(r"key|secret|token|password|sas|sig|credential")


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """Where objects are kept. Its text has no secrets, so it may be logged."""

    scheme: str
    bucket: str
    """Bucket or container; host and port of a cache; name of a store in memory; absolute path of a folder."""
    prefix: str = ""
    """Comes before every key, without slashes at its ends."""
    tenant: str = DEFAULT_TENANT
    endpoint: str = ""
    region: str = ""
    account: str = ""
    anonymous: bool = False

    @classmethod
    def parse(cls, url: str) -> StoreUrl:
        """Parse a URL; raise `UsageError` if it is none of an object store, or has what does not belong there."""
        made = cls._read(url)
        if len(str(made)) > _MAX_URL:
            raise UsageError(f"{_shown(url)}: has more than {_MAX_URL} characters once they are quoted")
        return made

    @classmethod
    def _read(cls, url: str) -> StoreUrl:
        try:
            parts = urlsplit(url)
            host = parts.netloc
            _ = parts.port
        except ValueError as error:
            raise UsageError(f"{_shown(url)}: not a URL ({error})") from error
        if parts.scheme not in SCHEMES or len(url) > _MAX_URL:
            raise UsageError(f"{_shown(url)}: not the URL of an object store, as s3://BUCKET/PREFIX is")
        if "@" in host:
            raise UsageError(f"{_shown(url)}: a URL must not have credentials; {CREDENTIALS}")
        if parts.fragment:
            raise UsageError(f"{_shown(url)}: the URL of a store has no part behind a #")
        options = _options(url, parts.scheme, parts.query)
        tenant, endpoint = options.get("tenant", DEFAULT_TENANT), options.get("endpoint", "")
        if parts.scheme == "file":
            if host or options.get("layout") != "objects" or not parts.path.startswith("/"):
                raise UsageError(f"{_shown(url)}: a folder of objects is file:///PATH?layout=objects")
            return cls("file", unquote(parts.path).rstrip("/") or "/", tenant=tenant)
        prefix = _prefix(url, parts.path)
        if not (_HOST if parts.scheme in WEB else _BUCKET).fullmatch(host):
            raise UsageError(f"{_shown(url)}: {host[:80]!r} cannot be the name of a bucket or host")
        return cls(
            parts.scheme,
            host,
            prefix,
            tenant,
            endpoint,
            options.get("region", ""),
            options.get("account", ""),
            options.get("anonymous") == "true",
        )

    @property
    def root(self) -> str:
        """What comes before every key, with a slash at its end."""
        return "".join(f"{part}/" for part in (self.prefix, LAYOUT, self.tenant) if part)

    def __str__(self) -> str:
        options = {
            "layout": "objects" if self.scheme == "file" else "",
            "tenant": "" if self.tenant == DEFAULT_TENANT else self.tenant,
            "endpoint": self.endpoint,
            "region": self.region,
            "account": self.account,
            "anonymous": "true" if self.anonymous else "",
        }
        query = urlencode({name: value for name, value in options.items() if value}, safe="/:")
        path = quote(self.bucket) if self.scheme == "file" else f"{self.bucket}/{self.prefix}".rstrip("/")
        return f"{self.scheme}://{path}" + (f"?{query}" if query else "")

    def below(self, name: str) -> str:
        """Return the URL of something in this store, for messages and for `split_asset`."""
        if self.scheme == "file":
            return str(replace(self, bucket=f"{self.bucket.rstrip('/')}/{name}"))
        return str(replace(self, prefix=f"{self.prefix}/{name}".lstrip("/")))


def is_tenant(name: str) -> bool:
    """Return whether this can be the name of a tenant."""
    return _TENANT.fullmatch(name) is not None


CREDENTIALS = (
    "they come from the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, "
    "GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY ...) or from the machine's role"
)


def split_asset(url: str) -> tuple[StoreUrl, str | None]:
    """Parse the URL of a store, or of an asset in it, whose last part is 64 hex digits: its prompt digest."""
    parsed = StoreUrl.parse(url)
    field = "bucket" if parsed.scheme == "file" else "prefix"
    value: str = getattr(parsed, field)
    before, _, last = value.rpartition("/")
    if re.fullmatch(r"[0-9a-f]{64}", last) is None:
        return parsed, None
    return (replace(parsed, bucket=before or "/") if field == "bucket" else replace(parsed, prefix=before)), last


def _options(url: str, scheme: str, query: str) -> dict[str, str]:
    known, options = SCHEMES[scheme], dict[str, str]()
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=16)
    except ValueError as error:
        raise UsageError(f"{_shown(url)}: options are written ?NAME=VALUE&NAME=VALUE") from error
    for name, value in pairs:
        if name not in known and _SECRET.search(name.lower()):
            raise UsageError(f"{_shown(url)}: a URL must not have credentials ({name[:40]}); {CREDENTIALS}")
        if name not in known:
            hint = did_you_mean(name, known)
            raise UsageError(
                f"{_shown(url)}: no option {name[:40]!r}{hint}; {scheme}:// has {', '.join(sorted(known))}"
            )
        if name in options:
            raise UsageError(f"{_shown(url)}: option {name} is there twice")
        options[name] = value
    if options.get("anonymous", "false") not in ("true", "false"):
        raise UsageError(f"{_shown(url)}: anonymous is true or false")
    _check_options(url, options)
    return options


def _check_options(url: str, options: dict[str, str]) -> None:
    tenant, endpoint = options.get("tenant", DEFAULT_TENANT), options.get("endpoint", "")
    if not _TENANT.fullmatch(tenant):
        raise UsageError(
            f"{_shown(url)}: tenant {tenant[:80]!r} must have 1 to 63 of a-z, 0-9 and . _ - and begin with a letter or "
            "digit"
        )
    for name in ("region", "account"):
        if options.get(name) and not _NAME.fullmatch(options[name]):
            raise UsageError(f"{_shown(url)}: {name} has up to 64 letters, digits and -")
    if endpoint:
        check_endpoint(endpoint, f"{_shown(url)}: endpoint")


def _prefix(url: str, path: str) -> str:
    prefix = unquote(path).strip("/")
    if prefix and not all(_PART.fullmatch(part) and part.strip(".") for part in prefix.split("/")):
        raise UsageError(f"{_shown(url)}: a prefix has letters, digits and . _ = @ + - between its slashes")
    return prefix


def _shown(url: str) -> str:
    """Return a URL for messages, without what might be a secret."""
    before, _, rest = url[:200].partition("://")
    path = rest.partition("?")[0].partition("#")[0]
    host, slash, tail = path.partition("/")
    return f"{before}://{host.rpartition('@')[2]}{slash}{tail}" if rest else before


def check_endpoint(endpoint: str, name: str) -> None:
    """Raise `UsageError` unless this is the endpoint of a store; ``name`` says what named it."""
    try:
        parts = urlsplit(endpoint)
        known = parts.scheme in WEB and bool(_HOST.fullmatch(parts.netloc) and parts.hostname) and parts.port != 0
    except ValueError:  # brackets without an address, or a port that is none
        known = False
    if not known or not endpoint.isascii() or not endpoint.isprintable():
        raise UsageError(f"{name} must be http://HOST:PORT or https://HOST, without credentials")

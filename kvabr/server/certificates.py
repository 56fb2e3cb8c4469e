"""Certificates of a server: checked before anything is bound, or made for development."""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvabr.store.files import read_bytes
from kvabr.types.errors import TransportError

DEV_DAYS = 13
"""Validity of a development certificate, days. Browsers pin certificates by fingerprint for at most 14 days."""

_MAX_PEM_BYTES = 1 << 20
_DEV_PREFIX, _SETTLED_S = "kvabr-dev-", 10.0
"""Prefix of the folders of development certificates, and the age in seconds at which one in use is surely locked."""
_DEV_HINT = "for a first try, --dev makes a certificate"


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Files of a server's certificate and key."""

    certfile: Path
    """Certificate chain, PEM, the server's own first."""
    keyfile: Path
    """Private key, PEM, without a password."""


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    """What a certificate says."""

    fingerprint: str
    """SHA-256 of its DER form, hex."""
    names: tuple[str, ...]
    """Host names and addresses that it is valid for."""
    not_after: datetime
    """When it expires, UTC."""


class CertificateError(TransportError):
    """A certificate or a key cannot be used."""


def check(tls: ServerTls, now: datetime | None = None) -> CertificateFacts:
    """Check that a certificate and its key can be served at a time (None: now), and return its facts.

    Raises:
        CertificateError: a file is missing or unreadable, is not PEM, the two do not belong together, or the
            certificate is not valid yet or any more; the message says what to do.
    """
    now = datetime.now(UTC) if now is None else now
    try:
        chain = x509.load_pem_x509_certificates(_read(tls.certfile, "certificate"))
        _ = chain[0].not_valid_before_utc, chain[0].not_valid_after_utc  # may be no dates, such as the year 0
    except ValueError as error:
        raise CertificateError(
            f"{tls.certfile}: not a certificate in PEM form (-----BEGIN CERTIFICATE-----); {_DEV_HINT}"
        ) from error
    key = _load_key(tls.keyfile)
    certificate = chain[0]
    if certificate.public_key() != key.public_key():
        raise CertificateError(
            f"{tls.keyfile}: not the key of {tls.certfile}; the server's own certificate must come first in that file"
        )
    facts = facts_of(certificate)
    if facts.not_after < now:
        raise CertificateError(f"{tls.certfile}: expired on {facts.not_after:%Y-%m-%d %H:%M} UTC; renew it")
    if certificate.not_valid_before_utc > now:
        raise CertificateError(
            f"{tls.certfile}: not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; is the clock "
            "of this machine right?"
        )
    if not facts.names:
        raise CertificateError(
            f"{tls.certfile}: names no host (it has no subjectAltName), so no client would accept it; make one with "
            "the server's name in it"
        )
    return facts


def facts_of(certificate: x509.Certificate) -> CertificateFacts:
    """Return the facts of a certificate."""
    try:
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = (
            *alternatives.get_values_for_type(x509.DNSName),
            *map(str, alternatives.get_values_for_type(x509.IPAddress)),
        )
    except (x509.ExtensionNotFound, ValueError):
        names = ()
    der = certificate.public_bytes(serialization.Encoding.DER)
    return CertificateFacts(hashlib.sha256(der).hexdigest(), names, certificate.not_valid_after_utc)


def make(hosts: tuple[str, ...] = (), now: datetime | None = None) -> tuple[bytes, bytes]:
    """Make a certificate for development and its key (ECDSA on P-256), both PEM.

    It vouches for nothing: a client accepts it by its fingerprint, or not at all. It is for ``hosts``, ``localhost``,
    ``127.0.0.1`` and ``::1``, and is valid from an hour before ``now``, for clocks that are off.
    """
    now = datetime.now(UTC) if now is None else now
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvabr development")])
    names = [_general_name(host) for host in dict.fromkeys(("localhost", "127.0.0.1", "::1", *hosts))]
    begin = now - timedelta(hours=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + timedelta(days=DEV_DAYS))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return (
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


@contextmanager
def development(*hosts: str) -> Iterator[ServerTls]:
    """Yield the files of a new development certificate, in a private folder that is removed afterwards."""
    certificate, key = make(hosts)
    _remove_leftovers()
    with TemporaryDirectory(prefix=_DEV_PREFIX) as name, _locked(Path(name)):  # mode 0700
        folder = Path(name)
        tls = ServerTls(folder / "cert.pem", folder / "key.pem")
        tls.certfile.write_bytes(certificate)
        with os.fdopen(os.open(tls.keyfile, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(key)
        yield tls


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; the kernel releases it when this process ends in any way."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _remove_leftovers() -> None:
    """Remove the folders of killed servers: those that are not locked."""
    for folder in Path(gettempdir()).glob(f"{_DEV_PREFIX}*"):
        try:
            found = folder.lstat()
            old = time.time() - found.st_mtime > _SETTLED_S  # a younger one may not have its lock yet
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and old:
                with _locked(folder):
                    shutil.rmtree(folder)
        except OSError:
            continue  # in use, or gone


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host.encode("idna").decode())
    except UnicodeError as error:
        raise CertificateError(f"{host!r} is no host name that a certificate could carry") from error


def _load_key(path: Path) -> PrivateKeyTypes:
    data = _read(path, "key")
    try:
        return serialization.load_pem_private_key(data, password=None)
    except TypeError as error:
        raise CertificateError(
            f"{path}: has a password, which a server cannot ask for; write it without, for instance with: "
            f"openssl pkey -in {path} -out key.pem"
        ) from error
    except ValueError as error:
        raise CertificateError(f"{path}: not a private key in PEM form (-----BEGIN PRIVATE KEY-----)") from error


def _read(path: Path, what: str) -> bytes:
    if not path.exists():
        raise CertificateError(f"{path}: there is no such {what}; {_DEV_HINT}")
    return read_bytes(path, _MAX_PEM_BYTES, unreadable=CertificateError, unfit=CertificateError)

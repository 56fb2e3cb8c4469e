"""Certificates of a server: checked before anything is bound, or made for development."""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from platformdirs import user_state_path

from kvabr.link.moqt.options import names_of
from kvabr.store.files import PRIVATE, PRIVATE_FOLDER, read_bytes, write_file
from kvabr.types.errors import AssetError, TransportError

DEV_DAYS = 13
"""Validity of a development certificate, days. Browsers pin certificates by fingerprint for at most 14 days."""

_MAX_PEM_BYTES = 1 << 20
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
    fingerprint = hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()
    facts = CertificateFacts(fingerprint, tuple(names_of(certificate)), certificate.not_valid_after_utc)
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


def development(*hosts: str) -> ServerTls:
    """Return the files of a development certificate for some hosts; servers of one user share it.

    It is kept in the user's state folder and replaced in its last day, so that clients which trust its fingerprint
    survive a restart of the server.

    Raises:
        CertificateError: the folder cannot be written.
    """
    of_hosts = hashlib.sha256(" ".join(hosts).encode()).hexdigest()[:16]
    folder = user_state_path("kvabr", appauthor=False) / "dev" / of_hosts
    tls = ServerTls(folder / "cert.pem", folder / "key.pem")
    try:
        folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        with (folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of two servers that start at once, one makes it
            if not _lasts(tls, datetime.now(UTC) + timedelta(days=1)):
                certificate, key = make(hosts)
                write_file(tls.keyfile, key, mode=PRIVATE)
                write_file(tls.certfile, certificate, mode=PRIVATE)
    except (OSError, AssetError) as error:
        raise CertificateError(
            f"a development certificate cannot be kept in {folder} ({error}): set XDG_STATE_HOME to a folder that can "
            "be written, or give a certificate of your own"
        ) from error
    return tls


def _lasts(tls: ServerTls, until: datetime) -> bool:
    """Return whether a certificate is there, fits its key and is valid now and at a later time."""
    try:
        return check(tls).not_after > until
    except CertificateError:
        return False


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

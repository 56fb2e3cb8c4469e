"""Certificates: made for development, or checked before they are served."""

import hashlib
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

from kvabr.server.certificates import CertificateError, ServerTls, check, development, make

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.fixture
def tls(tmp_path):
    certificate, key = make(("example.org",), NOW)
    found = ServerTls(tmp_path / "cert.pem", tmp_path / "key.pem")
    found.certfile.write_bytes(certificate)
    found.keyfile.write_bytes(key)
    return found


def test_a_certificate_for_development_passes_and_names_its_hosts(tls):
    facts = check(tls, NOW)
    assert set(facts.names) == {"localhost", "127.0.0.1", "::1", "example.org"}
    certificate = x509.load_pem_x509_certificate(tls.certfile.read_bytes())
    der = certificate.public_bytes(serialization.Encoding.DER)
    assert facts.fingerprint == hashlib.sha256(der).hexdigest()
    assert NOW < facts.not_after <= certificate.not_valid_before_utc + timedelta(days=14)


@pytest.fixture
def state(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_a_development_certificate_survives_a_restart(state):
    tls = development("10.1.2.3", "localhost", "bücher.example")
    assert state in tls.keyfile.parents
    assert stat.S_IMODE(tls.keyfile.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(tls.keyfile.stat().st_mode) == 0o600
    facts = check(tls)
    assert {"10.1.2.3", "xn--bcher-kva.example"} <= set(facts.names)
    assert check(development("10.1.2.3", "localhost", "bücher.example")) == facts
    assert check(development()).fingerprint != facts.fingerprint  # for other hosts


@pytest.mark.parametrize("wrong", ["old", "cut", "no key", "another key"])
def test_a_development_certificate_that_cannot_be_used_is_replaced(state, wrong):
    tls = development()
    first = check(tls).fingerprint
    if wrong == "old":
        old = make(now=datetime.now(UTC) - timedelta(days=12.5))
        for path, data in zip((tls.certfile, tls.keyfile), old, strict=True):
            path.write_bytes(data)
    elif wrong == "cut":
        tls.certfile.write_bytes(tls.certfile.read_bytes()[:100])
    elif wrong == "no key":
        tls.keyfile.unlink()
    else:
        tls.keyfile.write_bytes(make()[1])
    facts = check(development())
    assert facts.fingerprint != first
    assert facts.not_after > datetime.now(UTC) + timedelta(days=12)


def test_two_servers_that_start_at_once_share_one(state):
    code = "from kvabr.server.certificates import *; print(check(development()).fingerprint)"
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(3)]  # noqa: S603
    assert len({process.communicate()[0] for process in started}) == 1


def test_a_folder_that_cannot_be_written_is_named(state):
    state.write_text("no folder")
    with pytest.raises(CertificateError, match="XDG_STATE_HOME"):
        development()


def refused(tls, words, now=NOW):
    with pytest.raises(CertificateError, match=words):
        check(tls, now)


def test_files_that_are_not_there_or_not_pem(tls, tmp_path):
    refused(ServerTls(tmp_path / "no.pem", tls.keyfile), "no such certificate; .*--dev")
    refused(ServerTls(tls.certfile, tmp_path / "no.pem"), "no such key")
    refused(ServerTls(tmp_path, tls.keyfile), "cannot be read")
    refused(ServerTls(tls.keyfile, tls.keyfile), "not a certificate in PEM form")
    refused(ServerTls(tls.certfile, tls.certfile), "not a private key in PEM form")
    der = tmp_path / "cert.der"
    der.write_bytes(x509.load_pem_x509_certificate(tls.certfile.read_bytes()).public_bytes(serialization.Encoding.DER))
    refused(ServerTls(der, tls.keyfile), "not a certificate in PEM form")
    big = tmp_path / "big.pem"
    big.write_bytes(b"x" * ((1 << 20) + 1))
    refused(ServerTls(big, tls.keyfile), "more than the")


def test_dates(tls):
    refused(tls, r"expired on 2026-05-14 11:00 UTC; renew", NOW + timedelta(days=13))
    refused(tls, "not valid before .*clock", NOW - timedelta(hours=2))
    check(tls, NOW + timedelta(days=12, hours=22))


def test_another_key_and_a_key_with_a_password(tls, tmp_path):
    refused(ServerTls(tls.certfile, write_key(tmp_path, ed25519.Ed25519PrivateKey.generate())), "not the key of")
    key = serialization.load_pem_private_key(tls.keyfile.read_bytes(), None)
    locked = write_key(tmp_path, key, serialization.BestAvailableEncryption(b"pw"))
    refused(ServerTls(tls.certfile, locked), "password.*openssl pkey")


def test_a_chain_must_begin_with_the_servers_own(tls, tmp_path):
    other, _ = make((), NOW)
    chain = tmp_path / "chain.pem"
    chain.write_bytes(tls.certfile.read_bytes() + other)
    assert "example.org" in check(ServerTls(chain, tls.keyfile), NOW).names
    chain.write_bytes(other + tls.certfile.read_bytes())
    refused(ServerTls(chain, tls.keyfile), "must come first")


def test_a_certificate_without_names(tmp_path):
    key = rsa.generate_private_key(65537, 2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "old.example")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    path = tmp_path / "cert.pem"
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    refused(ServerTls(path, write_key(tmp_path, key)), "has no host name")


def write_key(folder, key, how=None):
    path = folder / "other.key"
    how = serialization.NoEncryption() if how is None else how
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how))
    return path

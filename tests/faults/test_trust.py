"""Whom a player believes and whom an origin lets in: certificates and tokens, over every QUIC library."""

import asyncio
import datetime as dt
import hashlib
import ipaddress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvabr.client.result import NothingCached
from kvabr.link.moqt.connect import connect
from kvabr.server.certificates import ServerTls
from kvabr.server.grants import Grant, Grants
from kvabr.types.errors import NotFoundError, PlayError, TransportError
from kvabr.types.peer import PeerOptions
from tests.client.playing import play, play_asset
from tests.faults.common import LIBRARIES, LIMIT_S, SPEC, TOKENS, right, serving

pytestmark = pytest.mark.process

GOOD = ("localhost", "127.0.0.1")
DATES = "it is for localhost, 127.0.0.1, valid from "


class Authority:
    """Signs certificates, and a file that trusts it."""

    def __init__(self, folder, name) -> None:
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._certificate = self._made(self._name, self._key.public_key(), (), -1, 9, ca=True)
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, label, names=GOOD, *, begin=-1, end=9):
        """A certificate for ``names``, valid from ``begin`` to ``end``, days from now; and its fingerprint."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, label)])
        made = self._made(subject, key.public_key(), names, begin, end, ca=False)
        tls = ServerTls(self._folder / f"{label}.cert", self._folder / f"{label}.key")
        tls.certfile.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
        tls.keyfile.write_bytes(key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain))
        return tls, made.fingerprint(hashes.SHA256()).hex()

    def _made(self, subject, key, names, begin, end, *, ca):
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + dt.timedelta(days=begin))
            .not_valid_after(now + dt.timedelta(days=end))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if ca:
            usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)  # signs
            builder = builder.add_extension(usage, critical=True)
            own = x509.SubjectKeyIdentifier.from_public_key(key)
            builder = builder.add_extension(own, critical=False)
        else:
            issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
            builder = builder.add_extension(issuer, critical=False)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([*map(general, names)]), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def general(name):
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"), "authority")


def connecting(served, quic, host="localhost", **trust):
    return connect(f"moqt://{host}:{served.address[1]}/", PeerOptions(quic=quic, timeout_s=LIMIT_S, **trust))


async def said(served, quic, **trust):
    """The message of the error that a client gets."""
    with pytest.raises(TransportError) as caught:
        async with connecting(served, quic, **trust):
            pass
    return str(caught.value)


async def test_a_certificate_that_is_signed_by_who_is_trusted(root, authority):
    tls, fingerprint = authority.issue("good")
    async with serving(root, tls, fingerprint) as served:
        for quic in LIBRARIES:
            for host in GOOD:
                async with connecting(served, quic, host, ca=authority.file) as connection:
                    assert right(await play(connection, TOKENS, deadline=LIMIT_S, policy="fixed:Int4", spec=SPEC))


@pytest.mark.parametrize("quic", LIBRARIES)
async def test_certificates_that_must_not_be_trusted(root, authority, tmp_path, quic):
    stranger = Authority(tmp_path, "stranger")
    cases = [
        (authority.issue("expired", begin=-9, end=-1), {"ca": authority.file}, DATES),
        (authority.issue("early", begin=2, end=9), {"ca": authority.file}, DATES),
        (authority.issue("elsewhere", ("other.example",)), {"ca": authority.file}, "it is for other.example,"),
        (authority.issue("fine"), {"ca": stranger.file}, "local issuer"),
        (authority.issue("public"), {}, "local issuer"),
        (authority.issue("pinned"), {"fingerprint": "ab" * 32}, "fingerprint"),
    ]
    tls, fingerprint = authority.issue("stale", begin=-9, end=-1)
    cases.append(((tls, fingerprint), {"fingerprint": fingerprint}, "expired on"))

    async def one(issued, trust, words):
        async with serving(root, *issued) as served:
            error = await said(served, quic, **trust)
            assert words in error, error
            assert f"localhost:{served.address[1]}" in error
            # Nothing was said to a server that is not trusted.
            assert served.metrics.value("kvabr_connections_total", result="accepted") == 0
            if "ca" in trust:
                async with connecting(served, quic, insecure=True):
                    pass

    await asyncio.gather(*(one(*case) for case in cases))


def grant(token, **what):
    return Grant(token, token_sha256=hashlib.sha256(token.encode()).hexdigest(), **what)


WRONG = r"UNAUTHORIZED.*token is missing or wrong; .*--token-file"


@pytest.mark.parametrize(("quic", "draft"), [("qh3", "moqt-22"), ("aioquic", "moqt-20")])
async def test_tokens(root, tls, fingerprint, catalog, quic, draft):
    grants = Grants([grant("all"), grant("none", assets=("elsewhere/*",))])
    async with serving(root, tls, fingerprint, grants=grants) as served:

        def connect(token):
            return served.connect(quic, token=token, drafts=(draft,))

        async def refused(token):
            # Whether the peer's SETUP or its refusal comes first is a matter of luck.
            with pytest.raises((TransportError, PlayError), match=WRONG):
                async with connect(token) as connection:
                    await play(connection, TOKENS, deadline=LIMIT_S, spec=SPEC)

        for token in (None, "wrong", "al", "alll"):
            await refused(token)

        missing = []
        async with connect("none") as connection:
            played = await play(connection, TOKENS, deadline=LIMIT_S, spec=SPEC)
            assert isinstance(played, NothingCached)
            for prompt in (catalog.namespace.prompt, "f" * 64):
                with pytest.raises(NotFoundError) as caught:
                    await play_asset(connection, type(catalog.namespace)(SPEC.model, prompt), deadline=LIMIT_S)
                missing.append((caught.value.reason, str(caught.value).replace(prompt, "DIGEST")))
        assert missing[0] == missing[1]  # nothing tells what there is from what there is not

        async with connect("all") as connection:
            assert right(await play(connection, TOKENS, deadline=LIMIT_S, policy="fixed:Int4", spec=SPEC))
            served.server.source.regrant(Grants([grant("all", assets=("elsewhere/*",))]))
            played = await play(connection, TOKENS, deadline=LIMIT_S, spec=SPEC)
            assert isinstance(played, NothingCached)
            served.server.source.regrant(Grants([grant("another")]))
            with pytest.raises(PlayError, match=r"UNAUTHORIZED.*token is (no longer accepted|missing or wrong)"):
                await play(connection, TOKENS, deadline=LIMIT_S, spec=SPEC)
        await refused("all")
        await served.empty()

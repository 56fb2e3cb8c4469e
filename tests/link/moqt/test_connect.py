"""Reaching a real origin over QUIC: URLs, who is let in, the blocking twin, and what is left when it ends."""

import asyncio
import importlib.util
import os
import re
import signal
import sys
import threading
from collections import Counter

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from kvabr.client.blocking import Client
from kvabr.link.moqt.connect import asset_of, connect, parse_namespace, parse_url
from kvabr.link.quic.backend import LIBRARIES, installed_libraries
from kvabr.server.certificates import make
from kvabr.types.errors import TransportError, UsageError
from kvabr.types.naming import TrackNamespace
from kvabr.types.peer import PeerOptions
from tests.client.playing import play
from tests.client.served import LIMIT_S, Served
from tests.toymodel import SPEC, prompt

pytestmark = pytest.mark.process

TOKENS = prompt(70).tokens
DIGEST = "ab" * 32


@pytest.fixture(scope="module")
def served(root, tmp_path_factory):
    with Served(root / "short", tmp_path_factory.mktemp("served")) as made:
        yield made


def threads():
    """The threads there are, but for those of the process, which end when they have had nothing to do for a while."""
    own = ("kvabr-decode", "kvabr-cpu-limit")
    return sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith(own))


# ---------------------------------------------------------------------- URLs


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("moqt://origin.example", ("origin.example", 443, "/")),
        ("moqt://origin.example:4443/", ("origin.example", 4443, "/")),
        ("moqt://[::1]:4443/a/b?x=1&y=2", ("::1", 4443, "/a/b?x=1&y=2")),
        ("moqt://Origin.Example/?q=1#kvcache:m/" + DIGEST, ("origin.example", 443, "/?q=1")),
    ],
)
def test_urls(url, parts):
    assert parse_url(url) == parts


@pytest.mark.parametrize(
    "url",
    [
        "origin.example:4443", "https://origin.example/", "moqt:///path", "moqt://", "moqt://h:0/", "moqt://h:99999/",
        "moqt://h:port/", "moqt://user:secret@h/", "moqt://[::1/", "moqt://h /", "", "moqt://a..b/",
        f"moqt://{'a' * 64}.test/",
    ],
)  # fmt: skip
def test_what_is_no_url_says_so_and_keeps_secrets(url):
    with pytest.raises(UsageError) as caught:
        connect(url)
    assert "secret" not in str(caught.value)


def test_fragments_name_assets():
    assert asset_of("moqt://h/") is None
    assert asset_of(f"moqt://h/?q#kvcache:org/model/{DIGEST}") == TrackNamespace("org/model", DIGEST)
    assert asset_of(f"moqt://h/#kvcache:a%20b/{DIGEST.upper()}") == TrackNamespace("a b", DIGEST)
    for fragment in ("kvcache", "kvcache:", "kvcache:model", f"video:m/{DIGEST}", f"kvcache:m/{DIGEST[:-1]}", DIGEST):
        with pytest.raises(UsageError, match="digest"):
            asset_of(f"moqt://h/#{fragment}")
    with pytest.raises(UsageError, match="64 hex digits"):
        parse_namespace("model/12")


@pytest.mark.parametrize(
    "options",
    [{"timeout_s": 0}, {"timeout_s": float("nan")}, {"quic": "tcp"}, {"fingerprint": "12"}, {"fingerprint": "x" * 64}],
)
def test_options_that_make_no_sense(options):
    with pytest.raises(UsageError):
        connect("moqt://h/", PeerOptions(**options))


def test_the_environment_has_a_token(monkeypatch):
    monkeypatch.setenv("KVABR_TOKEN", "from-the-environment")
    assert connect("moqt://h/")._dialler._options.token == "from-the-environment"  # noqa: S105
    assert connect("moqt://h/", PeerOptions(token="mine"))._dialler._options.token == "mine"  # noqa: S105, S106
    colons = ":".join([DIGEST[:2].upper()] * 32)
    assert connect("moqt://h/", PeerOptions(fingerprint=colons))._dialler._options.how.fingerprint == DIGEST


# ------------------------------------------------------------- real networks


async def test_auto_takes_the_fastest_that_is_installed(served, monkeypatch):
    async with connect(served.url, PeerOptions(ca=served.pem, timeout_s=LIMIT_S)) as origin:
        assert (await play(origin, TOKENS, deadline=LIMIT_S, spec=SPEC)).tokens == 70
    async with connect(
        served.url, PeerOptions(fingerprint=served.fingerprint, timeout_s=LIMIT_S, transport="quic")
    ) as origin:
        assert origin.backend == next(name for name in LIBRARIES if importlib.util.find_spec(name))
    monkeypatch.setitem(sys.modules, "qh3", None)
    assert installed_libraries("auto") == ("aioquic",)


# ------------------------------------------------------------------ blocking


def test_the_blocking_twin_says_what_is_wrong_and_leaves_nothing():
    before = threads()
    with pytest.raises(UsageError):
        Client("ftp://h/")
    with Client("moqt://127.0.0.1:9/", PeerOptions(timeout_s=0.3)) as client, pytest.raises(TransportError):
        client.connect()
    assert not Counter(threads()) - Counter(before)  # threads of earlier tests may end meanwhile


def test_ctrl_c_cancels_what_the_main_thread_waits_for(served, monkeypatch):
    with Client(served.url, PeerOptions(timeout_s=LIMIT_S, ca=served.pem, quic="aioquic"), model=SPEC) as client:
        begun, ended = [], []

        async def forever():
            begun.append(True)
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                ended.append(True)

        async def interrupting():
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
            await forever()

        with pytest.raises(KeyboardInterrupt):
            client._loop.call(interrupting())
        assert ended == begun == [True]

        # The interrupt comes when the call has begun and the main thread does not wait for it yet.
        def begin(work, loop):
            threadsafe(work, loop)
            raise KeyboardInterrupt

        threadsafe = asyncio.run_coroutine_threadsafe
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", begin)
        with pytest.raises(KeyboardInterrupt):
            client._loop.call(forever())
        monkeypatch.undo()
        assert ended == begun == [True] * 2
        assert client.play(TOKENS, deadline=LIMIT_S).tokens == 70


# ---------------------------------------------------------------------- files of certificates


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("what", ["none", "folder", "empty", "key", "der", "garbage", "cut"])
async def test_a_file_that_has_no_certificates_is_named(served, tmp_path, library, what):
    pem, key = make()
    path = tmp_path / "ca"
    if what == "folder":
        path.mkdir()
    elif what != "none":
        der = x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)
        garbage = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
        path.write_bytes({"empty": b"", "key": key, "der": der, "garbage": garbage, "cut": pem[: len(pem) // 2]}[what])
    with pytest.raises(TransportError, match=re.escape(f"{path}: ")):
        async with asyncio.timeout(300), connect(served.url, PeerOptions(ca=str(path), quic=library, timeout_s=5.0)):
            pass

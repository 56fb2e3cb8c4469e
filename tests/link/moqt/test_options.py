"""Whom a client trusts."""

import asyncio
import datetime as dt
import hashlib
import socket
import threading

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from kvabr.link.moqt.connect import addresses_of
from kvabr.link.moqt.options import check_pinned, untrusted
from kvabr.server.certificates import make
from kvabr.types.errors import TransportError


def der(now=None):
    return x509.load_pem_x509_certificate(make(now=now)[0]).public_bytes(Encoding.DER)


def test_the_pinned_certificate_and_no_other():
    good = der()
    pin = hashlib.sha256(good).hexdigest()
    check_pinned(good, pin)
    with pytest.raises(TransportError, match="not the expected one"):
        check_pinned(der(), pin)
    with pytest.raises(TransportError, match="no certificate"):
        check_pinned(None, pin)
    garbage = b"\x30\x03garbage"
    with pytest.raises(TransportError, match="cannot be read"):
        check_pinned(garbage, hashlib.sha256(garbage).hexdigest())


def test_a_certificate_of_no_known_version_is_refused():
    strange = der().replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x42", 1)
    with pytest.raises(TransportError, match="cannot be read"):
        check_pinned(strange, hashlib.sha256(strange).hexdigest())
    assert untrusted("why", strange) == untrusted("why")


def test_a_certificate_whose_dates_are_none_is_refused():
    strange = der(dt.datetime(2890, 1, 1, tzinfo=dt.UTC)).replace(b"\x18\x0f2890", b"\x18\x0f0000")
    with pytest.raises(TransportError, match="cannot be read"):
        check_pinned(strange, hashlib.sha256(strange).hexdigest())
    assert untrusted("why", strange) == untrusted("why")


def test_a_refused_certificate_is_described():
    message = untrusted("why", der(dt.datetime(2020, 1, 2, 12, tzinfo=dt.UTC)))
    assert "(why; it is for localhost, 127.0.0.1, ::1, valid from 2020-01-02 to 2020-01-15)" in message


def test_a_pinned_certificate_must_be_valid_today():
    now = dt.datetime.now(dt.UTC)
    for shift, words in ((-30, "expired on"), (30, "not valid before")):
        other = der(now + dt.timedelta(days=shift))
        with pytest.raises(TransportError, match=words):
            check_pinned(other, hashlib.sha256(other).hexdigest())


async def test_silent_name_servers_hold_up_nobody_else(monkeypatch):
    answered, asked, real = threading.Event(), [], socket.getaddrinfo

    def silent(host, *rest, **how):
        if host.endswith(".silent") and not how.get("flags"):
            asked.append(host)
            answered.wait()
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return real(host, *rest, **how)

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    waiting = [asyncio.create_task(addresses_of(f"{number}.silent", 1)) for number in range(40) for _ in range(2)]
    assert (socket.AF_INET, ("127.0.0.1", 7)) in await addresses_of("localhost", 7)
    assert await addresses_of("127.0.0.1", 7) == [(socket.AF_INET, ("127.0.0.1", 7))]
    await asyncio.to_thread(lambda: None)  # the loop's own threads are free
    waiting[0].cancel()
    answered.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert all(isinstance(each, socket.gaierror) for each in found[1:])
    assert set(asked) == {f"{number}.silent" for number in range(40)}

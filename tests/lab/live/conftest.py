"""A certificate for tests that need no more of TLS than that it is there."""

import pytest

from kvabr.server.certificates import development


@pytest.fixture
def certificate():
    """Files of a certificate and its key."""
    with development() as tls:
        yield tls.certfile, tls.keyfile

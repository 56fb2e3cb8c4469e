"""A certificate for tests that need no more of TLS than that it is there."""

import pytest

from kvabr.server.certificates import development


@pytest.fixture
def certificate():
    """Files of a certificate and its key."""
    tls = development()
    return tls.certfile, tls.keyfile

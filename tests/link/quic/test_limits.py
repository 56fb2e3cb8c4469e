"""Limits of the QUIC libraries."""

import pytest
from aioquic.quic.connection import QuicConnectionError
from aioquic.quic.packet import QuicStreamFrame
from aioquic.quic.stream import QuicStreamReceiver

from kvabr.link.quic.backend import library


def test_aioquic_ends_a_connection_whose_peer_leaves_many_gaps():
    """It looks at every gap of a stream for each frame."""
    library("aioquic")
    stream = QuicStreamReceiver(0, readable=True)
    for gap in range(1025):
        assert stream.handle_frame(QuicStreamFrame(data=b"x", fin=False, offset=2 + 2 * gap)) is None
    with pytest.raises(QuicConnectionError):
        stream.handle_frame(QuicStreamFrame(data=b"x", fin=False, offset=4000))

"""The parts of a moqt URI that a client's SETUP carries (draft 18, sections 10.3.1.1 and 10.3.1.2; RFC 3986)."""

from __future__ import annotations

import re

from kvabr.moqt.codes import SessionCode, SessionFault

_PLAIN = rb"[A-Za-z0-9\-._~!$&'()*+,;=]|%[0-9A-Fa-f]{2}"
_PATH = re.compile(rb"(?:/(?:" + _PLAIN + rb"|[:@])*)*(?:\?(?:" + _PLAIN + rb"|[:@/?])*)?")
_AUTHORITY = re.compile(rb"(?:(?:" + _PLAIN + rb"|:)*@)?(?:\[[0-9A-Za-z:.%_~-]+\]|(?:" + _PLAIN + rb")+)(?::[0-9]*)?")


def check_path(path: bytes) -> None:
    """PATH: ``path-abempty``, and perhaps a query.

    Raises:
        SessionFault: it is none.
    """
    if not _PATH.fullmatch(path):
        raise SessionFault("the PATH is no path of a URI", SessionCode.MALFORMED_PATH)


def check_authority(authority: bytes) -> None:
    """AUTHORITY: a host that is not empty, and perhaps a port.

    Raises:
        SessionFault: it is none.
    """
    if not _AUTHORITY.fullmatch(authority):
        raise SessionFault("the AUTHORITY is no authority of a URI", SessionCode.MALFORMED_AUTHORITY)

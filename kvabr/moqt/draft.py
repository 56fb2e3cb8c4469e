"""What differs between the drafts of moq-transport that are spoken here."""

from __future__ import annotations

from dataclasses import dataclass

from kvabr.moqt.wire import NARROW, WIDE, Varint


@dataclass(frozen=True, slots=True)
class Draft:
    """One draft."""

    number: int
    varint: Varint
    streams: bool
    """Whether every request has a bidirectional stream of its own (draft 17 and later), or all share one."""

    @property
    def alpn(self) -> str:
        """Its ALPN protocol identifier."""
        return f"moqt-{self.number}"


DRAFT_18 = Draft(18, WIDE, streams=True)
DRAFT_16 = Draft(16, NARROW, streams=False)
DRAFTS = (DRAFT_18, DRAFT_16)
"""All of them, the preferred one first."""


def by_alpn(alpn: str) -> Draft | None:
    """The draft of an ALPN protocol identifier, or None if it is not spoken here."""
    return next((draft for draft in DRAFTS if draft.alpn == alpn), None)

"""Vocabulary of a play's events that the player, the transport and the reports share."""

from __future__ import annotations

from typing import Literal

Limit = Literal["network", "publisher", "cpu", "kept"]
"""What held a transfer up: the path, a peer with nothing to send, or this process, which could not read faster.

``kept``: the bytes were already here, and say nothing about the path.
"""

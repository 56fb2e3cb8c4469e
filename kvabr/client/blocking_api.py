"""The library for code that does not use asyncio: the same calls, blocking. See `kvabr.client.blocking_connection`."""

from kvabr.client.blocking_connection import Origin, connect, play, play_asset

__all__ = ["Origin", "connect", "play", "play_asset"]

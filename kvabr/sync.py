"""The library for code that does not use asyncio: the same calls, blocking. See `kvabr.client.sync`."""

from kvabr.client.sync import Origin, connect, play, play_asset

__all__ = ["Origin", "connect", "play", "play_asset"]

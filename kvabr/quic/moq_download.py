"""One download by moq-rs."""

from __future__ import annotations

import asyncio
from abc import abstractmethod

from kvabr.quic.buffered import BufferedDownload, Owner
from kvabr.types.naming import TrackNamespace


class MoqOwner(Owner):
    """A connection that can change the order of what waits."""

    @abstractmethod
    def prioritise(self, download: MoqDownload, priority: int) -> None:
        """Change the place of a download that waits."""


class MoqDownload(BufferedDownload):
    """One group on its way."""

    def __init__(
        self,
        connection: MoqOwner,
        namespace: TrackNamespace,
        track: str,
        group: int,
        priority: int,
        limit: int,
        *,
        exact: bool = False,
    ) -> None:
        super().__init__(connection, track, group, priority, limit, exact=exact)
        self.namespace, self.track, self.group = namespace, track, group
        self.task: asyncio.Task[None] | None = None
        """Once it has been asked for."""
        self._connection = connection

    def prioritise(self, priority: int) -> None:
        """See `Download.prioritise`; it only counts before the request goes out."""
        if self.task is None and not self.over:
            self._connection.prioritise(self, priority)

"""The node: one long-lived fetcher for all plays of a decode node.

`Fetcher` gives every play a connection of its own to look at (`seat`), behind which all share what there is: one
connection per peer (`peers`), downloads under way (`flights`), groups that came before (`store`, `disk`), the link by
deadline (`order`), and a bound on how many play at once (`gate`). A play notices none of it: it speaks to a
`kvabr.quic.interface.Connection` as ever, so nothing here decides what a policy could decide.

`BlockingFetcher` is the same for engines with threads.
"""

from kvabr.client.blocking_fetcher import BlockingFetcher, Handle
from kvabr.client.fetcher import Fetcher, Limits
from kvabr.client.metrics import NodeMetrics
from kvabr.client.peers import Peer

__all__ = ["BlockingFetcher", "Fetcher", "Handle", "Limits", "NodeMetrics", "Peer"]

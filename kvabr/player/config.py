"""What a player does whatever its policy: how much it asks for at a time, and how long it has patience."""

from __future__ import annotations

from dataclasses import dataclass

from kvabr.types.errors import UsageError

GPU_PRICE = 1e-3
"""What a second of an engine's time is worth unless the user says otherwise, nats per token: it has time to spare."""


@dataclass(frozen=True, slots=True)
class PlayerConfig:
    """What a player does whatever its policy."""

    min_requests: int = 2
    """Requests kept in flight at least, to hide the round trip."""
    first_requests: int = 4
    """Requests in flight at least while no rate is known."""
    max_requests: int = 32
    """Requests in flight at most."""
    ticks: int = 50
    """Times per deadline that the session looks at transfers that move, or do not."""
    attempts: int = 3
    """Times that one group of one track is asked for before it counts as not to be had."""
    plan_after: float = 0.1
    """Share of the deadline before which nothing is left to the engine: slow start makes every link look too slow."""
    give_up_after: float = 10.0
    """Deadlines after which a play that cannot be completed is given up."""
    gpu_price: float = GPU_PRICE
    """Nats per token that a second of the engine's time is worth: about nothing where it is idle, much where others
    wait for it; infinite: it computes only what the network will not bring in time."""
    lumps: bool = False
    """Whether bytes are told of as they are read, as real transports do, and not as they flow."""
    stalled_after: float | None = None
    """Share of the deadline after which a transfer that stands still is asked for again; None: never."""
    silent_after: float | None = None
    """Share of the deadline: a play that is late and has heard nothing for so long, and for thrice the usual time to a
    first byte, is given up; None: never."""

    def __post_init__(self) -> None:
        if not self.gpu_price >= 0:
            raise UsageError(f"the price of engine time is {self.gpu_price}; it must be zero or more nats a second")

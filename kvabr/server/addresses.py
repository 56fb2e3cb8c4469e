"""Networks that identify a client, or that probably share its path."""

from __future__ import annotations

import ipaddress

_SITE_BITS = {4: 32, 6: 64}
"""Leading bits that identify a client, by IP version; an IPv6 client chooses the remaining bits itself."""
_BLOCK_BITS = {4: 24, 6: 56}
"""Leading bits of addresses that usually share a path, by IP version."""


def site_of(address: str) -> str:
    """Return the IPv4 address or IPv6 network that identifies a client."""
    return _network(address, _SITE_BITS).removesuffix("/32")


def block_of(address: str) -> str:
    """Return the network of addresses that usually share a path with this one."""
    return _network(address, _BLOCK_BITS)


def _network(address: str, bits: dict[int, int]) -> str:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return str(ipaddress.ip_network((found, bits[found.version]), strict=False))

"""An emulated link for whole IP packets: the kernel's TCP and UDP pass one bottleneck, on a single machine.

The shaper uses a TUN device instead of sockets, without network namespaces. Packets to `FAR` leave through the device;
the shaper's process rewrites their addresses to those of the other end and returns them to the kernel:

  player 198.18.0.1, to 198.18.0.4 (`FAR`) | device, shaper, device | from 198.19.0.2, to 198.19.0.1 (`NEAR`) origin

Both pairs of addresses have the same sum, so checksums stay valid. They are two small networks of the benchmark range
(RFC 2544). Requires Linux, iproute2 and the right to administer the network (CAP_NET_ADMIN, as for root).
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import socket
import struct
import subprocess
from collections.abc import Iterable
from multiprocessing.connection import Connection

from kvabr_lab.live.child import Child
from kvabr_lab.live.packet_schedule import Conditions
from kvabr_lab.live.shaper import Address, Forwarder, Port, Shaper

NEAR, FAR = "198.19.0.1", "198.18.0.4"
"""An origin's address, and the address at which players reach it."""
_PLAYER, _FAR_PLAYER = "198.18.0.1", "198.19.0.2"
"""A player's address, and the address that an origin sees for the player."""
MTU = 1500
_DEVICE = "/dev/net/tun"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
_BATCH = 64
_ADDRESSES = slice(12, 20)


class Device:
    """A TUN device with both addresses; closing it removes it."""

    def __init__(self) -> None:
        """Create the device.

        Raises:
            OSError: The device or the right to create one is missing, or another link is running.
        """
        if _is_here(NEAR):
            raise OSError(f"the network device {NEAR} is in use by another link")
        self._file = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK)
        try:
            made = fcntl.ioctl(self._file, _TUNSETIFF, struct.pack("16sH14x", b"kvabr%d", _IFF_TUN | _IFF_NO_PI))
            name = made[:16].rstrip(b"\0").decode()
            for command in (
                ("addr", "add", f"{_PLAYER}/24", "dev", name),
                ("addr", "add", f"{NEAR}/24", "dev", name),
                ("link", "set", name, "mtu", str(MTU), "txqueuelen", "10000", "up"),
            ):
                _ip(*command)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._file

    def read(self) -> bytes:
        """Return the next packet that leaves through the device; raise a BlockingIOError if there is none."""
        return os.read(self._file, MTU)

    def send(self, data: bytes, /) -> int:
        """Deliver a packet to the kernel."""
        return os.write(self._file, data)

    def close(self) -> None:
        """Remove the device."""
        os.close(self._file)


def _is_here(address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind((address, 0))
        except OSError:
            return False
    return True


def _ip(*command: str) -> None:
    done = subprocess.run(("ip", *command), capture_output=True, text=True, check=False)  # noqa: S603, S607
    if done.returncode:
        raise OSError(f"ip {' '.join(command)}: {done.stderr.strip()}")


class TunShaper(Shaper):
    """Runs the process of a link for IP packets; `FAR` leads to an origin at `NEAR`. It cannot be rebound."""

    def __init__(self, conditions: Conditions | None = None) -> None:
        """Create the device, and a link without a bottleneck.

        Raises:
            TransportError: The device cannot be created; the message gives the reason.
        """
        Child.__init__(self, "link shaper", _main, conditions or Conditions())
        self.address, self._trace = self.greeting, None


def _main(pipe: Connection, conditions: Conditions) -> None:
    gc.disable()  # as in the UDP shaper
    try:
        forwarder = _PacketForwarder(Device(), conditions)
    except OSError as error:
        pipe.send(f"{error}; a link for TCP needs {_DEVICE}, `ip`, and permission to administer the network (root)")
        return
    pipe.send((FAR, 0))
    with contextlib.suppress(EOFError, OSError):
        forwarder.run(pipe)


class _PacketForwarder(Forwarder):
    def __init__(self, device: Device, conditions: Conditions) -> None:
        self._device = device
        super().__init__(conditions)
        player, far, far_player, near = map(socket.inet_aton, (_PLAYER, FAR, _FAR_PLAYER, NEAR))
        self._ways = {player + far: (self.up, far_player + near), near + far_player: (self.down, far + player)}

    def ports(self) -> Iterable[Port]:
        return (self._device,)

    def read(self, port: Port, now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(_BATCH):
                packet = self._device.read()
                if (found := self._ways.get(packet[_ADDRESSES])) is not None:  # otherwise an unknown address
                    way, addresses = found
                    there = packet[: _ADDRESSES.start] + addresses + packet[_ADDRESSES.stop :]
                    self.hold(way, now, port, None, there, 0)

    def rebind(self, origin: Address | None) -> None:
        """Do nothing, see `Forwarder.rebind`: this link has no ports to change."""

    def kernel_drops(self) -> int | None:
        return None

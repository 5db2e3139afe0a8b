"""Delay all packets from and to a node: ``delay.py NODE SECONDS``. Ends at SIGTERM.

A program in place of the cable between node and bridge. ``tc``'s netem would need a kernel module.
"""

import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque

OUTGOING = 4  # PACKET_OUTGOING of linux/if_packet.h
ETHTOOL = 0x8946  # SIOCETHTOOL of linux/sockios.h
OFFLOADS = (0x17, 0x1F, 0x24)  # checksums, TCP segmentation and generic segmentation


def disable_offloads(interface: str) -> None:
    """Send packets as on a real cable: with checksums, and no longer than the MTU."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP16x", interface.encode(), ctypes.addressof(value))
            fcntl.ioctl(control, ETHTOOL, request)


def open_interface(name: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))  # ETH_P_ALL
    opened.bind((name, 0))
    return opened


def main(node: str, seconds: float) -> None:
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    os.setns(os.open(f"/run/netns/{node}", os.O_RDONLY))
    disable_offloads("eth0")
    os.setns(home)
    for words in (
        f"link add {node}-near type veth peer name {node}-far",
        f"link set {node} nomaster",
        f"link set {node}-far master bridge up",
        f"link set {node}-near up",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    disable_offloads(f"{node}-far")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    ends = {open_interface(node), open_interface(f"{node}-near")}
    queue: deque[tuple[float, socket.socket, bytes]] = deque()
    try:
        while True:
            wait = max(0.0, queue[0][0] - time.monotonic()) if queue else None
            for end in select.select(ends, [], [], wait)[0]:
                packet, (_, _, kind, *_) = end.recvfrom(1 << 16)
                if kind != OUTGOING:
                    (other,) = ends - {end}
                    queue.append((time.monotonic() + seconds, other, packet))
            while queue and queue[0][0] <= time.monotonic():
                _, end, packet = queue.popleft()
                end.send(packet)
    finally:
        for words in (f"link delete {node}-near", f"link set {node} master bridge"):
            subprocess.run(["ip", *words.split()], check=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))

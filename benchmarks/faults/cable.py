"""A cable between two machines that delays, doubles and loses packets, or is cut. The machines are network namespaces.

Each has a tun device; a thread here carries packets from one to the other. Not every kernel has netem for that.
"""

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from contextlib import suppress

NEW_DEVICE, WITHOUT_HEADER = 0x400454CA, 0x1001  # TUNSETIFF; IFF_TUN | IFF_NO_PI
LARGEST = 1 << 16  # bytes of a packet
NAME = "cable"


def why_not() -> str:
    """Why there can be no such machines here, or ''."""
    name = f"millionway-{os.getpid()}"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
        done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    if done.returncode:
        return f"network namespaces are not allowed ({done.stderr.strip()})"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


class Cable:
    """Machines `hosts` with the addresses 10.231.7.1 and 10.231.7.2."""

    def __init__(self) -> None:
        self.hosts = [f"millionway-{os.getpid()}-{number}" for number in (1, 2)]
        self.ends: list[int] = []
        self.ended = threading.Event()
        self.be()

    def be(self, delay: float = 0.0, doubled: float = 0.0, lost: float = 0.0) -> None:
        """delay: seconds, by up to a quarter more or less, so that packets overtake each other; shares of packets."""
        self.delay, self.doubled, self.lost = delay, doubled, lost

    def __enter__(self) -> "Cable":
        for number, host in enumerate(self.hosts, start=1):
            device = f"mw{os.getpid()}-{number}"
            subprocess.run(["ip", "netns", "add", host], check=True)
            self.ends.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
            fcntl.ioctl(self.ends[-1], NEW_DEVICE, struct.pack("16sH", device.encode(), WITHOUT_HEADER))
            subprocess.run(["ip", "link", "set", device, "netns", host, "name", NAME], check=True)
            for command in (f"addr add 10.231.7.{number}/24 dev {NAME}", f"link set {NAME} up", "link set lo up"):
                subprocess.run(["ip", "-n", host, *command.split()], check=True)
        self.thread = threading.Thread(target=self._carry, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        for end in self.ends:
            os.close(end)
        for host in self.hosts:
            subprocess.run(["ip", "netns", "delete", host], capture_output=True)

    def _carry(self) -> None:
        chance, under_way, number = random.Random(0), [], 0
        while not self.ended.is_set():
            wait = min(0.05, max(0.0, under_way[0][0] - time.monotonic())) if under_way else 0.05
            for end in select.select(self.ends, [], [], wait)[0]:
                packet = os.read(end, LARGEST)
                if chance.random() < self.lost:
                    continue
                for _ in range(1 + (chance.random() < self.doubled)):
                    number += 1
                    due = time.monotonic() + self.delay * chance.uniform(0.75, 1.25)
                    heapq.heappush(under_way, (due, number, self.ends[end == self.ends[0]], packet))
            while under_way and under_way[0][0] <= time.monotonic():
                *_, end, packet = heapq.heappop(under_way)
                with suppress(OSError):  # the machine's own queue is full
                    os.write(end, packet)

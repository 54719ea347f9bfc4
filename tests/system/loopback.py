"""Brings up ``lo`` in a network namespace, as ``ip link set lo up`` does, without iproute2."""

import fcntl
import socket
import struct

SIOCSIFFLAGS = 0x8914
UP_AND_RUNNING = 0x1 | 0x40

if __name__ == "__main__":
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", UP_AND_RUNNING))

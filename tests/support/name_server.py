"""A name server on loopback whose one answer a test changes at will."""

import asyncio
import contextlib
import ipaddress
import struct

_A, _IN = 1, 1


class NameServer(asyncio.DatagramProtocol):
    """Answers every question for an address with `addresses` (IPv4), others with nothing."""

    def __init__(self):
        self.addresses = []
        self.port = 0
        self._transport = None

    def connection_made(self, transport):
        self._transport = transport
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data, sender):
        end = data.index(b"\0", 12) + 1
        (kind,) = struct.unpack_from("!H", data, end)
        question = data[12 : end + 4]
        answers = self.addresses if kind == _A else []
        header = data[:2] + struct.pack("!HHHHH", 0x8180, 1, len(answers), 0, 0)
        records = [
            # The name as at offset 12, then type, class, time to live, length, address.
            struct.pack("!HHHIH", 0xC00C, _A, _IN, 0, 4) + ipaddress.ip_address(each).packed
            for each in answers
        ]
        self._transport.sendto(header + question + b"".join(records), sender)


@contextlib.asynccontextmanager
async def name_server():
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", 0))
    try:
        yield server
    finally:
        transport.close()

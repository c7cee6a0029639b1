"""A line to a server on loopback that takes as long as a test says."""

import asyncio
import contextlib


class SlowLine:
    """Passes bytes on in order, each piece `delay_s` after it came. `port` is its own."""

    def __init__(self, port):
        self.delay_s = 0.0
        self.port = 0
        self._to = port

    async def serve(self, reader, writer):
        """One connection, in both directions, until either end closes."""
        out_reader, out_writer = await asyncio.open_connection("127.0.0.1", self._to)
        both = (self._pass(reader, out_writer), self._pass(out_reader, writer))
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await asyncio.gather(*both)
        for each in (writer, out_writer):
            each.close()

    async def _pass(self, reader, writer):
        while piece := await reader.read(65_536):
            await asyncio.sleep(self.delay_s)
            writer.write(piece)
        writer.close()


@contextlib.asynccontextmanager
async def slow_line(port, tls=None):
    """`tls` is the SSLContext of its near end."""
    line = SlowLine(port)
    server = await asyncio.start_server(line.serve, "127.0.0.1", 0, ssl=tls)
    line.port = server.sockets[0].getsockname()[1]
    try:
        yield line
    finally:
        server.close()

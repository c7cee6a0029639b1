"""An app server before Noria: adds a system text, streams, and cancels when its client goes.

Start it, then: curl -N localhost:8000 -d "Is a tomato a fruit?"
"""

import asyncio
from asyncio import StreamReader, StreamWriter
from email import message_from_bytes

from noria import AsyncClient, NoriaError

SYSTEM = "You work for a greengrocer. Answer in one sentence."


async def read_question(reader: StreamReader) -> str:
    fields = message_from_bytes((await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[2])
    return (await reader.readexactly(min(int(fields["Content-Length"] or 0), 10_000))).decode()


async def answer(noria: AsyncClient, question: str, writer: StreamWriter) -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    try:
        async with noria.stream_chat(question, system=SYSTEM, max_tokens=200) as stream:
            async for delta in stream:
                writer.write(head + f"{len(delta.encode()):x}\r\n{delta}\r\n".encode())
                head = b""
                await writer.drain()
        writer.write(head + b"0\r\n\r\n")
    except NoriaError as error:
        if head:  # Later on, the missing last chunk tells that the answer was cut.
            writer.write(f"HTTP/1.1 503 Unavailable\r\n\r\n{error}\n".encode())


async def until_gone(reader: StreamReader) -> None:
    await reader.read(1)
    raise ConnectionError("the client went")


async def serve(noria: AsyncClient, reader: StreamReader, writer: StreamWriter) -> None:
    try:
        question = await asyncio.wait_for(read_question(reader), timeout=10)
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(until_gone(reader))
            await answer(noria, question, writer)  # Cancelled when the client goes.
            watch.cancel()
    except* (OSError, EOFError, ValueError, asyncio.LimitOverrunError):
        pass  # Nobody is there any more, or what came is no question.
    finally:
        writer.close()


async def main() -> None:
    async with AsyncClient("localhost:50051") as noria:
        server = await asyncio.start_server(lambda r, w: serve(noria, r, w), "localhost", 8000)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())

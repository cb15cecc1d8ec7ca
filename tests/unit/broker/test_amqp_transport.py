"""Writes of one turn of the event loop are one packet."""

import asyncio

from shared.broker.amqp.transport import GatheringWriter


class Packets(asyncio.WriteTransport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self._closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self._closed
        self.sent.append(bytes(data))

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True


def writer_to(packets: Packets) -> GatheringWriter:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    return GatheringWriter(packets, protocol, reader, asyncio.get_running_loop())


async def test_writes_of_one_turn_are_one_packet() -> None:
    writer = writer_to(packets := Packets())
    for data in (b"a", b"b"):
        writer.write(data)
    await asyncio.sleep(0)
    writer.write(b"c")
    await asyncio.sleep(0)
    writer.close()

    assert packets.sent == [b"ab", b"c"]


async def test_drain_and_close_send_what_was_written() -> None:
    writer = writer_to(packets := Packets())
    writer.write(b"a")
    await writer.drain()
    writer.write(b"b")
    writer.close()

    assert packets.sent == [b"a", b"b"]

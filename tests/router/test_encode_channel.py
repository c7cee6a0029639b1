"""Prompts find a tokenizer that came back with certificates of another authority."""

import grpc
import pytest

from noria.service.server import running_server
from noria.service.tls_files import TlsSource
from noria.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from router.encode_channel import EncodeChannel
from tests.support.certificates import Fleet


class Encoder(tokenizer_pb2_grpc.TokenizerServiceServicer):
    async def Encode(self, request, context):  # noqa: N802 - the wire's name
        return tokenizer_pb2.EncodeResponse(token_ids=[7])


def serving(listen, tls):
    def add(server):
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(Encoder(), server)

    return running_server(add, ("noria.v1.TokenizerService",), listen, tls=tls)


async def encoded(channel, timeout=5):
    request = tokenizer_pb2.EncodeRequest()
    answer = await channel.stub().Encode(request, timeout=timeout, wait_for_ready=True)
    return list(answer.token_ids)


async def test_a_channel_follows_its_files(tmp_path):
    fleet = Fleet(tmp_path)
    server, client = TlsSource(fleet.service), TlsSource(fleet.peers)
    async with serving("127.0.0.1:0", server) as running:
        address = running.address
        async with EncodeChannel(address, client) as channel:
            assert await encoded(channel) == [7]
            assert channel.stub() is channel.stub()
            await running.grpc_server.stop(0)
            fleet.renew()
            async with serving(address, TlsSource(fleet.service)):
                with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
                    await encoded(channel, timeout=0.5)
                assert client.poll()
                assert await encoded(channel) == [7]


async def test_without_tls_the_channel_stays_the_same():
    async with EncodeChannel("127.0.0.1:1", None) as channel:
        assert channel.stub() is channel.stub()

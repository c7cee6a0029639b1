"""A session that brings bytes that are no message ends with a reason; the others go on."""

import grpc
import pytest

from noria.reasons import Reason
from noria.service.channel import CLIENT_OPTIONS
from noria.service.errors import DETAILS_KEY, parse_status_details
from noria.v1 import worker_pb2
from tests.support.waiting import until
from tests.support.worker_client import GREEDY, worker_client
from worker.app import running_worker
from worker.config import WorkerConfig

HELLO = worker_pb2.SessionRequest(
    hello=worker_pb2.RouterHello(protocol_version=1, router_instance_id="test")
).SerializeToString()
SUBMIT = worker_pb2.SessionRequest(
    submit=worker_pb2.Submit(
        id="r", submit_number=1, prompt_token_ids=[5, 9], max_tokens=10**4, sampling=GREEDY
    )
).SerializeToString()
BROKEN = b"\xff" * 100


@pytest.mark.parametrize("sent", [[BROKEN], [HELLO, BROKEN], [HELLO, SUBMIT, BROKEN]])
async def test_the_session_ends_with_a_reason_and_gives_everything_back(
    sent, golden_model, script_file
):
    """Instead of hello, as the first after it, or while something is being computed."""
    script = script_file(mean_output_tokens=0, step_seconds=0.001)
    config = WorkerConfig(model=golden_model, script=script, listen="127.0.0.1:0")
    async with running_worker(config) as worker:
        scheduler = (await worker.ready()).scheduler
        async with grpc.aio.insecure_channel(worker.address, options=CLIENT_OPTIONS) as channel:
            call = channel.stream_stream("/noria.v1.WorkerService/Session")()
            for message in sent:
                await call.write(message)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await to_its_end(call)
        error = parse_status_details(dict(caught.value.trailing_metadata())[DETAILS_KEY])
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (error.reason, error.fields[0][0]) == (Reason.INVALID_FIELD, "request")
        await until(lambda: worker.state().live_submits + scheduler.pool.num_used == 0)
        async with worker_client(worker.address) as client:
            assert len(await client.generate([5, 9], 3)) == 3


async def to_its_end(call):
    while await call.read() is not grpc.aio.EOF:
        pass

"""One running tokenizer service: server, encode threads and the model put together."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Callable

import grpc
import structlog

from noria.service.metrics import new_registry, serving_metrics
from noria.service.server import RunningServer, running_server
from noria.service.tls_files import opened
from noria.service.tls_watch import TlsWatch
from noria.v1 import tokenizer_pb2_grpc
from tokenizer_svc.config import TokenizerConfig
from tokenizer_svc.encode_pool import EncodePool
from tokenizer_svc.servicer import TokenizerServicer
from tokenizer_svc.text_service import TextService, load_text_service

SERVICE = "noria.v1.TokenizerService"
# Name of the thread that loads the model. It cannot be interrupted.
LOADING = "load"
STAGE = "loading the vocabulary"
_POLL_S = 0.05


class RunningTokenizer:
    """A tokenizer service whose address is known. It answers once `ready` returns."""

    def __init__(
        self,
        server: RunningServer,
        servicer: TokenizerServicer,
        loading: asyncio.Future[TextService],
    ) -> None:
        self.address = server.address
        self.metrics_address = ""
        self._server = server
        self._servicer = servicer
        self._loading = loading

    async def ready(self) -> TextService:
        """Wait until the model is loaded, then serve. Raises what loading it raised."""
        text = await asyncio.shield(self._loading)
        self._servicer.start(text)
        await self._server.set_ready(True)
        return text

    async def drain(self, grace_s: float) -> int:
        """Ask for no new outputs, let outputs and calls that are open finish for `grace_s`.

        Gives how many are left then.
        """
        await self._server.set_ready(False)
        self._servicer.announce_draining()
        for _ in range(round(grace_s / _POLL_S)):
            if self._servicer.num_open == 0:
                break
            await asyncio.sleep(_POLL_S)
        return self._servicer.num_open


@contextlib.asynccontextmanager
async def running_tokenizer(
    config: TokenizerConfig,
    *,
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    on_failure: Callable[[Exception], None] = lambda failure: None,
) -> AsyncIterator[RunningTokenizer]:
    """Listen at once, load on a thread. `on_progress(stage, done, total)` is called there.

    Leaving the block does not wait for that thread, whose name is LOADING. Raises TlsFileError
    for unusable certificates.
    """

    def load() -> TextService:
        on_progress(STAGE, 0, 1)
        text = load_text_service(config.model, config.name)
        on_progress(STAGE, 1, 1)
        return text

    tls = opened(config.tls)
    watch = TlsWatch({"server": tls}, structlog.get_logger(service="tokenizer"))
    with EncodePool(config.encode_threads) as pool:
        registry = new_registry()
        servicer = TokenizerServicer(pool, on_failure, registry)

        def add_services(server: grpc.aio.Server) -> None:
            tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(servicer, server)

        async with (
            running_server(add_services, (SERVICE,), config.listen, tls=tls) as server,
            watch.running(registry),
        ):
            loading = _on_thread(load)
            tokenizer = RunningTokenizer(server, servicer, loading)
            try:
                async with serving_metrics(config.metrics_listen, registry) as address:
                    tokenizer.metrics_address = address
                    yield tokenizer
            finally:
                loading.cancel()


def _on_thread(load: Callable[[], TextService]) -> asyncio.Future[TextService]:
    """What `load` gives; a thread that nothing waits for at the loop's end runs it."""
    loaded: concurrent.futures.Future[TextService] = concurrent.futures.Future()
    loaded.set_running_or_notify_cancel()

    def run() -> None:
        try:
            loaded.set_result(load())
        except BaseException as error:
            loaded.set_exception(error)

    threading.Thread(target=run, name=LOADING, daemon=True).start()
    return asyncio.wrap_future(loaded)

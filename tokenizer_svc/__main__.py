"""`python -m tokenizer_svc`: one tokenizer process."""

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click
import structlog

from noria.service.log import LEVELS, configure_logging, places_of, why_not
from noria.service.parent import die_with_parent
from noria.service.server import stop_event
from noria.service.tasks import unless
from noria.service.tls_flags import server_tls_flags, take_server_tls
from tokenizer_svc.app import LOADING, running_tokenizer
from tokenizer_svc.config import TokenizerConfig

_MODEL = "A GGUF file or a Hugging Face folder."


@click.command(context_settings={"auto_envvar_prefix": "NORIA_TOKENIZER", "show_default": True})
@click.option("--model", type=click.Path(exists=True, path_type=Path), required=True, help=_MODEL)
@click.option("--served-model-name", default="", help="Name that requests use.")
@click.option("--listen", default="127.0.0.1:50052", help="host:port; port 0 picks one.")
@click.option("--metrics-listen", default="", help="host:port for /metrics; empty: none.")
@server_tls_flags
@click.option("--encode-threads", type=click.IntRange(1), default=2, help="For short texts.")
@click.option(
    "--drain-grace-s", type=click.FloatRange(0), default=60.0, help="For outputs left at SIGTERM."
)
@click.option("--log-level", type=click.Choice(LEVELS), default="info", help="The least told.")
@click.option("--parent-pid", type=int, help="End when this process ends.")
def main(parent_pid: int | None, log_level: str, **settings: Any) -> None:
    """Serve one model's text side to routers."""
    if parent_pid is not None:
        die_with_parent(parent_pid)
    config = TokenizerConfig(tls=take_server_tls(settings), **settings)
    log = configure_logging("tokenizer", log_level)
    status = asyncio.run(serve(config, log))
    if any(thread.name == LOADING for thread in threading.enumerate()):
        # It is inside a native library, which must not lose the interpreter under its feet.
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


async def serve(config: TokenizerConfig, log: structlog.typing.FilteringBoundLogger) -> int:
    """Run until told to stop; the exit status."""
    started = time.monotonic()
    stop = stop_event()

    def on_progress(stage: str, done: int, total: int) -> None:
        log.info("progress", stage=stage, done=done, total=total)

    def on_failure(failure: Exception) -> None:
        log.error("call failed", kind=type(failure).__name__, where=places_of(failure))

    try:
        async with running_tokenizer(
            config, on_progress=on_progress, on_failure=on_failure
        ) as tokenizer:
            log.info("listening", address=tokenizer.address, metrics=tokenizer.metrics_address)
            text = await unless(stop, tokenizer.ready())
            if text is None:
                log.info("draining")
                log.info("stopped", cut_off=0)
                return 0
            log.info(
                "ready",
                seconds=round(time.monotonic() - started, 2),
                model=config.name,
                vocab_fingerprint=text.vocabulary.fingerprint,
                template_fingerprint=text.template_fingerprint,
            )
            await stop.wait()
            log.info("draining")
            left = await tokenizer.drain(config.drain_grace_s)
    except Exception as error:
        log.error("cannot serve", **why_not(error))
        return 1
    log.info("stopped", cut_off=left)
    return 0


if __name__ == "__main__":
    main()

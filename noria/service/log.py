"""Structured logs: JSON lines on stderr, one event per line."""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import structlog

LEVELS = ("debug", "info", "warning", "error")


def configure_logging(service: str, level: str = "info") -> structlog.typing.FilteringBoundLogger:
    """Set up logging for this process and return its logger, bound to the service's name.

    `level` is one of LEVELS, the least that is written.
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(ensure_ascii=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(service=service)
    return logger


def loop_end(
    log: structlog.typing.FilteringBoundLogger,
) -> Callable[[BaseException | None], None]:
    """Tells `log` that a loop, which should never end, did so and is begun again."""

    def tell(error: BaseException | None) -> None:
        kind, where = (type(error).__name__, places_of(error)) if error else ("", [])
        log.error("loop_ended", error=kind, where=where)

    return tell


def why_not(error: Exception) -> dict[str, object]:
    """What to log of an error that kept a service from its start.

    Settings and model files are told of in the error's own words; another error is a defect,
    told by its place.
    """
    if isinstance(error, ValueError | OSError):
        return {"reason": str(error)}
    return {"reason": f"unexpected {type(error).__name__}", "where": places_of(error)}


def places_of(error: BaseException) -> list[str]:
    """A traceback's places, without the exception's text: that could hold what a request sent."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]

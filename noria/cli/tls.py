"""How the `noria` command encrypts its connections: options that stand before the subcommand."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from noria.cli.terminal import tell
from noria.client.tls import Tls
from noria.service.tls import handshake_problem

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--ca", metavar="FILE", help="The server's CA in PEM: encrypts the connection."),
    click.option("--client-cert", metavar="FILE", help="This client's certificate in PEM."),
    click.option("--client-key", metavar="FILE", help="Its private key in PEM."),
    click.option("--server-name", metavar="NAME", help="In the server's certificate."),
)


def tls_options(command: F) -> F:
    """Add all of them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def tls_of(
    ca: str | None, client_cert: str | None, client_key: str | None, server_name: str | None
) -> Tls | None:
    """What they say; None if nothing is said. Raises UsageError."""
    if ca is None:
        if client_cert or client_key or server_name:
            raise click.UsageError("--ca: none; the other options of TLS need it")
        return None
    return Tls(ca, client_cert, client_key, server_name or "")


def why_unreachable(address: str, problem: str, tls: Tls | None) -> str:
    """What may be wrong where no server answers; `problem` is what gRPC says of it."""
    if handshake := handshake_problem(problem):
        hint = "; --server-name says which" if "name" in handshake else " given with --ca"
        return f"{address}: {handshake}{'' if 'no TLS' in handshake else hint}"
    if tls is None and "Socket closed" in problem:
        return f"{address} closes the connection; if it speaks TLS, give its --ca"
    if tls is not None and tls.cert is None and "Socket closed" in problem:
        return f"{address} closes the connection; it may ask for a --client-cert"
    return f"no server answers at {address}"


@contextlib.contextmanager
def told_warnings() -> Iterator[None]:
    """Warnings of the client are told on one line, without the place in the code."""

    def show(message: Warning | str, *place: Any, **more: Any) -> None:
        tell(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield

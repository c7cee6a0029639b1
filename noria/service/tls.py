"""gRPC's credentials from files that may change while they are in use.

A connection keeps what it began with: a server asks for its certificate at each handshake,
a client's new channels have the new files.
"""

from typing import Any

import grpc

from noria.service.channel import Options
from noria.service.tls_files import TlsMaterial, TlsSource


def server_credentials(source: TlsSource) -> grpc.ServerCredentials:
    """A server's side. With a CA, every client needs a certificate that it signed."""
    told = source.material

    def changed() -> grpc.ServerCertificateConfiguration | None:
        # Called at each handshake, on a thread of gRPC's; None: the same as before.
        nonlocal told
        if source.material is told:
            return None
        told = source.material
        return _configuration(told)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(told),
        changed,  # type: ignore[arg-type] # None is allowed, gRPC's documentation says
        require_client_authentication=told.ca is not None,
    )


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    pairs = [(material.key or b"", material.cert or b"")]
    return grpc.ssl_server_certificate_configuration(pairs, root_certificates=material.ca)


def channel_credentials(source: TlsSource) -> grpc.ChannelCredentials:
    """A client's side, as the files are now."""
    material = source.material
    return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)


def channel_options(source: TlsSource) -> Options:
    """What a channel needs besides: the name in the server's certificate, where it is another."""
    name = source.files.server_name
    return (("grpc.ssl_target_name_override", name),) if name else ()


def certified_names(context: grpc.aio.ServicerContext[Any, Any]) -> tuple[str, ...]:
    """The subject alternative names of a caller's certificate; none of a caller without one.

    Only a certificate that the server's CA has signed comes so far.
    """
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return tuple(name.decode("utf-8", "replace") for name in names)


def handshake_problem(details: str) -> str:
    """Why a connection's handshake failed, from what gRPC says of it; empty for anything else."""
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return "its certificate is not of the CA"
    if "Hostname Verification" in details:
        return "its certificate has another name"
    if "WRONG_VERSION_NUMBER" in details:
        return "it speaks no TLS"
    return ""


def break_cause(error: grpc.aio.AioRpcError) -> str:
    """Why a session broke: the status, and what was wrong with the handshake, if it was that.

    Nothing else of the details is told: the other side may have put anything there.
    """
    problem = handshake_problem(error.details() or "")
    return f"{error.code().name}: {problem}" if problem else error.code().name


def channel(address: str, source: TlsSource | None, options: Options) -> grpc.Channel:
    """`aio_channel` for code without an event loop."""
    if source is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(
        address, channel_credentials(source), options=(*options, *channel_options(source))
    )


def aio_channel(address: str, source: TlsSource | None, options: Options) -> grpc.aio.Channel:
    """A channel with the files' present content; without files it is not encrypted."""
    if source is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(
        address, channel_credentials(source), options=(*options, *channel_options(source))
    )

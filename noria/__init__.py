"""Noria: an LLM serving system. What is here is the client.

from noria import Client

with Client() as client, client.stream_chat("Is a tomato a fruit?") as stream:
    for piece in stream:
        print(piece, end="", flush=True)
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from noria.client.public import *  # noqa: F403 - the names are listed there


# The services import parts of this package, the engine among them: what belongs to the
# client, gRPC above all, is loaded when it is first asked for.
def __getattr__(name: str) -> object:
    if not name.startswith("_"):
        from noria.client import public

        if name in public.__all__:
            return getattr(public, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    from noria.client import public

    return sorted({*globals(), *public.__all__})

"""How a tokenizer service runs."""

from dataclasses import dataclass
from pathlib import Path

from noria.service.tls_files import TlsFiles


@dataclass(frozen=True)
class TokenizerConfig:
    """One tokenizer service.

    model            a GGUF file or a Hugging Face folder
    metrics_listen   host:port for /metrics; empty: none
    encode_threads   threads for short texts; long ones have one of their own
    drain_grace_s    seconds for which outputs are still decoded after the order to stop
    tls              certificate, key and the routers' CA; None: no TLS
    """

    model: Path
    served_model_name: str = ""
    listen: str = "127.0.0.1:50052"
    metrics_listen: str = ""
    encode_threads: int = 2
    drain_grace_s: float = 60.0
    tls: TlsFiles | None = None

    @property
    def name(self) -> str:
        """The name under which the model is served."""
        return self.served_model_name or self.model.name.removesuffix(".gguf").lower()

    def __post_init__(self) -> None:
        if self.encode_threads < 1:
            raise ValueError(f"encode_threads is {self.encode_threads}, at least 1 is needed")

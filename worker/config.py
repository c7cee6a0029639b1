"""What a worker can be told."""

from dataclasses import dataclass, field
from pathlib import Path

from noria.plan.kv import DTYPE_BYTES
from noria.service.tls_files import TlsFiles

MAX_NUM_SEQS = 32
MAX_NUM_BATCHED_TOKENS = 512
GPU_MEMORY_UTILIZATION = 0.9


_COUNTS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "num_blocks",
    "kv_cache_memory_bytes",
    "local_workers",
    "cpu_threads",
)
_EVERYWHERE = ("", "0.0.0.0", "[::]", "::")
DTYPES = ("auto", *DTYPE_BYTES)
DEVICES = ("auto", "cpu", "cuda")
HOST_BACKENDS = ("cpu_native", "torch")
DEVICE_BACKENDS = ("flash_attn_3", "triton", "flash_attn_2", "torch_varlen", "torch_padded")
ATTENTION_BACKENDS = ("auto", *HOST_BACKENDS, *DEVICE_BACKENDS)
CPU_KERNELS = ("auto", "avx512_bf16", "avx512", "avx2")
_CHOICES = {
    "device": DEVICES,
    "dtype": DTYPES,
    "attention_backend": ATTENTION_BACKENDS,
    "cpu_kernels": CPU_KERNELS,
}


@dataclass(frozen=True)
class WorkerConfig:
    """One worker's settings; the names are vLLM's where the thing is the same.

    model                   a GGUF file or a Hugging Face folder
    script                  replay this file instead of running the network
    max_model_len           tokens of prompt and output together; None: what the model allows
    num_blocks              KV blocks; None: what fits kv_cache_memory_bytes and can be used
    kv_cache_memory_bytes   memory for keys and values; touched only as blocks are used;
                            None: this worker's share of the half of what weights leave free
    local_workers           workers that start on this computer and divide its memory
    dtype                   of weights and of keys and values; auto: what the backend is best at
    device                  auto: cuda where there is one, unless the backend is the CPU's
    attention_backend       auto: on a CPU cpu_native where it can compute the model, else torch;
                            on a GPU the first of the others that can
    gpu_memory_utilization  share of a GPU's memory for weights, activations, graphs and KV blocks
    enforce_eager           on a GPU no decode is captured in a CUDA graph
    async_scheduling        launch a step before the last has landed; None: on a GPU alone
    cpu_kernels             which build of cpu_native; auto: the fastest on this CPU
    metrics_listen          host:port for /metrics; empty: none
    aliases                 further names that requests may use
    default_max_tokens      max_tokens of a request that names none; 0: the room left
    tls                     certificate, key and the routers' CA; None: no TLS
    redis_url               where routers look for workers; empty: they are told the address
    advertise               host:port at which routers find it there; empty: `listen`
    """

    model: Path
    served_model_name: str = ""
    listen: str = "127.0.0.1:50053"
    metrics_listen: str = ""
    dtype: str = "auto"
    attention_backend: str = "auto"
    cpu_kernels: str = "auto"
    device: str = "auto"
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    local_workers: int = 1
    max_num_seqs: int = MAX_NUM_SEQS
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS
    max_model_len: int | None = None
    default_max_tokens: int = 0
    enable_prefix_caching: bool = True
    cpu_threads: int | None = None
    script: Path | None = None
    drain_grace_s: float = 60.0
    aliases: tuple[str, ...] = ()
    tls: TlsFiles | None = None
    redis_url: str = field(default="", repr=False)
    advertise: str = ""

    @property
    def name(self) -> str:
        """The name under which the model is served."""
        return self.served_model_name or self.model.name.removesuffix(".gguf").lower()

    @property
    def may_use_device(self) -> bool:
        """Whether a GPU is not ruled out."""
        return (
            self.device != "cpu"
            and self.script is None
            and (self.attention_backend not in HOST_BACKENDS or self.device == "cuda")
        )

    @property
    def look_ahead(self) -> int:
        """Sequences that may wait here so that a freed place never idles a step."""
        return max(1, self.max_num_seqs // 16)

    def __post_init__(self) -> None:
        self._check_lease()
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, at least 1 is needed")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} is {value!r}, one of {', '.join(choices)} is needed")
        if self.device == "cpu" and self.attention_backend in DEVICE_BACKENDS:
            raise ValueError(f"attention_backend {self.attention_backend} needs a GPU")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}, above 0 and at most 1 "
                "is needed"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below "
                f"max_num_seqs {self.max_num_seqs}"
            )

    def _check_lease(self) -> None:
        host, _, port = (self.advertise or self.listen).rpartition(":")
        if self.advertise and not (host and port.isdecimal()):
            raise ValueError(f"advertise is {self.advertise!r}, host:port is needed")
        if self.redis_url and not self.advertise and host in _EVERYWHERE:
            raise ValueError(f"advertise is needed: nobody is found at {self.listen}")

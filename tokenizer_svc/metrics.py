"""What an operator sees of a tokenizer service."""

from collections.abc import Callable

from prometheus_client import Counter, Histogram
from prometheus_client.registry import CollectorRegistry

from noria.service.metrics import SECONDS_BUCKETS, LiveCollector, gauge

_ENCODE_BUCKETS = (0.0005, 0.001, 0.0025, *SECONDS_BUCKETS)


class TokenizerMetrics:
    """Counts what is encoded and decoded; `open_slots` is asked at each scrape.

    Make it on the event loop, and call it there.
    """

    def __init__(self, registry: CollectorRegistry, open_slots: Callable[[], int]) -> None:
        self._encode_s = Histogram(
            "noria_tokenizer_encode_seconds",
            "From a text's arrival to its ids, waiting for a thread included.",
            buckets=_ENCODE_BUCKETS,
            registry=registry,
        )
        self._encoded_ids = Counter(
            "noria_tokenizer_encoded_ids", "Ids that texts became.", registry=registry
        )
        self._decoded_ids = Counter(
            "noria_tokenizer_decoded_ids",
            "Ids taken in by decode slots, those of a reopened slot again.",
            registry=registry,
        )
        slots_text = "Outputs being decoded now."
        registry.register(
            LiveCollector(lambda: [gauge("noria_tokenizer_open_slots", slots_text, open_slots())])
        )

    def encoded(self, seconds: float, num_ids: int) -> None:
        self._encode_s.observe(seconds)
        self._encoded_ids.inc(num_ids)

    def decoded(self, num_ids: int) -> None:
        self._decoded_ids.inc(num_ids)

"""What a retriever server counts, in Prometheus' text form.

Requests by address and status, their latency, the size of each joined search, and the queue; rates such as QPS are
what Prometheus makes of the counters.
"""

from __future__ import annotations

from collections.abc import Callable

from memopd_env.errors import MissingExtraError

try:
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
except ImportError as error:
    raise MissingExtraError("prometheus-client", "retrieval") from error

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_QUERIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# Only known addresses become labels: a client that tries a million paths must not fill the memory.
_PATHS = frozenset({"/retrieve", "/search", "/health", "/metrics", "/reload"})


class Metrics:
    """One server's counters."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "memopd_retriever_requests", "Requests answered.", ["path", "status"], registry=self._registry
        )
        self._errors = Counter(
            "memopd_retriever_errors", "Requests answered with 4xx or 5xx.", ["path"], registry=self._registry
        )
        self._latency = Histogram(
            "memopd_retriever_latency_seconds",
            "Time from the request's start to the end of its answer.",
            ["path"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._batches = Histogram(
            "memopd_retriever_batch_queries",
            "Queries joined into one search.",
            buckets=_QUERIES,
            registry=self._registry,
        )
        self._queue = Gauge("memopd_retriever_queue_queries", "Queries waiting.", registry=self._registry)

    def watch_queue(self, length: Callable[[], int]) -> None:
        """Read the queue's length from a function whenever metrics are asked for."""
        self._queue.set_function(length)

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        path = path if path in _PATHS else "other"
        self._requests.labels(path, str(status)).inc()
        self._latency.labels(path).observe(seconds)
        if status >= 400:
            self._errors.labels(path).inc()

    def batch(self, queries: int) -> None:
        """Count one search of so many queries."""
        self._batches.observe(queries)

    def render(self) -> tuple[bytes, str]:
        """The page for Prometheus and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

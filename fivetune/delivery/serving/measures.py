"""What a server counts, in the text format of Prometheus.

In: requests, answers and batches. Out: `format_text` for /metrics.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


class ServerMeasures:
    """Counts of requests, tokens and batches; every method may be called from any thread.

    The values of labels come from the server, never from a request: each new value is a series that stays.
    """

    def __init__(self) -> None:
        # Not the library's own registry, which is one per process: servers of one process would share their counts.
        own = CollectorRegistry()
        self._registry = own
        self._requests = Counter("fivetune_requests", "Requests answered", ("route", "code"), registry=own)
        self._records = Counter("fivetune_records", "Records answered", ("model",), registry=own)
        self._input_tokens = Counter("fivetune_input_tokens", "Tokens read", ("model",), registry=own)
        self._output_tokens = Counter("fivetune_output_tokens", "Tokens written", ("model",), registry=own)
        self._seconds = Histogram("fivetune_request_seconds", "Time of a request", buckets=SECONDS, registry=own)
        self._batch_records = Histogram("fivetune_batch_records", "Records of a batch", buckets=SIZES, registry=own)
        self._batch_seconds = Histogram("fivetune_batch_seconds", "Time of a batch", buckets=SECONDS, registry=own)
        self._queue = Gauge("fivetune_queue_requests", "Requests that wait", registry=own)

    def add_answers(self, model: str, *, records: int, input_tokens: int, output_tokens: int) -> None:
        """Count the answers to one request."""
        self._records.labels(model).inc(records)
        self._input_tokens.labels(model).inc(input_tokens)
        self._output_tokens.labels(model).inc(output_tokens)

    def add_batch(self, num_records: int, seconds: float) -> None:
        self._batch_records.observe(num_records)
        self._batch_seconds.observe(seconds)

    def add_request(self, route: str, code: int, seconds: float) -> None:
        self._requests.labels(route, code).inc()
        self._seconds.observe(seconds)

    def format_text(self, num_waiting: int) -> bytes:
        """Format all measures; `num_waiting` requests wait now."""
        self._queue.set(num_waiting)
        return generate_latest(self._registry)

"""The server of trained runs, from its arguments to its end.

In: run directories or exports, the address and the limits. Out: after Ctrl-C or SIGTERM, when the waiting requests are
answered.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path

from fivetune.errors import ConfigError, FiveTuneEnvironmentError
from fivetune.installation import name_install
from fivetune.types import OnNote

TOKEN = "FIVETUNE_TOKEN"
MIN_TOKEN_CHARS = 16
MAX_EXAMPLES = 100
END_SECONDS = 1.0  # for the thread of an idle model to end


def serve(
    runs: str | Path | Sequence[str | Path],
    overrides: Mapping[str, object] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    allow_host: Sequence[str] = (),
    one_base: bool = False,
    examples: int = 6,
    max_error: str | float | None = None,
    min_confidence: str | float | None = None,
    max_batch: int = 32,
    max_wait_ms: float = 50.0,
    max_queue: int = 64,
    max_records: int = 16,
    max_body_kib: int = 64,
    max_input_tokens: int = 2048,
    max_seconds: float = 30.0,
    drain_seconds: float = 30.0,
    write_line: OnNote = print,
    on_warning: OnNote = warnings.warn,
) -> bool:
    """Serve runs over HTTP until Ctrl-C or SIGTERM, then answer the waiting requests.

    Args:
        runs: run directories or exports; requests name one of several.
        overrides: dotted settings of the answers that differ from the run's: {"eval.num_beams": 4}.
        host, port: address; any but a loopback one needs the environment variable FIVETUNE_TOKEN. Port 0: a free one.
        allow_host: further names by which clients call the server.
        one_base: hold the weights of the base of several runs with adapters once.
        examples: right ones, and as many wrong ones, of each run's evaluation on the page, 0 to 100.
        max_error, min_confidence: as of `TrainedRun.predict`: answers that are withheld.
        max_batch, max_wait_ms: most records of a batch, and most milliseconds that a request waits for others.
        max_queue, max_records, max_body_kib, max_input_tokens: most requests that wait, and records, KiB and tokens of
            one.
        max_seconds: most seconds from the headers of a request to its answer.
        drain_seconds: within which the waiting requests are answered at the end.
        write_line: receives the address when the server accepts requests, and the names of its models.
        on_warning: receives a sentence for each damaged file of a run.

    Returns whether the thread that computes has ended; if not, torch still computes a batch. Raises ConfigError for
    limits that let no request pass and for an open address without a token, FiveTuneEnvironmentError for a port in use
    and without the packages of the extra `serve`, RunDirError for a run without a model.

    >>> serve("runs/tickets", port=8001)  # doctest: +SKIP
    serving on http://127.0.0.1:8001
    """
    limits = {
        "max_batch": max_batch,
        "max_queue": max_queue,
        "max_records": max_records,
        "max_body_kib": max_body_kib,
        "max_input_tokens": max_input_tokens,
        "max_seconds": max_seconds,
    }
    refuse_port(port)
    _refuse_limits(examples, limits, {"max_wait_ms": max_wait_ms, "drain_seconds": drain_seconds})
    token = read_server_token(host)
    try:
        from fivetune.delivery.serving.app import Service, ServingLimits, build_app
        from fivetune.delivery.serving.server import bind_socket, build_server, run_until_stopped
    except ModuleNotFoundError as error:
        raise FiveTuneEnvironmentError(
            f"serve: the package {error.name} is missing. Install it: {name_install('serve')}"
        ) from None
    from fivetune.delivery.serving.batching import Batcher
    from fivetune.delivery.serving.guard import Guard
    from fivetune.delivery.serving.measures import ServerMeasures
    from fivetune.delivery.serving.models import open_models

    folders = [runs] if isinstance(runs, str | Path) else runs
    # A port that is taken is reported before the models load.
    with bind_socket(host, port) as bound:
        models = open_models(
            [str(folder) for folder in folders],
            overrides or {},
            shares_base=one_base,
            max_input_tokens=max_input_tokens,
            num_examples=examples,
            withheld={"max_error": max_error, "min_confidence": min_confidence},
            on_warning=on_warning,
            on_note=write_line,
        )
        # One thread computes; the application queues requests for it.
        measures = ServerMeasures()
        batcher = Batcher(
            {name: model.answer for name, model in models.items()},
            max_batch=max_batch,
            max_wait_seconds=max_wait_ms / 1000,
            max_queue=max_queue,
            on_batch=measures.add_batch,
        )
        service = Service(
            batcher=batcher,
            models={name: model.facts for name, model in models.items()},
            limits=ServingLimits(max_body_kib * 1024, max_records, max_seconds),
            guard=Guard(frozenset(name.lower() for name in (host, *allow_host)), token),
            measures=measures,
        )
        own_host, own_port = bound.getsockname()[:2]
        address = f"http://[{own_host}]:{own_port}" if ":" in own_host else f"http://{own_host}:{own_port}"
        for name, model in models.items():
            write_line(f"model {name}: {model.folder} ({model.facts.task}, step {model.facts.step})")
            if silence := model.facts.silence:
                write_line(f"model {name}: answers with a confidence below {silence.min_confidence:.4g} are withheld")

        def announce() -> None:
            write_line(f"serving on {address}")
            write_line(f"page: {address}/   interface: {address}/docs   Ctrl-C answers the waiting requests and stops")

        server = build_server(build_app(service), drain_seconds=drain_seconds, on_listening=announce)
        # Until a signal: then waiting requests are answered, and the thread ends.
        run_until_stopped(server, bound)
        return batcher.close(timeout=END_SECONDS)


def _refuse_limits(num_examples: int, limits: Mapping[str, float], waits: Mapping[str, float]) -> None:
    """Raise ConfigError for a limit that would let no request pass.

    Args:
        limits: name -> number above 0. waits: name -> number, 0 or more.
    """
    for name, value in limits.items():
        if not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be above 0.")
    if not 0 <= num_examples <= MAX_EXAMPLES:
        raise ConfigError(f"--examples {num_examples}: Allowed are 0 to {MAX_EXAMPLES}.")
    for name, value in waits.items():
        if not 0 <= value <= 3_600_000:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be 0 or more.")


def refuse_port(port: int) -> None:
    """Raise ConfigError for a number that is no port: the system would take its remainder."""
    if not 0 <= port <= 65_535:
        raise ConfigError(f"--port {port}: Allowed are 1 to 65535, and 0 for a free one.")


def read_server_token(host: str) -> str | None:
    """Read the token from the environment. Raises ConfigError if another than a loopback address has none, or if it is
    weak."""
    token = os.environ.get(TOKEN)
    if token is not None and (len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable()):
        raise ConfigError(
            f"{TOKEN}: has {len(token)} characters. Allowed are {MIN_TOKEN_CHARS} or more, printable ASCII. "
            'Make one: python -c "import secrets; print(secrets.token_urlsafe())"'
        )
    try:
        is_loopback = ip_address(host).is_loopback
    except ValueError:  # a name
        is_loopback = host == "localhost"
    if token is None and not is_loopback:
        raise ConfigError(
            f"--host {host}: other machines could send requests. Set {TOKEN}, or leave --host out (127.0.0.1)."
        )
    return token

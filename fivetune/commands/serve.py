"""Serve a trained run over HTTP.

Predictions in batches, an OpenAI-like route, health, measures, limits.
"""

from __future__ import annotations

import argparse
import os
import sys
from ipaddress import ip_address

from fivetune.commands import add_silence_arguments, print_text, print_warning, refuse_token_flag

TAKES_SETTINGS = True
TOKEN = "FIVETUNE_TOKEN"
MIN_TOKEN_CHARS = 16
MAX_EXAMPLES = 100
END_SECONDS = 1.0  # for the thread of an idle model to end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directories or exports; requests name one of several"
    )
    parser.add_argument(
        "--one-base", action="store_true", help="hold the weights of the base of several runs with adapters once"
    )
    parser.add_argument("--host", default="127.0.0.1", help=f"address; any but a loopback one needs {TOKEN}")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one (default: 8000)")
    parser.add_argument("--token", help=argparse.SUPPRESS)
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="a name by which clients call the server"
    )
    parser.add_argument(
        "--examples",
        type=int,
        default=6,
        metavar="N",
        help="right ones, and as many wrong ones, of each run's evaluation on the page; 0: none (default: 6)",
    )
    add_silence_arguments(parser)
    group = parser.add_argument_group("batches and limits")
    for flag, kind, default, text in (
        ("--max-batch", int, 32, "most records of a batch"),
        ("--max-wait-ms", float, 50.0, "most milliseconds that a request waits for others, a fifth if none come"),
        ("--max-queue", int, 64, "most requests that wait; more are answered 429"),
        ("--max-records", int, 16, "most records of a request"),
        ("--max-body-kib", int, 64, "most KiB of a request"),
        ("--max-input-tokens", int, 2048, "most tokens of a record"),
        ("--max-seconds", float, 30.0, "most seconds from the headers of a request to its answer"),
        ("--drain-seconds", float, 30.0, "after SIGTERM or Ctrl-C, within which waiting requests are answered"),
    ):
        group.add_argument(flag, type=kind, default=default, metavar="N", help=f"{text} (default: {default:g})")
    parser.epilog = (
        f"{TOKEN}: the token that requests send as Authorization: Bearer TOKEN.\n"
        "Settings of the run can be overridden: --eval.num_beams 4 --train.precision fp32 --device cpu\n"
        'curl -H "Content-Type: application/json" -d \'{"question": "Who?", "context": "Ann."}\' localhost:8000/predict'
    )


def run(args: argparse.Namespace) -> int:
    from fivetune.config.layers import parse_overrides

    refuse_token_flag(args.token, TOKEN)
    _refuse_limits(args)
    token = read_token(args.host)
    settings = parse_overrides(args.settings)
    try:
        from fivetune.delivery.serving.app import Service, ServingLimits, build_app
        from fivetune.delivery.serving.server import bind_socket, build_server, run_until_stopped
    except ModuleNotFoundError as error:
        from fivetune.errors import FiveTuneEnvironmentError
        from fivetune.installation import name_install

        raise FiveTuneEnvironmentError(
            f"serve: the package {error.name} is missing. Install it: {name_install('serve')}"
        ) from None
    from fivetune.delivery.serving.batching import Batcher
    from fivetune.delivery.serving.guard import Guard
    from fivetune.delivery.serving.measures import ServerMeasures
    from fivetune.delivery.serving.models import open_models

    # A port that is taken is reported before the models load.
    with bind_socket(args.host, args.port) as bound:
        models = open_models(
            args.runs,
            settings,
            shares_base=args.one_base,
            max_input_tokens=args.max_input_tokens,
            num_examples=args.examples,
            withheld={"max_error": args.max_error, "min_confidence": args.min_confidence},
            on_warning=print_warning,
            on_note=print,
        )
        # One thread computes; the application queues requests for it.
        measures = ServerMeasures()
        batcher = Batcher(
            {name: model.answer for name, model in models.items()},
            max_batch=args.max_batch,
            max_wait_seconds=args.max_wait_ms / 1000,
            max_queue=args.max_queue,
            on_batch=measures.add_batch,
        )
        service = Service(
            batcher=batcher,
            models={name: model.facts for name, model in models.items()},
            limits=ServingLimits(args.max_body_kib * 1024, args.max_records, args.max_seconds),
            guard=Guard(frozenset(name.lower() for name in (args.host, *args.allow_host)), token),
            measures=measures,
        )
        host, port = bound.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        for name, model in models.items():
            print_text(f"model {name}: {model.folder} ({model.facts.task}, step {model.facts.step})")
            if silence := model.facts.silence:
                print_text(f"model {name}: answers with a confidence below {silence.min_confidence:.4g} are withheld")

        def announce() -> None:
            print(f"serving on {address}")
            print(f"page: {address}/   interface: {address}/docs   Ctrl-C answers the waiting requests and stops")
            sys.stdout.flush()

        server = build_server(build_app(service), drain_seconds=args.drain_seconds, on_listening=announce)
        # Until a signal: then waiting requests are answered, and the thread ends.
        run_until_stopped(server, bound)
        has_ended = batcher.close(timeout=END_SECONDS)
    print("stopped", flush=True)
    if not has_ended:  # torch still computes a batch: it would abort the process if the interpreter ended under it
        sys.stderr.flush()
        os._exit(0)
    return 0


def _refuse_limits(args: argparse.Namespace) -> None:
    """Raise ConfigError for a limit that would let no request pass."""
    from fivetune.errors import ConfigError

    if not 0 <= args.port <= 65_535:  # the system would take the remainder
        raise ConfigError(f"--port {args.port}: Allowed are 1 to 65535, and 0 for a free one.")
    names = ("max_batch", "max_queue", "max_records", "max_body_kib", "max_input_tokens", "max_seconds")
    for name in names:
        if not getattr(args, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be above 0.")
    if not 0 <= args.examples <= MAX_EXAMPLES:
        raise ConfigError(f"--examples {args.examples}: Allowed are 0 to {MAX_EXAMPLES}.")
    for name in ("max_wait_ms", "drain_seconds"):
        if not 0 <= getattr(args, name) <= 3_600_000:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be 0 or more.")


def read_token(host: str) -> str | None:
    """Read the token from the environment. Raises ConfigError if another than a loopback address has none, or if it is
    weak."""
    from fivetune.errors import ConfigError

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

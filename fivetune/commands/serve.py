"""Serve a trained run over HTTP.

Predictions in batches, an OpenAI-like route, health, measures, limits.
"""

from __future__ import annotations

import argparse
import os
import sys

from fivetune.commands import (
    add_flag,
    add_silence_arguments,
    print_text,
    print_warning,
    refuse_token_flag,
    refuse_wrong_silence,
)
from fivetune.delivery.serving.serve import TOKEN, serve

TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directories or exports; requests name one of several"
    )
    add_flag(parser, "--one-base", "hold the weights of the base of several runs with adapters once")
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
    refuse_wrong_silence(args)
    has_ended = serve(
        args.runs,
        parse_overrides(args.settings),
        host=args.host,
        port=args.port,
        allow_host=args.allow_host,
        one_base=args.one_base,
        examples=args.examples,
        max_error=args.max_error,
        min_confidence=args.min_confidence,
        max_batch=args.max_batch,
        max_wait_ms=args.max_wait_ms,
        max_queue=args.max_queue,
        max_records=args.max_records,
        max_body_kib=args.max_body_kib,
        max_input_tokens=args.max_input_tokens,
        max_seconds=args.max_seconds,
        drain_seconds=args.drain_seconds,
        write_line=print_text,
        on_warning=print_warning,
    )
    print("stopped", flush=True)
    if not has_ended:  # torch still computes a batch: it would abort the process if the interpreter ended under it
        sys.stderr.flush()
        os._exit(0)
    return 0

"""Show all runs on a local page: scores, curves, predictions.

The page is served to this machine only, and only reads the run directories.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from fivetune.commands import print_text
from fivetune.delivery.serving.serve import refuse_port

HOST = "127.0.0.1"
PORT = 8070
DRAIN_SECONDS = 1.0  # for requests in progress at Ctrl-C


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "folders",
        metavar="RUNS",
        type=Path,
        nargs="*",
        default=[Path("runs")],
        help="folders of runs, or run directories (default: runs)",
    )
    parser.add_argument(
        "--port", type=int, help=f"0: a free one (default: {PORT}, or a free one where another program has it)"
    )
    parser.epilog = (
        "Runs of a cluster: start the board on a machine that sees their disk, and give it a way to your browser with\n"
        f"ssh -L {PORT}:localhost:{PORT} THAT_MACHINE"
    )


def run(args: Namespace) -> int:
    from fivetune.errors import FiveTuneEnvironmentError, RunDirError

    for folder in args.folders:
        if not folder.is_dir():
            raise RunDirError(f"{folder}: no such directory. Give folders of runs, or run directories.")
    port = PORT if args.port is None else args.port
    refuse_port(port)
    try:
        from fivetune.delivery.board.app import build_board_app
        from fivetune.delivery.board.rows import Board
        from fivetune.delivery.serving.guard import Guard
        from fivetune.delivery.serving.server import bind_socket, build_server, run_until_stopped
    except ModuleNotFoundError as error:
        from fivetune.installation import name_install

        raise FiveTuneEnvironmentError(
            f"board: the package {error.name} is missing. Install it: {name_install('serve')}"
        ) from None

    try:
        bound = bind_socket(HOST, port)
    except FiveTuneEnvironmentError:
        if args.port is not None:
            raise
        bound = bind_socket(HOST, 0)
    with bound:
        address = f"http://{HOST}:{bound.getsockname()[1]}"

        def announce() -> None:
            print_text(f"board of {', '.join(map(str, args.folders))}: {address}   Ctrl-C stops it; the runs continue")

        app = build_board_app(Board(list(dict.fromkeys(args.folders))), Guard())
        run_until_stopped(build_server(app, drain_seconds=DRAIN_SECONDS, on_listening=announce), bound)
    print("stopped", flush=True)
    return 0

"""Upload the model of a run to a model hub, with its card.

Lists the files to upload first; data and secrets are held back.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fivetune.commands import add_flag, print_json, print_table, print_warning, refuse_token_flag


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="run directory, or an export of one")
    parser.add_argument("repo", metavar="ORG/NAME", help="repository; it is created if it does not exist")
    add_flag(parser, "--private", "create it as private; a public one is refused")
    add_flag(parser, "--dry-run", "list the files and upload nothing; needs no token")
    add_flag(parser, "--adapter", "the adapter alone, without the merged model")
    add_flag(parser, "--report", "also report.html, which shows examples of your data")
    parser.add_argument("--license", metavar="ID", help="licence that you give the model, such as apache-2.0")
    parser.add_argument("--message", metavar="TEXT", help="message of the commit")
    parser.add_argument("--token", help=argparse.SUPPRESS)
    add_flag(parser, "--json", "print one JSON object as the last line")
    parser.epilog = (
        "The access token is read from HF_TOKEN, the address of the hub from HF_ENDPOINT. Data, predictions, logs, "
        "telemetry and checkpoints are never uploaded."
    )


def run(args: argparse.Namespace) -> int:
    from fivetune.delivery.hub.hub import get_endpoint, read_token, refuse_repo_name, upload_files
    from fivetune.delivery.hub.package import list_files
    from fivetune.errors import format_size
    from fivetune.redaction import hide_tokens

    refuse_token_flag(args.token, "HF_TOKEN")
    refuse_repo_name(args.repo)
    # A missing token and an impossible name are errors before the files are hashed.
    token = "" if args.dry_run else read_token()
    files = list_files(
        args.run,
        args.repo,
        only_adapter=args.adapter,
        with_report=args.report,
        license=args.license,
        on_note=print_warning,
    )
    print_table(["file", "size", "sha256"], [[one.name, format_size(one.size), one.sha256] for one in files])
    total = sum(one.size for one in files)
    visibility = "private" if args.private else "public unless it is private already"
    address = hide_tokens(f"{get_endpoint()}/{args.repo}")
    print(f"{len(files)} files, {format_size(total)}, to {address} ({visibility})", flush=True)
    if args.dry_run:
        print("dry run: nothing was uploaded")
    else:
        message = args.message or f"Model of the run {args.run.resolve().name}, by FiveTune"
        upload_files(args.repo, files, token=token, private=args.private, message=message)
        print(f"published  {address}")
    if args.json:
        listed = [{"name": one.name, "size": one.size, "sha256": one.sha256} for one in files]
        print_json(
            {"repo": args.repo, "address": None if args.dry_run else address, "private": args.private, "files": listed}
        )
    return 0

"""The ASGI application of the board.

In: a Board. Out: `build_board_app`, an application for uvicorn. It only reads run directories, but for report.html of a
finished run, which it writes where it is missing or old, as `fivetune report` does.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from html import escape
from pathlib import Path

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fivetune import rundir
from fivetune.delivery.board.details import describe_curves, describe_predictions
from fivetune.delivery.board.rows import Board, Entry, list_all_settings
from fivetune.delivery.page import render_page
from fivetune.delivery.serving.body import RequestError
from fivetune.delivery.serving.guard import Guard
from fivetune.errors import FiveTuneError
from fivetune.reading.report.live import ACTIVE
from fivetune.rundir.records import Run

LOG = logging.getLogger("fivetune.delivery.board")
PAGE = Path(__file__).with_name("page")
REPORT = "report.html"
HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"cache-control": b"no-store",
    b"cross-origin-resource-policy": b"same-origin",
    b"referrer-policy": b"no-referrer",
}
# A report comes from a folder that others may write, so it runs apart from the board and asks for nothing.
REPORT_POLICY = (
    "sandbox allow-scripts allow-downloads allow-popups; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PLAIN_POLICY = "default-src 'none'; frame-ancestors 'none'"


@dataclass(frozen=True, slots=True)
class Pages:
    """Answers the routes, each in a thread of the server."""

    board: Board

    def show(self, request: Request) -> Response:
        page, policy = render_page(PAGE)
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    def list_runs(self, request: Request) -> Response:
        since = request.query_params.get("since", "0")
        number = int(since) if since.isdecimal() and len(since) < 16 else 0
        return JSONResponse(self.board.read_changes(request.query_params.get("server", ""), number))

    def show_curves(self, request: Request) -> Response:
        entry = self._find_run(request)
        run = _get_run(entry)
        found = describe_curves(entry.folder, run)
        found["settings"] = list_all_settings(run)
        return JSONResponse(found)

    def show_predictions(self, request: Request) -> Response:
        entry = self._find_run(request)
        return JSONResponse(describe_predictions(entry.folder, _get_run(entry)))

    def show_report(self, request: Request) -> Response:
        entry = self._find_run(request)
        page = _read_report(entry.folder, entry.view.state)
        return HTMLResponse(page, headers={"Content-Security-Policy": REPORT_POLICY})

    def show_comparison(self, request: Request) -> Response:
        from fivetune.reading.compare import compare_runs
        from fivetune.reading.report.comparison import build_comparison_page
        from fivetune.reading.report.page.render import render_html

        names = dict.fromkeys(request.query_params.getlist("run"))
        folders = [self._find(name).folder for name in names]
        if len(folders) < 2:
            raise RequestError(422, "too_few_runs", "a comparison needs two runs. Tick two or more.")
        page = render_html(build_comparison_page(compare_runs(folders)))
        return HTMLResponse(page, headers={"Content-Security-Policy": REPORT_POLICY})

    def _find_run(self, request: Request) -> Entry:
        return self._find(request.query_params.get("run", ""))

    def _find(self, name: str) -> Entry:
        found = self.board.find_run(name)
        if found is None:
            raise RequestError(404, "unknown_run", f"run {name[:100]!r}: is not on the board. Choose one of its list.")
        return found


def _get_run(entry: Entry) -> Run:
    return entry.view.run or Run(name=entry.view.name)


def _read_report(folder: Path, state: str) -> str:
    """Read report.html of a run; it is written again where it is older than the records, and only built for a run that
    is not over or a folder that cannot be written.
    """
    from fivetune.reading.report.page.render import render_html
    from fivetune.reading.report.run.build import read_page, write_report

    path = folder / REPORT
    if state not in ACTIVE:
        try:
            if not _is_current(path):
                write_report(folder)
            return path.read_text(encoding="utf-8")
        except (FiveTuneError, OSError, UnicodeDecodeError) as error:
            LOG.debug("%s", error)
    _, _, page = read_page(folder)
    return render_html(page)


def _is_current(report: Path) -> bool:
    """Whether a report is newer than the steps and evaluations of its run."""
    if not report.is_file():
        return False
    made = report.stat().st_mtime
    for name in (rundir.STEPS, rundir.EVALS):
        records = report.with_name(name)
        if records.is_file() and records.stat().st_mtime > made:
            return False
    return True


def build_board_app(board: Board, guard: Guard) -> ASGIApp:
    """Build the application."""
    pages = Pages(board)
    routes = [
        Route("/", pages.show),
        Route("/runs.json", pages.list_runs),
        Route("/run.json", pages.show_curves),
        Route("/predictions.json", pages.show_predictions),
        Route("/report", pages.show_report),
        Route("/comparison", pages.show_comparison),
    ]
    return GuardedBoard(Router(routes, redirect_slashes=False), guard)


@dataclass(frozen=True, slots=True)
class GuardedBoard:
    """Checks headers before the routes, and turns every failure into one sentence: JSON for the page, else HTML."""

    app: ASGIApp
    guard: Guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_guarded(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message["headers"] = [*HEADERS.items(), *message["headers"]]
            await send(message)

        scope["app"] = self  # without it Starlette's router answers 404 and 405 itself, as plain text
        try:
            self.guard.check(scope["path"], Headers(scope=scope))
            await self.app(scope, receive, send_guarded)
            return
        except RequestError as error:
            answer = _build_error(scope["path"], error.code, str(error))
        except HTTPException as error:
            text = f"{scope['method']} {scope['path'][:100]}: the board has no such page. It is at /."
            answer = _build_error(scope["path"], error.status_code, text)
        except (FiveTuneError, OSError) as error:  # a damaged run, runs that cannot be compared
            answer = _build_error(scope["path"], 422, str(error))
        except Exception:
            LOG.exception("%s failed", scope["path"][:100])
            answer = _build_error(scope["path"], 500, "internal error. The board's terminal shows the cause.")
        if not has_begun:
            await answer(scope, receive, send_guarded)


def _build_error(path: str, code: int, message: str) -> Response:
    if path.endswith(".json"):
        return JSONResponse({"error": {"message": message}}, code)
    page = f"<!doctype html><html lang=en><meta charset=utf-8><title>FiveTune</title><p>{escape(message)}</p>"
    return HTMLResponse(page, code, {"Content-Security-Policy": PLAIN_POLICY})

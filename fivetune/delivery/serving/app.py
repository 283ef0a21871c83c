"""The ASGI application: routes, limits, and errors as one JSON object each.

In: a Batcher that answers. Out: `build_app`, an application for uvicorn. Every error is
{"error": {"message", "type"}}, without traces and paths; the server's log has the traces of internal errors.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fivetune.delivery.page import render_page
from fivetune.delivery.serving.batching import Batcher, Inputs, QueueFullError, ServerStoppingError
from fivetune.delivery.serving.body import (
    RequestError,
    check_table,
    choose_model,
    parse_json,
    read_inputs,
    read_min_confidence,
    read_query,
)
from fivetune.delivery.serving.demo import PAGE, describe_models
from fivetune.delivery.serving.guard import BROWSER_ROUTES, Guard
from fivetune.delivery.serving.measures import ServerMeasures
from fivetune.delivery.serving.openai import (
    AnswerForm,
    Asked,
    choose_decoding,
    count_answer_tokens,
    read_chat_request,
    read_completion_request,
    read_search_options,
    refuse_hidden_logprobs,
    take_search_options,
)
from fivetune.delivery.serving.schema import RunFacts, build_openapi, render_docs
from fivetune.errors import is_out_of_memory
from fivetune.model.decode import Decoding
from fivetune.rundir.records import Prediction
from fivetune.scores.analysis.abstention import Silence, withhold
from fivetune.training.answers.listening import WrittenToken
from fivetune.training.answers.output import build_line
from fivetune.types import JsonTable

LOG = logging.getLogger("fivetune.delivery.serving")
DISCARDED_BYTES = 32 * 2**20  # of a body that is too long: a client that still sends could not read the answer
DISCONNECTED = 499  # in the measures alone: the client has gone
SECURITY_HEADERS = {
    b"content-security-policy": b"default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"cache-control": b"no-store",
}
KINDS = {404: "not_found", 405: "method_not_allowed"}
PASSWORD_CHALLENGE = 'Basic realm="FiveTune: any name, and the token as password", charset="UTF-8"'


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Limits of a request; `seconds` from its headers to its answer."""

    body_bytes: int = 64 * 1024
    records: int = 16
    seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Service:
    """Answers the routes.

    Args:
        models: facts by the name of the model, of those that `batcher` answers with.
        started: seconds since 1970.
    """

    batcher: Batcher
    models: Mapping[str, RunFacts]
    limits: ServingLimits = field(default_factory=ServingLimits)
    guard: Guard = field(default_factory=Guard)
    measures: ServerMeasures = field(default_factory=ServerMeasures)
    started: float = field(default_factory=time.time)

    async def predict(self, request: Request) -> Response:
        model = choose_model(read_query(request.query_params.multi_items()), list(self.models))
        value = parse_json(await self._read_body(request))
        facts = self.models[model]
        columns = {part for one in facts.fields for part in (one.name, one.name.partition(".")[0])}
        least = read_min_confidence(value, columns)
        silence = facts.silence if least is None else Silence(least)
        inputs, options = read_inputs(value, max_records=self.limits.records)
        is_list = options is not None
        if not is_list:
            options = take_search_options(value, columns)
        decoding = facts.decoding
        if options:
            decoding = choose_decoding(
                read_search_options(options, inputs), decoding, writes=facts.writes, takes_seed=facts.takes_seed
            )
        found = await self._answer(request, model, inputs, decoding)
        found = [withhold(one, silence) for one in found]
        if is_list:
            return JSONResponse({"predictions": [_build_answer(one) for one in found]})
        _refuse_skipped(found)
        return JSONResponse(_build_answer(found[0]))

    async def complete(self, request: Request) -> Response:
        table = check_table(parse_json(await self._read_body(request)), '{"prompt": TEXT}')
        model = choose_model(table.get("model"), list(self.models))
        return await self._respond(request, model, read_completion_request(table, max_records=self.limits.records))

    async def chat(self, request: Request) -> Response:
        table = check_table(parse_json(await self._read_body(request)), '{"messages": [MESSAGES]}')
        model = choose_model(table.get("model"), list(self.models))
        fields = [one.name for one in self.models[model].fields if one.is_required]
        return await self._respond(request, model, read_chat_request(table, fields=fields))

    async def list_models(self, request: Request) -> Response:
        common = {"object": "model", "created": int(self.started), "owned_by": "fivetune"}
        data = [{"id": one.name, **common, "task": one.task, "step": one.step} for one in self.models.values()]
        return JSONResponse({"object": "list", "data": data})

    async def report_health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def report_ready(self, request: Request) -> Response:
        if not self.batcher.is_ready:
            raise _make_stopping_error()
        return JSONResponse({"status": "ready", "models": list(self.models)})

    async def report_measures(self, request: Request) -> Response:
        return PlainTextResponse(self.measures.format_text(len(self.batcher)))

    async def show_demo(self, request: Request) -> Response:
        page, policy = render_page(PAGE)
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    async def describe_demo(self, request: Request) -> Response:
        return JSONResponse({"models": describe_models(self.models.values())})

    async def show_openapi(self, request: Request) -> Response:
        return JSONResponse(build_openapi(list(self.models.values())))

    async def show_docs(self, request: Request) -> Response:
        facts = list(self.models.values())
        return HTMLResponse(render_docs(build_openapi(facts), facts[0]))

    async def _read_body(self, request: Request) -> bytes:
        """Read the body. Raises RequestError 415 unless it is JSON, 413 if it is too long."""
        headers = request.headers
        limit = self.limits.body_bytes
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" or headers.get("content-encoding", "identity") != "identity":
            raise RequestError(
                415, "unsupported_media_type", "Content-Type: Allowed is application/json, not compressed."
            )
        body = bytearray()
        size = 0
        given = int(headers.get("content-length", "0"))  # h11 has checked that it is a number
        if given <= DISCARDED_BYTES:
            async for piece in request.stream():
                size += len(piece)
                if size <= limit:
                    body += piece
                elif size > DISCARDED_BYTES:
                    break
        if max(size, given) > limit:
            raise RequestError(
                413, "body_too_large", f"body: too many bytes. Allowed are {limit:,}. Send less at once."
            )
        request.scope["fivetune.has_body"] = True
        return bytes(body)

    async def _respond(self, request: Request, model: str, asked: Asked) -> Response:
        """Answer a request in OpenAI's form, whole or in pieces."""
        facts = self.models[model]
        decoding = choose_decoding(asked, facts.decoding, writes=facts.writes, takes_seed=facts.takes_seed)
        refuse_hidden_logprobs(asked, decoding, writes=facts.writes)
        form = AnswerForm(asked, model, stop=decoding.stop, sends_tokens=facts.sends_tokens)
        if not asked.stream:
            listener = form.add_token if form.listens else None
            found = await self._answer(request, model, asked.inputs, decoding, listener)
            _refuse_skipped(found)
            _refuse_unsure(found, facts.silence)
            return JSONResponse(form.build_whole(found))

        loop = asyncio.get_running_loop()
        tokens: asyncio.Queue[WrittenToken | None] = asyncio.Queue()

        def hear(token: WrittenToken) -> None:  # in the thread of the model
            loop.call_soon_threadsafe(tokens.put_nowait, token)

        answer = asyncio.ensure_future(self._answer(request, model, asked.inputs, decoding, hear))
        answer.add_done_callback(lambda done: tokens.put_nowait(None))
        if facts.silence:  # no token is sent before it is known whether the answer is sure enough
            _refuse_unsure(await answer, facts.silence)
        # A request that fails before its first token is answered by a status code.
        try:
            first = await tokens.get()
        except asyncio.CancelledError:
            answer.cancel()
            raise
        if first is None:
            _refuse_skipped(answer.result())
        return StreamingResponse(_send_pieces(form, answer, tokens, first), media_type="text/event-stream")

    async def _answer(
        self,
        request: Request,
        model: str,
        inputs: Inputs,
        decoding: Decoding,
        on_token: Callable[[WrittenToken], object] | None = None,
    ) -> Sequence[Prediction]:
        """Queue the inputs and wait for the answers; a client that has gone, or a timeout, cancels them."""
        try:
            answer = asyncio.wrap_future(self.batcher.submit(model, inputs, decoding, on_token))
        except QueueFullError:
            raise RequestError(
                429, "queue_full", "the queue is full. Send the request again later.", retry_seconds=1
            ) from None
        except ServerStoppingError:
            raise _make_stopping_error() from None
        # A client that has gone must not hold a place in the queue.
        gone = asyncio.ensure_future(_wait_for_disconnect(request))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ClientDisconnect
            found = answer.result()
        finally:
            gone.cancel()
            answer.cancel()
        num_read, num_written = count_answer_tokens(found)
        self.measures.add_answers(model, records=len(found), input_tokens=num_read, output_tokens=num_written)
        return found


async def _send_pieces(
    form: AnswerForm,
    answer: asyncio.Future[Sequence[Prediction]],
    tokens: asyncio.Queue[WrittenToken | None],
    first: WrittenToken | None,
) -> AsyncGenerator[str]:
    """Yield the events of a stream: pieces as tokens are written, then what remains; an error is its last event."""
    token = first
    try:
        while token is not None:
            piece = form.add_token(token)
            if piece:
                yield _format_event(piece)
            token = await tokens.get()
        found = answer.result()
        _refuse_skipped(found)
        for piece in form.build_rest(found):
            yield _format_event(piece)
        yield "data: [DONE]\n\n"
    except ClientDisconnect:
        return
    except RequestError as error:
        yield _format_event({"error": {"message": str(error), "type": error.kind}})
    except Exception:
        LOG.exception("a stream failed")
        message = "internal error. The server's log has the cause."
        yield _format_event({"error": {"message": message, "type": "internal_error"}})
    finally:
        answer.cancel()


def _format_event(table: JsonTable) -> str:
    return f"data: {json.dumps(table, ensure_ascii=False)}\n\n"


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _build_answer(prediction: Prediction) -> dict[str, object]:
    if prediction.skipped:
        return build_line(prediction)
    answer: dict[str, object] = {
        **build_line(prediction),
        "num_input_tokens": prediction.num_input_tokens,
        "num_clipped_tokens": prediction.num_clipped_tokens,
    }
    if prediction.clipped_spans:
        answer["inputs"] = prediction.inputs
        answer["clipped_spans"] = prediction.clipped_spans
    return answer


def _refuse_skipped(found: Sequence[Prediction]) -> None:
    """Raise RequestError 422 for the first record that cannot be answered."""
    for number, one in enumerate(found):
        if one.skipped:
            where = f"record {number}: " if len(found) > 1 else ""
            raise RequestError(422, "invalid_record", f"{where}{one.skipped}")


def _refuse_unsure(found: Sequence[Prediction], silence: Silence | None) -> None:
    """Raise RequestError 422 for the first answer that is withheld: OpenAI's form has no place for it."""
    for number, one in enumerate(found):
        given = withhold(one, silence)
        if given.unsure:
            where = f"prompt {number}: " if len(found) > 1 else ""
            raise RequestError(422, "unsure", f"{where}{given.reason}. /predict gives it.")


def _make_stopping_error() -> RequestError:
    return RequestError(503, "stopping", "the server stops. Send the request again later.", retry_seconds=5)


# --- around the routes ---


def build_app(service: Service) -> ASGIApp:
    """Build the application."""
    routes = {
        "/predict": (service.predict, "POST"),
        "/v1/completions": (service.complete, "POST"),
        "/v1/chat/completions": (service.chat, "POST"),
        "/v1/models": (service.list_models, "GET"),
        "/health": (service.report_health, "GET"),
        "/ready": (service.report_ready, "GET"),
        "/metrics": (service.report_measures, "GET"),
        "/": (service.show_demo, "GET"),
        "/demo.json": (service.describe_demo, "GET"),
        "/openapi.json": (service.show_openapi, "GET"),
        "/docs": (service.show_docs, "GET"),
    }
    listed = [Route(path, endpoint, methods=[method]) for path, (endpoint, method) in routes.items()]
    return GuardedApp(Router(listed, redirect_slashes=False), service, frozenset(routes))


def _build_refusal(error: RequestError, path: str) -> Response:
    headers = {"Retry-After": str(error.retry_seconds)} if error.retry_seconds else {}
    if error.code == 401:  # a browser asks for a password only where it may send one
        headers["WWW-Authenticate"] = PASSWORD_CHALLENGE if path in BROWSER_ROUTES else "Bearer"
    if error.code in (401, 403, 408, 413, 415) or error.kind == "invalid_http":  # the rest of the body is not read
        headers["Connection"] = "close"
    return _build_error(error.code, error.kind, str(error), headers)


def _build_error(code: int, kind: str, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": message, "type": kind}}, code, headers)


@dataclass(frozen=True, slots=True)
class GuardedApp:
    """Checks headers and time around the routes, counts what was answered, and turns every failure into an answer."""

    app: ASGIApp
    service: Service
    routes: frozenset[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, code = time.monotonic(), DISCONNECTED

        async def send_counted(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                message["headers"] = list((SECURITY_HEADERS | dict(message["headers"])).items())  # its own win
            await send(message)

        scope["app"] = self  # without it Starlette's router answers 404 and 405 itself, as plain text
        refusal = await self._run(scope, receive, send_counted)
        if refusal is not None and code == DISCONNECTED:
            with suppress(asyncio.CancelledError):
                await refusal(scope, receive, send_counted)
        route = scope["path"] if scope["path"] in self.routes else "other"
        self.service.measures.add_request(route, code, time.monotonic() - started)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> Response | None:
        """Run the routes; returns the error to send, None if an answer is sent or the client has gone."""
        try:
            self.service.guard.check(scope["path"], Headers(scope=scope))
            async with asyncio.timeout(self.service.limits.seconds) as limit:
                await self.app(scope, receive, send)
        except RequestError as error:
            return _build_refusal(error, scope["path"])
        except HTTPException as error:
            phrase = HTTPStatus(error.status_code).phrase
            message = f"{scope['method']} {scope['path'][:100]}: {phrase}. See /docs."
            return _build_error(error.status_code, KINDS[error.status_code], message, dict(error.headers or {}))
        except ClientDisconnect:
            return None
        except asyncio.CancelledError:  # the time to drain is over
            return _build_refusal(_make_stopping_error(), scope["path"])
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                seconds = f"{self.service.limits.seconds:g} seconds"
                late = RequestError(408, "request_timeout", f"the request did not arrive within {seconds}.")
                if scope.get("fivetune.has_body", False):
                    again = f"no answer within {seconds}. Send it again later."
                    late = RequestError(503, "timeout", again, retry_seconds=1)
                return _build_refusal(late, scope["path"])
            LOG.exception("%s %s failed", scope["method"], scope["path"][:100])
            if is_out_of_memory(error) or is_out_of_memory(error.__cause__ or error):
                return _build_error(503, "out_of_memory", "the device has too little memory for it. Send less at once.")
            return _build_error(500, "internal_error", "internal error. The server's log has the cause.")
        return None

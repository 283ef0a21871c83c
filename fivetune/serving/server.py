"""The HTTP server: uvicorn with the protocol h11, connections that time out, and a shutdown that drains.

In: an ASGI application and a bound socket. Out: when a signal came and the requests in progress are answered.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import Callable

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from fivetune.errors import FiveTuneEnvironmentError
from fivetune.launch.signals import STOP_SIGNALS, handle_signals

MAX_CONNECTIONS = 512
FREE_FILES = 256  # beside connections: weights, libraries, inputs


class TimedProtocol(H11Protocol):
    """Closes a connection on which no request arrives or no answer is read: uvicorn has no time limit for them, so that
    slow clients could hold all connections. Refuses one beyond MAX_CONNECTIONS. Reports what is not HTTP as JSON, as
    all errors.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(
                503, b"Service Unavailable", "too_many_connections", "too many connections. Send it again later."
            )
        else:
            self._watch(None)

    def _watch(self, before: tuple[object, int] | None) -> None:
        """Close the connection if it has no request now and had none since the last call, or its client has read
        nothing of the answer since then.
        """
        unsent = self.transport.get_write_buffer_size()
        if self.transport.is_closing() and not unsent:
            return
        is_waiting = self.cycle is None or self.cycle.response_complete or unsent > 0
        now = (self.cycle, unsent) if is_waiting else None
        if now is None or now != before:
            self.loop.call_later(self.timeout_keep_alive, self._watch, now)
        elif unsent:
            self.transport.abort()  # close() would wait until it is read
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, b"Bad Request", "invalid_http", msg)

    def _refuse(self, code: int, phrase: bytes, kind: str, message: str) -> None:
        body = json.dumps({"error": {"message": message, "type": kind}}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        try:
            for event in (
                h11.Response(status_code=code, headers=headers, reason=phrase),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:  # an answer has begun
            pass
        self.transport.close()


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind an address that does not listen yet. Raises FiveTuneEnvironmentError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        reason = error.strerror or error
        raise FiveTuneEnvironmentError(
            f"--host {host} --port {port}: {reason}. Choose another port, or an address of this machine."
        ) from None
    return bound


class AnnouncedServer(uvicorn.Server):
    """Calls `on_listening` once connections are accepted."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()


def build_server(
    app: ASGIApp, *, drain_seconds: float, idle_seconds: int = 15, on_listening: Callable[[], object] = lambda: None
) -> uvicorn.Server:
    """Build the server.

    Args:
        drain_seconds: after a stop signal, within which the requests in progress are answered.
        idle_seconds: within which a connection must have sent the headers of its next request.
        on_listening: called when connections are accepted.
    """
    return AnnouncedServer(
        uvicorn.Config(
            app,
            http=TimedProtocol,
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=idle_seconds,
            timeout_graceful_shutdown=max(1, round(drain_seconds)),
        ),
        on_listening,
    )


def extend_file_limit() -> None:
    """Let the process open as many files as MAX_CONNECTIONS needs, as far as the system lets it: else connections would
    wait without an answer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = MAX_CONNECTIONS + FREE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run_until_stopped(server: uvicorn.Server, bound: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, then answer the requests in progress."""
    extend_file_limit()
    with handle_signals(STOP_SIGNALS, lambda signum, frame: None):  # uvicorn raises them again at its end
        server.run(sockets=[bound])

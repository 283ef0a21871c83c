"""The HTTP server: uvicorn with the protocol h11, connections that time out or give way, a shutdown that drains.

In: an ASGI application and a bound socket. Out: when a signal came and the requests in progress are answered.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Callable

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from fivetune.distributed.processes.signals import STOP_SIGNALS, handle_signals
from fivetune.errors import FiveTuneEnvironmentError
from fivetune.rundir.files import extend_file_limit

MAX_CONNECTIONS = 512
LINGER_SECONDS = 1.0  # within which a refused client reads why


class TimedProtocol(H11Protocol):
    """Closes a connection on which no request arrives or no answer is read: uvicorn has no time limit for them, so that
    slow clients could hold all connections. Beyond MAX_CONNECTIONS a new one takes the place of the one that has waited
    longest for its client, of the client that holds most of them, so that no client can lock others out by opening
    connections; if all have requests in progress, it is refused. Reports what is not HTTP as JSON, as all errors.
    """

    is_refused = False
    waiting_since = 0.0  # seconds of the loop's clock: when it was opened, or its last answer was complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.waiting_since = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS and not self._take_place():
            self._refuse(
                503, b"Service Unavailable", "too_many_connections", "too many connections. Send it again later."
            )
        else:
            self._watch(None)

    def data_received(self, data: bytes) -> None:
        if not self.is_refused:
            super().data_received(data)

    def on_response_complete(self) -> None:
        self.waiting_since = self.loop.time()
        super().on_response_complete()

    def is_waiting(self) -> bool:
        """Whether it has no request in progress, or its client does not read the answer."""
        is_idle = self.cycle is None or self.cycle.response_complete
        return is_idle or self.transport.get_write_buffer_size() > 0

    def _take_place(self) -> bool:
        """Close the connection that has waited longest for its client, of the client that holds most; False if none
        waits.
        """
        others = [one for one in self.connections if isinstance(one, TimedProtocol) and one is not self]
        waiting = [one for one in others if one.is_waiting()]
        if not waiting:
            return False
        held = Counter(one.get_host() for one in waiting)
        chosen = max(waiting, key=lambda one: (held[one.get_host()], -one.waiting_since))
        self.connections.discard(chosen)  # the next new one looks for another, also before the loop has closed this
        chosen.transport.abort()
        return True

    def get_host(self) -> str:
        """The address of its client, or of the proxy before it."""
        return self.client[0] if self.client else ""

    def _watch(self, before: tuple[object, int] | None) -> None:
        """Close the connection if it has no request now and had none since the last call, or its client has read
        nothing of the answer since then.
        """
        unsent = self.transport.get_write_buffer_size()
        if self.transport.is_closing() and not unsent:
            return
        now = (self.cycle, unsent) if self.is_waiting() else None
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
        # A socket that is closed with unread bytes resets the connection, and the client might not get the answer.
        self.is_refused = True
        self.connections.discard(self)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


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


def run_until_stopped(server: uvicorn.Server, bound: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, then answer the requests in progress."""
    extend_file_limit(MAX_CONNECTIONS)  # else connections would wait without an answer
    with handle_signals(STOP_SIGNALS, lambda signum, frame: None):  # uvicorn raises them again at its end
        server.run(sockets=[bound])

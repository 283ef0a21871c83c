"""The HTTP server: uvicorn with the protocol h11, connections that time out, and a shutdown that drains.

In: an ASGI application and a bound socket. Out: when a signal came and the requests in progress are answered.
"""

from __future__ import annotations

import asyncio
import json
import socket

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from fivetune.errors import FiveTuneEnvironmentError
from fivetune.launch.signals import STOP_SIGNALS, handle_signals


class TimedProtocol(H11Protocol):
    """Closes a connection on which no request arrives: uvicorn has no time limit for headers, so that slow clients
    could hold all connections. Reports what is not HTTP as JSON, as all errors.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch(None)

    def _watch(self, before: object) -> None:
        """Close the connection if it has no request now and had none since the last call."""
        cycle = self.cycle
        is_idle = cycle is None or cycle.response_complete
        if is_idle and before == (cycle,):
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(self.timeout_keep_alive, self._watch, (cycle,) if is_idle else None)

    def send_400_response(self, msg: str) -> None:
        body = json.dumps({"error": {"message": msg, "type": "invalid_http"}}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        try:
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
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


def build_server(app: ASGIApp, *, drain_seconds: float, idle_seconds: int = 15) -> uvicorn.Server:
    """Build the server.

    Args:
        drain_seconds: after a stop signal, within which the requests in progress are answered.
        idle_seconds: within which a connection must have sent the headers of its next request.
    """
    return uvicorn.Server(
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
        )
    )


def run_until_stopped(server: uvicorn.Server, bound: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, then answer the requests in progress."""
    with handle_signals(STOP_SIGNALS, lambda signum, frame: None):  # uvicorn raises them again at its end
        server.run(sockets=[bound])

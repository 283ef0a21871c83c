"""Who may ask: the Host and Origin of a request, and the token.

A page in a browser may send requests to its own name, and have its DNS resolve that to an address of this machine (DNS
rebinding). Such a request has the page's name as Host; an address as Host cannot be rebound.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from hmac import compare_digest
from ipaddress import ip_address

from fivetune.delivery.serving.body import RequestError

HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[\w.-]+))(?::[0-9]{1,5})?")
OPEN_ROUTES = ("/", "/health", "/ready")  # the page, which asks for the token; probes of a scheduler
BROWSER_ROUTES = ("/docs", "/openapi.json")
"""Read by a browser, which can send a password, but no Bearer token. It sends a password again with each request to the
server, also with one that another site's page starts: no route that does something may take it."""


@dataclass(frozen=True, slots=True)
class Guard:
    """Refuses requests by their headers.

    Args:
        hosts: names by which the server is called, beside localhost and addresses; lower case, without port.
        token: None lets every request pass.
    """

    hosts: frozenset[str] = frozenset()
    token: str | None = None

    def check(self, path: str, headers: Mapping[str, str]) -> None:
        """Raise RequestError 403 for a foreign Host or Origin, 401 without the token, 400 for two lengths of a body.

        >>> Guard().check("/predict", {"host": "localhost:8000"})
        >>> Guard().check("/predict", {"host": "evil.example"})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        fivetune.delivery.serving.body.RequestError: Host 'evil.example': not a name of this server. ...
        """
        host = headers.get("host", "")
        if not self._is_own_host(host):
            raise RequestError(
                403, "forbidden_host", f"Host {host[:100]!r}: not a name of this server. Add it with --allow-host."
            )
        for origin in [value for name, value in headers.items() if name.lower() == "origin"]:
            if origin.partition("://")[2] != host:
                raise RequestError(
                    403,
                    "forbidden_origin",
                    f"Origin {origin[:100]!r}: pages of other servers may not send requests here.",
                )
        if "content-length" in headers and "transfer-encoding" in headers:  # smuggling (RFC 9112, section 6.1)
            raise RequestError(
                400, "invalid_http", "Content-Length beside Transfer-Encoding: the body has two lengths. Send one."
            )
        if self.token is not None and path not in OPEN_ROUTES:
            given = _read_token(headers.get("authorization", ""), allows_password=path in BROWSER_ROUTES)
            if not compare_digest(given, self.token.encode()):
                raise RequestError(401, "unauthorized", "Authorization: Bearer TOKEN is missing or wrong.")

    def _is_own_host(self, host: str) -> bool:
        found = HOST.fullmatch(host)
        name = (found["address"] or found["name"]).lower() if found else ""
        if name == "localhost" or name in self.hosts:
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True


def _read_token(header: str, *, allows_password: bool) -> bytes:
    """Read the token of an Authorization header; b"" for none.

    >>> _read_token("Bearer abc", allows_password=False), _read_token("Basic bWU6YWJj", allows_password=True)
    (b'abc', b'abc')
    """
    kind, _, given = header.partition(" ")
    if kind.lower() == "bearer":
        return given.strip().encode()
    if kind.lower() == "basic" and allows_password:
        try:
            return b64decode(given.strip(), validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return b""

"""A model hub on loopback: repositories, LFS objects, commits and downloads, as huggingface_hub asks for them."""

from __future__ import annotations

import base64
import json
import re
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import yaml

COMMIT = "0" * 40


@dataclass
class FakeHub:
    """What the hub holds, and how it answers.

    Args:
        fails: status by a part of the path; the answer to every request whose path has it.
        gated: names of models that are given with a token alone.
        cuts: parts of the path at which the connection is closed without an answer, once each.
        spoils: by a part of the path, how its files are given: "half" of the bytes, with one bit "changed", or "never".
    """

    address: str = ""
    token: str = "hf_abcdefghijklmnopqrstuvwx"
    repos: dict[str, bool] = field(default_factory=dict)  # name -> private
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    fails: dict[str, int] = field(default_factory=dict)
    cuts: list[str] = field(default_factory=list)
    gated: tuple[str, ...] = ()
    spoils: dict[str, str] = field(default_factory=dict)
    closed: threading.Event = field(default_factory=threading.Event)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, body: Any = b"", **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def handle_request(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        body = self.read_body()
        hub.requests.append(f"{self.command} {path}")
        for part in [part for part in hub.cuts if part in path]:
            hub.cuts.remove(part)
            self.close_connection = True
            self.connection.close()
            return
        for part, way in hub.spoils.items():
            if part in path and way == "never" and self.command != "HEAD":
                hub.closed.wait()
                self.close_connection = True
                return
        for part, status in hub.fails.items():
            if part in path:
                return self.answer(status, {"error": "refused"})
        if any(name in path for name in hub.gated):
            return self.answer(401, {"error": "Access to it is restricted."}, X_Error_Code="GatedRepo")
        if "/lfs/" not in path and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self.answer(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            table = json.loads(body)
            name = f"{table['organization']}/{table['name']}" if table.get("organization") else table["name"]
            if name in hub.repos:
                return self.answer(409, {"error": "You already created this model repo", "url": f"/{name}"})
            hub.repos[name] = bool(table.get("private") or table.get("visibility") == "private")
            return self.answer(200, {"url": f"{hub.address}/{name}"})
        if path == "/api/validate-yaml":
            metadata = yaml.safe_load(json.loads(body)["content"].split("---")[1])
            errors = [] if isinstance(metadata, dict) else [{"message": "no metadata"}]
            return self.answer(400 if errors else 200, {"errors": errors, "warnings": []})
        if found := re.match(r"/lfs/(\w+)$", path):
            assert sha256(body).hexdigest() == found[1]
            hub.objects[found[1]] = body
            return self.answer(200)
        if found := re.match(
            r"/(?:(?:api/models|api/datasets|datasets)/)?([\w.-]+/[\w.-]+?)(?:\.git)?(?:/(.*))?$", path
        ):
            return self.answer_repo(found[1], found[2] or "", body)
        return self.answer(404)

    def answer_repo(self, name: str, rest: str, body: bytes) -> None:
        hub = self.hub
        if name not in hub.repos:
            return self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        files = hub.files.setdefault(name, {})
        if rest in ("", "revision/main", f"revision/{COMMIT}"):
            siblings = [describe_file(path, content) for path, content in files.items()]
            return self.answer(200, {"id": name, "private": hub.repos[name], "sha": COMMIT, "siblings": siblings})
        if rest.startswith("paths-info/"):
            asked = parse_qs(body.decode())["paths"]
            return self.answer(200, [list_file(path, files[path]) for path in asked if path in files])
        if rest.startswith("tree/"):
            return self.answer(
                200,
                [list_file(path, content) for path, content in files.items()],
            )
        if rest.startswith("preupload"):
            asked = json.loads(body)["files"]
            modes = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for one in asked
            ]
            return self.answer(200, {"files": modes})
        if rest.endswith("objects/batch"):
            objects = []
            for one in json.loads(body)["objects"]:
                action = {"upload": {"href": f"{hub.address}/lfs/{one['oid']}"}}
                objects.append({**one, **({} if one["oid"] in hub.objects else {"actions": action})})
            return self.answer(200, {"transfer": "basic", "objects": objects})
        if rest.startswith("commit/"):
            for line in map(json.loads, body.decode().splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = hub.objects[value["oid"]]
            return self.answer(200, {"commitUrl": f"{hub.address}/{name}/commit/{COMMIT}", "commitOid": COMMIT})
        if (found := re.match(rf"resolve/(?:main|{COMMIT})/(.+)$", rest)) and found[1] in files:
            return self.answer_file(files[found[1]])
        return self.answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")

    def answer_file(self, content: bytes) -> None:
        ways = {way for part, way in self.hub.spoils.items() if part in self.path}
        headers = {"Content-Length": str(len(content)), "ETag": f'"{sha256(content).hexdigest()}"'}
        if "changed" in ways:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if "half" in ways:
            content = content[: len(content) // 2]
            self.close_connection = True
        self.answer(200, content, X_Repo_Commit=COMMIT, **headers)

    do_GET = do_POST = do_PUT = do_HEAD = handle_request


def list_file(path: str, content: bytes) -> dict[str, Any]:
    """What the hub lists of a file in a folder."""
    return {"type": "file", "path": path, "size": len(content), "oid": COMMIT}


def describe_file(path: str, content: bytes) -> dict[str, Any]:
    """What the hub lists of a file: the sha256 of a large one, the object id of git of another."""
    found: dict[str, Any] = {"rfilename": path, "size": len(content)}
    if path.endswith(".safetensors"):
        return {**found, "lfs": {"sha256": sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}}
    return {**found, "blobId": sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()}


def make_certificate(folder: Path) -> Path:
    """A file with a key and a certificate of 127.0.0.1 that nobody has signed but the key itself."""
    assert shutil.which("openssl"), "the certificate needs the command openssl, which is not installed"
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    words = ["openssl", "req", "-x509", *kind, *names, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(words, check=True, capture_output=True)
    certificate.write_bytes(key.read_bytes() + certificate.read_bytes())
    return certificate


@contextmanager
def running_hub(certificate: Path | None = None) -> Iterator[FakeHub]:
    """A hub that answers until the block ends; with a certificate, by TLS."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.daemon_threads = True
    server.handle_error = lambda request, client_address: None  # a connection that `cuts` closed
    hub.address = f"{'https' if certificate else 'http'}://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.closed.set()
        server.shutdown()
        server.server_close()
        thread.join()

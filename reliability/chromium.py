"""Pages in headless Chromium: what they run, ask for and show."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@dataclass(frozen=True)
class Visit:
    """What a browser made of a page: the DOM, its console lines, the requests that the page itself started."""

    dom: str
    console: list[str]
    requests: list[str]


def visit(html: str, folder: Path) -> Visit:
    """Open a page in headless Chromium. Requests without an initiator are the browser's own and left out."""
    folder.mkdir(exist_ok=True)
    (folder / "page.html").write_text(html, encoding="utf-8")
    quiet = (
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
    )
    flags = [
        "--headless",
        "--no-sandbox",
        *(f"--{flag}" for flag in quiet),
        f"--user-data-dir={folder / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--log-net-log={folder / 'net.json'}",
        "--enable-logging=stderr",
        "--v=0",
        "--virtual-time-budget=20000",
    ]
    command = [str(CHROMIUM), *flags, "--dump-dom", (folder / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    log = json.loads((folder / "net.json").read_text(encoding="utf-8"))
    start = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    started = [event.get("params", {}) for event in log["events"] if event["type"] == start]
    requests = [
        p["url"] for p in started if p.get("url", "").startswith("http") and p.get("initiator") != "not an origin"
    ]
    return Visit(done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line], requests)


@dataclass
class Tab:
    """A page in headless Chromium that is typed into, by the DevTools protocol over pipes.

    Args:
        events: what the browser has reported: requests, console lines, errors.
    """

    pipes: tuple[IO[bytes], IO[bytes]]
    session: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    num_calls: int = 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its result."""
        self.num_calls += 1
        message: dict[str, Any] = {"id": self.num_calls, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        self.pipes[0].write(json.dumps(message).encode() + b"\0")
        self.pipes[0].flush()
        while True:
            found = json.loads(self._read())
            if found.get("id") == self.num_calls:
                assert "error" not in found, found
                return found["result"]
            self.events.append(found)

    def _read(self) -> bytes:
        message = bytearray()
        while (one := self.pipes[1].read(1)) != b"\0":
            assert one, "the browser has ended"
            message += one
        return bytes(message)

    def open(self, url: str) -> None:
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Evaluate an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < until, (condition, self.run("document.body.innerText"))
            time.sleep(0.02)

    def read(self, selector: str = "body") -> str:
        """The text that is seen."""
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, ctrl: bool = False) -> None:
        """Press a key: Tab, Enter, Space."""
        codes = {"Tab": 9, "Enter": 13, "Space": 32}
        text = {"Enter": "\r", "Space": " "}.get(key, "")
        event = {"key": {"Space": " "}.get(key, key), "code": key, "windowsVirtualKeyCode": codes[key]}
        event |= {"modifiers": 2} if ctrl else ({"text": text} if text else {})
        self.call("Input.dispatchKeyEvent", type="keyDown", **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def set_scheme(self, name: str) -> None:
        """Prefer `light` or `dark`."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def set_width(self, width: int, height: int = 900) -> None:
        size: dict[str, Any] = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    @property
    def requests(self) -> list[str]:
        """The addresses that the page has asked for."""
        return [one["params"]["request"]["url"] for one in self.events if one["method"] == "Network.requestWillBeSent"]

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Exceptions of scripts, and what the policy has blocked."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        found = [one["params"] for one in self.events if one["method"] in kinds]
        return [one for one in found if one.get("entry", {}).get("source") != "network"]


@contextmanager
def open_tab(folder: Path) -> Iterator[Tab]:
    """Start a browser that asks no other host than this machine."""
    to_browser, from_browser = os.pipe(), os.pipe()

    def place_pipes() -> None:  # the browser reads descriptor 3 and writes 4
        ours = os.dup(to_browser[0]), os.dup(from_browser[1])
        for one, target in zip(ours, (3, 4), strict=True):
            os.dup2(one, target)

    quiet = ("disable-gpu", "no-first-run", "disable-background-networking", "disable-component-update", "disable-sync")
    flags = [
        "--headless",
        "--no-sandbox",
        "--remote-debugging-pipe",
        *(f"--{flag}" for flag in quiet),
        f"--user-data-dir={folder / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
        "about:blank",
    ]
    process = subprocess.Popen(
        [str(CHROMIUM), *flags],
        close_fds=False,
        preexec_fn=place_pipes,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    with os.fdopen(to_browser[1], "wb") as writer, os.fdopen(from_browser[0], "rb") as reader:
        tab = Tab((writer, reader))
        target = tab.call("Target.createTarget", url="about:blank")["targetId"]
        tab.session = tab.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            tab.call(f"{domain}.enable")
        try:
            yield tab
        finally:
            tab.session = ""
            tab.call("Browser.close")
            process.wait(20)

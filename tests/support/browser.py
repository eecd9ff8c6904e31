"""A page in the real Chromium, headless, over the DevTools protocol on a pipe: no driver, no websocket, no network."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--remote-debugging-pipe", "--window-size=1280,1000",
)  # fmt: skip


def find() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._number, self._rest = to_browser, from_browser, 0, b""
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if hasattr(self, "_session"):
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._from, 1 << 16)
            assert data, "Chromium went away"
            self._rest += data
        raw, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(raw)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(message["params"]))
        return message

    def open(self, path: Path) -> None:
        self.call("Page.navigate", url=path.resolve().as_uri())
        while self.evaluate("document.readyState") != "complete":
            pass

    def evaluate(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def click(self, selector: str) -> None:
        """A real mouse click in the middle of the first element that matches."""
        found = json.dumps(selector)
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({found}); e.scrollIntoView({{block: 'center'}});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))


@contextmanager
def page(profile: Path) -> Iterator[Page]:
    """A fresh Chromium with an empty profile directory, ended afterwards."""
    browser = find()
    assert browser is not None, "no Chromium: apt-get install chromium"
    for_browser, to_browser = os.pipe()
    from_browser, by_browser = os.pipe()
    script = f'exec "$@" 3<&{for_browser} 4>&{by_browser}'
    command = ["bash", "-c", script, "bash", browser, *FLAGS, f"--user-data-dir={profile}"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, pass_fds=(for_browser, by_browser), stdin=quiet, stdout=quiet, stderr=quiet)
    os.close(for_browser)
    os.close(by_browser)
    try:
        yield Page(to_browser, from_browser)
    finally:
        process.terminate()
        process.wait(30)
        os.close(to_browser)
        os.close(from_browser)

"""A headless Chromium that is driven through its own pipe: no driver, no package, no network."""

import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

NAMES = (
    "chromium",
    "chromium-headless-shell",
    "chrome-headless-shell",
    "chromium-browser",
    "google-chrome",
)
_TIMEOUT = 300.0  # seconds; starting it takes one or two where nothing else runs


def find() -> str | None:
    """The browser of this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of Chromium, over the DevTools protocol (``--remote-debugging-pipe``)."""

    def __init__(self, program: str) -> None:
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # the browser reads descriptor 3 and writes 4: take numbers out of the way of these
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (to_browser, from_browser)]
        words = [program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        words += ["--remote-debugging-pipe", f"--user-data-dir={self._home.name}", "about:blank"]
        shell = f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *words],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (to_browser, from_browser, *ends):
            os.close(end)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer; events that come meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._wait(lambda m: m.get("id") == self._number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, url: str, *, width: int, height: int, dark: bool = False) -> None:
        """Load a page on a screen of that many CSS pixels; a narrow one is a phone's."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        if not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._wait(lambda m: m.get("method") == "Page.loadEventFired")

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._home.cleanup()

    def _wait(self, is_wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + _TIMEOUT
        while True:
            while b"\0" in self._buffer:
                line, _, self._buffer = self._buffer.partition(b"\0")
                message = json.loads(line)
                if "method" in message:
                    self.events.append(message)
                if is_wanted(message):
                    return message
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise TimeoutError("the browser did not answer")
            if not (data := os.read(self._in, 2**16)):
                raise RuntimeError(f"the browser ended with code {self._process.wait()}")
            self._buffer += data

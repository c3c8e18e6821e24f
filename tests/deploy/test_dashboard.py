"""The dashboard in a real browser, and `penstock status --watch` on a terminal: a slot lags, a worker is killed, the
coordinator goes away and comes back. One run, looked at from start to end: the tests stand in its order."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import streams
from appliances import made
from tests.deploy.conftest import DEADLINE_S, Shell
from waiting import until

from penstock.client import DataExecutor, DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:streams.lagging. worker slot:UserWarning")  # it was recovered

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NASTY = "<img src=x onerror=alert(1)>"
"""Name of a worker: what peers say of themselves."""
LAGS = 1
"""The slot that takes 60 ms for each batch, where the loop takes 4 ms for one and there are four slots."""


class Live:
    """A coordinator with a dashboard, two workers, and a training loop that goes on in a thread of this process."""

    def __init__(self, folder: Path) -> None:
        self.shell = Shell(folder)
        self.coordinator = self._coordinator("127.0.0.1:0", "127.0.0.1:0")
        self.address = self.coordinator.line
        self.shell.environment["PENSTOCK_COORDINATOR"] = self.address
        self.url = str(self.status()["coordinator"]["dashboard"])
        worker = ("worker", "--slots", "4", "--allow", "streams")
        self.workers = {name: self.shell.start(*worker, "--name", name) for name in ("w1", NASTY)}
        self._end = threading.Event()
        self.error: BaseException | None = None
        self._loop = threading.Thread(target=self._train)
        self._loop.start()

    def _coordinator(self, listen: str, http: str) -> Any:
        return self.shell.start("coordinator", "--listen", listen, "--state-dir", "state", "--http", http)

    def restart_coordinator(self) -> None:
        self.coordinator = self._coordinator(self.address, self.url.removeprefix("http://"))

    def status(self) -> Any:
        done = self.shell.call("status", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=DEADLINE_S) as reply:
            return json.load(reply)

    def _train(self) -> None:
        token = self.shell.environment["PENSTOCK_TOKEN"]
        try:
            with made(self.address, token=token, job="lm", num_workers_per_box=4, seed=1, timeout_s=60) as appliance:
                loader = DataLoader(streams.lagging, 0.06, LAGS)
                for _ in DataExecutor(loader, num_steps=1 << 40, appliance=appliance):
                    time.sleep(0.004)
                    if self._end.is_set():
                        break
        except BaseException as error:  # for the test's thread
            self.error = error

    def close(self) -> None:
        self._end.set()
        self._loop.join(DEADLINE_S)
        self.shell.close()
        assert self.error is None, self.error


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    live = Live(tmp_path_factory.mktemp("live"))
    yield live
    live.close()


@pytest.fixture(scope="module")
def browser(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("Debian's chromium and chromium-driver are not here (apt-get install chromium chromium-driver)")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--window-size=1280,1400",
    )
    quiet = ("--disable-background-networking", "--disable-component-update", "--disable-sync")
    for flag in (*flags, *quiet, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        driver.get(live.url)
        yield driver
    finally:
        driver.quit()


def shown(browser: Any, selector: str) -> list[str]:
    script = "return Array.from(document.querySelectorAll(arguments[0]), (one) => one.innerText)"
    return [str(text) for text in browser.execute_script(script, selector)]


def complaints(browser: Any) -> list[str]:
    """Return the log of the browser's console, except for answers that did not come."""
    said = [str(entry["message"]) for entry in browser.get_log("browser")]
    return [message for message in said if "ERR_CONNECTION" not in message and "ERR_EMPTY_RESPONSE" not in message]


class Watch:
    """`penstock status --watch` on a terminal of its own."""

    def __init__(self, live: Live, columns: int = 110, rows: int = 30) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.terminal = theirs
        command = [str(Path(sys.executable).with_name("penstock")), "status", "--watch"]
        environment = live.shell.env({"TERM": "xterm-256color", "COLUMNS": None, "LINES": None})
        self.process = subprocess.Popen(
            command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        self.said = ""

    def has(self, text: str) -> bool:
        """Return whether it shows that from now on."""
        self.said = ""
        until = time.monotonic() + DEADLINE_S
        while time.monotonic() < until:
            ready, _, _ = select.select([self.ours], [], [], 0.2)
            if ready:
                self.said += os.read(self.ours, 1 << 16).decode(errors="replace")
            if text in self.said:
                return True
        return False

    def end(self, number: signal.Signals) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        ended = threading.Thread(target=self.process.wait, daemon=True)
        ended.start()
        while ended.is_alive():
            ready, _, _ = select.select([self.ours], [], [], 0.1)
            if ready:
                self.said += os.read(self.ours, 1 << 16).decode(errors="replace")
        while select.select([self.ours], [], [], 0.1)[0]:
            self.said += os.read(self.ours, 1 << 16).decode(errors="replace")
        return int(self.process.returncode)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.terminal)


@pytest.fixture(scope="module")
def watch(live: Live) -> Iterator[Watch]:
    watch = Watch(live)
    yield watch
    watch.close()


def test_page_shows_the_run_and_names_the_slot(live: Live, browser: Any) -> None:
    until(lambda: shown(browser, ".finding strong") == ["▲ Straggler"])
    assert f"for slot {LAGS} on worker" in shown(browser, ".finding p")[0]
    assert shown(browser, "article h2") == ["lm/0"]
    assert browser.title == "Penstock"
    assert shown(browser, "#link") == ["live"]
    states = "return Array.from(document.querySelectorAll('.map .slot'), (one) => one.dataset.state)"
    until(lambda: browser.execute_script(states) == ["ahead", "hot", "ahead", "ahead"])
    label = browser.execute_script("return document.querySelectorAll('.map .slot')[1].getAttribute('aria-label')")
    assert label.startswith(f"Box 0 slot {LAGS}: ready, worker ")
    until(lambda: float(shown(browser, "#tiles dd")[4].split()[0]) > 1)  # batches/s delivered
    until(lambda: browser.execute_script("return document.querySelectorAll('svg path.stroke').length") >= 2)
    steps = "return Number(document.querySelectorAll('article table')[0].tBodies[0].rows[0].cells[2].innerText)"
    before = browser.execute_script(steps)
    until(lambda: browser.execute_script(steps) > before)
    assert complaints(browser) == []


def test_a_phone_cuts_nothing(browser: Any) -> None:
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        beyond = "return Array.from(document.querySelectorAll('body *')).filter((one) => {"
        beyond += "const box = one.getBoundingClientRect(); return box.left < 0 || box.right > 390"
        assert browser.execute_script(f"{beyond}}}).map((one) => one.outerHTML)") == []
        heading = "return getComputedStyle(document.querySelector('#workers td:not(.state)'), '::before').content"
        assert browser.execute_script(heading) == '"slots used"'
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_what_peers_call_themselves_is_text(browser: Any) -> None:
    assert NASTY in shown(browser, "#workers tbody th")
    assert browser.execute_script("return document.images.length") == 0
    assert complaints(browser) == []


def test_watch_on_a_terminal(live: Live, watch: Watch) -> None:
    assert watch.has("Input-bound: box 0 waits for data")
    assert "lm/0" in watch.said
    assert "steps/s" in watch.said
    assert "\x1b[?1049h" in watch.said or watch.has("waits")  # a screen of its own: what was there comes back
    assert "Traceback" not in watch.said


def test_the_page_gets_sources_of_open_runs(live: Live) -> None:
    found = live.get("/api/dashboard.json")
    assert (found["sources"], found["runs"][0]["run"]) == ({"lm/0": None}, "lm/0")


def test_a_worker_that_is_killed_is_a_fault(live: Live, browser: Any, watch: Watch) -> None:
    slots = live.get("/api/status.json")["runs"][0]["boxes"][0]["slots"]
    lost = sum(slot["worker"] == "w1" for slot in slots)
    os.killpg(live.workers["w1"].process.pid, signal.SIGKILL)
    assert watch.has("worker lost")  # at once: later faults may leave it no line
    until(lambda: any("worker lost" in line for line in shown(browser, "#events li[data-fault=true]")))
    until(lambda: any("slot recovered" in line for line in shown(browser, "#events li")))
    assert "w1" not in shown(browser, "#workers tbody th")
    assert "alarm" in browser.execute_script("return document.querySelectorAll('#tiles div')[5].className")
    until(lambda: live.get("/api/status.json")["runs"][0]["recoveries"] >= lost > 0)
    assert complaints(browser) == []


def test_lost_coordinator_is_shown_then_found(live: Live, browser: Any, watch: Watch) -> None:
    step = live.get("/api/status.json")["runs"][0]["boxes"][0]["step"]
    live.coordinator.stop(signal.SIGKILL)
    until(lambda: "the coordinator is away for" in shown(browser, "#link")[0])
    assert shown(browser, "article h2") == ["lm/0"]  # what it said last
    assert watch.has("has not answered for")
    live.restart_coordinator()
    until(lambda: shown(browser, "#link") == ["live"])
    until(lambda: any("coordinator restarted" in line for line in shown(browser, "#events li[data-fault=true]")))
    until(lambda: live.get("/api/status.json")["runs"][0]["boxes"][0]["step"] > step)
    assert watch.has("coordinator restarted")
    assert complaints(browser) == []


def test_signals_end_watch_and_restore_the_terminal(live: Live) -> None:
    for number, code in ((signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)):
        watch = Watch(live)
        try:
            assert watch.has("lm/0")
            assert watch.end(number) == code
            assert "\x1b[?25h" in watch.said  # the cursor is back
            assert "\x1b[?1049l" in watch.said  # and what the screen had shown before
            assert "Traceback" not in watch.said
            assert termios.tcgetattr(watch.terminal) == watch.before
        finally:
            watch.close()

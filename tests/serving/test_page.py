"""The page of `serve` in a real browser: a chat that streams and stops, and a live picture of the daemons."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.daemons import command

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="needs Chromium and its driver"),
]
PATIENCE_S = 60


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    served = subprocess.Popen(
        command("serve", "--model", "smollm2", "--port", "0", "--max-tokens", "400", "--log-level", "warning"),
        stdout=subprocess.PIPE,
    )
    assert served.stdout is not None
    yield f"http://{json.loads(served.stdout.readline())['http']}/"
    served.terminate()
    served.communicate(timeout=PATIENCE_S)


def test_a_chat_streams_stops_and_shows_the_daemons(page: str, tmp_path: Path) -> None:
    webdriver = pytest.importorskip("selenium.webdriver")
    support = pytest.importorskip("selenium.webdriver.support.wait")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking",
                 "disable-component-update", "disable-sync", "disable-quic", "window-size=1200,800",
                 f"user-data-dir={tmp_path}"):  # fmt: skip
        options.add_argument(f"--{flag}")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    wait = support.WebDriverWait(driver, PATIENCE_S)
    try:
        driver.get(page)
        wait.until(lambda it: len(it.find_elements("css selector", ".daemon .up")) == 2)
        driver.find_element("id", "prompt").send_keys("Count from one to one hundred.\n")
        wait.until(lambda it: it.find_element("css selector", ".assistant").text)
        driver.find_element("id", "stop").click()
        wait.until(lambda it: it.find_element("id", "send").is_displayed())
        figures = driver.find_element("css selector", ".figures").text
        assert "stopped" in figures
        assert "first token" in figures
        driver.find_element("id", "clear").click()
        driver.find_element("id", "prompt").send_keys("What is the capital of France?\n")
        wait.until(lambda it: "tokens a second" in it.find_element("css selector", ".figures").text)
        live = driver.find_element("id", "live").text
        assert "prefill" in live
        assert "GiB/s" in live
        driver.save_screenshot(str(tmp_path / "page.png"))
        assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []
    finally:
        driver.quit()

"""JupyterLab in a real browser: lessons run from first to last cell, a slider moves its figure, and nothing errs."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ROOT = Path(__file__).parent.parent
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
MINUTES = 60_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium, or another package manager's"),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab on loopback, over a copy of the notebooks."""
    root = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", root / "notebooks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"IdentityProvider.token": "", "ServerApp.password": "", "LabApp.news_url": "None"}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--allow-root"]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", f"--ServerApp.root_dir={root}"]
    environment = {key: value for key, value in os.environ.items() if key != "GCTUTOR_OUT"}
    server = subprocess.Popen(
        [*command, *(f"--{name}={value}" for name, value in settings.items())],
        env={
            **environment,
            "JUPYTER_CONFIG_DIR": str(root / "config"),
            "JUPYTERLAB_SETTINGS_DIR": str(root / "settings"),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(address)
        yield address
    finally:
        server.terminate()
        server.wait(timeout=30)


def _wait_for(address: str) -> None:
    for _ in range(120):
        try:
            json.load(urllib.request.urlopen(f"{address}/api/status", timeout=2))
            return
        except OSError:
            time.sleep(1)
    pytest.fail("JupyterLab did not start within two minutes")


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'gctutor[dev]'")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


def run_all(browser, lab, name):
    """Open a notebook, run all its cells, and return the page, its console errors and the time it took."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{lab}/lab/tree/notebooks/{name}?reset", wait_until="domcontentloaded")
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=2 * MINUTES)
    page.wait_for_selector("[data-status=idle]", timeout=2 * MINUTES)
    page.evaluate("window.jupyterapp?.commands.execute('notebook:restart-run-all')") if page.evaluate(
        "!!window.jupyterapp"
    ) else _run_by_menu(page)
    _accept_restart(page)
    return page, errors


def _run_by_menu(page) -> None:
    page.click("text=Run >> nth=0")
    page.click("text=Restart Kernel and Run All Cells…")


def _accept_restart(page) -> None:
    button = page.locator(".jp-Dialog button.jp-mod-accept")
    button.wait_for(timeout=MINUTES)
    button.click()


def wait_until_done(page, cells: int) -> None:
    """Until no cell is waiting or running, as the kernel's own status and the prompts say."""
    page.wait_for_function("document.querySelectorAll('.jp-InputPrompt').length > 0", timeout=MINUTES)
    page.wait_for_selector("[data-status=busy]", timeout=MINUTES)
    page.wait_for_function(
        "!document.querySelector('[data-status=busy]')"
        " && ![...document.querySelectorAll('.jp-InputPrompt')].some(p => p.textContent.includes('[*]'))",
        timeout=6 * MINUTES,
    )


@pytest.mark.parametrize("name", ["01_store_or_recompute", "05_selective_by_module", "07_pareto"])
def test_a_lesson_runs_in_jupyterlab_without_an_error(browser, lab, name):
    page, errors = run_all(browser, lab, f"{name}.ipynb")
    wait_until_done(page, 1)
    saved = page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']")
    assert saved.count() == 0, saved.first.inner_text()
    assert errors == []
    page.close()


def test_moving_a_slider_changes_the_figure(browser, lab):
    page, _ = run_all(browser, lab, "07_pareto.ipynb")
    wait_until_done(page, 1)
    slider = page.locator(".jupyter-widgets.widget-slider .noUi-handle, .jupyter-widgets input[type=range]").first
    slider.scroll_into_view_if_needed(timeout=MINUTES)
    figure = page.locator(".jupyter-widgets-output-area img, .jp-OutputArea img").last
    before = figure.get_attribute("src")
    slider.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "before => [...document.querySelectorAll('.jupyter-widgets-output-area img')].some(i => i.src !== before)",
        arg=before,
        timeout=MINUTES,
    )
    page.close()

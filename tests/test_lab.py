"""JupyterLab in a real browser: lessons run from first to last cell, a slider moves its figure, and nothing errs."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

import nbformat
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
MINUTE_MS = 60_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium, or another package manager's"),
]


class Lab(NamedTuple):
    """A running JupyterLab: its address, and the folder it serves."""

    address: str
    root: Path


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab on loopback, over a copy of the notebooks without their outputs."""
    root = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks" / "src", root / "src")
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        book = nbformat.read(path, as_version=4)
        for cell in book.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(book, root / path.name)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--allow-root"]
    command += [f"--ServerApp.root_dir={root}", "--IdentityProvider.token=", "--ServerApp.password="]
    environment = {key: value for key, value in os.environ.items() if key != "GCTUTOR_OUT"}
    environment["JUPYTER_CONFIG_DIR"] = str(root / "config")
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield Lab(_answering(f"http://127.0.0.1:{port}"), root)
    finally:
        server.terminate()
        server.wait(timeout=30)


def _answering(address: str) -> str:
    for _ in range(120):
        try:
            urllib.request.urlopen(f"{address}/api/status", timeout=2).close()
            return address
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
    """Open a lesson, run all its cells, and wait for the last; returns the page and its script errors."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{lab.address}/lab/tree/{name}.ipynb?reset", wait_until="domcontentloaded")
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]", timeout=2 * MINUTE_MS)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    for _ in range(120):
        time.sleep(3)
        page.click("[data-command='docmanager:save']")
        if not pending(lab.root / f"{name}.ipynb") and page.locator("[data-status=idle]").count():
            break
    return page, errors


def saved_cells(path: Path) -> list:
    """The code cells of a notebook that JupyterLab may be writing at this moment."""
    for _ in range(50):
        try:
            return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        except nbformat.reader.NotJSONError:
            time.sleep(0.2)
    pytest.fail(f"{path.name} was never saved whole")


def pending(path: Path) -> list[str]:
    """Code cells of a saved notebook that have not run, unless one before them has failed."""
    cells = saved_cells(path)
    if any(output.output_type == "error" for cell in cells for output in cell.outputs):
        return []
    return [cell.source for cell in cells if cell.execution_count is None]


def failures(path: Path) -> list[str]:
    """Errors and warnings among the outputs of a saved notebook."""
    outputs = [output for cell in saved_cells(path) for output in cell.outputs]
    return [o.evalue for o in outputs if o.output_type == "error"] + [
        o.text for o in outputs if o.output_type == "stream" and o.name == "stderr"
    ]


@pytest.mark.parametrize("name", ["01_store_or_recompute", "05_selective_by_module", "07_pareto"])
def test_a_lesson_runs_in_jupyterlab_without_an_error(browser, lab, name):
    page, errors = run_all(browser, lab, name)
    try:
        assert pending(lab.root / f"{name}.ipynb") == []
        assert failures(lab.root / f"{name}.ipynb") == []
        assert errors == []
        if name == "07_pareto":
            assert_a_slider_moves_its_figure(page)
    finally:
        page.close()


def assert_a_slider_moves_its_figure(page) -> None:
    handle = page.locator(".widget-slider .noUi-handle").first
    handle.scroll_into_view_if_needed(timeout=MINUTE_MS)
    pictures = "[...document.querySelectorAll('.jupyter-widgets img')].map(i => i.src).join()"
    page.wait_for_function(f"{pictures} !== ''", timeout=MINUTE_MS)
    before = page.evaluate(pictures)
    handle.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(f"before => {pictures} !== before && {pictures} !== ''", arg=before, timeout=MINUTE_MS)

"""JupyterLab in a real browser: lessons run from first to last cell, a slider moves its figure, and nothing errs."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'gctutor[dev]'")
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


@pytest.fixture
def lab(tmp_path):
    """The address of a JupyterLab on loopback, over a copy of the notebooks without their outputs.

    All cells are put into the page at once: by default JupyterLab draws only those in view.
    """
    root, settings = tmp_path / "lab", tmp_path / "settings"
    shutil.copytree(ROOT / "notebooks" / "src", root / "src")
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        book = nbformat.read(path, as_version=4)
        for cell in book.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(book, root / path.name)
    tracker = settings / "@jupyterlab" / "notebook-extension" / "tracker.jupyterlab-settings"
    tracker.parent.mkdir(parents=True)
    tracker.write_text('{"windowingMode": "none"}', encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--allow-root"]
    command += [f"--ServerApp.root_dir={root}", "--IdentityProvider.token=", "--ServerApp.password="]
    environment = {key: value for key, value in os.environ.items() if key != "GCTUTOR_OUT"}
    environment |= {"JUPYTER_CONFIG_DIR": str(tmp_path / "config"), "JUPYTERLAB_SETTINGS_DIR": str(settings)}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield _answering(f"http://127.0.0.1:{port}")
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
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


# A folded cell, a solution's, has an empty prompt.
PROMPTS = "[...document.querySelectorAll('.jp-Notebook .jp-CodeCell .jp-InputPrompt')].map(e => e.textContent.trim())"
STARTED = f"{PROMPTS}.some(text => /[\\d*]/.test(text))"
FINISHED = f"{PROMPTS}.every(text => text === '' || /\\d/.test(text))"
OUTPUTS = "e => e.map(output => output.textContent)"


def run_all(page, address: str, name: str) -> None:
    """Open a lesson in a page of the browser, run all its cells, and wait for the last."""
    # On a busy machine JupyterLab may ask which kernel to take before it knows that there is one only.
    page.add_locator_handler(page.locator(".jp-Dialog"), lambda asked: asked.locator("button.jp-mod-accept").click())
    page.goto(f"{address}/lab/tree/{name}.ipynb?reset", wait_until="domcontentloaded")
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]", timeout=2 * MINUTE_MS)
    for _ in range(6):  # and a question closes the menu
        with contextlib.suppress(playwright.TimeoutError):
            page.get_by_role("menuitem", name="Run", exact=True).click(timeout=MINUTE_MS // 6)
            page.get_by_role("menuitem", name="Run All Cells", exact=True).click(timeout=MINUTE_MS // 6)
            page.wait_for_function(STARTED, timeout=MINUTE_MS // 2)
            break
    page.wait_for_function(f"{FINISHED} || document.querySelector('{ERROR}')", timeout=8 * MINUTE_MS)


ERROR = '[data-mime-type="application/vnd.jupyter.error"]'
STDERR = '[data-mime-type="application/vnd.jupyter.stderr"]'


@pytest.mark.parametrize("name", ["01_store_or_recompute", "05_selective_by_module", "07_pareto"])
def test_a_lesson_runs_in_jupyterlab_without_an_error(browser, lab, name):
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    try:
        try:
            run_all(page, lab, name)
        except playwright.TimeoutError as error:
            pytest.fail(f"{error.message.splitlines()[0]}; dialogs: {page.locator('.jp-Dialog').all_inner_texts()}")
        assert page.eval_on_selector_all(f"{ERROR}, {STDERR}", OUTPUTS) == []
        assert page.locator(".jp-Notebook .jp-OutputArea-output img").count() > 0
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

"""The static site: pages of executed lessons, folded solutions, formulas without scripts, links that lead somewhere."""

import nbformat
import pytest

from gctutor.errors import UserError
from gctutor.site import broken_links, build_site, title_of

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture
def house(tmp_path):
    """Two executed lessons: a formula, a picture with alt text, a solution, and a link to the next."""
    new = nbformat.v4
    picture = new.new_output("display_data", {"image/png": PNG}, metadata={"image/png": {"alt": "a red dot"}})
    first = new.new_notebook(
        cells=[
            new.new_markdown_cell("# 1. First\n\nA step is $3 T_f$. Next: [two](02_second.ipynb)."),
            new.new_code_cell("draw()", outputs=[picture], execution_count=1),
            new.new_code_cell("answer = 42", metadata={"tags": ["solution"]}, execution_count=2),
        ],
        metadata={"gctutor": {"device": "CPU", "date": "2026-01-02T00:00:00"}},
    )
    second = new.new_notebook(cells=[new.new_markdown_cell("# 2. Second\n\nThe end.")])
    (tmp_path / "src").mkdir()
    for name, book in (("01_first", first), ("02_second", second)):
        (tmp_path / "src" / f"{name}.py").write_text("# %% [markdown]\n# text\n")
        nbformat.write(book, tmp_path / f"{name}.ipynb")
    return tmp_path


def test_pages_stand_alone_and_their_links_lead_somewhere(house):
    build_site(house / "out", folder=house)
    assert broken_links(house / "out") == []
    page = (house / "out" / "01_first.html").read_text()
    assert "<math" in page
    assert "$3 T_f$" not in page
    assert 'alt="a red dot"' in page
    assert "<summary>Solution</summary>" in page
    assert 'href="02_second.html"' in page
    assert "width=device-width" in page
    assert "CPU, 2026-01-02" in (house / "out" / "index.html").read_text()


def test_a_broken_link_and_a_fetched_script_are_found(house):
    build_site(house / "out", folder=house)
    page = house / "out" / "02_second.html"
    page.write_text(page.read_text() + '<a href="03_gone.html">x</a><script src="https://example.org/x.js"></script>')
    assert broken_links(house / "out") == [
        "02_second.html: 03_gone.html",
        "02_second.html fetches https://example.org/x.js",
    ]


def test_a_lesson_never_executed_is_refused(house):
    (house / "02_second.ipynb").unlink()
    with pytest.raises(UserError, match="02_second has not been executed"):
        build_site(house / "out", folder=house)


def test_title_is_the_first_heading(house):
    assert title_of(nbformat.read(house / "01_first.ipynb", as_version=4)) == "1. First"

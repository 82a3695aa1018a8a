"""The executed series as a static site: one page a notebook, navigation, no request to anywhere else."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from pygments.formatters import HtmlFormatter

from gctutor.errors import UserError
from gctutor.pairs import NOTEBOOKS, Lesson, lessons

STYLE = """
:root { color-scheme: light; --ink: #222; --quiet: #666; --line: #ddd; --accent: #0072b2; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); font: 17px/1.6 system-ui, sans-serif; }
nav { background: #f6f6f6; border-bottom: 1px solid var(--line); padding: .6rem 1rem; }
nav a { display: inline-block; margin: .1rem .8rem .1rem 0; }
nav a[aria-current] { color: var(--ink); font-weight: 600; text-decoration: none; }
main { max-width: 54rem; margin: 0 auto; padding: 1rem; }
a { color: var(--accent); }
img, svg { max-width: 100%; height: auto; }
pre { overflow-x: auto; padding: .7rem; border-radius: 4px; font-size: .82em; line-height: 1.4; }
:not(pre) > code { overflow-wrap: anywhere; }
math[display="block"] { display: block math; max-width: 100%; overflow-x: auto; }
.input_area pre, .highlight pre { background: #f6f8fa; }
.jp-OutputPrompt, .jp-InputPrompt, .prompt { display: none; }
table { border: 0; border-collapse: collapse; display: block; overflow-x: auto; font-size: .9em; }
th, td { border: 0; border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: right; }
th:first-child, td:first-child { text-align: left; }
details { border-left: 3px solid var(--line); padding-left: .8rem; }
.anchor-link { display: none; }
footer { color: var(--quiet); border-top: 1px solid var(--line); margin-top: 3rem; padding: 1rem 0; }
"""


def build_site(out: Path | str = "build/site", *, folder: Path = NOTEBOOKS) -> Path:
    """Write the committed, executed series as pages to `out` and return the index.

    Formulas become MathML, pictures are embedded with their alt text, solutions are folded. Raises `UserError` when a
    notebook has never been executed.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    series = lessons(folder=folder)
    books = []
    for lesson in series:
        if not lesson.notebook.exists():
            raise UserError(f"{lesson.name} has not been executed yet: run 'make refresh' first.")
        books.append(nbformat.read(lesson.notebook, as_version=4))
    titles = [title_of(book) for book in books]
    for index, book in enumerate(books):
        page = _page(titles[index], _navigation(series, titles, index), _body(book) + _onward(series, titles, index))
        (out / f"{series[index].name}.html").write_text(page, encoding="utf-8")
    (out / "index.html").write_text(_index(series, titles, books), encoding="utf-8")
    return out / "index.html"


def title_of(book: NotebookNode) -> str:
    """The first heading of a notebook."""
    heading = re.search(r"^# (.+)$", "\n".join(c.source for c in book.cells if c.cell_type == "markdown"), re.MULTILINE)
    return heading[1].strip() if heading else "Untitled"


def _body(book: NotebookNode) -> str:
    body, _ = HTMLExporter(template_name="basic", embed_images=True).from_notebook_node(_folded(book))
    for mark, tag in FOLD.items():
        body = body.replace(mark, tag)
    return _local_links(_formulas(body))


FOLD = {"@@solution@@": "<details><summary>Solution</summary>", "@@end of solution@@": "</details>"}


def _folded(book: NotebookNode) -> NotebookNode:
    """Solutions between marks that become a folded section: nbconvert escapes tags in raw cells."""
    cells = []
    for cell in book.cells:
        before, after = map(nbformat.v4.new_raw_cell, FOLD)
        cells += [before, cell, after] if "solution" in cell.metadata.get("tags", []) else [cell]
    return nbformat.from_dict({**book, "cells": cells})


def _formulas(body: str) -> str:
    """`$…$` and `$$…$$` outside code as MathML, which browsers draw by themselves."""
    from latex2mathml.converter import convert

    def mathml(match: re.Match[str]) -> str:
        block = match[0].startswith("$$")
        return convert(html.unescape(match[1] or match[2]), display="block" if block else "inline")

    pieces = re.split(r"(<pre.*?</pre>|<code.*?</code>)", body, flags=re.DOTALL)
    formula = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$", re.DOTALL)
    return "".join(p if p.startswith(("<pre", "<code")) else formula.sub(mathml, p) for p in pieces)


def _local_links(body: str) -> str:
    """Links between notebooks lead to their pages."""
    return re.sub(r'href="(\d\d_\w+)\.ipynb', r'href="\1.html', body)


def _navigation(series: Sequence[Lesson], titles: Sequence[str], current: int | None) -> str:
    links = ['<a href="index.html"' + (' aria-current="page"' if current is None else "") + ">Contents</a>"]
    for index, (lesson, title) in enumerate(zip(series, titles, strict=True)):
        here = ' aria-current="page"' if index == current else ""
        links.append(
            f'<a href="{lesson.name}.html" title="{html.escape(title, quote=True)}"{here}>{lesson.name[:2]}</a>'
        )
    return f'<nav aria-label="Notebooks">{"".join(links)}</nav>'


def _onward(series: Sequence[Lesson], titles: Sequence[str], index: int) -> str:
    if index + 1 == len(series):
        return '<footer><a href="index.html">Back to the contents</a></footer>'
    return f'<footer>Next: <a href="{series[index + 1].name}.html">{html.escape(titles[index + 1])}</a></footer>'


def _index(series: Sequence[Lesson], titles: Sequence[str], books: Sequence[NotebookNode]) -> str:
    rows = []
    for lesson, title, book in zip(series, titles, books, strict=True):
        stamp = book.metadata.get("gctutor", {})
        when = f"{stamp.get('device', '?')}, {str(stamp.get('date', '?'))[:10]}"
        rows.append(
            f'<tr><td><a href="{lesson.name}.html">{html.escape(title)}</a></td><td>{html.escape(when)}</td></tr>'
        )
    head = "<tr><th>Notebook</th><th>Executed on</th></tr>"
    text = "<h1>Gradient checkpointing without guessing</h1><p>The executed series; every number says its source.</p>"
    return _page("Contents", _navigation(series, titles, None), f"{text}<table>{head}{''.join(rows)}</table>")


def _page(title: str, navigation: str, body: str) -> str:
    code = HtmlFormatter(style="default").get_style_defs(".highlight")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}{code}</style></head>"
        f"<body>{navigation}<main>{body}</main></body></html>\n"
    )


def broken_links(out: Path | str) -> list[str]:
    """Internal links of a built site that lead nowhere, and anything a page would fetch from elsewhere."""
    out = Path(out)
    found = []
    for page in sorted(out.glob("*.html")):
        text = page.read_text(encoding="utf-8")
        anchors = set(re.findall(r'id="([^"]+)"', text))
        for target in re.findall(r'href="([^"]+)"', text):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            if name and not (out / name).exists():
                found.append(f"{page.name}: {target}")
            if not name and anchor not in anchors:
                found.append(f"{page.name}: #{anchor}")
        fetched = re.findall(r'<(?:script|img|link|iframe)[^>]+(?:src|href)="(https?:[^"]+)"', text)
        found += [f"{page.name} fetches {address}" for address in fetched]
    return found

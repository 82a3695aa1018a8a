"""`save_figure`: the one function here that writes files."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from gctutor.devices import DATA
from gctutor.plots.canvas import headline, title_height
from gctutor.plots.style import DPI, SIZE_IN


def save_figure(
    fig: Figure, name: str, folder: Path | str | None = None, *, alt: str | None = None, caption: str | None = None
) -> tuple[Path, Path, Path]:
    """Write `name.svg`, `name.png` (1920 × 1080) and `name.json` (title, caption, alt text, …) to `folder`.

    `folder` is by default `figures` under `$GCTUTOR_OUT`, or under the repository's `build`. The same figure gives the
    same bytes again: no date, no random identifiers. Caption and alt text default to the title, which states the
    finding, and the subtitle. Returns the paths of the three files.
    """
    folder = Path(folder or Path(os.environ.get("GCTUTOR_OUT") or DATA.parent / "build") / "figures")
    folder.mkdir(parents=True, exist_ok=True)
    svg, png, sidecar = (folder / f"{name}.{ending}" for ending in ("svg", "png", "json"))
    title, subtitle = headline(fig)
    words = {
        "name": name,
        "title": title,
        "subtitle": subtitle,
        "title_height": title_height(fig),
        "caption": caption or title,
        "alt": alt or ". ".join(part for part in (title, subtitle) if part),
    }
    with (
        _laid_out(fig),
        matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "path", "savefig.bbox": "standard"}),
    ):
        fig.savefig(svg, dpi=DPI, metadata={"Date": None, "Creator": None, "Title": words["alt"]})
        fig.savefig(png, dpi=DPI, metadata={"Software": None})
    sidecar.write_text(json.dumps(words, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return svg, png, sidecar


@contextlib.contextmanager
def _laid_out(fig: Figure) -> Iterator[None]:
    """The figure at its full size, laid out anew and held so for the block.

    Constrained layout starts from where the last draw left the axes and so moves them a little with every draw: start
    from the grid's own places, let it settle, and stop it.
    """
    width, height = fig.get_size_inches()
    engine = fig.get_layout_engine()
    fig.set_size_inches(SIZE_IN)
    for ax in fig.axes:
        spec = ax.get_subplotspec()
        if engine is not None and spec is not None:
            ax.set_position(spec.get_position(fig))
            ax.set_in_layout(True)
    for _ in range(3):
        fig.draw_without_rendering()
    try:
        fig.set_layout_engine("none")
        yield
    finally:
        fig.set_layout_engine(engine)
        fig.set_size_inches(width, height)

"""The figures of the series as slides: 1920 × 1080 pictures in the slide style, and a PowerPoint deck of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gctutor.errors import UserError
from gctutor.plots.canvas import HEAD_MARGIN

WIDE_IN = (13.333, 7.5)  # PowerPoint's 16:9 page
TITLE = "Gradient checkpointing without guessing"
CREDIT = "Prose and figures: CC BY 4.0. Every number says whether it was measured, recorded or estimated."


def build_deck(figures: Path | str, path: Path | str, *, recommendation: Sequence[str] = ()) -> Path:
    """Write a deck to `path`: a title slide, one slide a figure of the folder `figures`, and a recommendation.

    A figure's title is the slide's title, its picture carries the alt text, and the notes hold caption and source.
    Raises `UserError` when the folder holds no figure or python-pptx is missing.
    """
    try:
        from pptx import Presentation
        from pptx.util import Inches
    except ImportError as error:
        raise UserError("The deck needs python-pptx: pip install 'gctutor[slides]'.") from error
    found = sorted(Path(figures).glob("*.json"))
    if not found:
        raise UserError(f"There is no figure in {Path(figures).name}: run the series first.")
    deck = Presentation()
    deck.slide_width, deck.slide_height = (Inches(length) for length in WIDE_IN)
    _words(deck, TITLE, ["What a training step keeps, what recomputing it costs, and how to choose.", CREDIT])
    for sidecar in found:
        _picture(deck, json.loads(sidecar.read_text(encoding="utf-8")), sidecar.with_suffix(".png"))
    if recommendation:
        _words(deck, "What to do on Monday", recommendation)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    deck.save(str(path))
    return path


def _words(deck: Any, title: str, lines: Sequence[str]) -> None:
    from pptx.util import Inches, Pt

    slide = deck.slides.add_slide(deck.slide_layouts[5])
    _title(slide, title, left=0.8, top=0.9, size=36)
    box = slide.shapes.add_textbox(Inches(0.8), Inches(2.3), Inches(WIDE_IN[0] - 1.6), Inches(4.5)).text_frame
    box.word_wrap = True
    for index, line in enumerate(lines):
        paragraph = box.paragraphs[0] if index == 0 else box.add_paragraph()
        paragraph.text = line
        paragraph.font.size, paragraph.space_after = Pt(22), Pt(12)


def _title(slide: Any, text: str, *, left: float, top: float, size: int) -> None:
    from pptx.enum.text import PP_ALIGN
    from pptx.util import Inches, Pt

    shape = slide.shapes.title
    shape.left, shape.top = Inches(left), Inches(top)
    shape.width, shape.height = Inches(WIDE_IN[0] - 2 * left), Inches(1.0)
    shape.text_frame.margin_left = 0
    shape.text_frame.word_wrap = True
    shape.text = text
    (line,) = shape.text_frame.paragraphs
    line.alignment, line.font.size, line.font.bold = PP_ALIGN.LEFT, Pt(size), True


def _picture(deck: Any, words: dict[str, Any], png: Path) -> None:
    """A figure under its own title: the part of the picture that repeats the title is cropped away."""
    from pptx.util import Inches

    slide = deck.slides.add_slide(deck.slide_layouts[5])
    crop = words.get("title_height", 0.0)
    top = 1.1
    height = WIDE_IN[1] - top
    width = min(WIDE_IN[0], height * 16 / 9 / (1 - crop))
    left = (WIDE_IN[0] - width) / 2
    _title(slide, words["title"], left=left + HEAD_MARGIN * width, top=0.1, size=24)
    picture = slide.shapes.add_picture(str(png), Inches(left), Inches(top), width=Inches(width))
    picture.crop_top = crop
    picture.height = Inches(width * 9 / 16 * (1 - crop))
    picture._element.nvPicPr.cNvPr.set("descr", words["alt"])
    notes = [words["caption"], words["subtitle"], f"Figure {words['name']} of the series."]
    slide.notes_slide.notes_text_frame.text = "\n\n".join(part for part in notes if part)

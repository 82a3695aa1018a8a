"""Direct labels that keep clear of one another, of markers and of lines, placed anew each time the figure is drawn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib import patheffects, rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.lines import Line2D
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Transform

from gctutor.plots.style import INK, PALE

Boxes = np.ndarray  # (n, 4): left, bottom, right, top in pixels
NO_BOXES: Boxes = np.empty((0, 4))


class AtDraw(Artist):
    """Calls `place(renderer)` whenever its axes are drawn: the layout is final then, and the labels come after."""

    def __init__(self, place: Callable[[RendererBase], None]) -> None:
        super().__init__()
        self.place = place
        self.set_zorder(-10)
        self.set_in_layout(False)

    def draw(self, renderer: RendererBase) -> None:
        self.place(renderer)


def annotation(
    ax: Axes,
    text: str,
    x: float,
    y: float,
    *,
    color: str = INK,
    leader_from: tuple[float, float] = (0.5, 0.5),
    marked: bool = True,
    **options: Any,
) -> Annotation:
    """A label for the point (`x`, `y`), with a white halo and a leader that shows only when the label is moved off.

    `leader_from` is where in the label's box the leader starts; it ends at the mark of a `marked` point.
    """
    options = {"ha": "center", "va": "center", "zorder": 6, "linespacing": 1.0, **options}
    leader = {
        "arrowstyle": "-",
        "color": PALE,
        "linewidth": rcParams["axes.linewidth"],
        "relpos": leader_from,
        "shrinkA": 1,
        "shrinkB": 0.6 * rcParams["lines.markersize"] if marked else 0,
    }
    label = ax.annotate(
        text, (x, y), xytext=(0, 0), textcoords="offset points", color=color, arrowprops=leader, **options
    )
    label.set_path_effects([patheffects.withStroke(linewidth=0.2 * rcParams["font.size"], foreground="white")])
    if label.arrow_patch is not None:
        label.arrow_patch.set_zorder(1)
    return label


def end_label(ax: Axes, text: str, x: float, y: float, **options: Any) -> Annotation:
    """A label for the end of a line, to be placed by `label_ends`."""
    return annotation(ax, text, x, y, ha="left", leader_from=(0, 0.5), marked=False, **options)


def label_points(
    ax: Axes,
    labels: Sequence[Annotation],
    *,
    lines: Sequence[Line2D] = (),
    texts: Sequence[Text] = (),
    avoid: Callable[[], Boxes] | None = None,
) -> None:
    """Keep `labels` beside their points, inside `ax`, off each other, `texts`, all the points, `avoid` and `lines`."""
    for label in labels:
        label.set_in_layout(False)
    marker_pt, font_pt = rcParams["lines.markersize"], rcParams["font.size"]

    def place(renderer: RendererBase) -> None:
        em, radius = pixels(renderer, font_pt), pixels(renderer, marker_pt) * 0.75
        points = _anchors(labels)
        extents = [_text_box(label, renderer) for label in labels]
        sizes = [(float(box[2] - box[0]) + 0.3 * em, float(box[3] - box[1]) + 0.1 * em) for box in extents]
        fixed = [_text_boxes(text, renderer, em) for text in texts]
        blocked = np.vstack([NO_BOXES, *fixed, *([avoid()] if avoid else [])])
        drawn = np.vstack([NO_BOXES, *(_line_boxes(line, em, radius) for line in lines)])
        centres = _arrange(points, sizes, np.array(ax.bbox.extents), blocked, drawn, em, radius)
        for label, point, centre, (width, height) in zip(labels, points, centres, sizes, strict=True):
            offset = centre - point
            label.set_position(tuple(offset / pixels(renderer, 1)))
            half = np.array([width, height]) / 2
            gaps = np.hypot(*np.maximum(np.abs(points - centre) - half, 0).T)
            own = float(np.hypot(*np.maximum(np.abs(offset) - half, 0)))
            _show_leader(label, own > 1.4 * em or own > gaps.min() + 0.3 * em)

    ax.add_artist(AtDraw(place))


def label_ends(ax: Axes, labels: Sequence[Annotation]) -> None:
    """Put `labels` in the margin right of `ax`, each level with its point where the others leave room."""
    font_pt = rcParams["font.size"]
    for label in labels:
        label.set_position((1.8 * font_pt, 0))

    def place(renderer: RendererBase) -> None:
        em = pixels(renderer, font_pt)
        points = _anchors(labels)
        boxes = [_text_box(label, renderer) for label in labels]
        heights = [max(box[3] - box[1], em) + 0.2 * em for box in boxes]
        centres = spread(points[:, 1], heights, ax.bbox.y0, ax.bbox.y1)
        for label, point, centre in zip(labels, points, centres, strict=True):
            moved = centre - point[1]
            label.set_position((1.8 * font_pt, moved / pixels(renderer, 1)))
            _show_leader(label, bool(abs(moved) > 0.4 * em))

    ax.add_artist(AtDraw(place))


def show_if_fits(ax: Axes, texts: Sequence[tuple[Text, float]]) -> None:
    """Show each text only when it is narrower than its room: a width in data units of a linear x axis."""
    for text, _ in texts:
        text.set_in_layout(False)

    def place(renderer: RendererBase) -> None:
        per_unit = ax.bbox.width / abs(np.diff(ax.get_xlim())[0])
        for text, room in texts:
            text.set_visible(True)
            text.set_visible(bool(text.get_window_extent(renderer).width < 0.92 * room * per_unit))

    ax.add_artist(AtDraw(place))


def spread(wanted: Sequence[float] | np.ndarray, sizes: Sequence[float], low: float, high: float) -> np.ndarray:
    """Centres as near as possible to `wanted` so that intervals of `sizes` between `low` and `high` do not overlap.

    An isotonic regression of the intervals' starts. What cannot fit starts at `low` and runs over.
    """
    from scipy.optimize import isotonic_regression

    order = np.argsort(np.asarray(wanted, dtype=float), kind="stable")
    lengths = np.asarray(sizes, dtype=float)[order]
    before = np.cumsum(lengths) - lengths
    starts = isotonic_regression(np.asarray(wanted, dtype=float)[order] - lengths / 2 - before).x
    starts = np.clip(starts, low, max(low, high - lengths.sum()))
    centres = np.empty(len(order))
    centres[order] = starts + before + lengths / 2
    return centres


def pixels(renderer: RendererBase, points: float) -> float:
    return float(np.asarray(renderer.points_to_pixels(points)))


def _anchors(labels: Sequence[Annotation]) -> np.ndarray:
    """The labels' points (n, 2) in pixels."""
    points = [
        (label.xycoords if isinstance(label.xycoords, Transform) else label.axes.transData).transform(label.xy)
        for label in labels
        if label.axes is not None
    ]
    return np.array(points).reshape(-1, 2)


def _show_leader(label: Annotation, visible: bool) -> None:
    if label.arrow_patch is not None:
        label.arrow_patch.set_visible(visible)


def _text_box(text: Text, renderer: RendererBase) -> np.ndarray:
    """Extent of the text alone: an annotation's own extent would include its leader."""
    if isinstance(text, Annotation):
        text.update_positions(renderer)
    return np.array(Text.get_window_extent(text, renderer).extents)


def _text_boxes(text: Text, renderer: RendererBase, em: float) -> Boxes:
    """The box of a level text; boxes along a text that rises."""
    box = _text_box(text, renderer)
    if not text.get_rotation():
        return box[None, :]
    dots = _along(box[:2] + 0.3 * em, box[2:] - 0.3 * em, em)
    return dots + 0.4 * em * np.array([-1, -1, 1, 1])


def _line_boxes(line: Line2D, em: float, radius: float) -> Boxes:
    """Small boxes along a line; one box for a mark of its own."""
    vertices = np.asarray(line.get_transform().transform_path(line.get_path()).vertices)
    if len(vertices) == 1:
        return np.hstack([vertices - radius, vertices + radius])
    moved = (np.diff(np.round(vertices / (0.2 * em)), axis=0) != 0).any(axis=1)
    vertices = vertices[np.append(True, moved)]  # one vertex where many lie within a fifth of an em
    return np.vstack([NO_BOXES, *(_along(*ends, em) for ends in itertools.pairwise(vertices))])


def _along(start: np.ndarray, end: np.ndarray, em: float) -> Boxes:
    """Boxes of a fifth of an em, about as far apart again, between two points."""
    if not np.isfinite([*start, *end]).all():
        return NO_BOXES
    steps = int(min(np.hypot(*(end - start)) / (0.3 * em), 1000)) + 1
    dots = start + (end - start) * np.linspace(0, 1, steps)[:, None]
    return np.hstack([dots - 0.1 * em, dots + 0.1 * em])


_RING = [(x, y) for x in (-1, -0.5, 0, 0.5, 1) for y in (-1, -0.5, 0, 0.5, 1) if max(abs(x), abs(y)) == 1]
_ROUNDS = 6
_REACH = (0.35, 0.7, 1.2, 2.0, 3.0, 4.5, 6.5, 9.0)


def _arrange(
    points: np.ndarray,
    sizes: Sequence[tuple[float, float]],
    frame: np.ndarray,
    blocked: Boxes,
    lines: Boxes,
    em: float,
    radius: float,
) -> np.ndarray:
    """Centres (n, 2) of the labels: each in turn takes its cheapest place given the others', until none moves."""
    markers = np.hstack([points - radius, points + radius])
    options = []
    for index, (point, size) in enumerate(zip(points, np.array(sizes), strict=True)):
        centres, cost = _candidates(point, size, em, radius)
        around, ends = np.hstack([centres - size / 2, centres + size / 2]), _leader_ends(point, centres, size / 2)
        cost = cost + 100 * (size.prod() - _overlap(around, frame[None, :])[:, 0]) / em**2
        cost += (60 * _overlap(around, blocked).sum(1) + 40 * _overlap(around, markers).sum(1)) / em**2
        cost += 12 * _overlap(around, lines).sum(1) / em**2
        cost += 12 * _hits(point, ends, blocked) + 1.5 * _hits(point, ends, np.delete(markers, index, axis=0))
        options.append((centres, around, ends, cost))
    chosen = [-1] * len(points)
    boxes: list[Boxes] = [NO_BOXES] * len(points)
    leaders: list[Boxes] = [NO_BOXES] * len(points)
    for _ in range(_ROUNDS):
        before = list(chosen)
        for index, (_, around, ends, fixed) in enumerate(options):
            others = np.vstack([NO_BOXES, *boxes[:index], *boxes[index + 1 :]])
            crossed = np.vstack([NO_BOXES, *leaders[:index], *leaders[index + 1 :]])
            moving = (60 * _overlap(around, others).sum(1) + 150 * _overlap(around, crossed).sum(1)) / em**2
            best = int(np.argmin(fixed + moving + 12 * _hits(points[index], ends, others)))
            chosen[index], boxes[index] = best, around[best : best + 1]
            leaders[index] = _along(points[index], ends[best], em)[2:]
        if chosen == before:
            break
    return np.array([option[0][best] for option, best in zip(options, chosen, strict=True)]).reshape(-1, 2)


def _candidates(point: np.ndarray, size: np.ndarray, em: float, radius: float) -> tuple[np.ndarray, np.ndarray]:
    """Centres (n, 2) round a point, and how far each lies off in em (right and level a little preferred)."""
    ring = np.array(_RING)
    centres, reaches = [], []
    for reach in _REACH:
        centres.append(point + ring * (radius + reach * em + size / 2))
        reaches.append(reach + 0.25 * np.abs(ring[:, 1]) - 0.15 * ring[:, 0])
    return np.vstack(centres), np.hstack(reaches)


def _leader_ends(point: np.ndarray, centres: np.ndarray, half: np.ndarray) -> np.ndarray:
    """Where the line from the point to each centre enters that label's box."""
    away = centres - point
    share = ((np.abs(away) - half) / np.maximum(np.abs(away), 1e-9)).max(axis=1)
    return point + np.clip(share, 0, 1)[:, None] * away


def _hits(point: np.ndarray, ends: np.ndarray, obstacles: Boxes) -> np.ndarray:
    """How many of ten samples of each leader, from the point to its end, lie on an obstacle."""
    dots = point + np.linspace(0.1, 0.95, 10)[:, None, None] * (ends - point)
    x, y = dots[..., 0, None], dots[..., 1, None]
    left, bottom, right, top = obstacles.T
    return ((x >= left) & (x <= right) & (y >= bottom) & (y <= top)).any(-1).sum(0)


def _overlap(a: Boxes, b: Boxes) -> np.ndarray:
    """Areas (len(a), len(b)) that the boxes have in common."""
    width, height = (
        np.minimum(a[:, None, i + 2], b[None, :, i + 2]) - np.maximum(a[:, None, i], b[None, :, i]) for i in (0, 1)
    )
    return width.clip(0) * height.clip(0)

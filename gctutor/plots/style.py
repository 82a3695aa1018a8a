"""The two styles (`notebook`, `slide`), and the fixed looks of policy families, memory categories, phases, bounds."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import matplotlib
from matplotlib.colors import to_hex, to_rgb

from gctutor.policies import family

SIZE_IN = (12.8, 7.2)  # 1920 × 1080 at DPI
DPI = 150

# Okabe & Ito, "Color Universal Design" (2008): distinguishable with every common form of colour blindness.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILLION, PURPLE, GREY = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
    "#666666",
)
INK = "#222222"
QUIET_INK = "#666666"
PALE = "#B8B8B8"


class Look(NamedTuple):
    """A colour and a marker."""

    color: str
    marker: str


FAMILY_STYLE: dict[str, Look] = {
    "none": Look(BLACK, "o"),
    "block": Look(VERMILLION, "s"),
    "sub": Look(ORANGE, "^"),
    "ops": Look(BLUE, "D"),
    "modules": Look(GREEN, "P"),
    "compile": Look(PURPLE, "X"),
    "mix": Look(SKY, "v"),
    "auto": Look(YELLOW, "*"),
    "budget": Look(GREY, "h"),
}
CATEGORY_COLOR = {
    "weights": "#999999",
    "gradients": SKY,
    "activations": ORANGE,
    "loss": PURPLE,
    "temporary": YELLOW,
}
PHASE_COLOR = {"forward": BLUE, "recompute": VERMILLION, "backward": SKY, "optimizer": PURPLE}
BOUND_STYLE = {"compute": Look(BLUE, "o"), "memory": Look(ORANGE, "o"), "launch": Look("#999999", "o")}
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.2, 1.6)), (0, (6, 2, 1.2, 2)))

_active: ContextVar[bool] = ContextVar("gctutor plot style", default=False)


def _settings(text: float, title: float, line: float, thin: float, marker: float) -> dict[str, Any]:
    return {
        "figure.figsize": SIZE_IN,
        "figure.dpi": 100,
        "figure.facecolor": "white",
        "font.family": "DejaVu Sans",
        "font.size": text,
        "axes.titlesize": title,
        "axes.titleweight": "bold",
        "axes.labelsize": text,
        "xtick.labelsize": text,
        "ytick.labelsize": text,
        "axes.edgecolor": PALE,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": PALE,
        "ytick.color": PALE,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": thin,
        "xtick.major.width": thin,
        "ytick.major.width": thin,
        "lines.linewidth": line,
        "lines.markersize": marker,
        "lines.markeredgewidth": line,
        "hatch.linewidth": thin,
        "axes.axisbelow": True,
    }


NOTEBOOK = _settings(text=12, title=17, line=2.0, thin=1.0, marker=9)
SLIDE = _settings(text=18, title=25, line=3.0, thin=2.5, marker=13)


@contextlib.contextmanager
def notebook() -> Iterator[None]:
    """The style for reading: text of 12 pt on a 12.8 × 7.2 inch figure. Settings are restored afterwards.

    With the environment variable `GCTUTOR_STYLE=slide` it is the slides' style: `gctutor slides` redraws a series so.
    """
    with _style(SLIDE if os.environ.get("GCTUTOR_STYLE") == "slide" else NOTEBOOK):
        yield


@contextlib.contextmanager
def slide() -> Iterator[None]:
    """The style for talks: text of 18 pt and more, lines of 2.5 pt and more. Settings are restored afterwards."""
    with _style(SLIDE):
        yield


@contextlib.contextmanager
def _style(settings: dict[str, Any]) -> Iterator[None]:
    # Not rc_context: it would also put back `interactive`, which the notebook's backend switches on when it loads
    # inside the block; figures would then no longer be shown at the end of a cell.
    before = {name: matplotlib.rcParams[cast(Any, name)] for name in settings}
    token = _active.set(True)
    matplotlib.rcParams.update(cast(Any, settings))
    try:
        yield
    finally:
        matplotlib.rcParams.update(cast(Any, before))
        _active.reset(token)


P = ParamSpec("P")
T = TypeVar("T")


def styled(plot: Callable[P, T]) -> Callable[P, T]:
    """Make `plot` draw in the notebook style when it is called outside both styles."""

    @functools.wraps(plot)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if _active.get():
            return plot(*args, **kwargs)
        with notebook():
            return plot(*args, **kwargs)

    return run


def family_look(policy: str) -> Look:
    """The fixed colour and marker of a policy's family."""
    return FAMILY_STYLE.get(family(policy), Look(GREY, "h"))


def line_looks(policies: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker of each policy's family; policies of one family differ by their dashes."""
    looks: dict[str, dict[str, Any]] = {}
    seen: dict[Look, int] = {}
    for policy in dict.fromkeys(policies):
        look = family_look(policy)
        dashes = DASHES[seen.get(look, 0) % len(DASHES)]
        seen[look] = seen.get(look, 0) + 1
        looks[policy] = {"color": look.color, "marker": look.marker, "linestyle": dashes}
    return looks


def readable(color: str) -> str:
    """`color`, darkened until text in it has a contrast of 4.5 to 1 on white (WCAG 2, level AA)."""
    rgb = to_rgb(color)
    while 1.05 / (_luminance(rgb) + 0.05) < 4.5:
        rgb = (0.95 * rgb[0], 0.95 * rgb[1], 0.95 * rgb[2])
    return to_hex(rgb)


def _luminance(rgb: tuple[float, ...]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def text_on(color: str) -> str:
    """Black or white, whichever reads better on `color`."""
    return "white" if _luminance(to_rgb(color)) < 0.18 else "black"

"""Figures: what they show, what they write, and that nothing overlaps. All data here are made up."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

from gctutor import plots
from gctutor.devices import Device
from gctutor.errors import UserError
from gctutor.plots.canvas import headline
from gctutor.plots.labels import spread
from gctutor.plots.roofline import rank_sites
from gctutor.plots.style import CATEGORY_COLOR, PALE, readable
from gctutor.plots.words import number, percent, row_names
from gctutor.policies.grammar import FAMILIES
from gctutor.results import Results, StepCost
from gctutor.workload import Workload

matplotlib.use("Agg")

GB, MS = 1e9, 1e-3
DEVICE = Device(
    name="H100 SXM",
    usable_bytes=84_000_000_000,
    bf16_flop_per_s=989e12,
    fp32_flop_per_s=67e12,
    bandwidth_bytes_per_s=3.35e12,
    host_link_bytes_per_s=55e9,
    source="made up",
)
COSTS = {  # policy: kept GB, ms
    "none": (34.38, 435),
    "block": (3.83, 541),
    "block/2": (19.1, 488),
    "block+offload": (2.62, 563),
    "sub:mlp": (19.88, 481),
    "sub:attn": (25.2, 470),
    "sub:norms": (24.6, 452),
    "ops:mm,core_attn": (16.54, 475),
    "ops:mm,core_attn,-down_proj": (15.33, 475),
    "modules:q_proj,k_proj,v_proj,core_attn,o_proj,gate_proj,up_proj": (15.33, 471),
    "modules:core_attn@0-17;none@18-35": (19.4, 485),
    "compile:0.5": (12.2, 498),
}


def cost(policy: str, gb: float | None, ms: float | None, source: str = "estimated", **fields) -> StepCost:
    samples = {} if source == "estimated" or ms is None else {"step_s": [ms * f * MS for f in (0.985, 1, 1.03)]}
    defaults = {
        "workload": Workload(),
        "device": "H100 SXM",
        "meter": "made up",
        "activation_bytes": None if gb is None else int(gb * GB),
        "step_s": None if ms is None else ms * MS,
        "samples": samples,
        "provenance": {"date": "2025-03-04T10:00:00+00:00"},
    }
    return StepCost(policy=policy, source=source, **{**defaults, **fields})


def estimated() -> Results:
    return Results(cost(policy, *values) for policy, values in COSTS.items())


def mixed() -> Results:
    """Predictions, measurements that differ a little, one row out of memory, one refused."""
    rows = [cost(p, gb * 1.004, ms * 1.05, "measured") for p, (gb, ms) in list(COSTS.items())[:9] if p != "none"]
    failed = [
        cost("none", None, None, "measured", status="oom"),
        cost("block+reentrant", None, None, "measured", status="refused"),
    ]
    return Results([*estimated(), *rows, *failed])


def broken_down() -> Results:
    rows = []
    for policy, (gb, ms) in COSTS.items():
        loss = 2.62 * GB
        attention = 0.3 * (gb * GB - loss)
        parts = {"layer_activations": gb * GB - loss - attention, "attention": attention, "loss": loss}
        rows.append(cost(policy, gb, ms, breakdown={name: int(size) for name, size in parts.items()}))
    return Results(rows)


def by_length() -> Results:
    rows = []
    for policy in ("none", "block", "sub:mlp", "ops:mm,core_attn", "ops:mm,core_attn,-down_proj"):
        for seqlen in (1024, 2048, 4096, 8192, 16384, 32768):
            gb, ms = (value * seqlen / 4096 for value in COSTS[policy])
            fits = gb < 62
            values = (gb, ms) if fits else (None, None)
            rows.append(cost(policy, *values, workload=Workload(seqlen=seqlen), status="ok" if fits else "oom"))
    return Results(rows)


@dataclass(frozen=True)
class Span:
    phase: str
    layer: int | None
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    seconds: np.ndarray
    live: dict[str, np.ndarray]
    spans: tuple[Span, ...]
    peak_index: int
    peak_owner: str
    label: str


def timeline(policy: str, layer_gb: float, recompute_ms: float, layers: int = 36) -> Timeline:
    """A step whose layers keep `layer_gb` each and take `recompute_ms` more in backward."""
    spans, points, clock = [], [], 0.0
    kept = gradients = 0.0

    def point(loss: float = 0.0, temporary: float = 0.0) -> None:
        points.append((clock, 16.4, gradients, kept, loss, temporary))

    def advance(phase: str, layer: int | None, ms: float) -> None:
        nonlocal clock
        spans.append(Span(phase, layer, clock * MS, (clock + ms) * MS))
        clock += ms

    point()
    for layer in range(layers):
        advance("forward", layer, 3.4)
        kept += layer_gb
        point(temporary=0.2)
        point()
    advance("forward", None, 14)
    point(loss=3.7, temporary=3.7)
    advance("backward", None, 24)
    gradients += 1.2
    point(loss=2.5)
    for layer in reversed(range(layers)):
        if recompute_ms:
            advance("recompute", layer, recompute_ms)
            kept += 0.88 - layer_gb
            point()
            kept -= 0.88 - layer_gb
        advance("backward", layer, 7.1)
        kept -= layer_gb
        gradients += 0.38
        point(temporary=0.3)
        point()
    columns = np.array(points).T
    live = dict(zip(CATEGORY_COLOR, columns[1:] * GB, strict=True))
    peak = int(np.argmax(sum(live.values())))
    owner = "lm_head and loss" if points[peak][4] else "layer 0 backward"
    label = f"Qwen3-8B, 1 × 4096, hf, bf16, {policy}, estimated for H100 SXM"
    return Timeline(columns[0] * MS, live, tuple(spans), peak, owner, label)


def timelines() -> dict[str, Timeline]:
    return {
        "none": timeline("none", 0.88, 0),
        "block": timeline("block", 0.034, 2.9),
        "ops:mm,core_attn,-down_proj": timeline("ops:mm,core_attn,-down_proj", 0.35, 1.1),
    }


@dataclass(frozen=True)
class Operator:
    name: str
    site: str
    phase: str
    count: int
    flop: int
    bytes: int
    seconds: float
    bound: str
    kept_bytes: int
    recompute_s: float
    share: float = 0.0

    @property
    def intensity(self) -> float:
        return self.flop / self.bytes

    @property
    def roi(self) -> float:
        return self.kept_bytes / self.recompute_s


def operators() -> list[Operator]:
    """The call sites of a decoder layer at 1 × 4096, 36 times, by a simple roofline."""
    tokens, hidden, mlp = 4096, 4096, 12288
    gemms = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, 1024),
        "self_attn.v_proj": (hidden, 1024),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, mlp),
        "mlp.up_proj": (hidden, mlp),
        "mlp.down_proj": (mlp, hidden),
        "lm_head": (hidden, 151936),
    }
    light = {
        "input_layernorm": (6, 9),
        "post_attention_layernorm": (6, 9),
        "rope": (4, 6),
        "mlp.act_fn": (9, 9),
        "residual": (1, 3),
    }
    rows = []
    for phase, times in (("forward", 1), ("backward", 2)):
        for site, (k, n) in gemms.items():
            count = 1 if site == "lm_head" else 36
            flop, moved = 2 * tokens * k * n * times * count, 2 * (tokens * k + k * n + tokens * n) * times * count
            seconds = flop / 742e12
            kept = 2 * tokens * n * count if phase == "forward" and site != "mlp.down_proj" else 0
            rows.append(
                Operator("mm", site, phase, count, flop, moved, seconds, "compute", kept, seconds if kept else 0.0)
            )
        for site, (flops, passes) in light.items():
            width = mlp if site == "mlp.act_fn" else hidden
            flop, moved = tokens * width * flops * times * 36, 2 * tokens * width * passes * times * 36
            seconds = moved / 2.85e12
            kept = 2 * tokens * width * 3 * 36 if phase == "forward" and site != "residual" else 0
            rows.append(
                Operator("mul", site, phase, 36, flop, moved, seconds, "memory", kept, seconds if kept else 0.0)
            )
        flop, moved = (
            int(36 * 2 * tokens**2 * hidden * (1 if times == 1 else 2.5)),
            36 * 2 * tokens * hidden * 4 * times,
        )
        seconds = flop / 540e12
        kept = 2 * tokens * hidden * 36 if times == 1 else 0
        rows.append(
            Operator("flash", "core_attn", phase, 36, flop, moved, seconds, "compute", kept, seconds if kept else 0.0)
        )
    rows.append(Operator("copy_", "lm_head", "forward", 2, 0, 4 * 10**9, 1.4e-3, "memory", 0, 0.0))
    rows.append(Operator("sum", "loss", "forward", 3, 4096, 16384, 15e-6, "launch", 0, 0.0))
    total = sum(row.seconds for row in rows)
    return [Operator(**{**row.__dict__, "share": row.seconds / total}) for row in rows]


def waterfall() -> list[tuple[str, StepCost]]:
    return [
        ("none", cost("none", 34.4, 435)),
        ("Liger's norms, RoPE, SwiGLU", cost("none", 22.0, 320)),
        ("keep modules only", cost("modules:q_proj", 11.0, 339)),
        ("Liger's fused loss", cost("modules:q_proj", 9.9, 352)),
        ("waive down_proj", cost("modules:q_proj", 8.7, 329)),
    ]


def pairs() -> list[tuple[StepCost, StepCost]]:
    return [
        (cost(p, gb, ms), cost(p, gb * (1 + 0.002 * i), ms * (0.95 + 0.02 * i), "measured"))
        for i, (p, (gb, ms)) in enumerate(list(COSTS.items())[:8])
    ]


def losses() -> dict[str, list[float]]:
    base = [2.2 + 5.4 * np.exp(-step / 12) + 0.05 * np.sin(step) for step in range(60)]
    shifted = {"none": 0.0, "block": 1e-6, "sub:mlp": -2e-6, "ops:mm,core_attn": 3e-6}
    return {policy: [loss + shift for loss in base] for policy, shift in shifted.items()}


def gradient_errors() -> dict[str, dict[str, float]]:
    layers = ["embed_tokens", "layers.0", "layers.1", "norm", "lm_head"]
    runs = {"bf16, no recompute": 1.0, "bf16, unordered sums in the replay": 1.1, "bf16, in-place bug": 30.0}
    return {name: dict.fromkeys(layers, 0.01 * factor) for name, factor in runs.items()}


DRAWINGS = {
    "pareto": lambda: plots.plot_pareto(estimated(), limit_bytes=30e9, limit_label="40 GB card: 30 GB left"),
    "pareto_mixed": lambda: plots.plot_pareto(mixed(), limit_bytes=28e9),
    "pareto_tokens": lambda: plots.plot_pareto(estimated(), y="tokens_per_s"),
    "pareto_line": lambda: plots.plot_pareto(
        estimated(), line=[(4e9, 0.53), (15e9, 0.46), (34e9, 0.42)], line_name="the planner"
    ),
    "timeline": lambda: plots.plot_memory_timeline(timelines()["none"]),
    "timeline_block": lambda: plots.plot_memory_timeline(timelines()["block"]),
    "gantt": lambda: plots.plot_gantt(timelines())[0],
    "breakdown": lambda: plots.plot_breakdown(broken_down()),
    "scaling": lambda: plots.plot_scaling(by_length(), limit_bytes=62e9, limit_label="80 GB card: 62 GB left"),
    "scaling_open": lambda: plots.plot_scaling(by_length().where(lambda row: row.workload.seqlen <= 4096), y="step_s"),
    "roofline": lambda: plots.plot_roofline(operators(), DEVICE),
    "roi": lambda: plots.plot_roi(operators(), subtitle="Qwen3-8B, 1 × 4096, hf, bf16 · estimated for H100 SXM"),
    "waterfall": lambda: plots.plot_waterfall(waterfall()),
    "predicted": lambda: plots.plot_predicted_vs_measured(pairs())[0],
    "gradients": lambda: plots.plot_gradient_errors(gradient_errors(), subtitle="nano, 2 × 32 · measured on CPU"),
    "losses": lambda: plots.plot_loss_curves(
        losses(), subtitle="nano, 2 × 256, hf, fp32 · measured on CPU, 2025-03-04"
    ),
}
STYLES = {"notebook": plots.notebook, "slide": plots.slide}


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def saved(name: str, style: str, folder) -> tuple:
    with STYLES[style]():
        figure = DRAWINGS[name]().figure
    return figure, plots.save_figure(figure, name, folder)


def shown_texts(figure) -> list[Text]:
    return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]


def boxes(figure, texts: list[Text]) -> np.ndarray:
    """Extents of the texts alone, as last drawn."""
    renderer = figure.canvas.get_renderer()
    return np.array([Text.get_window_extent(text, renderer).extents for text in texts])


def overlapping(figure, texts: list[Text]) -> list[tuple[str, str]]:
    """Pairs of texts whose boxes share more than a pixel each way."""
    found = boxes(figure, texts)
    shared = np.minimum(found[:, None, 2:], found[None, :, 2:]) - np.maximum(found[:, None, :2], found[None, :, :2])
    return [(texts[i].get_text(), texts[j].get_text()) for i, j in np.argwhere((shared > 1).all(-1)) if i < j]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", DRAWINGS)
def test_every_figure_is_legible_and_inside_its_frame(name, style):
    with STYLES[style]():
        figure = DRAWINGS[name]().figure
    figure.canvas.draw()
    assert all(headline(figure))
    texts = [text for ax in figure.axes for text in ax.texts if text.get_visible() and text.get_text().strip()]
    level = [text for text in texts if not text.get_rotation()]
    assert overlapping(figure, level) == []
    found = boxes(figure, level + list(figure.texts))
    assert found[:, :2].min() >= 0 and (found[:, 2:] <= figure.bbox.extents[2:]).all()
    assert boxes(figure, level)[:, 3].max() <= boxes(figure, list(figure.texts))[:, 1].min()
    if style == "slide":
        assert min(text.get_fontsize() for text in shown_texts(figure)) >= 18
        lines = [line for ax in figure.axes for line in ax.lines if line.get_linestyle() != "None"]
        assert min((line.get_linewidth() for line in lines), default=2.5) >= 2.5


@pytest.mark.parametrize("name", ["pareto", "gantt", "roi", "scaling"])
def test_files_are_full_hd_and_reproducible(name, tmp_path):
    figure, first = saved(name, "slide", tmp_path / "a")
    again = plots.save_figure(figure, name, tmp_path / "b")
    _, anew = saved(name, "slide", tmp_path / "c")
    for path, second, third in zip(first, again, anew, strict=True):
        assert path.read_bytes() == second.read_bytes() == third.read_bytes()
    with Image.open(first[1]) as image:
        assert image.size == (1920, 1080)
    svg = first[0].read_text(encoding="utf-8")
    assert "dc:date" not in svg
    assert ElementTree.fromstring(svg).get("viewBox") == "0 0 921.6 518.4"


def test_the_sidecar_holds_caption_and_alt_text(tmp_path):
    figure = plots.plot_pareto(estimated()).figure
    *_, sidecar = plots.save_figure(figure, "x", tmp_path, alt="what it shows", caption="what to see")
    words = json.loads(sidecar.read_text(encoding="utf-8"))
    assert (words["alt"], words["caption"]) == ("what it shows", "what to see")
    assert words["subtitle"] == "Qwen3-8B, 1 × 4096, hf, bf16 · estimated for H100 SXM"
    *_, sidecar = plots.save_figure(figure, "y", tmp_path)
    assert json.loads(sidecar.read_text(encoding="utf-8"))["alt"].startswith(words["title"])


def test_saving_leaves_the_figure_its_size(tmp_path):
    figure, ax = plt.subplots(figsize=(5, 4))
    plots.plot_pareto(estimated(), ax=ax)
    _, png, _ = plots.save_figure(figure, "small", tmp_path)
    assert tuple(figure.get_size_inches()) == (5, 4)
    with Image.open(png) as image:
        assert image.size == (1920, 1080)


def test_no_setting_of_matplotlib_changes(tmp_path):
    before = dict(matplotlib.rcParams)
    for style in STYLES:
        saved("pareto", style, tmp_path)
    plots.plot_pareto(estimated())
    assert dict(matplotlib.rcParams) == before


def test_each_family_has_its_own_colour_and_marker():
    assert set(plots.FAMILY_STYLE) == set(FAMILIES)
    assert len({look.color for look in plots.FAMILY_STYLE.values()}) == len(FAMILIES)
    assert len({look.marker for look in plots.FAMILY_STYLE.values()}) == len(FAMILIES)


def mark_of(ax, x: float):
    """The mark whose x is `x`."""
    (found,) = [line for line in ax.lines if len(line.get_xdata()) == 1 and line.get_xdata()[0] == pytest.approx(x)]
    return found


def test_marks_are_filled_when_measured_hollow_when_estimated_and_grey_when_dominated():
    rows = [cost("none", 30, 400), cost("block", 4, 500, "measured"), cost("sub:mlp", 6, 520, "recorded")]
    ax = plots.plot_pareto(Results(rows))
    none, block, dominated = mark_of(ax, 30), mark_of(ax, 4), mark_of(ax, 6)
    assert none.get_markerfacecolor() == "white"
    assert block.get_markerfacecolor() == plots.FAMILY_STYLE["block"].color
    assert dominated.get_markerfacecolor() == PALE
    assert (none.get_marker(), block.get_marker(), dominated.get_marker()) == ("o", "s", "^")


def test_out_of_memory_is_a_hollow_mark_at_the_limit_and_refusals_are_named():
    rows = [cost("block", 4, 500), cost("none", None, None, status="oom"), cost("auto", None, None, status="refused")]
    ax = plots.plot_pareto(Results(rows), limit_bytes=20e9)
    assert mark_of(ax, 20).get_markerfacecolor() == "white"
    assert any(text.get_text() == "none: out of memory" for text in ax.texts)
    assert "not drawn: auto (refused)" in headline(ax.figure)[1]


def test_a_pareto_plot_of_nothing_but_failures_still_draws():
    ax = plots.plot_pareto(Results([cost("none", None, None, status="oom")]))
    assert headline(ax.figure)[0] == "No policy ran"


def test_the_frontier_is_exact_with_ties_and_failures():
    rows = Results(
        [
            cost("none", 30, 400),
            cost("block", 4, 500),
            cost("sub:mlp", 20, 450),
            cost("sub:attn", 20, 450),
            cost("sub:norms", 20, 460),
            cost("block/2", 25, 450),
            cost("ops:mm", 21, 451),
            cost("compile", None, None, status="oom"),
            cost("auto", 1, None),
        ]
    )
    assert [row.policy for row in plots.frontier(rows)] == ["block", "sub:mlp", "sub:attn", "none"]


def test_more_tokens_per_second_is_better():
    rows = Results([cost("none", 30, 400), cost("block", 4, 500), cost("sub:mlp", 31, 410)])
    assert [row.policy for row in plots.frontier(rows, y="tokens_per_s")] == ["block", "none"]


def test_rows_at_one_place_share_a_label():
    ax = plots.plot_pareto(Results([cost("none", 30, 400), cost("sub:mlp", 20, 450), cost("sub:attn", 20, 450)]))
    assert any(text.get_text() == "sub:mlp = sub:attn" for text in ax.texts)


def test_subtitle_and_names_say_what_is_common_and_what_differs():
    liger = Workload(kernels="liger")
    rows = [cost("none", 34, 435), cost("none", 21, 441, workload=liger), cost("block", 4, 541, "recorded")]
    assert plots.subtitle(rows) == (
        "Qwen3-8B, 1 × 4096, bf16 · estimated for H100 SXM · recorded on H100 SXM, 2025-03-04"
    )
    assert row_names(rows) == ["none · hf", "none · liger", "block · hf"]


def test_numbers_have_three_digits_and_a_true_minus():
    assert [number(v) for v in (0.4, 3.834, 34.38, 99.97, 9420.3, -5)] == [
        "0.40",
        "3.83",
        "34.4",
        "100",
        "9,420",
        "−5.00",
    ]
    assert percent(1.083).split() == ["+8.3", "%"] and percent(0.45).split() == ["−55", "%"]


def test_small_multiples_keep_their_own_titles():
    with plots.notebook():
        figure, axes = plt.subplots(1, 2, layout="constrained")
        for ax in axes:
            plots.plot_pareto(estimated().where(lambda row: row.policy in ("none", "block")), ax=ax)
    assert all(ax.get_title("left") for ax in axes) and not figure.texts


def test_memory_categories_are_stacked_in_their_fixed_order():
    step = timelines()["none"]
    ax = plots.plot_memory_timeline(step)
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in ax.collections]
    layers = np.cumsum([step.live[name] for name in CATEGORY_COLOR], axis=0) / GB
    assert tops == pytest.approx(layers.max(axis=1))
    assert any(text.get_text() == "peak 55.5 GB: lm_head and loss" for text in ax.texts)


def test_the_gantt_hatches_recompute_only():
    bars, memory = plots.plot_gantt(timelines())
    assert sum(bool(bar.get_hatch()) for bar in bars.collections) == 2  # block and ops recompute, none does not
    assert bars.get_xlim() == memory.get_xlim()


def test_sites_are_ranked_by_bytes_per_second_of_recompute():
    def site(name: str, kept: int, seconds: float) -> Operator:
        return Operator("mm", name, "forward", 1, 1, 1, 1.0, "compute", kept, seconds)

    ranked = rank_sites(
        [site("a", 10, 2.0), site("b", 30, 2.0), site("a", 40, 1.0), site("c", 0, 1.0), site("d", 5, 0.0)]
    )
    assert [(s.name, s.roi) for s in ranked] == [("a", 50 / 3), ("b", 15.0)]


def test_roofline_labels_name_a_site_for_the_layer_itself_and_the_phase_only_when_there_are_several():
    rows = [Operator("add", "", "forward", 1, 10**9, 10**9, 1e-3, "memory", 0, 0.0, 1.0)]
    texts = [text.get_text() for text in plots.plot_roofline(rows, DEVICE).texts]
    assert "layer" in texts
    texts = [text.get_text() for text in plots.plot_roofline(operators(), DEVICE).texts]
    assert "core_attn (forward)" in texts and "core_attn (backward)" in texts


def test_a_style_leaves_alone_what_a_notebooks_backend_switches_on_inside_it():
    """The inline backend shows a cell's figures only while `interactive` is on, and it loads with the first figure."""
    before = plt.rcParams["font.size"]
    try:
        with plots.slide():
            plt.ion()
        assert plt.isinteractive() and plt.rcParams["font.size"] == before
    finally:
        plt.ioff()


def test_a_waterfall_gives_no_change_no_sign():
    ax = plots.plot_waterfall([("a", cost("none", 30, 400)), ("b", cost("none", 30, 400))])
    assert "±0.00 ms" in [text.get_text() for text in ax.texts]


def test_a_line_of_its_own_stands_in_for_the_steps():
    ax = plots.plot_pareto(estimated(), line=[(4e9, 0.53), (34e9, 0.42)], line_name="the planner")
    (line,) = [line for line in ax.lines if len(line.get_xdata()) > 1]
    assert line.get_xydata() == pytest.approx(np.array([(4, 530), (34, 420)]))
    assert "the planner" in [text.get_text() for text in ax.texts]


def test_a_waterfall_needs_values():
    with pytest.raises(UserError, match="missing: b"):
        plots.plot_waterfall([("a", cost("none", 30, 400)), ("b", cost("block", None, None, status="oom"))])


def test_predictions_outside_the_band_are_counted():
    rows = [(cost("none", 10, 100), cost("none", 10.1, 120, "measured"))]
    axes = plots.plot_predicted_vs_measured(rows)
    title = headline(axes[0].figure)[0].replace("\u00a0", " ")
    assert title == "Bytes within 1.0 % (1 of 1 in the 2 % band); step time within 16.7 % (0 of 1 in the 10 % band)"


def test_intervals_are_spread_apart_and_kept_inside():
    assert spread([0, 0, 10], [2, 2, 2], -5, 20) == pytest.approx([-1, 1, 10])
    assert spread([0, 0], [2, 2], 0, 20) == pytest.approx([1, 3])
    assert spread([20, 19], [2, 2], 0, 20) == pytest.approx([19, 17])


@pytest.mark.parametrize("look", plots.FAMILY_STYLE.values())
def test_coloured_text_reads_on_white(look):
    assert contrast_on_white(readable(look.color)) >= 4.5


def contrast_on_white(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 1.05 / (0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)

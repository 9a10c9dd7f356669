"""A plan as a table for the terminal and as a picture: the stacked shares of the sources over the tokens."""

import io
import os
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..atomic import replacing
from ..errors import ConfigurationError

if TYPE_CHECKING:
    from .rehearse import Plan

__all__ = ["draw_plan", "render_plan"]

WIDTH = 120
LONGEST = 32  # characters of a name
MOST_ROWS = 60  # sources that the table shows
MOST_BANDS = 30  # sources that the picture shows; the smallest share one band
UNITS = {1000: "thousands", 1000**2: "millions", 1000**3: "billions", 1000**4: "trillions"}
MOST_LINES = 24  # changes of weights that the picture shows

COLOURS = (
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#ee8866", "#332288", "#44aa99",
    "#999933", "#882255", "#117733", "#ddcc77", "#cc6677", "#88ccee", "#aa4499", "#77aadd", "#bbcc33", "#ffaabb",
    "#0077bb", "#cc3311", "#009988", "#ee3377", "#5566aa", "#a6be54", "#8c510a", "#d6c1de", "#5aae61", "#444444",
)  # fmt: skip
"""Paul Tol's qualitative colours (Colour Schemes, SRON technical note, 2021), most distinct first."""


def human(value: float, units: "Sequence[str]" = ("", " K", " M", " B", " T")) -> str:
    """Three digits and a unit of a thousand: 4194304 → "4.19 M"."""
    unit = 0
    while unit + 1 < len(units) and abs(value) >= 999.5:
        value, unit = value / 1000, unit + 1
    if not unit:
        return f"{value:,.0f}{units[0]}"
    digits = max(0, 2 - len(str(int(abs(value)))) + 1)
    return f"{value:,.{digits}f}{units[unit]}"


def human_bytes(value: float) -> str:
    return human(value, (" B", " kB", " MB", " GB", " TB", " PB"))


def shortened(name: str, longest: int = LONGEST) -> str:
    """The name as a terminal may show it, with what is too long left out of its middle."""
    name = "".join(c if c.isprintable() else repr(c)[1:-1] for c in name)
    if len(name) <= longest:
        return name
    head = (longest - 1) // 2
    return f"{name[:head]}…{name[head + 1 - longest :]}"


# The table --------------------------------------------------------------------------------------------------


def render_plan(plan: "Plan") -> str:
    """The plan as lines of text."""
    last = plan.first_step + plan.steps
    which = f"steps {plan.first_step:,} … {last - 1:,}" if plan.steps else f"no step from {plan.first_step:,} on"
    lines = [
        f"{which}: {plan.steps:,} steps, {plan.samples:,} samples of {plan.sequence_length:,} tokens, "
        f"{human(plan.tokens)} tokens, {human_bytes(plan.bytes_read)} read",
        "",
        *_sources(plan),
        "",
        *_aligned(
            [("steps", "global batch", "samples", "tokens")]
            + [
                (
                    f"{b.first_step:,} … {b.first_step + b.steps - 1:,}",
                    f"{b.global_batch_size:,}",
                    f"{b.samples:,}",
                    human(b.tokens),
                )
                for b in plan.batches
            ],
            left=1,
        ),
        "",
    ]
    if plan.changes:
        shown = ", ".join(f"{step:,}" for step in plan.changes[:12])
        more = f" and {len(plan.changes) - 12:,} more" if len(plan.changes) > 12 else ""
        lines.append(f"weights change in step {shown}{more}")
    if plan.end_step is None:
        lines.append("the run has no end of its own" if plan.end is None else f"the run ends: {plan.end}")
    else:
        left = max(0, plan.end_step - last)
        lines.append(f"the run ends before step {plan.end_step:,} ({plan.end}); {left:,} steps are left after these")
    for text in plan.warnings:
        lines += textwrap.wrap(
            f"warning: {text}", WIDTH, subsequent_indent=" " * 9, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines)


def _sources(plan: "Plan") -> "list[str]":
    capped = any(source.cap_step is not None for source in plan.sources)
    head = ["source", "samples", "tokens", "share", "asked", "epochs", "exhausted", "capped", "repeats", "unseen"]
    rows: list[Sequence[str]] = [[*head, "read", "files"]]
    shown = plan.sources if len(plan.sources) <= MOST_ROWS else plan.sources[: MOST_ROWS - 1]
    for s in shown:
        epochs = f"{s.epochs_after:,.2f}"
        rows.append(
            [
                shortened(s.name),
                f"{s.samples:,}",
                human(s.tokens),
                f"{s.share:.2%}",
                f"{s.asked:.2%}",
                f"{s.epochs_before:,.2f} → {epochs}" if s.epochs_before else epochs,
                _step(s.exhausted_step),
                _step(s.cap_step),
                f"{s.repeats:,}" if s.repeats else "-",
                f"{s.unseen:,}" if s.unseen else "-",
                human_bytes(s.bytes_read),
                f"{s.files:,} ({human_bytes(s.file_bytes)})" if s.files else "gone",
            ]
        )
    if len(shown) < len(plan.sources):
        rest = plan.sources[len(shown) :]
        rows.append(
            [
                f"… {len(rest):,} more",
                f"{sum(s.samples for s in rest):,}",
                human(sum(s.tokens for s in rest)),
                f"{sum(s.share for s in rest):.2%}",
                f"{sum(s.asked for s in rest):.2%}",
                *[""] * 5,
                human_bytes(sum(s.bytes_read for s in rest)),
                "",
            ]
        )
    if not capped:
        rows = [[cell for i, cell in enumerate(row) if i != head.index("capped")] for row in rows]
    return _aligned(rows, left=1)


def _step(step: "int | None") -> str:
    return "-" if step is None else f"step {step:,}"


def _aligned(rows: "Sequence[Sequence[str]]", left: int) -> "list[str]":
    """Rows as lines, the first `left` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if i < left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


# The picture ------------------------------------------------------------------------------------------------


def draw_plan(plan: "Plan", path: "str | os.PathLike[str]") -> None:
    """Writes the picture. Raises ConfigurationError without matplotlib, or for a file that is no .png or .svg."""
    kind = Path(path).suffix.lower()
    if kind not in (".png", ".svg"):
        raise ConfigurationError(f"a picture is a .png or .svg file, got {os.fspath(path)!r}")
    if not plan.steps:
        raise ConfigurationError("the plan has no steps, so there is nothing to draw")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("a picture needs matplotlib: pip install 'tokenpipe[plot]'") from error
    figure = Figure(figsize=(11, 5.5), dpi=120)
    axes = figure.add_subplot()
    edges = np.array([0, *plan.timeline.tokens], np.float64)
    unit = 1000 ** min(4, max(0, int(np.log10(max(edges[-1], 1)) // 3)))
    bands = _bands(plan)
    base = np.zeros(len(edges) - 1)
    handles: list[Any] = []
    for (name, share, counts), colour in zip(bands, COLOURS, strict=False):
        total = np.diff([0, *plan.timeline.tokens]) / plan.sequence_length
        top = base + np.diff([0, *counts]) / total
        handles.append(
            axes.stairs(top, edges / unit, baseline=base, fill=True, color=colour, label=f"{name}  {share:.1%}", lw=0)
        )
        axes.stairs(top, edges / unit, color="white", lw=0.6)
        base = top
    axes.set_xlim(0, edges[-1] / unit)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("tokens" + {1: ""}.get(unit, f" ({UNITS[unit]})"))
    axes.set_ylabel("share of the samples")
    handles.reverse()  # as the bands are stacked
    if 0 < len(plan.changes) <= MOST_LINES:  # a ramp's many are seen without lines
        places = [_tokens_at(plan, step) / unit for step in plan.changes]
        lines = [axes.axvline(place, color="black", lw=1, ls=(0, (4, 3))) for place in places]
        lines[0].set_label("weights change")
        handles.append(lines[0])
    columns = 1 + len(handles) // 24
    axes.legend(
        handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9, ncols=columns
    )
    _step_axis(plan, axes, unit)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind[1:], bbox_inches="tight")
    with replacing(path) as file:
        file.write(buffer.getvalue())


def _bands(plan: "Plan") -> "list[tuple[str, float, Sequence[int]]]":
    """(name, share, cumulative samples) of what the picture stacks, in the order of the graph."""
    sources = [source for source in plan.sources if source.samples]
    few = sources
    if len(sources) > MOST_BANDS:
        few = sorted(sources, key=lambda source: -source.samples)[: MOST_BANDS - 1]
    kept = {source.name for source in few}
    bands: list[tuple[str, float, Sequence[int]]] = [
        (shortened(s.name, 28), s.share, plan.timeline.samples[s.name]) for s in sources if s.name in kept
    ]
    if rest := [source for source in sources if source.name not in kept]:
        summed = np.sum([plan.timeline.samples[source.name] for source in rest], axis=0).tolist()
        bands.append((f"{len(rest)} others", sum(source.share for source in rest), summed))
    return bands


def _tokens_at(plan: "Plan", step: float) -> float:
    """Where a step begins, in tokens from the plan's first."""
    steps = [plan.first_step, *(b.first_step + b.steps for b in plan.batches)]
    return float(np.interp(step, steps, np.cumsum([0, *(b.tokens for b in plan.batches)])))


def _step_axis(plan: "Plan", axes: Any, unit: int) -> None:
    """Steps along the top, where they leave each other room."""
    from matplotlib.ticker import MaxNLocator

    last = plan.first_step + plan.steps
    ticks: Iterable[float] = MaxNLocator(nbins=8, integer=True).tick_values(plan.first_step, last)
    places: list[float] = []
    labels: list[str] = []
    for tick in ticks:
        place = _tokens_at(plan, tick) / unit
        if plan.first_step <= tick <= last and (not places or place - places[-1] > 0.09 * axes.get_xlim()[1]):
            places.append(place)
            labels.append(f"{int(tick):,}")
    top = axes.secondary_xaxis("top")
    top.set_xticks(places, labels)
    top.set_xlabel("step", labelpad=8)

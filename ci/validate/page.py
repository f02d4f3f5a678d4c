"""The report as one HTML page with its plots in it: no script, nothing to fetch."""

import hashlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from matplotlib.figure import Figure

from ci.validate import stats
from ci.validate.report import MARKS, key_figure

_TEMPLATES = Path(__file__).parent
# matplotlib wants colours; the page wants names, so that light and dark can differ.
_COLOURS = {
    "#010203": "var(--ink)",
    "#020304": "var(--muted)",
    "#030405": "var(--line)",
    "#040506": "var(--good)",
    "#050607": "var(--bad)",
    "#060708": "var(--band)",
    "#070809": "var(--accent)",
    "#08090a": "var(--warn)",
}
INK, MUTED, LINE, GOOD, BAD, BAND, ACCENT, WARN = _COLOURS
_STATUS = {"pass": GOOD, "fail": BAD, "error": BAD, "did not serve": WARN}
_WIDTH = 4.7  # inches: legible on a phone, two beside each other on a desk


def _svg(figure: Figure) -> str:
    """Return a figure as inline SVG with the page's colours and fonts."""
    buffer = io.StringIO()
    settings = {"svg.fonttype": "none", "svg.hashsalt": "ci.validate"}
    with matplotlib.rc_context(settings):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    for colour, name in _COLOURS.items():
        text = text.replace(colour, name)
    # The page has more than one figure: ids must not meet.
    mark = "f" + hashlib.sha256(text.encode()).hexdigest()[:8]
    text = re.sub(r'id="([^"]+)"', rf'id="{mark}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{mark}-\1)", text)
    return re.sub(r'href="#([^"]+)"', rf'href="#{mark}-\1"', text)


def _axes(height: float, columns: int = 1) -> tuple[Figure, Any]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots(1, columns, sharey=columns > 1, squeeze=False)[0]
    for one in axes:
        one.set_facecolor("none")
        for side in ("top", "right", "left"):
            one.spines[side].set_visible(False)
        one.spines["bottom"].set_color(LINE)
        one.tick_params(colors=MUTED, labelcolor=INK, labelsize=9, length=3)
        one.tick_params(axis="y", length=0, pad=8)
        one.grid(axis="x", color=LINE, linewidth=0.6)
        one.set_axisbelow(True)
    return figure, axes if columns > 1 else axes[0]


def _legend(figure: Figure) -> None:
    """Put the legend below, where no line runs through it."""
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False, labelcolor=INK)


def agreement_plot(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Plot misses against the band, and the disturbance against noise, of one model."""
    points = [
        (row["variant"], path, row["verdict"]["paths"][path], row["verdict"]["status"])
        for row in rows
        for path in row["verdict"].get("paths") or {}
    ]
    if not points:
        return None
    figure, (left, right) = _axes(0.75 + 0.3 * len(points), 2)
    for y, (_, _, p, status) in enumerate(points):
        n = p["positions"] or 1
        colour = _STATUS.get(status, MUTED)
        left.barh(y, 100 * p["allowed"] / n, height=0.62, color=BAND, linewidth=0)
        left.plot(100 * p["misses"] / n, y, "o", color=colour, markersize=6, clip_on=False)
        # Runs that are equal bit for bit lie on the edge.
        right.plot(max(p["ratio"], 0.05), y, "o", color=colour, markersize=6, clip_on=False)
    left.set_yticks(range(len(points)), [f"{name}, {path}" for name, path, *_ in points])
    left.invert_yaxis()
    left.set_xscale("symlog", linthresh=1.0)
    worst = max(100 * p["misses"] / (p["positions"] or 1) for _, _, p, _ in points)
    widest = max(100 * p["allowed"] / (p["positions"] or 1) for _, _, p, _ in points)
    left.set_xlim(0, 1.15 * max(worst, widest, 1.0))
    ticks = [t for t in (0, 1, 3, 10, 30, 100) if t <= max(worst * 1.5, 3)]
    left.set_xticks(ticks, [f"{t}%" for t in ticks])
    left.set_title("other best token", fontsize=9, color=MUTED, loc="left")
    right.set_xscale("log")
    top = max(max(p["ratio"] for _, _, p, _ in points) * 1.8, 5)
    right.set_xlim(0.05, top)
    right.axvspan(1e-3, stats.SIZE_LIMIT, color=BAND, linewidth=0)
    ratios = [t for t in (0.1, 1, 10, 100) if t < top]
    right.set_xticks(ratios, [f"{t:g}x" for t in ratios])
    right.minorticks_off()
    right.set_title("disturbance / noise", fontsize=9, color=MUTED, loc="left")
    return _svg(figure)


def speed_plot(row: Mapping[str, Any]) -> str | None:
    """Plot the ratios of one variant with their ranges; what is noise is grey."""
    rows = row["verdict"].get("rows") or []
    if not rows:
        return None
    figure, axes = _axes(0.7 + 0.27 * len(rows))
    for y, r in enumerate(rows):
        colour = {"faster": GOOD, "slower": BAD}.get(r["verdict"], MUTED)
        axes.plot([r["low"], r["high"]], [y, y], color=colour, linewidth=2)
        axes.plot(r["ratio"], y, "o", color=colour, markersize=6)
    axes.axvline(1.0, color=INK, linewidth=1)
    short = {"inter-token latency": "ITL", "time to first token": "TTFT", "output tokens/s": "rate"}
    axes.set_yticks(
        range(len(rows)),
        [
            f"{r['workload']}, "
            + (short.get(r["figure"]) or r["figure"].replace("inter-token latency", "ITL")
               .replace("time to first token", "TTFT"))
            for r in rows
        ],
    )  # fmt: skip
    axes.invert_yaxis()
    low = min(min(r["low"] for r in rows), 0.9)
    high = max(max(r["high"] for r in rows), 1.1)
    if high / low > 4:
        axes.set_xscale("log")
        ticks = [t for t in (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32) if low * 0.8 < t < high * 1.2]
        axes.set_xticks(ticks, [f"{t:g}x" for t in ticks])
        axes.minorticks_off()
    else:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.set_title("speed-up over the baseline", fontsize=9, color=MUTED, loc="left")
    return _svg(figure)


def turns_plot(variant: str, turns: Mapping[str, Any]) -> str | None:
    """Plot the time to first token of each turn, for both sides."""
    if not turns["base"] or not turns["candidate"]:
        return None
    figure, axes = _axes(2.5)
    axes.spines["left"].set_visible(True)
    axes.spines["left"].set_color(LINE)
    axes.grid(axis="y", color=LINE, linewidth=0.6)
    for side, colour, name in (("base", MUTED, "baseline"), ("candidate", ACCENT, variant)):
        points = turns[side]
        x = range(1, len(points) + 1)
        axes.fill_between(
            x, [p["low"] for p in points], [p["high"] for p in points],
            color=colour, alpha=0.25, linewidth=0,
        )  # fmt: skip
        axes.plot(x, [p["median"] for p in points], "o-", color=colour, markersize=4, label=name)
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(1, len(turns["base"]) + 1))
    axes.set_xlabel("turn", fontsize=9, color=MUTED)
    axes.set_title("time to first token, ms", fontsize=9, color=MUTED, loc="left")
    _legend(figure)
    return _svg(figure)


def history_plot(runs: Sequence[Mapping[str, Any]]) -> str | None:
    """Plot the best and worst clear ratios of each run, and the cells that passed."""
    if len(runs) < 2:
        return None
    figure, axes = _axes(2.6)
    axes.spines["left"].set_visible(True)
    axes.spines["left"].set_color(LINE)
    axes.grid(axis="y", color=LINE, linewidth=0.6)
    x = range(1, len(runs) + 1)
    passed, other = [], []
    for run in runs:
        states = [r["verdict"]["status"] for r in run["rows"]]
        passed.append(states.count("pass"))
        other.append(sum(s in ("fail", "error", "did not serve") for s in states))
    axes.plot(x, passed, "o-", color=GOOD, markersize=5, label="pass")
    axes.plot(x, other, "o-", color=BAD, markersize=5, label="fail")
    axes.set_ylim(bottom=0)
    axes.set_xticks(x, [run["created"][5:10] for run in runs])
    _legend(figure)
    axes.set_title("verdicts of each run", fontsize=9, color=MUTED, loc="left")
    return _svg(figure)


def speed_history_plot(runs: Sequence[Mapping[str, Any]]) -> str | None:
    """Plot the speed-ups that every run of one architecture measured, over the runs."""
    lines: dict[tuple[str, str, str], list[float | None]] = {}
    for at, run in enumerate(runs):
        for row in run["rows"]:
            for r in row["verdict"].get("rows") or ():
                if row["role"] == "candidate" and r["kind"] in ("decode", "prefill"):
                    key = (row["model"], row["variant"], r["workload"])
                    lines.setdefault(key, [None] * len(runs))[at] = r["ratio"]
    if len(runs) < 2 or not lines:
        return None
    figure, axes = _axes(3.2)
    axes.spines["left"].set_visible(True)
    axes.spines["left"].set_color(LINE)
    axes.grid(axis="y", color=LINE, linewidth=0.6)
    styles = [(c, s) for s in ("-", "--", ":") for c in (ACCENT, GOOD, WARN, MUTED)]
    for (key, values), (colour, style) in zip(sorted(lines.items()), styles, strict=False):
        x = [i + 1 for i, v in enumerate(values) if v is not None]
        y = [v for v in values if v is not None]
        label = f"{key[1]}, {key[2]}"
        axes.plot(x, y, "o", linestyle=style, color=colour, markersize=4, label=label)
    axes.axhline(1.0, color=INK, linewidth=1)
    axes.set_xticks(range(1, len(runs) + 1), [run["created"][5:10] for run in runs])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    _legend(figure)
    axes.set_title(
        "speed-up over the baseline of the same run", fontsize=9, color=MUTED, loc="left"
    )
    return _svg(figure)


def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    filters: dict[str, Callable[..., Any]] = {
        "figure": key_figure,
        "percent": lambda value, digits=2: f"{100 * value:.{digits}f}%",
        "slug": lambda status: status.replace(" ", "-"),
        "short": lambda value: str(value)[:12],
        "when": lambda text: text[:16].replace("T", " "),
    }
    made.filters.update(filters)
    return made


def render(summary: Mapping[str, Any]) -> str:
    """Return the page of one summary."""
    rows = summary["rows"]
    arches = sorted({row["arch"] for row in rows})
    models = list(dict.fromkeys(row["model"] for row in rows))
    places = []
    for arch in arches:
        for model in models:
            mine = [r for r in rows if (r["arch"], r["model"]) == (arch, model)]
            if not mine:
                continue
            generated = [r for r in mine if r["task"] == "generate"]
            speed = [r for r in mine if r["task"] == "perf"]
            places.append(
                {
                    "arch": arch,
                    "model": model,
                    "rows": mine,
                    "agreement": agreement_plot(generated),
                    "speed": [
                        {
                            "row": r,
                            "plot": speed_plot(r),
                            "turns": {
                                name: turns_plot(r["variant"], turns)
                                for name, turns in (r["verdict"].get("turns") or {}).items()
                            },
                        }
                        for r in speed
                    ],
                }
            )
    # Each variant once, with its tasks beside it.
    cells: dict[tuple[str, str], dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        if row["role"] != "baseline" or row["verdict"]["status"] != "pass":
            cell = cells.setdefault((row["arch"], row["model"]), {})
            cell.setdefault(row["variant"], []).append(row)
    states = [r["verdict"]["status"] for r in rows]
    order = [s for s in MARKS if s in states]
    template = _environment().get_template("page.html.j2")
    text: str = template.render(
        summary=summary,
        arches=arches,
        models=models,
        cells=cells,
        places=places,
        states=states,
        order=order,
        limit=stats.SIZE_LIMIT,
        confidence=stats.CONFIDENCE,
    )
    return text


def render_history(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the page of all runs, by architecture."""
    plots = {
        arch: [p for p in (history_plot(e), speed_history_plot(e)) if p] for arch, e in runs.items()
    }
    template = _environment().get_template("history.html.j2")
    text: str = template.render(runs=runs, plots=plots, order=list(MARKS))
    return text

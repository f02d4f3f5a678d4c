"""Verdicts as Markdown, as a page that opens offline, side by side, and over time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ci.errors import StackError
from ci.validate import store

MARKS = {
    "pass": "pass",
    "measured": "measured",  # speed is told, not judged
    "fail": "**FAIL**",
    "error": "**ERROR**",
    "did not serve": "**did not serve**",
    "inconclusive": "inconclusive",
    "not run": "not run",
}


def all_well(summary: Mapping[str, Any]) -> bool:
    """Say whether something was judged, and nothing failed or could not be judged."""
    states = [row["verdict"]["status"] for row in summary["rows"]]
    judged = "pass" in states or "measured" in states
    return judged and all(s in ("pass", "measured", "not run") for s in states)


def key_figure(row: Mapping[str, Any]) -> str:
    """Return what matters most in a verdict, in a few words."""
    verdict = row["verdict"]
    if verdict.get("paths"):
        return ", ".join(
            f"{name} {p['agreement']:.2%} (band {p['threshold']:.2%})"
            for name, p in verdict["paths"].items()
        )
    if "cosine_min" in verdict:
        return f"cosine distance at most {1.0 - verdict['cosine_min']:.1e}"
    if "acceptance" in verdict:
        return f"acceptance length {verdict['acceptance']:.2f}"
    if "score" in verdict:
        return f"GSM8K {verdict['score']:.3f}"
    if "rows" in verdict:
        moved = [r for r in verdict["rows"] if r["verdict"] != "noise"]
        if not verdict["rows"]:
            return ""
        if not moved:
            return f"{len(verdict['rows'])} figures, all within noise"
        best = max(moved, key=lambda r: r["ratio"])
        least = min(moved, key=lambda r: r["ratio"])
        text = f"{best['ratio']:.2f}x ({best['workload']})"
        return text if best is least else f"{least['ratio']:.2f}x ({least['workload']}) to {text}"
    return ""


def table(summary: Mapping[str, Any]) -> str:
    """Return the table of all verdicts as lines of plain text."""
    lines = []
    for row in summary["rows"]:
        if row["role"] == "baseline" and row["verdict"]["status"] == "pass":
            continue
        status = row["verdict"]["status"]
        where = f"{row['arch']} {row['model']} {row['task']} {row['variant']}"
        lines.append(f"{status:<13} {where}: {key_figure(row)}")
        lines += [f"{'':<13}   {reason}" for reason in row["verdict"]["reasons"]]
    return "\n".join(lines)


def markdown(summary: Mapping[str, Any]) -> str:
    """Return the model x architecture table and what lies behind it."""
    arches = sorted({row["arch"] for row in summary["rows"]})
    keys = list(dict.fromkeys((r["model"], r["task"], r["variant"]) for r in summary["rows"]))
    cells = {(r["arch"], r["model"], r["task"], r["variant"]): r for r in summary["rows"]}
    out = ["# Validation", "", f"Made {summary['created']}.", ""]
    out.append("| model | task | variant | " + " | ".join(arches) + " |")
    out.append("|---|---|---|" + "---|" * len(arches))
    for model, task, variant in keys:
        row = []
        for arch in arches:
            found = cells.get((arch, model, task, variant))
            if found is None:
                row.append("-")
            else:
                figure = key_figure(found)
                row.append(MARKS[found["verdict"]["status"]] + (f": {figure}" if figure else ""))
        out.append(f"| {model} | {task} | {variant} | " + " | ".join(row) + " |")
    parts = {
        "What did not pass": _failures(summary),
        "Routing": _routes(summary),
        "Speed": _speed(summary),
        "Software": _software(summary),
    }
    for heading, part in parts.items():
        if part:
            out += ["", f"## {heading}", "", *part]
    return "\n".join(out) + "\n"


def _failures(summary: Mapping[str, Any]) -> list[str]:
    out = []
    for row in summary["rows"]:
        verdict = row["verdict"]
        if verdict["status"] in ("pass", "measured"):
            continue
        where = f"{row['arch']}, {row['model']}, {row['task']}, {row['variant']}"
        out.append(f"- {where}: {MARKS[verdict['status']]}. " + "; ".join(verdict["reasons"]))
        for name, path in verdict.get("paths", {}).items():
            for miss in path["listed"][:6]:
                lost = "" if miss["lost"] is None else f", lost by {miss['lost']:.3f}"
                out.append(
                    f"  - {name}, prompt {miss['sequence']}, position {miss['position']}: token "
                    f"{miss['base']} became {miss['other']}; margin {miss['base_margin']:.3f}{lost}"
                )
    return out


def _routes(summary: Mapping[str, Any]) -> list[str]:
    out = []
    for row in summary["rows"]:
        routing = row["verdict"].get("routing")
        if routing:
            out.append(
                f"- {row['arch']}, {row['model']}, {row['task']}, {row['variant']}: "
                f"{routing['text']}"
            )
    return out


def _speed(summary: Mapping[str, Any]) -> list[str]:
    out = []
    for row in summary["rows"]:
        rows = row["verdict"].get("rows")
        if not rows:
            continue
        out += [f"{row['arch']}, {row['model']}: {row['variant']} against the baseline", ""]
        out += ["| workload | figure | baseline | variant | ratio | range | |",
                "|---|---|---|---|---|---|---|"]  # fmt: skip
        for r in rows:
            out.append(
                f"| {r['workload']} | {r['figure']} | {r['base']:.2f} | {r['candidate']:.2f} | "
                f"{r['ratio']:.2f}x | {r['low']:.2f}-{r['high']:.2f} | {r['verdict']} |"
            )
        out.append("")
    return out


def _software(summary: Mapping[str, Any]) -> list[str]:
    out = []
    for arch, identities in summary["identities"].items():
        for known in identities:
            machine = known["machine"]
            versions = ", ".join(f"{k} {v}" for k, v in known["versions"].items())
            out.append(
                f"- {arch} on {machine['device']}: vLLM {known['pin']} ({known['commit'][:12]}), "
                f"set {str(known['set_hash'])[:12]} ({known['set_hash_from']}), code "
                f"{known['code'][:12]}; {versions}"
            )
    return out


def write(summary: Mapping[str, Any], out: Path, with_page: bool = True) -> list[Path]:
    """Write summary.json, report.md and report.html; return what was written."""
    paths = [out / "summary.json", out / "report.md"]
    store.write_json(paths[0], summary)
    store.write_bytes(paths[1], markdown(summary).encode())
    if not with_page:
        return paths
    try:
        from ci.validate import page

        text = page.render(summary)
    except ImportError as error:
        print(f"no HTML page: {error.name} is not installed")
        return paths
    store.write_bytes(out / "report.html", text.encode())
    return [*paths, out / "report.html"]


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, bool]:
    """Compare two summaries.

    Returns:
        The lines, and whether something that passed does not any more.
    """

    def by_key(summary: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
        return {(r["arch"], r["model"], r["task"], r["variant"]): r for r in summary["rows"]}

    one, two = by_key(before), by_key(after)
    lines, worse = [], False
    for key in list(dict.fromkeys([*one, *two])):
        old, new = one.get(key), two.get(key)
        states = [r["verdict"]["status"] if r else "-" for r in (old, new)]
        where = " ".join(key)
        if states[0] != states[1]:
            lost = states[0] in ("pass", "measured")
            worse |= lost
            mark = "WORSE " if lost else "      "
            lines.append(f"{mark} {where}: {states[0]} -> {states[1]}")
            if new and lost:
                lines += [f"         {reason}" for reason in new["verdict"]["reasons"]]
        if old and new:
            lines += [f"       {where}: {text}" for text in _changes(old, new)]
    software = [_software(before), _software(after)]
    if software[0] != software[1]:
        lines += ["before:", *software[0], "after:", *software[1]]
    return "\n".join(lines) or "no difference", worse


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return what moved between two verdicts of the same cell."""
    out = []
    for path, one in (old["verdict"].get("paths") or {}).items():
        two = (new["verdict"].get("paths") or {}).get(path)
        if two and one["misses"] != two["misses"]:
            out.append(
                f"{path} agreement {one['agreement']:.3%} -> {two['agreement']:.3%}, "
                f"disturbance {one['ratio']:.2f} -> {two['ratio']:.2f} times noise"
            )
    known = {(r["workload"], r["key"]): r for r in new["verdict"].get("rows") or ()}
    for r in old["verdict"].get("rows") or ():
        other = known.get((r["workload"], r["key"]))
        # Ratios within each job, since two jobs' clocks are not comparable.
        if other and (other["low"] > r["high"] or other["high"] < r["low"]):
            out.append(
                f"{r['workload']}, {r['figure']}: {r['ratio']:.2f}x -> {other['ratio']:.2f}x"
            )
    return out


def history(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Return all summaries below a folder, oldest first, by architecture.

    Raises:
        StackError: There is none.
    """
    out: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(root.rglob("summary.json")):
        try:
            summary = store.read_json(path)
            arches = {row["arch"] for row in summary["rows"]}
        except (StackError, KeyError, TypeError):
            print(f"left out: {path} is no summary of ci.validate")
            continue
        for arch in arches:
            rows = [r for r in summary["rows"] if r["arch"] == arch]
            out.setdefault(arch, []).append(
                {
                    "path": str(path.parent.relative_to(root)),
                    "created": max(r["created"] for r in rows),
                    "identity": summary["identities"].get(arch, [{}])[-1],
                    "rows": rows,
                }
            )
    if not out:
        raise StackError(f"no summary.json below {root}", "python3 -m ci.validate report FOLDER")
    return {a: sorted(v, key=lambda run: run["created"]) for a, v in sorted(out.items())}


def history_markdown(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return one table for each architecture: a line a run."""
    out = ["# Validation over time"]
    for arch, entries in runs.items():
        out += ["", f"## {arch}", "",
                "| when | set | vLLM | device | pass | fail | not judged | fastest | |",
                "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
        for run in entries:
            states = [r["verdict"]["status"] for r in run["rows"]]
            failed = [r for r in run["rows"] if r["verdict"]["status"] in
                      ("fail", "error", "did not serve")]  # fmt: skip
            ratios = [
                x["ratio"]
                for r in run["rows"]
                for x in r["verdict"].get("rows") or ()
                if x["verdict"] == "faster"
            ]
            known = run["identity"]
            out.append(
                f"| {run['created']} | {str(known.get('set_hash'))[:12]} | "
                f"{known.get('pin', '?')} | {known.get('machine', {}).get('device', '?')} | "
                f"{states.count('pass')} | {len(failed)} | "
                f"{len(states) - states.count('pass') - len(failed)} | "
                f"{f'{max(ratios):.2f}x' if ratios else '-'} | {run['path']} |"
            )
    return "\n".join(out) + "\n"


def write_history(root: Path) -> list[Path]:
    """Write history.md and history.html of all runs below a folder."""
    runs = history(root)
    paths = [root / "history.md"]
    store.write_bytes(paths[0], history_markdown(runs).encode())
    try:
        from ci.validate import page

        text = page.render_history(runs)
    except ImportError as error:
        print(f"no HTML page: {error.name} is not installed")
        return paths
    store.write_bytes(root / "history.html", text.encode())
    return [*paths, root / "history.html"]

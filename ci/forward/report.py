"""The report of a forward port: data first, then Markdown from it."""

from dataclasses import dataclass
from typing import Any

from ci import arches
from ci.forward import port, reliance, tables
from ci.forward.facts import Tree
from ci.forward.port import Attempt, Hunk, Port
from ci.forward.reliance import Finding
from ci.patches import Patch, Series
from ci.pin import Pin

PLATFORMS = ("vllm/platforms/rocm.py",)
# Conflicts are shown, upstream's files are not: so many lines of a side at most.
_SIDE_LINES = 14
_MOST_PLACES = 4


@dataclass(frozen=True)
class Outcome:
    """One patch's attempt with what upstream changed under it."""

    attempt: Attempt
    findings: tuple[Finding, ...]
    unresolved: tuple[str, ...]
    uses: int

    @property
    def verdict(self) -> str:
        """The class of the report that the patch falls into."""
        if self.attempt.status in (port.CONFLICT, port.UPSTREAM):
            return self.attempt.status
        if any(f.level != reliance.LOOK for f in self.findings):
            return f"{self.attempt.status}, but upstream changed what it relies on"
        return self.attempt.status


def added_lines(patch: Patch) -> dict[str, frozenset[int]]:
    """Return the numbers of the lines that a patch adds, by Python file."""
    import io

    from unidiff.patch import PatchSet

    found = {}
    for item in PatchSet(io.StringIO(patch.diff, newline="\n")):
        if item.path.endswith(".py"):
            found[item.path] = frozenset(
                line.target_line_no
                for hunk in item
                for line in hunk
                if line.is_added and line.target_line_no is not None
            )
    return found


def judge(work: Port, attempts: list[Attempt], before: Tree, after: Tree) -> list[Outcome]:
    """Compare what every patch relies on in both trees.

    Args:
        work: The port.
        attempts: What became of the patches.
        before: The tree at the pin.
        after: The target.
    """
    stack = Tree(work.stack)
    outcomes = []
    for attempt in attempts:
        patch = attempt.patch
        uses: set[reliance.Use] = set()
        unresolved: set[str] = set()
        for path, lines in sorted(added_lines(patch).items()):
            text = work.show(work.commits[patch.name], path)
            if not text or not lines:
                continue
            reader = reliance.Reader(before, stack, path, text, lines).read()
            uses |= reader.uses
            unresolved |= reader.unresolved
        findings: list[Finding] = []
        if attempt.status != port.UPSTREAM:
            findings = reliance.compare(uses, before, after, work.moved)
        outcomes.append(
            Outcome(attempt, tuple(findings), tuple(sorted(unresolved)), len({u.key for u in uses}))
        )
    return outcomes


def priority_tables(work: Port, before: Tree, after: Tree) -> list[dict[str, Any]]:
    """Compare the full priority tables of the four trees, for every architecture.

    Returns:
        One entry a platform module: its rows by group of architectures, or why there are
        none.
    """
    found: list[dict[str, Any]] = []
    for path in PLATFORMS:
        moved = work.moved.get(path, path)
        places = [
            before.root / path, work.stack / path, after.root / moved, work.repo / moved
        ]  # fmt: skip
        texts = [p.read_text(encoding="utf-8") if p.is_file() else None for p in places]
        entry: dict[str, Any] = {"path": path, "groups": []}
        try:
            for names, rows in tables.by_arch(texts, tuple(arches.ARCHES)):
                entry["groups"].append(
                    {
                        "arches": names,
                        "rows": [
                            {
                                "conditions": [list(c) for c in row.conditions],
                                "pin": list(row.lists[0]),
                                "pin_with_series": list(row.lists[1]),
                                "target": list(row.lists[2]),
                                "target_with_series": list(row.lists[3]),
                            }
                            for row in rows
                        ],
                    }
                )
        except tables.NotEvaluated as error:
            entry["problem"] = str(error)
        found.append(entry)
    return found


def as_data(
    pin: Pin, name: str, origin: str, series: Series, outcomes: list[Outcome], priorities: Any
) -> dict[str, Any]:
    """Return the whole report as JSON-ready data; the same inputs give the same bytes."""
    return {
        "schema": 1,
        "pin": {"version": pin.version, "commit": pin.commit},
        "target": {"name": name, "origin": origin},
        "set_hash": series.set_hash,
        "patches": [_patch_data(o) for o in outcomes],
        "priorities": priorities,
    }


def _patch_data(outcome: Outcome) -> dict[str, Any]:
    attempt = outcome.attempt
    return {
        "name": attempt.patch.name,
        "subject": attempt.patch.subject,
        "status": attempt.status,
        "verdict": outcome.verdict,
        "notes": list(attempt.notes),
        "on_trial": list(attempt.on_trial),
        "forwarded": attempt.patch.fields.get("Forwarded", ""),
        "obsolete_when": " ".join(attempt.patch.fields.get("Obsolete-When", "").split()),
        "upstream_has": [list(item) for item in attempt.evidence.found],
        "upstream_lacks": list(attempt.evidence.absent),
        "upstream_has_partly": [list(item) for item in attempt.evidence.partly],
        "conflicts": [
            {
                "path": h.path,
                "line": h.line,
                "kind": h.kind,
                "base": list(h.base),
                "upstream": list(h.upstream),
                "patch": list(h.patch),
            }
            for h in attempt.hunks
        ],
        "uses": outcome.uses,
        "unresolved": list(outcome.unresolved),
        "findings": [
            {"level": f.level, "key": f.key, "what": f.what, "where": list(f.where)}
            for f in outcome.findings
        ],
    }


def verdicts(data: dict[str, Any]) -> dict[str, list[str]]:
    """Return the patches of a report by verdict, in the order of their first one."""
    found: dict[str, list[str]] = {}
    for patch in data["patches"]:
        found.setdefault(patch["verdict"], []).append(patch["name"])
    return found


def as_markdown(data: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    target, pin = data["target"], data["pin"]
    lines = [
        f"# The series on vLLM {target['name']}",
        "",
        f"Written by `python3 -m ci.forward`; do not edit. From vLLM {pin['version']} "
        f"({pin['commit'][:12]}) to {target['name']} ({target['origin']}). "
        f"Set `{data['set_hash'][:12]}`, {len(data['patches'])} patches.",
        "",
        "| patch | verdict | conflicts | breaks | changed | to look at | upstream has |",
        "|---|---|---|---|---|---|---|",
    ]
    for patch in data["patches"]:
        levels = [f["level"] for f in patch["findings"]]
        counts = [levels.count(x) for x in (reliance.BREAKS, reliance.CHANGED, reliance.LOOK)]
        lines.append(
            f"| `{patch['name']}` | {patch['verdict']} | {len(patch['conflicts'])} | "
            f"{counts[0]} | {counts[1]} | {counts[2]} | {_share(patch)} |"
        )
    lines += [
        "",
        "*Breaks*: will fail as it is. *Changed*: a signature, default, field or value is "
        "another. *To look at*: the code behind a name changed, what it promises did not. "
        "*Upstream has*: functions, or what stands outside of them, that are there already or "
        "in part, of all that the patch changes outside of tests.",
        "",
    ]
    for patch in data["patches"]:
        lines += _patch_markdown(patch)
    lines += _tables_markdown(data)
    return "\n".join(lines).rstrip("\n") + "\n"


def _share(patch: dict[str, Any]) -> str:
    found, partly = len(patch["upstream_has"]), len(patch["upstream_has_partly"])
    whole = found + partly + len(patch["upstream_lacks"])
    if not found + partly:
        return "-"
    part = f", {partly} in part" if partly else ""
    return f"{found} of {whole}{part}"


def _patch_markdown(patch: dict[str, Any]) -> list[str]:
    lines = [f"## {patch['name']}", "", f"{patch['subject']}. **{patch['verdict'].capitalize()}.**"]
    if patch["on_trial"]:
        lines.append(
            "Provisional: tried on top of its dependencies' own side of their conflicts "
            f"({', '.join(patch['on_trial'])})."
        )
    lines.append("")
    lines += [f"- {note}" for note in patch["notes"]]
    if patch["upstream_has"] or patch["upstream_has_partly"]:
        lines.append("- Upstream has of it:")
        lines += [f"  - `{unit}`: {where}" for unit, where in patch["upstream_has"]]
        lines += [
            f"  - `{unit}`: {have} of {whole} changed statements"
            for unit, have, whole in patch["upstream_has_partly"]
        ]
    if patch["unresolved"]:
        lines.append(f"- Not resolved, so not compared: {', '.join(patch['unresolved'])}")
    lines.append(
        f"- Uses {patch['uses']} names of upstream. Obsolete when: {patch['obsolete_when']}."
    )
    lines.append("")
    for conflict in patch["conflicts"]:
        lines += _conflict_markdown(Hunk(**{k: _tuple(v) for k, v in conflict.items()}))
    for level, title in (
        (reliance.BREAKS, "Breaks"), (reliance.CHANGED, "Changed"), (reliance.LOOK, "To look at")
    ):  # fmt: skip
        findings = [f for f in patch["findings"] if f["level"] == level]
        if not findings:
            continue
        lines += [f"{title}:", ""]
        for finding in findings:
            places = finding["where"][:_MOST_PLACES]
            more = len(finding["where"]) - len(places)
            used = ", ".join(places) + (f" and {more} more" if more else "")
            lines.append(f"- `{finding['key']}`: {finding['what']} (used at {used})")
        lines.append("")
    return lines


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _conflict_markdown(hunk: Hunk) -> list[str]:
    if hunk.kind != "content":
        return [f"Conflict: `{hunk.path}`: {hunk.kind}. Its content is not shown here.", ""]
    lines = [f"Conflict: `{hunk.path}`, line {hunk.line} of the target:", ""]
    rows = side_by_side(hunk)
    return [*lines, "```text", *rows, "```", ""]


def side_by_side(hunk: Hunk, width: int = 60) -> list[str]:
    """Set the three sides of a conflict beside each other.

    Args:
        hunk: The conflict.
        width: Columns of a side.

    Returns:
        Lines of text; long sides are cut and say so.
    """
    sides = []
    for title, content in (("pin", hunk.base), ("target", hunk.upstream), ("patch", hunk.patch)):
        shown = list(content[:_SIDE_LINES])
        if len(content) > len(shown):
            shown.append(f"... {len(content) - len(shown)} more lines")
        sides.append([title, "-" * len(title), *shown])
    height = max(map(len, sides))
    wide = [min(width, max(map(len, side))) for side in sides]
    rows = []
    for index in range(height):
        cells = [
            (side[index] if index < len(side) else "")[:width].ljust(size)
            for side, size in zip(sides, wide, strict=True)
        ]
        rows.append(" | ".join(cells).rstrip())
    return rows


def _tables_markdown(data: dict[str, Any]) -> list[str]:
    lines = ["## Backend priorities", ""]
    for entry in data["priorities"]:
        lines += [
            f"`{entry['path']}`, every case of its priority function, evaluated for every "
            "architecture without importing it. What the module cannot answer by itself is a "
            "condition; an omitted condition does not matter.",
            "",
        ]
        if "problem" in entry:
            lines += [f"Not evaluated: {entry['problem']}", ""]
        for group in entry["groups"]:
            lines += [f"### {', '.join(group['arches'])}", ""]
            for row in group["rows"]:
                lines += _row_markdown(row)
            lines.append("")
    return lines


def _row_markdown(row: dict[str, Any]) -> list[str]:
    conditions = ", ".join(name if yes else f"not {name}" for name, yes in row["conditions"])
    lines = [f"- {conditions or 'always'}"]
    said: dict[tuple[str, ...], list[str]] = {}
    for key in ("pin", "pin_with_series", "target", "target_with_series"):
        said.setdefault(tuple(row[key]), []).append(key.replace("_", " "))
    for names, where in said.items():
        label = "everywhere the same" if len(said) == 1 else " = ".join(where)
        lines.append(f"  - {label}: {', '.join(names) or 'none'}")
    return lines

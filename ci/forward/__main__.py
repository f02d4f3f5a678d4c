"""The command line of the forward port."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ci import envs, forward, patches, paths, pin, toml
from ci.errors import StackError, guarded
from ci.forward import report

DOCS = paths.ROOT / "docs" / "forward"
_BEGIN, _END = "<!-- written by python3 -m ci.forward --docs -->", "<!-- end -->"


def _write(data: dict[str, Any], path: Path) -> None:
    if path.suffix == ".json":
        text = json.dumps(data, indent=1, sort_keys=True) + "\n"
    elif path.suffix == ".md":
        text = report.as_markdown(data)
    else:
        raise StackError(f"--out {path}: the name must end in .md or .json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _summary(data: dict[str, Any]) -> str:
    rows = [f"{data['target']['name']}: {data['target']['origin']}"]
    for verdict, names in report.verdicts(data).items():
        rows.append(f"{len(names):3} {verdict}: {', '.join(names)}")
    return "\n".join(rows)


def plan_table(reports: Sequence[dict[str, Any]]) -> str:
    """Return the table of the plan: a row a patch, a column a target."""
    names = [str(data["target"]["name"]) for data in reports]
    lines = [
        f"Set `{reports[0]['set_hash'][:12]}`.",
        "",
        f"| patch | {' | '.join(f'[{name}]({name}.md)' for name in names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for index, patch in enumerate(reports[0]["patches"]):
        cells = []
        for data in reports:
            other = data["patches"][index]
            grave = sum(f["level"] == "breaks" for f in other["findings"])
            cell = other["verdict"] + (f" ({grave} breaks)" if grave else "")
            cells.append(cell)
        lines.append(f"| `{patch['name']}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def set_between(text: str, new: str) -> str:
    """Replace what stands between the plan's two marks.

    Raises:
        StackError: The marks are not there.
    """
    head, begin, rest = text.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not begin or not end:
        raise StackError(f"docs/forward/PLAN.md has no marks {_BEGIN} and {_END}")
    return f"{head}{_BEGIN}\n\n{new}\n\n{_END}{tail}"


def _docs(the_pin: pin.Pin, series: patches.Series, origin: str, only_check: bool) -> int:
    """Write, or compare, the reports that this project keeps."""
    stale = []
    reports = []
    for entry in toml.read(DOCS / "targets.toml")["targets"]:
        data = forward.forward_to(the_pin, series, entry["version"], entry["sha256"], origin=origin)
        reports.append(data)
        path = DOCS / f"{entry['version']}.md"
        if not only_check:
            _write(data, path)
        elif not path.is_file() or path.read_text(encoding="utf-8") != report.as_markdown(data):
            stale.append(path.name)
        print(_summary(data), flush=True)
    plan = DOCS / "PLAN.md"
    old = plan.read_text(encoding="utf-8")
    new = set_between(old, plan_table(reports))
    if not only_check:
        plan.write_text(new, encoding="utf-8")
    elif old != new:
        stale.append(plan.name)
    if stale:
        raise StackError(f"out of date: {', '.join(stale)}", "python3 -m ci.forward --docs")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python3 -m ci.forward",
        description=forward.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target", nargs="?",
        help="a version (its sdist, from the package index), a path to an sdist or a source "
        "tree, or a git tag, branch or commit",
    )  # fmt: skip
    parser.add_argument("--sha256", default="", help="what the sdist's hash must be")
    parser.add_argument(
        "--git", default="", metavar="URL", help="repository of the git reference (the pin's)"
    )
    parser.add_argument(
        "--out", action="append", default=[], metavar="FILE",
        help="write the report there, .md or .json; may be given twice",
    )  # fmt: skip
    parser.add_argument("--until", metavar="PATCH", help="only the series up to this patch")
    parser.add_argument("--pin", help="which pin of vllm-src/pin.toml (default: the current)")
    parser.add_argument("--source", default="sdist", help="of the pin: sdist, git or a path")
    parser.add_argument(
        "--docs", action="store_true", help="write the reports that docs/forward keeps"
    )
    parser.add_argument(
        "--check", action="store_true", help="with --docs: only say whether they are current"
    )
    args = parser.parse_args(argv)

    def work() -> int:
        if bool(args.target) == args.docs:
            raise StackError("name one target, or --docs")
        for name in args.out:
            if Path(name).suffix not in (".md", ".json"):
                raise StackError(f"--out {name}: the name must end in .md or .json")
        envs.reexec_in_tools("ci.forward", sys.argv[1:] if argv is None else argv)
        the_pin = pin.load(args.pin)
        series = patches.load().until(args.until)
        if args.docs:
            return _docs(the_pin, series, args.source, args.check)
        data = forward.forward_to(the_pin, series, args.target, args.sha256, args.git, args.source)
        for name in args.out:
            _write(data, Path(name))
        print(_summary(data) if args.out else report.as_markdown(data))
        return 0

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())

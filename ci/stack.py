"""Work on the patch stack: ``python -m ci.stack COMMAND``.

list      the patches, in order
hash      the hash of the set
check     everything that can be said of the series without running it
tree      a source tree to work on with quilt
branch    a git repository with a commit per patch
export    turn such a repository back into patches/ and series
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ci import check, envs, gitstack, patches, pin, source
from ci.errors import StackError, guarded
from ci.paths import PATCHES, QUILTRC, ROOT, SERIES_FILE, SOURCES


def _tree(args: argparse.Namespace) -> None:
    the_pin = pin.load(args.pin)
    target = Path(args.dir or SOURCES / f"vllm-{the_pin.version}").resolve()
    source.prepare(the_pin, target, args.source)
    # quilt finds both by these names, so that plain `quilt push` works in the tree.
    (target / "patches").symlink_to(os.path.relpath(PATCHES, target))
    (target / "series").symlink_to(os.path.relpath(SERIES_FILE, target))
    print(f"{target}\n\n  cd {target}")
    print(f"  export QUILTRC={QUILTRC}   # pins quilt's options")
    print("  quilt push -a       # apply, edit, then:")
    print("  quilt refresh       # writes into patches/")
    print("  python3 -m ci.stack check   # (from the repository) leaves the file's final form")


def _branch(args: argparse.Namespace) -> None:
    the_pin = pin.load(args.pin)
    target = Path(args.dir or SOURCES / f"vllm-{the_pin.version}-git").resolve()
    series = patches.load().until(args.until)
    if target.exists():
        raise StackError(f"{target} exists already")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".branch-") as scratch:
        work = Path(scratch) / "work"
        source.prepare(the_pin, work, args.source)
        gitstack.to_branch(work, series, the_pin)
        os.rename(work, target)
    print(f"{target}: branch {gitstack.BRANCH}, {len(series)} commits on {gitstack.BASE}")
    print("edit, commit --fixup, rebase -i; then: python -m ci.stack export")


def _export(args: argparse.Namespace) -> None:
    the_pin = pin.load(args.pin)
    repository = Path(args.dir or SOURCES / f"vllm-{the_pin.version}-git").resolve()
    if not (repository / ".git").exists():
        raise StackError(f"{repository} is no git repository", "python -m ci.stack branch")
    if dirty := gitstack.git(repository, "status", "--porcelain").strip():
        raise StackError(f"{repository} has uncommitted changes: {dirty.splitlines()[0]}")
    on = gitstack.git(repository, "rev-parse", "--abbrev-ref", "HEAD").strip()
    if on != gitstack.BRANCH:
        raise StackError(
            f"{repository} is on {on!r}, not on {gitstack.BRANCH!r}: a rebase may be under way",
            f"git checkout {gitstack.BRANCH}",
        )
    series = gitstack.from_branch(repository)
    gone = [name for name in patches.load().names if name not in series.names]
    if lost := sorted(set(gone) - {d.removesuffix(".patch") for d in args.drop}):
        raise StackError(
            f"the branch has no commit for: {', '.join(lost)}",
            " ".join(f"--drop {name}" for name in lost),
        )
    if problems := series.problems():
        raise StackError("; ".join(problems))
    for name in gitstack.write(series, PATCHES, SERIES_FILE):
        print(f"changed: {name}")
    print(f"{len(series)} patches, set {series.set_hash[:12]}")


def _check(args: argparse.Namespace) -> None:
    series = patches.load()
    problems = check.check(series, pin.load(args.pin), args.source)
    print(check.touched_table(series))
    print(f"set {series.set_hash}")
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    if problems:
        raise StackError(f"{len(problems)} problem(s) in the series")
    print(f"{len(series)} patches: applied without fuzz or offset, exported byte-identical")


def _list(args: argparse.Namespace) -> None:
    for patch in patches.load():
        forwarded = patch.fields.get("Forwarded", "?").split(",")[0]
        print(f"{patch.name:<44} {forwarded:<12} {patch.subject}")


def _hash(args: argparse.Namespace) -> None:
    print(patches.load().set_hash)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.stack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pin", help="which pin of vllm-src/pin.toml (default: the current)")
    commands = parser.add_subparsers(dest="command", required=True)
    table = {
        "list": (_list, "the patches, in order"),
        "hash": (_hash, "the hash of the set"),
        "check": (_check, "check the series"),
        "tree": (_tree, "make a tree to work on with quilt"),
        "branch": (_branch, "make a git repository with a commit per patch"),
        "export": (_export, "write the commits of that repository back as patches"),
    }
    for name, (function, text) in table.items():
        command = commands.add_parser(name, help=text)
        command.set_defaults(function=function)
        if name in ("tree", "branch", "check"):
            command.add_argument("--source", default="sdist", help="sdist, git or a path")
        if name in ("tree", "branch", "export"):
            command.add_argument(
                "dir", nargs="?", help=f"default: under {SOURCES.relative_to(ROOT)}/"
            )
        if name == "export":
            command.add_argument(
                "--drop", metavar="PATCH", action="append", default=[],
                help="remove this patch, whose commit is gone",
            )  # fmt: skip
        if name == "branch":
            command.add_argument("--until", metavar="PATCH", help="stop after this patch")
    args = parser.parse_args(argv)

    def work() -> int:
        envs.reexec_in_tools("ci.stack", sys.argv[1:] if argv is None else argv)
        args.function(args)
        return 0

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())

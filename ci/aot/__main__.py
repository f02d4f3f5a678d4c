"""Command line of ahead-of-time compilation; see ``python -m ci.aot --help``."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from ci import envs, pin
from ci.aot import AotError, Manifest, compile_list, lists, verify_manifest
from ci.aot.table import resource_table
from ci.errors import StackError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 1 if something is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.aot",
        description="Compile lists of Triton kernels for AMD GPUs; no GPU is needed.",
        epilog="example: python -m ci.aot --tree vllm-src/tree --arch gfx1201,gfx1100 "
        "--list unified_attention --out aot --table",
    )
    parser.add_argument("--tree", type=Path, help="a vLLM source tree")
    parser.add_argument("--arch", help="architectures, by commas")
    parser.add_argument(
        "--list",
        action="append",
        metavar="NAME",
        help=f"a kernel list ({', '.join(lists.available())}) or a list file; may be repeated",
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to make or to look at")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (1)")
    parser.add_argument("--cache", type=Path, help="keep Triton's cache here for the next run")
    parser.add_argument("--python", help="interpreter to compile with (default: build.sh's own)")
    parser.add_argument("--table", action="store_true", help="print the resource table")
    parser.add_argument("--quiet", action="store_true", help="print no progress")
    parser.add_argument(
        "--verify", action="store_true", help="compile nothing; check the folder that is there"
    )
    options = parser.parse_args(argv)
    if not options.verify and not (options.tree and options.arch and options.list):
        parser.error("--tree, --arch and --list are needed (or --verify)")
    try:
        envs.reexec_in_tools("ci.aot", sys.argv[1:] if argv is None else argv)
        if not options.verify and not options.python:
            here = importlib.util.find_spec("triton") is not None
            options.python = (
                sys.executable if here else str(envs.ensure_env(pin.load(), options.tree))
            )
    except StackError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    count = 0

    def progress(name: str) -> None:
        nonlocal count
        count += 1
        if not options.quiet:
            print(f"[{count}] {name}", file=sys.stderr, flush=True)

    try:
        if options.verify:
            problems = verify_manifest(options.out)
            for problem in problems:
                print(f"problem: {problem}", file=sys.stderr)
            if problems:
                return 1
            manifest = Manifest.load(options.out)
        else:
            manifest = compile_list(
                options.tree,
                options.list,
                options.arch.split(","),
                options.out,
                options.jobs,
                cache=options.cache,
                python=options.python,
                progress=progress,
            )
    except AotError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.table:
        print(resource_table(manifest))
    size = sum(item.size for item in manifest.objects)
    print(f"{len(manifest.objects)} code objects for {', '.join(manifest.arches)}, {size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

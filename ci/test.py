"""All tests: ``python3 -m ci.test``, on a bare machine as in CI.

Makes the environments, then runs ruff and mypy over this repository, the tests of the
stack and of its build (tests/), and everything that ci.verify runs in vLLM's own tree.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ci import check, envs, paths, pin, tree
from ci.errors import StackError

_BESIDE = ("vLLM's tree",)
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")


def _run(title: str, words: Sequence[str]) -> tuple[int, str]:
    """Run a command with its output shown; return its code and its last line."""
    mark = f"{title}: " if title in _BESIDE else ""
    print(f"== {title}", flush=True)
    begin = time.monotonic()
    process = subprocess.Popen(
        list(words), cwd=paths.ROOT, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        print(f"{mark}{line}", end="", flush=True)
        lines = [*lines[-20:], line]
    code = process.wait()
    print(f"-- {title}: {'ok' if code == 0 else 'FAILED'} in {time.monotonic() - begin:.0f} s")
    return code, lines[-1] if lines else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python3 -m ci.test",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="leave out builds and vLLM's tree")
    args = parser.parse_args(argv)
    # Every process that imports vLLM would compile all of it, and all that it imports, again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        envs.reexec_in_tools("ci.test", sys.argv[1:] if argv is None else argv)
        tree.ensure_quilt()
        the_pin = pin.load()
        begin = time.monotonic()
        python = str(envs.ensure_env(the_pin, check.pristine(the_pin)))
        lint = str(envs.ensure_lint(the_pin))
        print(f"environments: {time.monotonic() - begin:.0f} s", flush=True)
    except StackError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    marks = ["-m", "not build"] if args.quick else []
    quiet = ["-q", "-p", "no:cacheprovider", "-W", "ignore"]
    steps = [
        ("ruff check", [lint, "-m", "ruff", "check", "ci", "tests"]),
        ("ruff format", [lint, "-m", "ruff", "format", "--check", "ci", "tests"]),
        ("mypy", [lint, "-m", "mypy"]),
        ("tests of the stack and its build", [python, "-m", "pytest", *quiet, *marks, "tests"]),
    ]
    if not args.quick:
        steps.append(("vLLM's tree", [python, "-m", "ci.verify"]))
    failed = 0
    with ThreadPoolExecutor(2) as pool:
        # One process of pytest leaves a core idle: what works on vLLM's tree runs beside it.
        beside = pool.submit(lambda: [(t, *_run(t, w)) for t, w in steps if t in _BESIDE])
        results = [(t, *_run(t, w)) for t, w in steps if t not in _BESIDE] + beside.result()
    total = {"passed": 0, "failed": 0, "skipped": 0, "error": 0}
    for title, code, last in results:
        failed += code != 0
        print(f"{'ok    ' if code == 0 else 'FAILED'} {title}")
        if title in ("tests of the stack and its build", "vLLM's tree"):
            for number, kind in _COUNT.findall(last):
                total[kind] += int(number)
    total["failed"] += total.pop("error")
    if failed and not total["failed"]:
        total["failed"] = failed
    print("{passed} passed, {failed} failed, {skipped} skipped".format(**total))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

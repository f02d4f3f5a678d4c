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
from dataclasses import dataclass

from ci import check, envs, paths, pin, tree
from ci.errors import StackError

_COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")


@dataclass(frozen=True)
class Step:
    """A command and how it is run.

    Attributes:
        title: What it is called.
        words: The command.
        tests: Its last line counts tests.
        mark: Put before its lines, where other steps print beside it.
        yields: It takes only what the other steps leave of the CPUs.
    """

    title: str
    words: Sequence[str]
    tests: bool = False
    mark: str = ""
    yields: bool = False


def _run(step: Step) -> tuple[int, str]:
    """Run a step with its output shown; return its code and its last line."""
    print(f"== {step.title}", flush=True)
    begin = time.monotonic()
    process = subprocess.Popen(
        [*(["nice", "-n", "10"] if step.yields else []), *step.words], cwd=paths.ROOT, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        print(f"{step.mark}{line}", end="", flush=True)
        lines = [*lines[-20:], line]
    code = process.wait()
    print(f"-- {step.title}: {'ok' if code == 0 else 'FAILED'} in {time.monotonic() - begin:.0f} s",
          flush=True)  # fmt: skip
    return code, lines[-1] if lines else ""


def chains(python: str, lint: str, quick: bool) -> list[list[Step]]:
    """Return what is run: the steps of a chain one after the other, the chains together.

    The builds and the other tests each keep one CPU busy; what works on vLLM's tree, in
    several processes, takes the rest and in the end all of them.

    Args:
        python: The interpreter of the environment that tests vLLM.
        lint: That of the environment with ruff and mypy.
        quick: Leave out builds and vLLM's tree.
    """
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    found = [
        [
            Step("ruff check", [lint, "-m", "ruff", "check", "ci", "tests"]),
            Step("ruff format", [lint, "-m", "ruff", "format", "--check", "ci", "tests"]),
            Step("mypy", [lint, "-m", "mypy"]),
            Step("tests of the stack", [*pytest, "-m", "not build", "tests"], tests=True),
        ]
    ]
    if not quick:
        builds = [*pytest, "-m", "build", "tests"]
        found.append([Step("tests of the build", builds, True, "build: ")])
        verify = [python, "-m", "ci.verify"]
        found.append([Step("vLLM's tree", verify, True, "vLLM: ", yields=True)])
    return found


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
    running = chains(python, lint, args.quick)
    with ThreadPoolExecutor(len(running)) as pool:
        results = [
            result
            for chain in pool.map(lambda chain: [(s, *_run(s)) for s in chain], running)
            for result in chain
        ]
    failed = 0
    total = {"passed": 0, "failed": 0, "skipped": 0, "error": 0}
    for step, code, last in results:
        failed += code != 0
        print(f"{'ok    ' if code == 0 else 'FAILED'} {step.title}")
        if step.tests:
            for number, kind in _COUNT.findall(last):
                total[kind] += int(number)
    total["failed"] += total.pop("error")
    if failed and not total["failed"]:
        total["failed"] = failed
    print("{passed} passed, {failed} failed, {skipped} skipped".format(**total))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

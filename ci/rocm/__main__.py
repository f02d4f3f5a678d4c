"""The private root of ``--toolchain debian``, by itself.

python3 -m ci.rocm root                 make it, say where it is and what is in it
python3 -m ci.rocm check                and configure vLLM in it, build the targets that
                                        take seconds, and prove what came out
python3 -m ci.rocm prove WHEEL          prove a compiled wheel that exists
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ci import envs
from ci.errors import StackError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python3 -m ci.rocm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("root", "check", "prove"))
    parser.add_argument("wheel", nargs="?", type=Path, help="for prove")
    parser.add_argument("--arch", default="gfx1201", metavar="GFX[,GFX]")
    parser.add_argument("--mirror", metavar="URL", help="as for build.sh")
    parser.add_argument("--pin", help="which pin (default: the current)")
    parser.add_argument("--source", default="sdist", help="as for build.sh")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args(argv)
    try:
        envs.reexec_in_tools("ci.rocm", sys.argv[1:] if argv is None else argv)
        if (args.command == "prove") != (args.wheel is not None):
            raise StackError("prove wants a wheel, the others none")
        from ci.rocm import check

        problems = check.run_command(args)
    except (StackError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

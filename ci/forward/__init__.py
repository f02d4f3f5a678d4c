"""Try the series on another version of upstream: ``python3 -m ci.forward TARGET``.

For every patch the report says what became of it:

applied                   at the same lines
applied with offset       the same lines, elsewhere in the file
merged three-way          git merged it; the lines around it changed or the file moved
conflict                  with the hunks side by side
already upstream          by content, not by name: all that it changes is there, be it in
                          other words, under another name or in another file
..., but upstream changed what it relies on
                          it applies, but a method that it overrides, a function that it
                          calls, an enum or a field is another; by parsing both trees

and it compares the full table of backend priorities of every architecture, at the pin and
in the target, with the series and without.
"""

from pathlib import Path
from typing import Any

from ci import check, paths
from ci.errors import StackError
from ci.forward import report, target
from ci.forward.facts import Tree
from ci.forward.port import Port
from ci.patches import Series
from ci.pin import Pin


def forward(
    pin: Pin, series: Series, base: Path, goal: target.Target, folder: Path
) -> dict[str, Any]:
    """Try a series on a target and report.

    Args:
        pin: The pin.
        series: The patches.
        base: The pin's pristine tree.
        goal: The target.
        folder: Where to work; replaced.

    Returns:
        The report as data (see :func:`ci.forward.report.as_data`).

    Raises:
        StackError: The series does not apply to the pin, or git fails.
    """
    work = Port(pin, base, goal.tree, series, folder)
    attempts = work.run()
    before, after = Tree(base), Tree(goal.tree)
    outcomes = report.judge(work, attempts, before, after)
    priorities = report.priority_tables(work, before, after)
    return report.as_data(pin, goal.name, goal.origin, series, outcomes, priorities)


def forward_to(
    pin: Pin, series: Series, what: str, sha256: str = "", repository: str = "",
    origin: str = "sdist",
) -> dict[str, Any]:  # fmt: skip
    """Bring a target and report on it; see :func:`ci.forward.target.bring`.

    Raises:
        StackError: The target cannot be had, or the series has problems of its own.
    """
    if problems := series.problems():
        raise StackError(problems[0])
    folder = paths.BUILD / "forward"
    base = check.pristine(pin, origin)
    goal = target.bring(what, pin, folder / "target", sha256, repository)
    return forward(pin, series, base, goal, folder / "work")

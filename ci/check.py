"""Is the series in order?  Everything that can be said of it without running it."""

import fnmatch
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ci import gitstack, source, toml, tree
from ci.errors import StackError
from ci.patches import FileChange, Patch, Series
from ci.paths import AREAS_FILE, BUILD
from ci.pin import Pin

_verified: set[tuple[Path, str]] = set()


@dataclass(frozen=True)
class Area:
    """A folder of patches and what it may touch."""

    name: str
    about: str
    owns: tuple[str, ...]
    hooks: tuple[str, ...]
    hook_lines: int

    def owns_path(self, path: str) -> bool:
        """Whether the area may change the file freely."""
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.owns)

    def hooks_path(self, path: str) -> bool:
        """Whether the area may add a few lines to the file."""
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.hooks)


@dataclass(frozen=True)
class Touched:
    """How much of upstream a patch touches."""

    name: str
    new_files: int
    new_lines: int
    upstream_files: int
    upstream_added: int
    upstream_removed: int


def load_areas(path: Path = AREAS_FILE) -> dict[str, Area]:
    """Read the table of areas.

    Raises:
        StackError: The file is malformed.
    """
    areas: dict[str, Area] = {}
    for name, table in toml.read(path).items():
        if not isinstance(table, dict):
            raise StackError(f"{path.name}: {name} is no table")
        try:
            areas[name] = Area(
                name=name,
                about=table["about"],
                owns=tuple(table["owns"]),
                hooks=tuple(table.get("hooks", ())),
                hook_lines=int(table.get("hook-lines", 0)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StackError(f"{path.name}: area {name}: {error} is missing or wrong") from None
    return areas


def ownership_problems(series: Series, areas: dict[str, Area]) -> list[str]:
    """Name the files that patches touch outside their area.

    Args:
        series: The patches.
        areas: The table of areas.

    Returns:
        One sentence a problem.
    """
    found: list[str] = []
    made_by: dict[str, str] = {}
    for patch in series:
        area = areas.get(patch.area)
        if area is None:
            found.append(f"{patch.name}: patches/areas.toml has no area {patch.area}")
            continue
        for change in patch.changes:
            if change.is_new:
                made_by[change.path] = patch.area
            if area.owns_path(change.path) or made_by.get(change.path) == patch.area:
                continue
            if not area.hooks_path(change.path):
                found.append(f"{patch.name}: touches {change.path}, which {area.name} does not own")
            elif len(change.added) + change.removed > area.hook_lines:
                lines = len(change.added) + change.removed
                found.append(
                    f"{patch.name}: changes {lines} lines of {change.path}; "
                    f"a hook of area {area.name} may change {area.hook_lines}"
                )
    return found


def whitespace_problems(patch: Patch) -> list[str]:
    """Name added lines with trailing blanks, stray tabs or conflict markers."""
    found = []
    for change in patch.changes:
        for line in change.added:
            if line != line.rstrip() and not change.path.endswith((".md", ".txt")):
                found.append(f"{patch.name}: {change.path}: trailing blanks in {line.strip()!r}")
            elif " \t" in line[: len(line) - len(line.lstrip())]:
                found.append(f"{patch.name}: {change.path}: blank before tab in {line.strip()!r}")
            elif re.match(r"(<{7}|>{7}|={7})( |$)", line):
                found.append(f"{patch.name}: {change.path}: conflict marker {line!r}")
        if b"\n\\ No newline at end of file" in patch.data and change is patch.changes[-1]:
            found.append(f"{patch.name}: a file ends without a newline")
    return found


def touched(patch: Patch, made: set[str]) -> Touched:
    """Count what a patch adds beside upstream's files and what it changes in them.

    Args:
        patch: The patch.
        made: Paths that this and earlier patches created.
    """

    def ours(change: FileChange) -> bool:
        return change.is_new or change.path in made

    new = [c for c in patch.changes if ours(c)]
    old = [c for c in patch.changes if not ours(c)]
    return Touched(
        name=patch.name,
        new_files=sum(c.is_new for c in new),
        new_lines=sum(len(c.added) for c in new),
        upstream_files=len(old),
        upstream_added=sum(len(c.added) for c in old),
        upstream_removed=sum(c.removed for c in old),
    )


def touched_table(series: Series) -> str:
    """Return the table of upstream lines touched, patch by patch."""
    made: set[str] = set()
    rows = [f"{'patch':<44}{'new files':>10}{'lines':>8}{'upstream files':>16}{'+':>6}{'-':>6}"]
    total = [0, 0, 0, 0, 0]
    for patch in series:
        made |= {c.path for c in patch.changes if c.is_new}
        t = touched(patch, made)
        numbers = [t.new_files, t.new_lines, t.upstream_files, t.upstream_added, t.upstream_removed]
        total = [a + b for a, b in zip(total, numbers, strict=True)]
        rows.append("{:<44}{:>10}{:>8}{:>16}{:>6}{:>6}".format(t.name, *numbers))
    rows.append("{:<44}{:>10}{:>8}{:>16}{:>6}{:>6}".format("total", *total))
    return "\n".join(rows)


def pristine(pin: Pin, origin: str = "sdist", build: Path = BUILD) -> Path:
    """Return a pristine tree, made once and kept, verified once a process.

    Args:
        pin: The pin.
        origin: Where to take it from when it is not there.
        build: The build folder.

    Returns:
        Its path; do not write to it.
    """
    path = build / f"pristine-{pin.version}-{pin.tree_sha256[:12]}"
    if (path, origin) in _verified and path.is_dir():
        return path
    if origin not in ("sdist", "git"):
        # What the user names is judged, even where the result would be the same.
        with tempfile.TemporaryDirectory(prefix="hipstack-source-") as scratch:
            source.prepare(pin, Path(scratch) / "tree", origin)
    if path.is_dir() and source.tree_digest(path) != pin.tree_sha256:
        gitstack.remove_tree(path)
    if not path.is_dir():
        source.prepare(pin, path, origin)
    _verified.add((path, origin))
    return path


def round_trip_problems(series: Series, pin: Pin, base: Path, corrected: Path) -> list[str]:
    """Apply the series with quilt and with git, export it, and compare.

    Args:
        series: The patches.
        pin: The pin.
        base: A pristine tree.
        corrected: Folder that gets the corrected files when an export differs.

    Returns:
        One sentence a problem.
    """
    gitstack.remove_tree(corrected)
    found: list[str] = []
    with tempfile.TemporaryDirectory(prefix="hipstack-check-") as scratch:
        quilted, committed = Path(scratch) / "quilt", Path(scratch) / "git"
        gitstack.copy_tree(base, quilted)
        try:
            tree.apply(quilted, series, Path(scratch) / "applied")
        except StackError as error:
            found.append(str(error))
        gitstack.copy_tree(base, committed)
        try:
            gitstack.to_branch(committed, series, pin)
        except StackError as error:
            return [*found, str(error)]
        exported = gitstack.from_branch(committed)
        if exported.names != series.names:
            found.append("exported patches have other names than the series")
        for before, after in zip(series, exported, strict=False):
            if before.data != after.data:
                path = corrected / f"{after.name}.patch"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(after.data)
                found.append(f"{before.name}: its export differs; the corrected file is {path}")
        if not found and source.tree_digest(quilted) != source.tree_digest(committed):
            found.append("quilt and git am give different trees")
    return found


def check(series: Series, pin: Pin, origin: str = "sdist", build: Path = BUILD) -> list[str]:
    """Run every check of the series.

    Args:
        series: The patches.
        pin: The pin.
        origin: Where a pristine tree comes from.
        build: The build folder; corrected patches are left in its ``corrected``.

    Returns:
        One sentence a problem; an empty list when the series is in order.
    """
    found = series.problems()
    found += ownership_problems(series, load_areas())
    for patch in series:
        found += whitespace_problems(patch)
    return found + round_trip_problems(
        series, pin, pristine(pin, origin, build), build / "corrected"
    )

"""Try the series on another tree with git: three-way, patch by patch."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from ci import gitstack
from ci.errors import StackError
from ci.forward.equivalent import Catalogue, Change, Evidence, evidence
from ci.patches import Patch, Series
from ci.pin import Pin

APPLIED, OFFSET, MERGED, CONFLICT, UPSTREAM = (
    "applied", "applied with offset", "merged three-way", "conflict", "already upstream"
)  # fmt: skip
_CHECKING = re.compile(r"^Checking patch (.+?)(?: => .*)?\.\.\.$")
_OFFSET = re.compile(r"^Hunk #(\d+) succeeded at (\d+) \(offset (-?\d+) lines?\)")
_MERGE = (
    "-c", "merge.conflictStyle=diff3", "-c", "merge.renames=true", "-c", "diff.renames=true",
    "-c", "merge.directoryRenames=true", "-c", "rerere.enabled=false", "-c", "core.editor=true",
)  # fmt: skip


@dataclass(frozen=True)
class Hunk:
    """A place where the patch and upstream changed the same lines.

    Attributes:
        path: The file, as the target has it.
        line: Where it is in the target's file, from 1; 0 for a whole file.
        kind: ``content``, ``both add it``, ``upstream deleted it`` or ``the patch deletes it``.
        base: The lines at the pin.
        upstream: The lines in the target.
        patch: The lines that the patch wants.
    """

    path: str
    line: int
    kind: str
    base: tuple[str, ...] = ()
    upstream: tuple[str, ...] = ()
    patch: tuple[str, ...] = ()


@dataclass(frozen=True)
class Attempt:
    """What became of one patch.

    Attributes:
        patch: The patch.
        status: One of the five words of this module.
        notes: Offsets, moved files and the like, a phrase each.
        hunks: The conflicts.
        evidence: How much of the patch the target has already.
        on_trial: Patches in conflict that this one stands on; the attempt took their side
            everywhere, so its own result is provisional.
    """

    patch: Patch
    status: str
    notes: tuple[str, ...] = ()
    hunks: tuple[Hunk, ...] = ()
    evidence: Evidence = field(default_factory=lambda: Evidence((), (), ()))
    on_trial: tuple[str, ...] = ()


class Port:
    """A git repository with the pin, the series on it, and the target.

    Args:
        pin: The pin.
        base: The pin's pristine tree.
        target: The target's tree.
        series: The patches.
        folder: An empty or absent folder to work in.
    """

    def __init__(self, pin: Pin, base: Path, target: Path, series: Series, folder: Path) -> None:
        self.series = series
        self.target = target
        self.repo = folder / "ported"
        self.stack = folder / "stack"
        gitstack.remove_tree(folder)
        folder.mkdir(parents=True)
        gitstack.copy_tree(base, self.repo)
        gitstack.to_branch(self.repo, series, pin)
        commits = self._git("rev-list", "--reverse", f"{gitstack.BASE}..{gitstack.BRANCH}")
        self.commits = dict(zip(series.names, commits.split(), strict=True))
        self._git("checkout", "-q", "--detach", gitstack.BASE)
        self._git("worktree", "add", "-q", str(self.stack), gitstack.BRANCH)
        place = (f"--git-dir={self.repo / '.git'}", f"--work-tree={target}")
        gitstack.git(target, *place, "add", "-A", "-f", ".")
        tree = self._git("write-tree").strip()
        self._git("reset", "-q", "--hard", gitstack.BASE)
        commit = self._git("commit-tree", tree, "-p", gitstack.BASE, "-m", "target").strip()
        self._git("branch", "target", commit)
        self._git("checkout", "-q", "-b", "ported", commit)
        self.moved = self._moved()
        self._target_files: Catalogue | None = None

    def _git(self, *arguments: str, data: bytes | None = None) -> str:
        return gitstack.git(self.repo, *_MERGE, *arguments, data=data)

    def _moved(self) -> dict[str, str]:
        """Return where the target has files of the pin under another name."""
        rows = self._git(
            "diff", "--name-status", "-M50%", "--diff-filter=R", "-l0", gitstack.BASE, "target"
        ).splitlines()  # fmt: skip
        return {old: new for _, old, new in (row.split("\t") for row in rows)}

    def changed_files(self) -> list[str]:
        """Return the files that the target has and the pin has not, or has otherwise."""
        rows = self._git("diff", "--name-only", "--diff-filter=AMR", gitstack.BASE, "target")
        return rows.splitlines()

    def show(self, commit: str, path: str) -> str:
        """Return a file at a commit, or an empty string."""
        try:
            return self._git("show", f"{commit}:{path}")
        except StackError:
            return ""

    def changes(self, patch: Patch) -> list[Change]:
        """Return the Python files that a patch changes outside of tests."""
        commit = self.commits[patch.name]
        return [
            Change(c.path, self.show(f"{commit}^", c.path), self.show(commit, c.path))
            for c in patch.changes
            if c.path.endswith(".py") and not c.path.startswith("tests/")
        ]

    def _evidence(self, patch: Patch) -> Evidence:
        if self._target_files is None:
            self._target_files = Catalogue(
                {
                    path: (self.target / path).read_text(encoding="utf-8", errors="replace")
                    for path in self.changed_files()
                    if path.endswith(".py") and not path.startswith("tests/")
                }
            )
        changes = self.changes(patch)
        pin = Catalogue({c.path: self.show(gitstack.BASE, c.path) for c in changes})
        return evidence(changes, self._target_files, pin, self.moved)

    def run(self) -> list[Attempt]:
        """Try every patch in order, each on what the ones before it left."""
        attempts: list[Attempt] = []
        provisional: dict[str, tuple[str, ...]] = {}
        for patch in self.series:
            below = tuple(
                sorted({name for dep in patch.depends for name in provisional.get(dep, ())})
            )
            attempt = self._try(patch, below)
            if attempt.status == CONFLICT:
                provisional[patch.name] = (*below, patch.name)
            elif below:
                provisional[patch.name] = below
            attempts.append(attempt)
        return attempts

    def _try(self, patch: Patch, below: tuple[str, ...]) -> Attempt:
        evidence_ = self._evidence(patch)
        if evidence_.complete:
            return Attempt(patch, UPSTREAM, evidence=evidence_, on_trial=below)
        exact, notes = self._exact(patch)
        commit = self.commits[patch.name]
        try:
            self._git("cherry-pick", "--keep-redundant-commits", commit)
        except StackError as error:
            hunks = self._conflicts()
            if not hunks:
                raise StackError(f"{patch.name}: cannot be tried: {error}") from None
            self._git("cherry-pick", "--abort")
            self._take(patch, hunks)
            return Attempt(patch, CONFLICT, tuple(notes), tuple(hunks), evidence_, below)
        if self._same_tree("HEAD", "HEAD^"):
            self._git("reset", "-q", "--hard", "HEAD^")
            return Attempt(patch, UPSTREAM, ("it changes nothing there",), (), evidence_, below)
        if exact:
            status = OFFSET if notes else APPLIED
        else:
            status = MERGED
            notes = [
                f"{old} is {new} there"
                for old, new in self.moved.items()
                if old in {c.path for c in patch.changes}
            ] or ["the lines around it changed"]
        return Attempt(patch, status, tuple(notes), (), evidence_, below)

    def _same_tree(self, one: str, other: str) -> bool:
        trees = self._git("rev-parse", f"{one}^{{tree}}", f"{other}^{{tree}}").split()
        return trees[0] == trees[1]

    def _exact(self, patch: Patch) -> tuple[bool, list[str]]:
        """Say whether a patch applies as it is, and by which offsets."""
        try:
            output = self._git("apply", "--check", "--verbose", data=patch.data)
        except StackError:
            return False, []
        notes, path = [], ""
        for line in output.splitlines():
            if match := _CHECKING.match(line):
                path = match[1]
            elif match := _OFFSET.match(line):
                notes.append(f"{path}: hunk {match[1]} by {int(match[3]):+d} lines")
        return True, notes

    def _conflicts(self) -> list[Hunk]:
        """Read the conflicts of a merge that stopped."""
        stages: dict[str, set[str]] = {}
        for row in self._git("ls-files", "-u", "-z").split("\0"):
            if row:
                head, path = row.split("\t", 1)
                stages.setdefault(path, set()).add(head.split()[2])
        hunks: list[Hunk] = []
        for path, present in sorted(stages.items()):
            if present == {"1", "2", "3"}:
                text = (self.repo / path).read_text(encoding="utf-8", errors="replace")
                hunks += read_markers(path, text)
            elif present >= {"2", "3"}:
                hunks.append(Hunk(path, 0, "both add it"))
            elif "3" in present:
                hunks.append(Hunk(path, 0, "upstream deleted it"))
            else:
                hunks.append(Hunk(path, 0, "the patch deletes it"))
        return hunks

    def _take(self, patch: Patch, hunks: list[Hunk]) -> None:
        """Commit a patch in conflict with its own side everywhere, so that others follow."""
        commit = self.commits[patch.name]
        try:
            self._git("cherry-pick", "-X", "theirs", "--keep-redundant-commits", commit)
        except StackError:
            for hunk in self._conflicts():
                if hunk.kind == "the patch deletes it":
                    self._git("rm", "-q", "--", hunk.path)
                else:
                    self._git("checkout", commit, "--", hunk.path)
            self._git("cherry-pick", "--continue")
        whole = [h.path for h in hunks if h.kind == "both add it"]
        if whole:
            self._git("checkout", commit, "--", *whole)
            self._git("commit", "-q", "--amend", "--no-edit", "--allow-empty")


def read_markers(path: str, text: str) -> list[Hunk]:
    """Read git's diff3 conflict markers.

    Args:
        path: The file.
        text: Its content with the markers.

    Returns:
        One hunk a conflict, its line counted in the upstream side's file.
    """
    hunks: list[Hunk] = []
    sides: dict[str, list[str]] = {}
    side, line, begin = "", 1, 0
    for row in text.splitlines():
        if row.startswith("<<<<<<< "):
            side, begin = "upstream", line
            sides = {"upstream": [], "base": [], "patch": []}
        elif side and row.startswith("||||||| "):
            side = "base"
        elif side and row == "=======":
            side = "patch"
        elif side and row.startswith(">>>>>>> "):
            hunks.append(
                Hunk(path, begin, "content", tuple(sides["base"]), tuple(sides["upstream"]),
                     tuple(sides["patch"]))
            )  # fmt: skip
            side = ""
        else:
            if side:
                sides[side].append(row)
            if side in ("", "upstream"):
                line += 1
    return hunks

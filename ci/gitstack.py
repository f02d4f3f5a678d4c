"""The series as a git branch, and the branch back as a series."""

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ci.errors import StackError
from ci.patches import NAME, Patch, Series
from ci.pin import Pin
from ci.run import run

BASE = "pin"
BRANCH = "stack"

# Everything that would let a user's git configuration leak into the bytes of an export.
_STABLE = (
    "-c", "core.abbrev=40", "-c", "core.quotePath=true", "-c", "diff.noprefix=false",
    "-c", "diff.mnemonicPrefix=false", "-c", "diff.renames=false", "-c", "diff.context=3",
    "-c", "diff.interHunkContext=0", "-c", "diff.suppressBlankEmpty=false",
     "-c", "diff.external=", "-c", "core.attributesFile=/dev/null",
    "-c", "commit.gpgSign=false", "-c", "format.useAutoBase=false", "-c", "format.from=false",
    "-c", "format.subjectPrefix=PATCH", "-c", "format.thread=false", "-c", "format.pretty=email",
    "-c", "core.hooksPath=/dev/null", "-c", "core.autocrlf=false", "-c", "core.safecrlf=false",
)  # fmt: skip
_FORMAT = (
    "format-patch", "--zero-commit", "--full-index", "--no-stat", "--no-signature", "-N",
    "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", "--diff-algorithm=myers",
    "--no-indent-heuristic", "--unified=3", "--src-prefix=a/", "--dst-prefix=b/",
    "--encode-email-headers", "--quiet", "-O/dev/null", "--no-base", "--no-cover-letter", "--no-to",
    "--no-cc", "--no-add-header",
)  # fmt: skip
# As a mailing list or a pull request wants it: real commit ids, numbered, with statistics.
FORMAT_UPSTREAM = (
    "format-patch", "--full-index", "--no-signature", "--no-renames", "--no-ext-diff",
    "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/", "--no-base",
    "--no-cover-letter", "--no-to", "--no-cc", "--no-add-header", "--quiet",
)  # fmt: skip
_WHO = {
    "GIT_AUTHOR_NAME": "hipstack contributors",
    "GIT_AUTHOR_EMAIL": "hipstack@example.invalid",
    "GIT_COMMITTER_NAME": "hipstack contributors",
    "GIT_COMMITTER_EMAIL": "hipstack@example.invalid",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "LC_ALL": "C",
}
_BASE_DATE = "2026-10-04T00:00:00+0000"


def git(
    tree: Path,
    *arguments: str,
    data: bytes | None = None,
    who: bool = True,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run git in a tree, its output settings pinned.

    Args:
        tree: The working tree.
        arguments: What follows ``git``.
        data: Standard input.
        who: Author and commit as the stack; otherwise as the user's configuration says.
        env: Variables on top, such as another author.

    Returns:
        What it printed.

    Raises:
        StackError: It failed.
    """
    return run(
        ["git", *_STABLE, *arguments],
        cwd=tree,
        env={**(_WHO if who else {"LC_ALL": "C"}), **(env or {})},
        input_bytes=data,
        what=f"git {arguments[0]}",
    )


def init(tree: Path, pin: Pin) -> None:
    """Make a pristine source tree a git repository with the pin as its one commit."""
    git(tree, "init", "-q", "-b", BASE)
    # -f: upstream tracks five files that its own .gitignore matches.
    git(tree, "add", "-A", "-f")
    date = {"GIT_AUTHOR_DATE": _BASE_DATE, "GIT_COMMITTER_DATE": _BASE_DATE}
    run(
        ["git", *_STABLE, "commit", "-q", "-m", f"vLLM {pin.version} ({pin.commit})"],
        cwd=tree,
        env={**_WHO, **date},
        what="git commit",
    )


def am(tree: Path, patch: Patch) -> None:
    """Commit one patch on the current branch.

    Raises:
        StackError: It does not apply; the tree is left as it was.
    """
    try:
        git(
            tree, "am", "-q", "--keep-non-patch", "--committer-date-is-author-date",
            "--whitespace=nowarn", "--no-3way", data=patch.data,
        )  # fmt: skip
    except StackError as error:
        run(["git", "am", "--abort"], cwd=tree, env=_WHO)
        raise StackError(f"patch {patch.name} does not apply with git am: {error}") from None


def to_branch(tree: Path, series: Series, pin: Pin) -> None:
    """Turn a pristine tree into a repository: branch ``pin``, and ``stack`` on top.

    Args:
        tree: A pristine source tree without ``.git``.
        series: The patches; each becomes one commit.
        pin: The pin.

    Raises:
        StackError: A patch does not apply.
    """
    init(tree, pin)
    git(tree, "checkout", "-q", "-b", BRANCH)
    for patch in series:
        am(tree, patch)


def from_branch(tree: Path, base: str = BASE, branch: str = "HEAD") -> Series:
    """Turn the commits between two points of a repository into a series.

    Args:
        tree: The repository.
        base: Where the pin is.
        branch: Where the last patch is.

    Returns:
        The series, each patch named by its commit's ``Hipstack-Patch:`` line.

    Raises:
        StackError: A commit has no such line, two share one, or there is a merge.
    """
    git(tree, "rev-parse", "--verify", "-q", f"{base}^{{commit}}")
    if merges := git(tree, "rev-list", "--merges", f"{base}..{branch}").split():
        raise StackError(f"commit {merges[0][:12]} is a merge; the stack is a line of commits")
    patches: list[Patch] = []
    with tempfile.TemporaryDirectory() as scratch:
        git(tree, *_FORMAT, "-o", scratch, f"{base}..{branch}")
        for path in sorted(Path(scratch).iterdir()):
            data = path.read_bytes()
            if not data:
                raise StackError(
                    f"{path.name}: that commit changes nothing", "git rebase -i, drop it"
                )
            subject = Patch("unnamed/unnamed", data).subject
            match = re.search(rb"^Hipstack-Patch:[ \t]*(\S+)[ \t]*$", data, re.M)
            name = match[1].decode("ascii", "replace") if match else ""
            if not NAME.fullmatch(name):
                raise StackError(f"commit {subject!r} has no valid line Hipstack-Patch: area/name")
            if name in (p.name for p in patches):
                raise StackError(f"two commits are named {name}", "git rebase -i, squash them")
            patches.append(Patch(name, data))
    return Series(tuple(patches))


def write(series: Series, folder: Path, series_file: Path) -> list[str]:
    """Write a series to disk so that folder and series file hold exactly it.

    Every file is written beside its place and renamed; files of patches that are no
    longer in the series are removed; the comment that opens the series file stays.

    Args:
        series: The patches.
        folder: The ``patches`` folder.
        series_file: The series file.

    Returns:
        Names of the patches that are new, changed or gone.
    """
    changed: list[str] = []
    for patch in series:
        path = folder / f"{patch.name}.patch"
        if path.is_file() and path.read_bytes() == patch.data:
            continue
        changed.append(patch.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, patch.data)
    for path in sorted(folder.rglob("*.patch")):
        name = path.relative_to(folder).as_posix().removesuffix(".patch")
        if name not in series.names:
            changed.append(name)
            path.unlink()
    comment: list[str] = []
    if series_file.is_file():
        for line in series_file.read_text(encoding="utf-8").splitlines():
            if line.strip() and not line.startswith("#"):
                break
            comment.append(line)
    lines = [*comment, *(f"{name}.patch" for name in series.names)]
    text = "\n".join(lines) + "\n"
    if not series_file.is_file() or series_file.read_text(encoding="utf-8") != text:
        _replace(series_file, text.encode())
    return changed


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def copy_tree(source: Path, destination: Path) -> None:
    """Copy a source tree with its links and modes, cheaply where the disk can."""
    run(["cp", "-a", "--reflink=auto", str(source), str(destination)], what="copying the tree")


def remove_tree(path: Path) -> None:
    """Remove a tree if it is there."""
    shutil.rmtree(path, ignore_errors=True)

"""Put the series onto a source tree with quilt, strictly."""

import os
import re
import shutil
from pathlib import Path

from ci.errors import StackError
from ci.patches import Patch, Series
from ci.paths import PATCHES, QUILTRC, SERIES_FILE
from ci.run import capture, run

_DRIFT = re.compile(r"^Hunk #\d+ succeeded at \d+.*(?:fuzz|offset).*$", re.M)


def ensure_quilt() -> str:
    """Return quilt's version; install it where this process may.

    Raises:
        StackError: It is absent and cannot be installed from here.
    """
    if shutil.which("quilt") is None:
        hint = "apt-get install -y quilt"
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise StackError("quilt is not installed", f"sudo {hint}")
        command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "quilt"]
        env = {"DEBIAN_FRONTEND": "noninteractive"}
        try:
            run(command, env=env, what="installing quilt")
        except StackError:  # a machine whose package lists were never fetched
            run(["apt-get", "update", "-q"], env=env, what="apt-get update", hint=hint)
            run(command, env=env, what="installing quilt", hint=hint)
    return run(["quilt", "--version"]).strip()


def quilt_env(patches: Path = PATCHES, series: Path = SERIES_FILE) -> dict[str, str]:
    """Return the variables under which quilt works on this stack's patches."""
    return {"QUILT_PATCHES": str(patches), "QUILT_SERIES": str(series), "LC_ALL": "C"}


def apply(tree: Path, series: Series, scratch: Path) -> None:
    """Apply patches to a pristine tree with quilt, allowing neither fuzz nor offset.

    Args:
        tree: The tree; it is changed.
        series: The patches, in order.
        scratch: A folder for the patch files that quilt reads.

    Raises:
        StackError: A patch does not apply exactly; the message names it.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    folder = scratch / "patches"
    if folder.exists():
        shutil.rmtree(folder)
    for patch in series:
        path = folder / f"{patch.name}.patch"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(patch.data)
    names = scratch / "series"
    names.write_text("".join(f"{name}.patch\n" for name in series.names))
    env = {**os.environ, **quilt_env(folder, names)}
    for patch in series:
        push = ["quilt", "--quiltrc", str(QUILTRC), "push", f"{patch.name}.patch"]
        code, output = capture(push, cwd=tree, env=env)
        if code != 0:
            reason = next(
                (x.strip() for x in output.splitlines() if "FAILED" in x or "can't find" in x),
                (output.strip().splitlines() or ["quilt said nothing"])[-1],
            )
            raise StackError(f"patch {patch.name} does not apply: {reason}")
        if drift := _DRIFT.search(output):
            raise StackError(
                f"patch {patch.name} applies only with drift: {drift[0].strip()}",
                "refresh it: python -m ci.stack check writes the corrected file",
            )
    shutil.rmtree(tree / ".pc", ignore_errors=True)


def apply_with_offset(tree: Path, patch: Patch) -> None:
    """Apply one patch with git, which allows an offset and no fuzz.

    Args:
        tree: The tree; it is changed, or left as it was when the patch does not fit.
        patch: The patch.

    Raises:
        StackError: It does not apply; the message begins with its name.
    """
    # git must not take the tree for a part of a repository that it lies in.
    ceiling = {"GIT_CEILING_DIRECTORIES": str(tree.resolve().parent), "LC_ALL": "C"}
    try:
        run(
            ["git", "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", "-"],
            cwd=tree,
            env=ceiling,
            input_bytes=patch.data,
            what="git apply",
        )
    except StackError as error:
        raise StackError(f"{patch.name} does not apply: {error}") from None

"""Where this repository is published, found out and never guessed."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ci.errors import StackError
from ci.paths import ROOT

VARIABLE = "HIPSTACK_REPOSITORY"


@dataclass(frozen=True)
class Repository:
    """The repository that a release is made from.

    Attributes:
        url: Its web address without a slash at the end, or "" where none is known.
        commit: The commit that is checked out, or "" outside git.
        dirty: Whether files differ from that commit.
    """

    url: str
    commit: str
    dirty: bool = False

    def link(self, path: str) -> str:
        """Return the address of a file at this commit; the path alone where none is known."""
        return f"{self.url}/blob/{self.commit}/{path}" if self.url and self.commit else path

    @property
    def uri(self) -> str:
        """What names the repository in a statement: its address, or a package URL."""
        return f"git+{self.url}" if self.url else "pkg:generic/hipstack"


def web_address(remote: str) -> str:
    """Turn what git calls a remote into a web address.

    Args:
        remote: For example ``git@host:owner/name.git`` or ``https://host/owner/name``.

    Returns:
        ``https://host/owner/name``, or "" for a path on a disk and whatever else nobody
        could open.
    """
    remote = remote.strip()
    if match := re.fullmatch(
        r"(?:ssh://)?[\w.-]+@([\w.-]+)(?::\d+/|[:/])(.+?)(?:\.git)?/?", remote
    ):
        return f"https://{match[1]}/{match[2]}"
    if match := re.fullmatch(r"(https?)://(?:[^/@]+@)?([^/@]+/.+?)(?:\.git)?/?", remote):
        return f"{match[1]}://{match[2]}"
    return ""


def find(url: str | None = None, root: Path = ROOT) -> Repository:
    """Find out where the repository is published and which commit it is at.

    The address comes from the argument, from ``HIPSTACK_REPOSITORY``, from GitHub Actions'
    variables, or from git's remote ``origin``, whichever is the first to name one.

    Args:
        url: What the command line said.
        root: The repository's folder.

    Raises:
        StackError: The address that was given is none.
    """
    given = url or os.environ.get(VARIABLE, "")
    if given and not web_address(given):
        raise StackError(f"{given!r} is no address of a repository", "https://HOST/OWNER/NAME")
    server, name = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    candidates = (given, f"{server}/{name}" if server and name else "",
                  _git(root, "config", "--get", "remote.origin.url"))  # fmt: skip
    address = next((a for c in candidates if c and (a := web_address(c))), "")
    return Repository(
        url=address,
        commit=_git(root, "rev-parse", "HEAD"),
        dirty=bool(_git(root, "status", "--porcelain", "--untracked-files=no")),
    )


def _git(root: Path, *words: str) -> str:
    try:
        result = subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""

"""What is passed to the Dockerfile: build arguments, decided in one place."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ci import arches, paths
from ci.errors import StackError
from ci.patches import Series
from ci.pin import Pin
from ci.repository import Repository

DOCKERFILE = paths.ROOT / "Dockerfile"
_TAG_LENGTH = 128
_TAG = re.compile(rf"\w[\w.-]{{0,{_TAG_LENGTH - 1}}}")


def version_of(pin: Pin, stack_version: str) -> str:
    """Return the release's version as tags and files name it, such as ``0.31.0-hipstack1``.

    A tag may not hold the ``+`` of the wheels' version.
    """
    return f"{pin.version}-hipstack{stack_version}"


def image_tag(version: str, names: Sequence[str]) -> str:
    """Return an image's tag, such as ``0.31.0-hipstack1-gfx120x``.

    Args:
        version: As `version_of` returns it.
        names: The architectures.

    Raises:
        StackError: It would be no valid tag.
    """
    family = arches.family(names)
    tag = f"{version}-{family}"
    if len(tag) > _TAG_LENGTH:
        digest = hashlib.sha256(family.encode()).hexdigest()[:12]
        tag = f"{version}-{len(set(names))}-arches-{digest}"
    if not _TAG.fullmatch(tag):
        raise StackError(f"{tag!r} is no valid image tag")
    return tag


def describe(
    pin: Pin, stack_version: str, series: Series, names: Sequence[str], repository: Repository
) -> dict[str, str]:
    """Return the build arguments that become the image's labels.

    Args:
        pin: The pinned upstream release.
        stack_version: The stack's own version.
        series: The patches.
        names: The architectures.
        repository: Where the patches can be read.

    Returns:
        Argument name to value.  ``PATCHES`` has one link a patch (or its path, where the
        repository's address is not known), in order, with spaces between them.
    """
    return {
        "ARCH": ",".join(names),
        "VERSION": image_tag(version_of(pin, stack_version), names),
        "REVISION": repository.commit or "unknown",
        "SOURCE": repository.url,
        "PIN": pin.version,
        "PIN_COMMIT": pin.commit,
        "SET_HASH": series.set_hash,
        "PATCHES": " ".join(repository.link(f"patches/{name}.patch") for name in series.names),
    }


@dataclass(frozen=True)
class Recipe:
    """One image to build.

    Attributes:
        arguments: Build arguments.
        tags: Names that the image gets.
        wheel: Folder with the finished wheel; None builds it in the image's build stage.
        options: The engine's own options, passed on as they are.
    """

    arguments: Mapping[str, str]
    tags: Sequence[str]
    wheel: Path | None = None
    options: Sequence[str] = field(default=())

    def words(self) -> list[str]:
        """Return what follows the engine's ``build`` command."""
        words = ["--file", str(DOCKERFILE)]
        for name, value in sorted(self.arguments.items()):
            words += ["--build-arg", f"{name}={value}"]
        if self.wheel is not None:
            words += ["--build-context", f"wheel={self.wheel}"]
        for tag in self.tags:
            words += ["--tag", tag]
        return [*words, *self.options, str(paths.ROOT)]


def declared_arguments(text: str) -> dict[str, str]:
    """Return a Dockerfile's ``ARG`` names with their first default ("" for none)."""
    found: dict[str, str] = {}
    for name, value in re.findall(r"^ARG (\w+)(?:=(.*))?$", text, re.M):
        if not found.get(name):
            found[name] = value.strip().strip('"')
    return found

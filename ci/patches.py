"""The nouns of a patch stack: a patch, its header, the series.

A patch file is one git mailbox message.  Its header is::

    Subject: [PATCH] [ROCm][Attention] What it does

    Why: paragraphs.

    Test-Plan:
     one command a line, run from the root of vLLM's tree

    Depends: none, or names of patches
    Forwarded: no, or a URL, or "not-needed, because ..."
    Obsolete-When: how to tell that it is no longer needed
    Hipstack-Patch: area/name

The patch's name is its path under ``patches/`` without ``.patch``; its folder is its
area.  `Hipstack-Patch` repeats the name, so that a git commit knows its file.
"""

import email
import email.policy
import hashlib
import io
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ci.errors import StackError
from ci.paths import PATCHES, SERIES_FILE

FIELDS = ("Why", "Test-Plan", "Depends", "Forwarded", "Obsolete-When", "Hipstack-Patch")
NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*/[a-z0-9]+(?:-[a-z0-9]+)*")
# Where the diff begins, as git writes it and as quilt does.
_DIFF = re.compile(rb"^(?:diff --git |--- (?:a/|/dev/null)|Index: )", re.M)
_FIELD_LINE = re.compile(rf"^({'|'.join(FIELDS)}):[ \t]*(.*)$")


@dataclass(frozen=True)
class FileChange:
    """What a patch does to one file of vLLM's tree."""

    path: str
    is_new: bool
    added: tuple[str, ...]
    removed: int


@dataclass(frozen=True)
class Patch:
    """One patch of the stack."""

    name: str
    data: bytes

    @property
    def area(self) -> str:
        """The folder under ``patches/``: which part of the stack it belongs to."""
        return self.name.split("/", 1)[0]

    @property
    def sha256(self) -> str:
        """Hex digest of the file's bytes."""
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def _message(self) -> tuple[str, str]:
        diff = _DIFF.search(self.data)
        head = self.data[: diff.start()] if diff else self.data
        mail = email.message_from_bytes(
            head.split(b"\n", 1)[1] if head.startswith(b"From ") else head,
            policy=email.policy.default,
        )
        subject = " ".join(str(mail["Subject"] or "").split())
        subject = re.sub(r"^\[PATCH[^\]]*\] *", "", subject)
        body = mail.get_payload(decode=True)
        text = body.decode("utf-8", "replace") if isinstance(body, bytes) else ""
        return subject, re.sub(r"\n---\n\s*\Z", "\n", text + "\n")

    @property
    def subject(self) -> str:
        """The commit's subject line, without ``[PATCH]``."""
        return self._message[0]

    @property
    def message(self) -> str:
        """The commit message below the subject."""
        return self._message[1].strip("\n") + "\n"

    @cached_property
    def fields(self) -> dict[str, str]:
        """The header's fields; a field runs until the next one begins."""
        found: dict[str, list[str]] = {}
        current: list[str] | None = None
        for line in self.message.splitlines():
            if match := _FIELD_LINE.match(line):
                current = found.setdefault(match[1], [])
                current.append(match[2])
            elif current is not None:
                current.append(line)
        return {key: "\n".join(lines).strip() for key, lines in found.items()}

    @property
    def depends(self) -> tuple[str, ...]:
        """Names of the patches that this one says it needs."""
        text = self.fields.get("Depends", "")
        names = [n.strip() for n in re.split(r"[,\n]", text) if n.strip()]
        return () if names == ["none"] else tuple(names)

    @property
    def test_plan(self) -> tuple[str, ...]:
        """Commands that test the patch, run from the root of vLLM's tree."""
        lines = self.fields.get("Test-Plan", "").splitlines()
        return tuple(line.strip() for line in lines if line.strip())

    @property
    def diff(self) -> str:
        """The patch below its header, empty when there is none."""
        diff = _DIFF.search(self.data)
        return self.data[diff.start() :].decode("utf-8") if diff else ""

    @cached_property
    def changes(self) -> tuple[FileChange, ...]:
        """What it does, file by file.

        Raises:
            StackError: The diff cannot be parsed.
        """
        diff = _DIFF.search(self.data)
        if diff is None:
            raise StackError(f"{self.name}: there is no diff in it")
        from unidiff.patch import PatchSet

        try:
            parsed = PatchSet(io.StringIO(self.data[diff.start() :].decode("utf-8"), newline="\n"))
        except Exception as error:
            raise StackError(f"{self.name}: its diff cannot be parsed: {error}") from None
        return tuple(
            FileChange(
                path=item.path,
                is_new=item.is_added_file,
                added=tuple(
                    line.value.rstrip("\n") for hunk in item for line in hunk if line.is_added
                ),
                removed=item.removed,
            )
            for item in parsed
        )

    def problems(self) -> list[str]:
        """Say what is wrong with the header; an empty list when nothing is."""
        found = []
        if not self.data.startswith(b"From 0000000000000000000000000000000000000000 "):
            found.append("is not in git mailbox format with a zeroed commit id")
        if not self.subject.startswith("["):
            found.append("subject has no [Area] tag as vLLM writes them")
        if len(self.subject) > 80:
            found.append(f"subject is {len(self.subject)} characters long, 80 at most")
        for field in FIELDS:
            if not self.fields.get(field):
                found.append(f"header lacks {field}:")
        forwarded = self.fields.get("Forwarded", "")
        if forwarded and not re.match(r"no$|https?://\S+|not-needed\b.{8,}", forwarded, re.S):
            found.append("Forwarded: must be `no`, a URL, or `not-needed` and why")
        if self.fields.get("Hipstack-Patch", self.name) != self.name:
            found.append(f"Hipstack-Patch: says {self.fields['Hipstack-Patch']}")
        if not self.depends and self.fields.get("Depends") not in (None, "", "none"):
            found.append("Depends: must be `none` or names of patches")
        if not any(c.path.startswith("tests/") for c in self.changes):
            found.append("touches no file under tests/")
        return [f"{self.name}: {text}" for text in found]


@dataclass(frozen=True)
class Series:
    """The patches in their order."""

    patches: tuple[Patch, ...]

    def __iter__(self) -> Iterator[Patch]:
        return iter(self.patches)

    def __len__(self) -> int:
        return len(self.patches)

    @property
    def names(self) -> tuple[str, ...]:
        """The patches' names, in order."""
        return tuple(patch.name for patch in self.patches)

    @property
    def set_hash(self) -> str:
        """sha256 over the ordered names and contents: what identifies the applied set."""
        digest = hashlib.sha256()
        for patch in self.patches:
            digest.update(f"{patch.name}\0{patch.sha256}\n".encode())
        return digest.hexdigest()

    def get(self, name: str) -> Patch:
        """Return the patch of that name (``.patch`` and ``patches/`` may be left on).

        Raises:
            StackError: There is none, or an abbreviation fits several.
        """
        wanted = name.removeprefix("patches/").removesuffix(".patch")
        fits = [p for p in self.patches if p.name == wanted]
        fits = fits or [p for p in self.patches if p.name.split("/")[1] == wanted]
        if len(fits) != 1:
            raise StackError(f"no patch is named {name!r}; the series has: {', '.join(self.names)}")
        return fits[0]

    def until(self, name: str | None) -> "Series":
        """Return the series cut after a patch (the whole for None)."""
        if name is None:
            return self
        last = self.patches.index(self.get(name))
        return Series(self.patches[: last + 1])

    def closure(self, name: str) -> "Series":
        """Return a patch with the patches it depends on, in series order."""
        wanted: set[str] = set()
        stack = [self.get(name)]
        while stack:
            patch = stack.pop()
            if patch.name not in wanted:
                wanted.add(patch.name)
                stack += [self.get(dep) for dep in patch.depends]
        return self.only(wanted)

    def only(self, names: Container[str]) -> "Series":
        """Return the patches of these names, in series order."""
        return Series(tuple(p for p in self.patches if p.name in names))

    def problems(self) -> list[str]:
        """Say what is wrong with the headers and their dependencies."""
        found = [text for patch in self.patches for text in patch.problems()]
        for index, patch in enumerate(self.patches):
            earlier = set(self.names[:index])
            for dep in patch.depends:
                if dep not in earlier:
                    found.append(f"{patch.name}: Depends: {dep} is not earlier in the series")
        return found


def parse_series(text: str) -> tuple[str, ...]:
    """Parse a quilt series file.

    Args:
        text: Its content: one ``area/name.patch`` a line, ``#`` begins a comment.

    Returns:
        The patches' names in order, without ``.patch``.

    Raises:
        StackError: A line is no patch path, has options, or stands twice.
    """
    names: list[str] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(?:^|\s)#.*", "", raw).strip()
        if not line:
            continue
        name = line.removesuffix(".patch")
        if name == line or not NAME.fullmatch(name):
            raise StackError(f"series line {number}: {line!r} is no area/name.patch")
        if name in names:
            raise StackError(f"series line {number}: {line} stands there twice")
        names.append(name)
    return tuple(names)


def load(series_file: Path = SERIES_FILE, folder: Path = PATCHES) -> Series:
    """Read the series and its patches.

    Args:
        series_file: The series file.
        folder: Where the patches lie.

    Returns:
        The series.

    Raises:
        StackError: A listed file is absent or a file present is not listed.
    """
    if not series_file.is_file():
        raise StackError(f"{series_file} does not exist")
    names = parse_series(series_file.read_text(encoding="utf-8"))
    present = {
        path.relative_to(folder).as_posix().removesuffix(".patch")
        for path in folder.rglob("*.patch")
    }
    if missing := [name for name in names if name not in present]:
        raise StackError(f"listed in series but absent: {', '.join(missing)}")
    if orphans := sorted(present - set(names)):
        raise StackError(f"present but not listed in series: {', '.join(orphans)}")
    return Series(tuple(Patch(name, (folder / f"{name}.patch").read_bytes()) for name in names))

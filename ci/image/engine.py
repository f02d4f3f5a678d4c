"""docker, podman or buildah, behind the few verbs that are needed of them."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci.errors import StackError
from ci.run import run

NAMES = ("docker", "podman", "buildah")
# buildah's own words for a container that needs no namespace of its own: works as root in
# a container or a virtual machine without systemd, too.
_CHROOT = ("--isolation", "chroot")


@dataclass(frozen=True)
class Config:
    """What an image says of itself.

    Attributes:
        id: The image's identifier.
        labels: Its labels.
        env: Its environment.
        user: As which user it starts.
        entrypoint: Its entry point.
        volumes: Its volumes.
        healthcheck: The words of its health check, empty without one.
    """

    id: str
    labels: dict[str, str]
    env: dict[str, str]
    user: str
    entrypoint: tuple[str, ...]
    volumes: tuple[str, ...]
    healthcheck: tuple[str, ...]


@dataclass(frozen=True)
class Layer:
    """One layer: what made it, and its size in bytes (uncompressed)."""

    made_by: str
    size: int


def parse_config(identifier: str, config: Mapping[str, Any]) -> Config:
    """Turn an image's ``config`` (Docker's words) into a `Config`."""
    return Config(
        id=identifier,
        labels=dict(config.get("Labels") or {}),
        env=dict(word.split("=", 1) for word in config.get("Env") or [] if "=" in word),
        user=str(config.get("User") or ""),
        entrypoint=tuple(config.get("Entrypoint") or ()),
        volumes=tuple(sorted(config.get("Volumes") or {})),
        healthcheck=tuple((config.get("Healthcheck") or {}).get("Test") or ()),
    )


def parse_layers(history: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> list[Layer]:
    """Pair an image's history with the sizes of the layers that are not empty.

    Args:
        history: Entries with ``created_by`` and perhaps ``empty_layer``, oldest first.
        sizes: Bytes of each layer, oldest first.
    """
    made = [str(h.get("created_by", "")) for h in history if not h.get("empty_layer")]
    made += [""] * (len(sizes) - len(made))
    return [Layer(" ".join(text.split()), size) for text, size in zip(made, sizes, strict=False)]


class Engine:
    """A container engine.

    Args:
        name: docker, podman or buildah; the first that is installed by default.

    Raises:
        StackError: It, or every one of them, is absent.
    """

    def __init__(self, name: str | None = None) -> None:
        found = [n for n in ((name,) if name else NAMES) if shutil.which(n)]
        if found[:1] == ["docker"] and not name and _outcome(["docker", "info"])[0]:
            found = found[1:] or found  # its daemon does not run: another engine may
        if not found:
            raise StackError(
                f"{name or 'none of ' + ', '.join(NAMES)} is installed", "apt-get install buildah"
            )
        self.name = found[0]

    def build_command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line that builds an image with these arguments."""
        if self.name == "docker":
            return ["docker", "buildx", "build", "--load", *arguments]
        if self.name == "podman":
            return ["podman", "build", "--format", "docker", *arguments]
        # OCI's format has no health check; buildah drops it there.
        return ["buildah", "build", *_CHROOT, "--format", "docker", "--layers", *arguments]

    def build(self, arguments: Sequence[str]) -> None:
        """Build an image, its output shown.

        Raises:
            StackError: The build failed.
        """
        command = self.build_command(arguments)
        try:
            code = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
        except OSError as error:
            raise StackError(f"{command[0]} cannot be run: {error.strerror}") from None
        if code:
            raise StackError(f"{' '.join(command[:3])} failed ({code})", "read its output above")

    def config(self, image: str) -> Config:
        """Return what an image says of itself.

        Raises:
            StackError: There is no such image.
        """
        if self.name == "buildah":
            data = json.loads(run(["buildah", "inspect", "--type", "image", image]))
            return parse_config(data["FromImageID"], data["Docker"]["config"])
        data = json.loads(run([self.name, "image", "inspect", image]))[0]
        return parse_config(data["Id"], data["Config"])

    def layers(self, image: str) -> list[Layer]:
        """Return an image's layers, oldest first."""
        if self.name == "buildah":
            data = json.loads(run(["buildah", "inspect", "--type", "image", image]))
            store = json.loads(run(["buildah", "info"]))["store"]
            driver = store["GraphDriverName"]
            index = Path(store["GraphRoot"]) / f"{driver}-layers" / "layers.json"
            known = {
                entry.get("diff-digest"): int(entry.get("diff-size") or 0)
                for entry in json.loads(index.read_text())
            }
            sizes = [known.get(d, 0) for d in data["OCIv1"]["rootfs"]["diff_ids"]]
            return parse_layers(data["OCIv1"].get("history") or [], sizes)
        lines = run(
            [self.name, "history", "--no-trunc", "--human=false", "--format",
             "{{json .}}", image],
        ).splitlines()  # fmt: skip
        rows = [json.loads(line) for line in reversed(lines) if line.startswith("{")]
        return [
            Layer(" ".join(str(row["CreatedBy"]).split()), int(row["Size"]))
            for row in rows
            if int(row["Size"])
        ]

    def run_in(
        self,
        image: str,
        command: Sequence[str],
        user: str = "",
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> tuple[int, str]:
        """Run a command in a fresh container, with the image's own environment.

        Args:
            image: The image.
            command: Program and arguments; the entry point is not in the way.
            user: ``uid:gid`` instead of the image's own.
            env: Variables on top.
            options: More of the engine's options (volumes, devices).

        Returns:
            The exit code, and standard output and error together.
        """
        words = [*options, *(["--user", user] if user else [])]
        for name, value in (env or {}).items():
            words += ["--env", f"{name}={value}"]
        if self.name == "buildah":
            with self._container(image) as container:
                return _outcome(["buildah", "run", *_CHROOT, *words, container, "--", *command])
        return _outcome(
            [self.name, "run", "--rm", *words, "--entrypoint", command[0], image, *command[1:]]
        )

    @contextlib.contextmanager
    def files(self, image: str, path: str) -> Iterator[Path]:
        """Yield a local folder with the content of a folder of the image."""
        if self.name == "buildah":
            with self._container(image) as container:
                root = Path(run(["buildah", "mount", container]).strip().splitlines()[-1])
                try:
                    yield root / path.lstrip("/")
                finally:
                    run(["buildah", "umount", container])
            return
        container = run([self.name, "create", image]).strip().splitlines()[-1]
        try:
            with tempfile.TemporaryDirectory(prefix="hipstack-image-") as scratch:
                run([self.name, "cp", f"{container}:{path}", f"{scratch}/content"])
                yield Path(scratch) / "content"
        finally:
            run([self.name, "rm", "-f", container])

    def push(self, name: str) -> str:
        """Push an image.

        Returns:
            The digest that the registry knows it by (``sha256:...``).

        Raises:
            StackError: The push failed, or left no digest.
        """
        if self.name == "docker":
            output = run(["docker", "push", name])
            found = [w for line in output.splitlines() for w in line.split() if w[:7] == "sha256:"]
            digest = found[-1] if found else ""
        else:
            with tempfile.TemporaryDirectory() as scratch:
                file = os.path.join(scratch, "digest")
                run([self.name, "push", "--digestfile", file, name, f"docker://{name}"])
                digest = Path(file).read_text().strip()
        if len(digest) != 71:
            raise StackError(f"{self.name} push {name} printed no digest")
        return digest

    @contextlib.contextmanager
    def _container(self, image: str) -> Iterator[str]:
        name = f"hipstack-{uuid.uuid4().hex[:12]}"
        run(["buildah", "from", "--pull-never", "--name", name, image])
        try:
            yield name
        finally:
            run(["buildah", "rm", name])


def _outcome(command: Sequence[str]) -> tuple[int, str]:
    try:
        result = subprocess.run(
            list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    except OSError as error:
        raise StackError(f"{command[0]} cannot be run: {error.strerror}") from None
    return result.returncode, result.stdout.decode("utf-8", "replace")

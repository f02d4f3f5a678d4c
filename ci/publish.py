"""Make a release: wheels for every family, their proofs and records, images, statements.

The folder then holds the wheels, a build record and an SBOM for each, RELEASE_NOTES.md,
images.json, the provenance statement and SHA256SUMS.  docs/verify.md says how to check them.
"""

import argparse
import datetime
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci import arches, build, envs, patches, paths, pin, provenance, repository, source
from ci.errors import StackError
from ci.image.inside.install import InstallError, choose
from ci.image.recipe import Recipe, describe, image_tag, version_of
from ci.patches import Patch, Series
from ci.pin import Pin
from ci.repository import Repository
from ci.run import run

EPILOG = """\
examples:
  python3 -m ci.publish --dry-run                     what would be made, what is in the way
  python3 -m ci.publish --out release                 everything but the images
  python3 -m ci.publish --wheels dist --out release   around wheels that build.sh made elsewhere
  python3 -m ci.publish --wheels dist --images --registry HOST/OWNER/hipstack --push
  python3 -m ci.publish --verify release              is what lies there what it says?
"""
SUMS = "SHA256SUMS"
NOTES = "RELEASE_NOTES.md"
IMAGES = "images.json"


@dataclass(frozen=True)
class Item:
    """One family of a release.

    Attributes:
        family: Its name, such as ``gfx120x``.
        arches: Its architectures.
        wheel: The wheel's file name, or "" where it cannot be told.
        tag: The image's tag.
        how: How compiled ops come in and why, or why nothing can be built.
        blocked: Nothing can be built here.
    """

    family: str
    arches: tuple[str, ...]
    wheel: str
    tag: str
    how: str
    blocked: bool = False


@dataclass(frozen=True)
class Release:
    """Everything that a release is determined by."""

    version: str
    pin: Pin
    series: Series
    repository: Repository
    items: tuple[Item, ...]
    registry: str = ""
    images: bool = False

    @property
    def statement_name(self) -> str:
        """The file name of the provenance statement."""
        return f"hipstack-{self.version}.provenance.json"

    def image(self, item: Item) -> str:
        """Return an image's full name."""
        return f"{self.registry or 'hipstack'}:{item.tag}"

    def describe(self) -> str:
        """Return the plan as text."""
        state = f"{self.repository.commit or 'no commit'}{', changed' * self.repository.dirty}"
        rows = "".join(
            f"\n{i.family:<9}{', '.join(i.arches)}\n"
            f"  {'BLOCKED' if i.blocked else 'ops':<9}{i.how}\n"
            f"  wheel    {i.wheel or '?'}\n"
            f"  image    {self.image(i)}{'' if self.images else '  (not asked for)'}\n"
            for i in self.items
        )
        return (
            f"release   {self.version}\n"
            f"from      {self.repository.url or 'a repository without a known address'}\n"
            f"commit    {state}\n"
            f"pin       vLLM {self.pin.version}, commit {self.pin.commit}\n"
            f"patches   {len(self.series)}, set {self.series.set_hash}\n{rows}\n"
            f"and       a build record and an SBOM for each wheel, {NOTES},\n"
            f"          {IMAGES}, {self.statement_name}, {SUMS}"
        )


def first_paragraph(patch: Patch) -> str:
    """Return the first paragraph of why a patch exists, as one line."""
    text = " ".join(re.split(r"\n\s*\n", patch.fields.get("Why", "").strip())[0].split())
    return text[:1].upper() + text[1:]


def notes(release: Release, extensions: Mapping[str, str]) -> str:
    """Write the release notes from the patches' headers.

    Args:
        release: The release.
        extensions: Family to how compiled ops came into its wheel.

    Returns:
        Markdown.
    """
    link = release.repository.link
    table = "".join(
        f"| {i.family} | {'; '.join(f'{a}: {arches.ARCHES[a]}' for a in i.arches)} "
        f"| `{i.wheel}` | {extensions.get(i.family, '?')} | `{i.tag}` |\n"
        for i in release.items
    )
    areas: dict[str, list[Patch]] = {}
    for patch in release.series:
        areas.setdefault(patch.area, []).append(patch)
    text = ""
    for area, members in areas.items():
        text += f"\n### {area}\n"
        for patch in members:
            forwarded = " ".join(patch.fields.get("Forwarded", "").split())
            text += (
                f"\n- **{patch.subject}** ([{patch.name}]({link(f'patches/{patch.name}.patch')}))\n"
                f"  {first_paragraph(patch)}\n  Forwarded: {forwarded}\n"
            )
    return (
        f"# hipstack {release.version}\n\n"
        f"vLLM {release.pin.version} (commit `{release.pin.commit}`) with {len(release.series)} "
        f"patches, set `{release.series.set_hash}`.\n\n"
        f"| family | cards | wheel | compiled ops | image tag |\n|---|---|---|---|---|\n{table}\n"
        f"What each claim rests on: [README]({link('README.md')}). How to verify the files and "
        f"the images: [docs/verify.md]({link('docs/verify.md')}).\n\n## Patches\n{text}"
    )


def wheel_problems(
    wheel: Path, record: Mapping[str, Any], sbom: Mapping[str, Any], item: Item, set_hash: str
) -> list[str]:
    """Compare a wheel, from its file alone, with its record, its SBOM and the plan.

    Args:
        wheel: The wheel.
        record: Its build record.
        sbom: Its CycloneDX SBOM.
        item: What it should be.
        set_hash: The hash of the patches that should be in it.

    Returns:
        Sentences; empty for a good wheel.
    """
    from ci import codeobjects
    from ci import wheel as wheels

    digest = source.sha256(wheel)
    found = []
    if digest != record.get("sha256"):
        found.append("is not the file of its build record")
    try:
        with zipfile.ZipFile(wheel) as archive:
            stack = json.loads(archive.read(wheels.STACK_JSON))
            said, names = str(stack["set_hash"]), tuple(stack["arches"])
        objects = codeobjects.arches_by_file(codeobjects.scan_wheel(wheel))
    except (KeyError, ValueError, OSError, zipfile.BadZipFile) as error:
        return [*found, f"cannot be read: {error}"]
    except codeobjects.CodeObjectError as error:
        return [*found, str(error)]
    if said != set_hash:
        found.append(f"was built from the set {said[:12]}, not {set_hash[:12]}")
    if names != item.arches:
        found.append(f"is for {', '.join(names)}, not {', '.join(item.arches)}")
    if objects != record.get("code_objects"):
        found.append("holds other code objects than its build record lists")
    held = {a for file, those in objects.items() if file.endswith(".hsaco") for a in those}
    if held != set(item.arches):
        found.append(f"its kernels are for {', '.join(sorted(held)) or 'nothing'}")
    for file, those in objects.items():
        if file.endswith(".so") and not set(item.arches) <= set(those):
            found.append(
                f"{file} lacks code for {', '.join(sorted(set(item.arches) - set(those)))}"
            )
    component = sbom.get("metadata", {}).get("component", {})
    hashes = {h.get("content") for h in component.get("hashes", [])}
    if component.get("version") != record.get("version") or digest not in hashes:
        found.append("its SBOM describes another file")
    return found


def facts(
    release: Release, records: Mapping[str, Mapping[str, Any]], subjects: Mapping[str, str],
    command: Sequence[str], started: str, finished: str,
) -> provenance.Facts:  # fmt: skip
    """Collect what the provenance statement says.

    Args:
        release: The release.
        records: Family to its wheel's build record.
        subjects: File or image name to sha256.
        command: The command line.
        started: When the release began.
        finished: When it was finished.
    """
    the_pin, env = release.pin, os.environ
    dependencies = [
        (f"pkg:pypi/vllm@{the_pin.version}", "sha256", the_pin.sdist_sha256),
        (f"git+{the_pin.git}@refs/tags/{the_pin.tag}", "gitCommit", the_pin.commit),
    ]
    for record in records.values():
        ext = record["extensions"]
        if ext.get("wheel"):
            entry = (f"pkg:generic/{ext['wheel']}", "sha256", str(ext["wheel_sha256"]))
            if entry not in dependencies:
                dependencies.append(entry)
        for package in _compiler(record).get("packages", []):
            uri = f"pkg:deb/debian/{package['name']}@{package['version']}"
            entry = (uri, "sha256", str(package["sha256"]))
            if entry not in dependencies:
                dependencies.append(entry)
    server, workflow = env.get("GITHUB_SERVER_URL"), env.get("GITHUB_WORKFLOW_REF")
    if server and workflow:
        builder = f"{server}/{workflow}"
        invocation = (
            f"{server}/{env.get('GITHUB_REPOSITORY')}/actions/runs/{env.get('GITHUB_RUN_ID')}"
            f"/attempts/{env.get('GITHUB_RUN_ATTEMPT', '1')}"
        )
    else:
        builder = f"{release.repository.uri}#built-by-hand"
        invocation = uuid.uuid4().urn
    build_type = (
        release.repository.link("docs/verify.md") + "#build-type"
        if release.repository.url
        else "pkg:generic/hipstack#docs/verify.md"
    )
    return provenance.Facts(
        subjects=subjects,
        build_type=build_type,
        external={
            "command": shlex.join(command),
            "pin": the_pin.version,
            "setHash": release.series.set_hash,
            "families": {i.family: list(i.arches) for i in release.items},
        },
        internal={
            "workingTreeChanged": release.repository.dirty,
            "wheels": {
                family: {
                    "extensions": record["extensions"]["mode"],
                    "toolchain": record["toolchain"],
                    "compiler": {k: v for k, v in _compiler(record).items() if k != "packages"},
                }
                for family, record in records.items()
            },
        },
        source=release.repository.uri,
        commit=release.repository.commit,
        dependencies=dependencies,
        builder=builder,
        invocation=invocation,
        started=started,
        finished=finished,
    )  # fmt: skip


def _compiler(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the compiled ops of a wheel were made with; empty where none were compiled."""
    found: Mapping[str, Any] = record.get("compiled", {}).get("toolchain", {})
    return found


def digests(folder: Path, without: Sequence[str] = ()) -> dict[str, str]:
    """Return name and sha256 of every file of a folder, sorted."""
    return {
        p.name: source.sha256(p)
        for p in sorted(folder.iterdir())
        if p.is_file() and p.name[0] != "." and p.name not in without
    }


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        StackError: It cannot be written.
    """
    partial = path.with_name(f".{path.name}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise StackError(f"cannot write {path}: {error.strerror}", "another --out") from None
    finally:
        partial.unlink(missing_ok=True)


def plan(args: argparse.Namespace) -> Release:
    """Decide what the release consists of.

    Raises:
        StackError: The command line does not allow it.
    """
    the_pin, series = pin.load(), patches.load()
    version = version_of(the_pin, build.stack_version())
    items = []
    for name in args.family or list(arches.FAMILIES):
        members = arches.parse(name)
        family = arches.family(members)
        tag = image_tag(version, members)
        words = ["--arch", ",".join(members), "--extensions", args.extensions,
                 *(["--toolchain", args.toolchain] if args.toolchain else [])]  # fmt: skip
        if args.wheels:
            folder = (paths.CWD / args.wheels).resolve()
            try:
                wheel = choose([p.name for p in folder.iterdir()], ",".join(members))
                items.append(Item(family, members, wheel, tag, f"a wheel in {args.wheels}"))
            except (InstallError, OSError) as error:
                items.append(Item(family, members, "", tag, str(error), True))
            continue
        try:
            made = build.make_plan(build.parse_arguments(words))
            how = f"{made.extensions.mode}: {made.extensions.reason}"
            items.append(Item(family, members, made.wheel, tag, how))
        except StackError as error:
            items.append(Item(family, members, "", tag, str(error), True))
    return Release(
        version, the_pin, series, repository.find(args.repository), tuple(items),
        args.registry, args.images,
    )  # fmt: skip


def preflight(release: Release, args: argparse.Namespace) -> None:
    """Refuse a release that could not be explained afterwards.

    Raises:
        StackError: Every reason, in one line.
    """
    reasons = [f"{i.family}: {i.how}" for i in release.items if i.blocked]
    reasons += release.series.problems()
    if not release.repository.commit:
        reasons.append("this is no git repository")
    if release.repository.dirty and not args.allow_dirty:
        reasons.append("files differ from the commit (--allow-dirty for a trial)")
    tag = os.environ.get("GITHUB_REF_NAME", "")
    if os.environ.get("GITHUB_REF_TYPE") == "tag" and tag != f"v{release.version}":
        reasons.append(f"the git tag is {tag}, the version needs v{release.version}")
    if args.push and not (args.images and "/" in args.registry):
        reasons.append("--push needs --images and --registry HOST/OWNER/NAME")
    if reasons:
        raise StackError("; ".join(reasons))


def gather(release: Release, args: argparse.Namespace, out: Path) -> dict[str, dict[str, Any]]:
    """Build the wheels, or copy those that are given, and prove each from its file.

    Returns:
        Family to build record.

    Raises:
        StackError: A wheel cannot be built, lacks its records or fails its proof.
    """
    records: dict[str, dict[str, Any]] = {}
    for item in release.items:
        stem = item.wheel.removesuffix(".whl")
        names = (item.wheel, f"{stem}.build.json", f"{stem}.cdx.json")
        if args.wheels:
            folder = (paths.CWD / args.wheels).resolve()
            for name in names:
                try:
                    with tempfile.NamedTemporaryFile(dir=out, prefix=".", delete=False) as partial:
                        partial.write((folder / name).read_bytes())
                    os.chmod(partial.name, 0o644)
                    os.replace(partial.name, out / name)
                except OSError as error:
                    raise StackError(f"{folder / name}: {error.strerror}") from None
        else:
            words = ["--arch", ",".join(item.arches), "--extensions", args.extensions,
                     "--out", str(out), *(["--jobs", str(args.jobs)] if args.jobs else []),
                     *(["--toolchain", args.toolchain] if args.toolchain else [])]  # fmt: skip
            if build.main(words):
                raise StackError(f"{item.family}: the wheel could not be built")
        record = json.loads((out / names[1]).read_text())
        sbom = json.loads((out / names[2]).read_text())
        if found := wheel_problems(out / item.wheel, record, sbom, item, release.series.set_hash):
            raise StackError(f"{item.wheel} {'; '.join(found)}")
        print(f"proved {item.wheel}: {len(record['code_objects'])} files with GPU code", flush=True)
        records[item.family] = record
    return records


def make_images(
    release: Release, args: argparse.Namespace, out: Path, records: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Build, check and perhaps push the images.

    Returns:
        Image name to what is known of it; ``digest`` is empty for one that was not pushed.

    Raises:
        StackError: A build, a check or a push failed.
    """
    from ci.image import check
    from ci.image.engine import Engine

    engine = Engine(args.engine)
    made: dict[str, dict[str, Any]] = {}
    for item in release.items:
        name = release.image(item)
        arguments = describe(
            release.pin, build.stack_version(), release.series, item.arches, release.repository
        )
        for word in args.build_arg:
            key, _, value = word.partition("=")
            arguments[key] = value
        with tempfile.TemporaryDirectory(dir=out, prefix=".wheel-") as scratch:
            stem = item.wheel.removesuffix(".whl")
            for file in (item.wheel, f"{stem}.build.json", f"{stem}.cdx.json"):
                shutil.copyfile(out / file, Path(scratch) / file)
            engine.build(Recipe(arguments, [name], Path(scratch), args.option).words())
        bad = [r for r in check.check_image(engine, name, _show) if not r.ok]
        if bad:
            raise StackError(f"{name}: {'; '.join(f'{r.name}: {r.detail}' for r in bad)}")
        digest = engine.push(name) if args.push else ""
        packages = check.sbom_packages(engine, name)
        write(out / f"hipstack-{item.tag}.image.cdx.json",
              image_sbom(name, digest, records[item.family], packages))  # fmt: skip
        made[name] = {
            "id": engine.config(name).id,
            "digest": digest,
            "wheel": item.wheel,
            "layers": [[layer.size, layer.made_by[:200]] for layer in engine.layers(name)],
        }
    return made


def read_images(folder: Path, out: Path) -> dict[str, dict[str, Any]]:
    """Take over what other machines recorded of the images that they made.

    Args:
        folder: Where their ``images.json`` and SBOMs lie, at any depth.
        out: The release's folder, which gets the SBOMs.

    Returns:
        As `make_images`.

    Raises:
        StackError: There is no record, or one cannot be read.
    """
    made: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.rglob(IMAGES)):
        try:
            made |= json.loads(file.read_text())
        except (OSError, ValueError, TypeError) as error:
            raise StackError(f"{file}: {error}") from None
    for file in sorted(folder.rglob("*.image.cdx.json")):
        write(out / file.name, file.read_text())
    if not made:
        raise StackError(f"--image-records {folder}: there is no {IMAGES} in it")
    return made


def _show(result: Any) -> None:
    print(f"{'ok     ' if result.ok else 'PROBLEM'} {result.name}: {result.detail}", flush=True)


def image_sbom(
    name: str, digest: str, record: Mapping[str, Any], packages: Sequence[tuple[str, str, str]]
) -> str:
    """Return a CycloneDX SBOM (JSON) of an image: every Python and Debian package in it.

    Args:
        name: The image's name.
        digest: Its digest in the registry, or "".
        record: The build record of the wheel in it.
        packages: (kind, name, version), kinds as in package URLs.
    """
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot5
    from packageurl import PackageURL

    main = Component(
        name=name.rpartition(":")[0], version=name.rpartition(":")[2] + (digest and f"@{digest}"),
        type=ComponentType.CONTAINER, bom_ref=name,
    )  # fmt: skip
    seed = hashlib.sha256(f"{name}\0{digest}\0{record['sha256']}".encode()).digest()
    bom = Bom(serial_number=uuid.UUID(bytes=seed[:16], version=4))
    bom.metadata.component = main
    components = []
    for kind, package, version in packages:
        distribution = "debian" if kind == "deb" else None
        url = PackageURL(kind, distribution, package.lower(), version)
        components.append(
            Component(
                name=package, version=version, type=ComponentType.LIBRARY,
                bom_ref=url.to_string(), purl=url,
            )
        )  # fmt: skip
        bom.components.add(components[-1])
    bom.register_dependency(main, components)
    document = json.loads(JsonV1Dot5(bom).output_as_string())
    document["metadata"].pop("timestamp", None)
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def publish(release: Release, args: argparse.Namespace, out: Path) -> None:
    """Carry out a release.

    Raises:
        StackError: A step failed; SHA256SUMS, which is written last, is then absent.
    """
    started = _now()
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / SUMS).unlink(missing_ok=True)
    except OSError as error:
        raise StackError(f"cannot write to {out}: {error.strerror}", "another --out") from None
    records = gather(release, args, out)
    modes = {family: record["extensions"]["mode"] for family, record in records.items()}
    write(out / NOTES, notes(release, modes))
    images: dict[str, dict[str, Any]] = {}
    if args.images:
        images = make_images(release, args, out, records)
    elif args.image_records:
        images = read_images((paths.CWD / args.image_records).resolve(), out)
    write(out / IMAGES, json.dumps(images, indent=2, sort_keys=True) + "\n")
    subjects = digests(out, (SUMS, release.statement_name))
    # An image that nobody can pull is not attested.
    subjects |= {n: i["digest"].partition(":")[2] for n, i in images.items() if i["digest"]}
    command = ["python3", "-m", "ci.publish", *sys.argv[1:]]
    said = provenance.statement(facts(release, records, subjects, command, started, _now()))
    write(out / release.statement_name, json.dumps(said, indent=2, sort_keys=True) + "\n")
    write(out / SUMS, "".join(f"{d}  {n}\n" for n, d in digests(out, (SUMS,)).items()))
    if found := verify(out, release.series):
        (out / SUMS).unlink(missing_ok=True)
        raise StackError(f"the release fails its own check: {'; '.join(found)}")


def verify(folder: Path, series: Series | None = None) -> list[str]:
    """Check a release from its files alone.

    Args:
        folder: The folder with its files.
        series: The patches that its wheels must have been built from; None takes each
            wheel's own word for the set, and compares the rest.

    Returns:
        Sentences; empty for a good release.

    Raises:
        StackError: The folder is no release.
    """
    try:
        lines = (folder / SUMS).read_text().splitlines()
    except OSError as error:
        raise StackError(f"{folder / SUMS}: {error.strerror}") from None
    said = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    present = digests(folder, (SUMS,))
    found = [f"{n} is listed but absent" for n in sorted(set(said) - set(present))]
    found += [f"{n} is not listed" for n in sorted(set(present) - set(said))]
    found += [f"{n} has another sha256" for n in sorted(set(said) & set(present))
              if said[n] != present[n]]  # fmt: skip
    statements = sorted(n for n in present if n.endswith(".provenance.json"))
    if len(statements) != 1:
        found.append(f"{len(statements)} provenance statements instead of one")
    for name in statements:
        try:
            run([str(envs.ensure_release()), "-m", "ci.provenance", str(folder / name),
                 str(folder)], cwd=paths.ROOT, what=name)  # fmt: skip
        except StackError as error:
            found.append(str(error))
    for name in sorted(n for n in present if n.endswith(".whl")):
        stem = name.removesuffix(".whl")
        try:
            record = json.loads((folder / f"{stem}.build.json").read_text())
            sbom = json.loads((folder / f"{stem}.cdx.json").read_text())
            names = tuple(record["stack"]["arches"])
            item = Item(arches.family(names), names, name, "", "")
            known = series.set_hash if series else str(record["stack"]["set_hash"])
            wrong = wheel_problems(folder / name, record, sbom, item, known)
            found += [f"{name} {problem}" for problem in wrong]
        except (OSError, ValueError, KeyError, TypeError) as error:
            found.append(f"{name}: its records cannot be read: {error}")
    return found


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python3 -m ci.publish",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--verify", metavar="DIR", help="check a release instead of making one")
    parser.add_argument(
        "--family", action="append", metavar="NAME",
        help=f"only this one, may be repeated (all: {', '.join(arches.FAMILIES)})",
    )  # fmt: skip
    parser.add_argument("--extensions", default="compile", metavar="MODE", help="as build.sh's")
    parser.add_argument("--toolchain", metavar="NAME", help="as build.sh's")
    parser.add_argument("--jobs", type=int, help="as build.sh's")
    parser.add_argument("--wheels", metavar="DIR", help="take finished wheels from this folder")
    parser.add_argument("--out", default="release", metavar="DIR", help="where it all goes")
    parser.add_argument("--repository", metavar="URL", help="where this repository is read")
    parser.add_argument("--allow-dirty", action="store_true", help="a trial from changed files")
    parser.add_argument("--images", action="store_true", help="build and check the images, too")
    parser.add_argument("--image-records", metavar="DIR",
                        help="take over images.json files of images made elsewhere")  # fmt: skip
    parser.add_argument("--registry", default="", metavar="NAME", help="image name without tag")
    parser.add_argument("--push", action="store_true", help="push the images")
    parser.add_argument("--engine", choices=("docker", "podman", "buildah"))
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE",
                        help="an argument of the Dockerfile")  # fmt: skip
    parser.add_argument("--option", action="append", default=[], metavar="WORD",
                        help="an option of the engine's own")  # fmt: skip
    args = parser.parse_args(argv)
    try:
        envs.reexec_in_tools("ci.publish", sys.argv[1:] if argv is None else argv)
        if args.verify:
            folder = (paths.CWD / args.verify).resolve()
            found = verify(folder)
            for problem in found:
                print(f"problem: {problem}")
            print(f"{folder}: {f'{len(found)} problem(s)' if found else 'everything as it says'}")
            return 1 if found else 0
        release = plan(args)
        if args.dry_run:
            print(release.describe())
            return 0
        preflight(release, args)
        out = (paths.CWD / args.out).resolve()
        publish(release, args, out)
        print(f"{out}: {len(digests(out))} files, all as {SUMS} says")
        return 0
    except StackError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; there is no SHA256SUMS, so nothing of it counts", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

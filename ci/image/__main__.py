"""The container image: build it, look into it, and make a stand-in base to try it here."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ci import arches, build, envs, patches, paths, pin, repository
from ci.errors import StackError
from ci.image import check, standin
from ci.image.engine import Engine
from ci.image.recipe import Recipe, describe

EPILOG = """\
examples:
  python3 -m ci.image build --arch gfx1201                   builds the wheel in the image
  python3 -m ci.image build --arch gfx1201 --wheel dist      takes it from a folder
  python3 -m ci.image build --arch gfx1201 --dry-run         prints the engine's command
  python3 -m ci.image check hipstack:0.31.0-hipstack1-gfx1201
  python3 -m ci.image standin --arch gfx1201 --wheel dist    Debian base, CPU torch, and checks
"""
NAME = "hipstack"
STANDIN_BASE = f"localhost/{NAME}-standin-base"


def wheel_folder(text: str) -> Path:
    """Return the folder that ``--wheel`` names.

    Raises:
        StackError: It is no folder, or has no wheel.
    """
    folder = (paths.CWD / text).resolve()
    if not any(folder.glob("vllm-*.whl")):
        raise StackError(f"--wheel {text}: there is no vllm-*.whl in that folder")
    return folder


def recipe(args: argparse.Namespace) -> Recipe:
    """Turn the command line into a recipe.

    Raises:
        StackError: The command line does not allow it.
    """
    if not args.arch:
        raise StackError("--arch is missing", "--arch gfx1201")
    names = arches.parse(args.arch)
    arguments = describe(
        pin.load(), build.stack_version(), patches.load(), names, repository.find(args.repository)
    )
    for option, name in (("base", "BASE_IMAGE"), ("torch_index", "TORCH_INDEX"),
                         ("extensions", "EXTENSIONS"), ("toolchain", "TOOLCHAIN")):  # fmt: skip
        if (value := getattr(args, option, None)) is not None:
            arguments[name] = value
    for word in args.build_arg:
        name, equals, value = word.partition("=")
        if not equals:
            raise StackError(f"--build-arg {word}: NAME=VALUE is wanted")
        arguments[name] = value
    tags = args.tag or [f"{NAME}:{arguments['VERSION']}"]
    wheel = wheel_folder(args.wheel) if args.wheel else None
    return Recipe(arguments, tags, wheel, args.option)


def _show(result: check.Result) -> None:
    print(f"{'ok     ' if result.ok else 'PROBLEM'} {result.name}: {result.detail}", flush=True)


def _check(engine: Engine, image: str, gpu: bool = False) -> int:
    results = check.check_image(engine, image, _show, gpu)
    layers = engine.layers(image)
    print(f"\n{sum(x.size for x in layers) / 1e6:10.1f} MB in {len(layers)} layers")
    for layer in layers:
        print(f"{layer.size / 1e6:10.1f} MB  {layer.made_by[:110]}")
    failed = sum(not r.ok for r in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _build(args: argparse.Namespace) -> int:
    made = recipe(args)
    if args.dry_run:
        try:
            engine = Engine(args.engine)
            command = engine.build_command(made.words())
        except StackError:
            command = ["docker", "buildx", "build", "--load", *made.words()]
        print(shlex.join(command))
        return 0
    engine = Engine(args.engine)
    engine.build(made.words())
    print(f"built {', '.join(made.tags)}: {engine.config(made.tags[0]).id}")
    return 0


def _standin(args: argparse.Namespace) -> int:
    engine = Engine(args.engine or "buildah")  # docker mounts no folder into a build
    suite = standin.suite_of((sys.version_info[0], sys.version_info[1]))
    base = f"{STANDIN_BASE}:{suite}"
    if args.fresh or not _exists(engine, base):
        standin.make_base(engine, base, args.mirror)
    index = standin.make_index(pin.load(), paths.BUILD / "image" / "index")
    args.base, args.torch_index = base, "file:///index"
    args.tag = args.tag or [f"localhost/{NAME}-standin:{arches.family(arches.parse(args.arch))}"]
    args.build_arg = [
        "ANY_TORCH=1", "TORCH_PACKAGES=torch torchvision triton amdsmi", "EXTRA_PACKAGES=",
        *args.build_arg,
    ]  # fmt: skip
    args.option = [
        f"--volume={index}:/index:ro",
        "--label=hipstack.standin=Debian base and CPU torch: serves on no GPU", *args.option,
    ]  # fmt: skip
    # The same certificates and index as here; a real base image has its own.
    bundle = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
    if bundle:
        args.option.append(f"--volume={bundle}:/etc/ssl/certs/ca-certificates.crt:ro")
    if os.environ.get("PIP_INDEX_URL"):
        args.build_arg.append(f"PIP_INDEX_URL={os.environ['PIP_INDEX_URL']}")
    made = recipe(args)
    engine.build(made.words())
    return _check(engine, made.tags[0])


def _exists(engine: Engine, image: str) -> bool:
    try:
        engine.config(image)
    except StackError:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python3 -m ci.image",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("build", help="build the image")
    looked = commands.add_parser("check", help="start an image and look into it")
    tried = commands.add_parser("standin", help="build and check it on a base made here")
    for command in (made, looked, tried):
        command.add_argument("--engine", choices=("docker", "podman", "buildah"))
    looked.add_argument("image")
    looked.add_argument("--gpu", action="store_true", help="give it this machine's AMD GPUs")
    for command in (made, tried):
        command.add_argument("--arch", metavar="GFX[,GFX]", help="architectures, or a family")
        command.add_argument("--wheel", metavar="DIR", help="a folder with the finished wheel")
        command.add_argument("--extensions", metavar="MODE", help="as build.sh's")
        command.add_argument("--toolchain", metavar="NAME", help="as build.sh's")
        command.add_argument("--tag", action="append", default=[], metavar="NAME:TAG")
        command.add_argument("--repository", metavar="URL", help="where this repository is read")
        command.add_argument(
            "--build-arg", action="append", default=[], metavar="NAME=VALUE",
            help="another argument of the Dockerfile",
        )  # fmt: skip
        command.add_argument(
            "--option", action="append", default=[], metavar="WORD",
            help="an option of the engine's own, as --option=--no-cache",
        )  # fmt: skip
    made.add_argument("--base", metavar="IMAGE", help="the base image (BASE_IMAGE)")
    made.add_argument("--torch-index", metavar="URL", help="where torch for ROCm comes from")
    made.add_argument("--dry-run", action="store_true", help="print the engine's command")
    tried.add_argument("--mirror", default="", help="a Debian mirror")
    tried.add_argument("--fresh", action="store_true", help="make the base anew")
    args = parser.parse_args(argv)
    try:
        envs.reexec_in_tools("ci.image", sys.argv[1:] if argv is None else argv)
        if args.command == "check":
            engine = Engine(args.engine)
            if args.gpu and engine.name == "buildah":
                raise StackError("buildah gives no GPU to a container", "--engine podman")
            return _check(engine, args.image, args.gpu)
        return _build(args) if args.command == "build" else _standin(args)
    except StackError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

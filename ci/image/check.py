"""Start an image as a container would be started, and see whether it is what it says."""

import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ci import codeobjects, paths
from ci.image.engine import Config, Engine

PYTHON = "/opt/vllm/bin/python"
# A number that no /etc/passwd knows.
ANYONE = "12345:12345"
_SITE = "import os, vllm; print(os.path.dirname(vllm.__file__))"
_WRITABLE = """
import getpass, os, tempfile
for folder in (os.environ["HOME"], os.environ["XDG_CACHE_HOME"], os.environ["HF_HOME"]):
    with tempfile.TemporaryFile(dir=folder):
        pass
print("uid", os.getuid(), "groups", os.getgroups(), "user", getpass.getuser())
"""
_PLATFORM = """
import vllm, vllm.hipstack as h
from vllm.platforms import current_platform as p
print(h.describe()); print("platform", type(p).__name__)
"""
_SERVER = """
import http.server, subprocess, sys, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404); self.end_headers()
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
def ask(path):
    url = f"http://127.0.0.1:{server.server_port}{path}"
    return subprocess.run(sys.argv[1:], env={**__import__("os").environ,
        "HIPSTACK_HEALTH_URL": url}).returncode
codes = ask("/health"), ask("/other")
server.shutdown(); server.server_close()
closed = ask("/health")
print(*codes, closed)
"""


STANDIN = "/standin"


def documented_flags(text: str) -> list[str]:
    """Return the options of ``vllm serve`` that a page's ``docker run`` lines use, sorted.

    Args:
        text: Markdown; the image is ``$IMAGE`` in it, and what follows it is vLLM's.
    """
    joined = re.sub(r"\\\n\s*", " ", text)
    found: set[str] = set()
    for line in re.findall(r"^docker run .*$", joined, re.M):
        if "--entrypoint" not in line:
            words = shlex.split(line.partition("$IMAGE")[2], comments=True)
            found.update(w.split("=")[0].split(".")[0] for w in words if w.startswith("--"))
    return sorted(found)


@dataclass(frozen=True)
class Result:
    """One check.

    Attributes:
        name: What was looked at.
        ok: Whether it is as it should be.
        detail: What was found, one line.
    """

    name: str
    ok: bool
    detail: str


def check_config(config: Config, stack: dict[str, object]) -> list[Result]:
    """Compare an image's description with what the wheel in it says.

    Args:
        config: The image's.
        stack: The installed wheel's ``stack.json``.
    """
    labels = config.labels
    arches = ",".join(stack["arches"]) if isinstance(stack["arches"], list) else ""
    pin = stack["pin"] if isinstance(stack["pin"], dict) else {}
    patches = stack["patches"] if isinstance(stack["patches"], list) else []
    said = [re.sub(r".*\bpatches/(.+)\.patch$", r"\1", w) for w in
            labels.get("hipstack.patches", "").split()]  # fmt: skip
    wanted = {
        "hipstack.arches": arches,
        "hipstack.set-hash": stack["set_hash"],
        "hipstack.pin": pin.get("version"),
        "hipstack.pin.commit": pin.get("commit"),
    }
    wrong = [
        f"{k} is {labels.get(k)!r}, not {v!r}" for k, v in wanted.items() if labels.get(k) != v
    ]
    if said != [p["name"] for p in patches]:
        wrong.append("hipstack.patches lists other patches than the wheel")
    absent = [
        f"org.opencontainers.image.{key}"
        for key in ("title", "version", "revision", "licenses", "base.name")
        if labels.get(f"org.opencontainers.image.{key}", "unknown") in ("", "unknown")
    ]
    return [
        Result("labels", not wrong and not absent,
               "; ".join(wrong + [f"{k} is missing" for k in absent])
               or f"{len(labels)}, {len(patches)} patches, set {str(stack['set_hash'])[:12]}"),
        Result("user", bool(re.fullmatch(r"[1-9]\d*:[1-9]\d*", config.user)),
               config.user or "root"),
        Result("entry point", config.entrypoint == ("vllm", "serve"), " ".join(config.entrypoint)),
        Result("health check", "healthcheck.py" in " ".join(config.healthcheck),
               " ".join(config.healthcheck) or "none"),
        Result("volumes", "/cache" in config.volumes, ", ".join(config.volumes) or "none"),
    ]  # fmt: skip


def check_code(folder: Path, arches: Sequence[str], extensions: str) -> Result:
    """List the AMD code in the installed files.

    Args:
        folder: The installed package ``vllm``.
        arches: What every library must hold code for, and no kernel file may go beyond.
        extensions: How compiled ops came in: with "none" there must be no library, with
            "compile" every library holds exactly these architectures.
    """
    libraries: dict[str, list[str]] = {}
    kernels: set[str] = set()
    count, problems = 0, []
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".so", ".hsaco")):
        name = path.relative_to(folder).as_posix()
        try:
            found = codeobjects.scan_file(path, name)
        except codeobjects.CodeObjectError as error:
            problems.append(f"{name}: {error}")
            continue
        names = sorted({o.arch for o in found})
        if path.suffix == ".hsaco":
            count += 1
            kernels.update(names)
        elif names:
            libraries[name] = names
    if kernels != set(arches):
        problems.append(f"kernels are for {', '.join(sorted(kernels)) or 'nothing'}")
    for name, names in libraries.items():
        missing, more = set(arches) - set(names), set(names) - set(arches)
        if missing or (more and extensions == "compile"):
            problems.append(f"{name} holds {', '.join(names)}")
    if extensions == "compile" and not libraries:
        problems.append("no library holds AMD code")
    if extensions == "none" and libraries:
        problems.append("there are libraries with AMD code in a wheel without extensions")
    held = f"{count} kernels for {', '.join(sorted(kernels))}; " + (
        ", ".join(f"{n}: {'+'.join(a)}" for n, a in libraries.items()) or "no library"
    )
    return Result("code objects", not problems, "; ".join(problems) or held)


def check_image(
    engine: Engine, image: str, report: Callable[[Result], None], gpu: bool = False
) -> list[Result]:
    """Run every check.

    Args:
        engine: What holds the image.
        image: Its name.
        report: Called with each result as it comes.
        gpu: Give the container this machine's AMD GPUs.  Otherwise the stand-in `amdsmi` is
            laid over the image's, without which vLLM knows no platform and its command
            line does not even print its help.
    """
    results: list[Result] = []

    def add(*found: Result) -> None:
        for result in found:
            results.append(result)
            report(result)

    config = engine.config(image)
    arches = config.labels.get("hipstack.arches", "").split(",")
    env = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    if gpu:
        options = ["--device=/dev/kfd", "--device=/dev/dri"]
        options += [f"--group-add={gid}" for gid in sorted(_groups())]
    else:
        env |= {"PYTHONPATH": STANDIN, "FAKE_GFX": arches[0], "HIP_VISIBLE_DEVICES": ""}
        options = [f"--volume={paths.STANDIN}:{STANDIN}:ro"]

    def inside(
        name: str,
        command: Sequence[str],
        wanted: str,
        user: str = "",
        codes: Sequence[int] = (0,),
    ) -> str:
        code, output = engine.run_in(image, command, user, env, options)
        match = re.search(wanted, output, re.M)
        lines = [x.strip() for x in output.splitlines() if re.search(r"error", x, re.I)]
        shown = match[0] if match else (lines or output.strip().splitlines() or ["no output"])[-1]
        ok = code in codes and match is not None
        add(Result(name, ok, f"{'' if ok else f'exit code {code}: '}{' '.join(shown.split())}"))
        return output if ok else ""

    package = inside("import", [PYTHON, "-c", _SITE], r"^/.*/vllm$")
    if not package:
        return results
    with engine.files(image, re.findall(r"^/.*/vllm$", package, re.M)[-1]) as folder:
        stack = json.loads((folder / "hipstack" / "stack.json").read_text())
        add(*check_config(config, stack))
        add(check_code(folder, stack["arches"], stack["extensions"]))
    vllm = config.entrypoint[0] if config.entrypoint else "vllm"
    usage = inside(
        "entry point starts", [*config.entrypoint, "--help=all"], r"^usage: vllm serve.*"
    )
    flags = documented_flags((paths.ROOT / "docs" / "image.md").read_text(encoding="utf-8"))
    unknown = [f for f in flags if not re.search(rf"^\s*{re.escape(f)}\b", usage, re.M)]
    add(Result("flags of docs/image.md", bool(flags) and not unknown,
               f"unknown: {', '.join(unknown)}" if unknown else ", ".join(flags)))  # fmt: skip
    inside("platform", [PYTHON, "-c", _PLATFORM], r"^platform RocmPlatform$")
    inside(
        "doctor", [PYTHON, "-m", "vllm.hipdnn.doctor"], r"^(hipDNN|unusable) .*", codes=(0, 1, 2)
    )
    inside("as the image's user", [PYTHON, "-c", _WRITABLE], r"^uid \d+.*")
    inside("as an unknown user", [PYTHON, "-c", _WRITABLE], r"^uid 12345.*", user=ANYONE)
    inside("vllm as an unknown user", [vllm, "--version"], r"^\S+hipstack\S+$", user=ANYONE)
    inside("nothing replaced torch", [PYTHON, "/opt/hipstack/install.py", "verify"], r"^held: .*")
    inside(
        "health check: up, wrong, down",
        [PYTHON, "-c", _SERVER, PYTHON, "/opt/hipstack/healthcheck.py"], r"^0 1 1$",
    )  # fmt: skip
    return results


def _groups() -> set[int]:
    """Return the groups of the GPU's device files on this machine."""
    files = [Path("/dev/kfd"), *Path("/dev/dri").glob("renderD*")]
    return {os.stat(file).st_gid for file in files if file.exists()}


def sbom_packages(engine: Engine, image: str) -> list[tuple[str, str, str]]:
    """Return what is installed in an image: (kind, name, version), sorted.

    Kinds are those of package URLs: ``pypi``, and ``deb`` where the base has dpkg.
    """
    code = (
        "import json\nfrom importlib.metadata import distributions\n"
        "print(json.dumps(sorted({(d.metadata['Name'], d.version) for d in distributions()})))"
    )
    status, output = engine.run_in(image, [PYTHON, "-c", code])
    found = [("pypi", n, v) for n, v in json.loads(output.splitlines()[-1])] if not status else []
    status, output = engine.run_in(image, ["dpkg-query", "-W", "-f", "${Package}\\t${Version}\\n"])
    if status == 0:
        found += [("deb", *line.split("\t")) for line in output.splitlines() if "\t" in line]  # type: ignore[misc]
    return sorted(found)

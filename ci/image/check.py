"""Start an image as a container would be started, and see whether it is what it says."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ci import codeobjects
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
    wrong = [f"{k} is {labels.get(k)!r}, not {v!r}" for k, v in wanted.items() if labels.get(k) != v]
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


def check_image(engine: Engine, image: str, report: Callable[[Result], None]) -> list[Result]:
    """Run every check.

    Args:
        engine: What holds the image.
        image: Its name.
        report: Called with each result as it comes.
    """
    results: list[Result] = []

    def add(*found: Result) -> None:
        for result in found:
            results.append(result)
            report(result)

    def inside(name: str, command: Sequence[str], wanted: str, user: str = "", codes: Sequence[int] = (0,), **env: str) -> None:
        code, output = engine.run_in(image, command, user, env)
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        match = re.search(wanted, output, re.M | re.S)
        shown = " ".join((match[0] if match else (lines or ["no output"])[-1]).split())
        add(Result(name, code in codes and match is not None,
                   shown[:160] if code in codes else f"exit code {code}: {shown[:160]}"))  # fmt: skip

    config = engine.config(image)
    code, site = engine.run_in(image, [PYTHON, "-c", _SITE], env={"VLLM_LOGGING_LEVEL": "ERROR"})
    if code:
        add(Result("import", False, (site.strip().splitlines() or ["no output"])[-1]))
        return results
    package = site.strip().splitlines()[-1]
    with engine.files(image, package) as folder:
        stack = json.loads((folder / "hipstack" / "stack.json").read_text())
        add(*check_config(config, stack))
        add(check_code(folder, stack["arches"], stack["extensions"]))
    serve = [*config.entrypoint]
    inside("vllm serve --help", [*serve, "--help"], r"usage: vllm serve.*?\n")
    inside("its flags", [*serve, "--help=all"], r"--attention-backend.{0,60}")
    inside("vllm --version", [serve[0], "--version"], r"^\S*hipstack\S*$")
    inside("platform", [PYTHON, "-c", _PLATFORM], r"platform \w+", VLLM_LOGGING_LEVEL="ERROR")
    inside("doctor", [PYTHON, "-m", "vllm.hipdnn.doctor"], r"(?i)hipdnn[^\n]*", codes=(0, 1, 2))
    inside("as the image's user", [PYTHON, "-c", _WRITABLE], r"uid \d+.*")
    inside("as anyone", [PYTHON, "-c", _WRITABLE], r"uid 12345.*", user=ANYONE)
    inside("vllm as anyone", [serve[0], "--version"], r"^\S*hipstack\S*$", user=ANYONE)
    inside("nothing replaced torch", [PYTHON, "/opt/hipstack/install.py", "verify"], r"held: .*")
    inside(
        "health check: up, wrong, down",
        [PYTHON, "-c", _SERVER, PYTHON, "/opt/hipstack/healthcheck.py"], r"^0 1 1$",
    )  # fmt: skip
    return results


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
    status, output = engine.run_in(
        image, ["dpkg-query", "-W", "-f", "${Package}\\t${Version}\\n"]
    )
    if status == 0:
        found += [("deb", *line.split("\t")) for line in output.splitlines() if "\t" in line]  # type: ignore[misc]
    return sorted(found)

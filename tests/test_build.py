"""build.sh from its command line: plans, bad inputs, and the whole job."""

import json
import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci import arches, build, patches, paths, wheel
from ci.errors import StackError


def run(*arguments: str, env: dict[str, str] | None = None, timeout: int = 1200):
    return subprocess.run(
        [str(paths.ROOT / "build.sh"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env={**os.environ, **(env or {})},
    )


def one_clear_line(result, pattern):
    assert result.returncode == 1, result.stdout + result.stderr
    first = result.stderr.strip().splitlines()[0]
    assert first.startswith("error: ") and re.search(pattern, first), result.stderr
    assert "Traceback" not in result.stderr


def test_help_shows_examples():
    text = run("--help").stdout
    for part in ("--arch", "--dry-run", "--until", "precompiled=WHEEL", "R9700", "examples:"):
        assert part in text


def test_arch_list_names_cards():
    result = run("--arch", "list")
    assert result.returncode == 0 and result.stdout.strip() == arches.listing()


def test_a_dry_run_prints_the_whole_plan_and_makes_nothing(tmp_path):
    out = tmp_path / "out"
    result = run(
        "--arch", "gfx1201,gfx1100", "--dry-run", "--extensions", "none", "--out", str(out)
    )
    assert result.returncode == 0, result.stderr
    series = patches.load()
    for part in ("0.31.0", "db9527a", series.set_hash, "gfx1100", "R9700", "SHA256SUMS"):
        assert part in result.stdout
    assert f"patches       {len(series)}," in result.stdout
    assert "+hipstack" in result.stdout and ".gfx1100.gfx1201-" in result.stdout
    assert not out.exists()


def test_a_model_of_ones_own(tmp_path):
    """It is in the plan, and becomes a kernel list that loads; nonsense is refused at once."""
    from ci.aot import lists, models

    (tmp_path / "My-7B").mkdir()
    config = {"num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584}
    (tmp_path / "My-7B" / "config.json").write_text(json.dumps(config))
    text = f"{tmp_path}/My-7B/config.json:tp=1,2:kv=auto,fp8"
    command = ("--arch", "gfx1201", "--dry-run", "--extensions", "none", "--model-config")
    result = run(*command, text)
    assert result.returncode == 0, result.stderr
    assert "my-7b: 28/4 heads of 128, window all, tp 1,2, page 16, kv auto,fp8" in result.stdout
    refused = run(*command, f"{text}:seqs=8")
    assert refused.returncode != 0
    assert "error: --model-config: 'seqs=8'" in refused.stderr

    kernels, _ = lists.load(str(build.write_model_list((models.from_argument(text),))))
    names = [variant.name for variant in kernels.variants("gfx1201")]
    assert names == ["my-7b", "my-7b-kvfp8", "my-7b-tp2", "my-7b-tp2-kvfp8"]


def test_a_dry_run_until_a_patch():
    first = patches.load().names[0]
    result = run("--arch", "gfx1201", "--dry-run", "--extensions", "none", "--until", first)
    assert "patches       1," in result.stdout


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ([], "--arch is missing"),
        (["--arch", "gfx9999"], "unknown architecture 'gfx9999'"),
        (["--arch", "gfx1201,nonsense"], "unknown architecture 'nonsense'"),
        (["--arch", ","], "names no architecture"),
        (["--arch", "gfx1201", "--until", "core/absent"], "no patch is named 'core/absent'"),
        (["--arch", "gfx1201", "--extensions", "magic"], "is none of auto"),
        (["--arch", "gfx1201", "--extensions", "precompiled=/absent.whl"], "no such file"),
        (["--arch", "gfx1201", "--pin", "9.9.9"], "no pin named '9.9.9'"),
        (["--arch", "gfx1201", "--jobs", "0"], "--jobs must be at least 1"),
        (["--arch", "gfx1201", "--dry-run", "--source", "/absent"], "/absent: no such path"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line(arguments, pattern):
    one_clear_line(run(*arguments), pattern)


@pytest.fixture
def scratch_build(tmp_path):
    """A build folder of its own that shares the expensive environments."""
    return {
        "HIPSTACK_BUILD_DIR": str(tmp_path / "build"),
        "HIPSTACK_ENV_DIR": os.environ.get("HIPSTACK_ENV_DIR", str(paths.BUILD)),
    }


@pytest.mark.build
def test_bad_sources_are_one_clear_line(tmp_path, sdist, scratch_build):
    half = tmp_path / "vllm-0.31.0.tar.gz"
    half.write_bytes(sdist.read_bytes()[:1_000_000])
    base = ["--arch", "gfx1201", "--extensions", "none", "--out", str(tmp_path / "out")]
    result = run(*base, "--source", str(half), env=scratch_build)
    one_clear_line(result, r"step 2/8 \(source\).*truncated, damaged or another release")
    assert "log: " in result.stderr
    one_clear_line(
        run(*base, "--source", str(tmp_path / "absent"), env=scratch_build), "no such path"
    )
    left = [p.name for p in (tmp_path / "build").iterdir() if p.name != ".lock"]
    assert left == ["logs"]


@pytest.mark.build
def test_a_named_source_is_judged_even_when_the_pin_is_at_hand(tmp_path, the_pin, sdist):
    from ci import check

    check.pristine(the_pin, str(sdist))
    wrong = tmp_path / "vllm-0.31.0.tar.gz"
    wrong.write_bytes(sdist.read_bytes()[::-1])
    base = ["--arch", "gfx1201", "--extensions", "none", "--out", str(tmp_path / "out")]
    one_clear_line(run(*base, "--source", str(wrong)), r"sha256 is [0-9a-f]{64}, the pin says")
    one_clear_line(run(*base, "--source", str(tmp_path / "absent")), "no such path")


@pytest.mark.build
def test_no_network_is_one_clear_line(tmp_path, scratch_build):
    """Without the cached sdist and without an index there is nothing to build from."""
    copy = tmp_path / "clone"
    git = ["git", "clone", "-q", str(paths.ROOT), str(copy)]
    subprocess.run(git, check=True, capture_output=True)
    result = subprocess.run(
        [str(copy / "build.sh"), "--arch", "gfx1201", "--extensions", "none"],
        capture_output=True, text=True, check=False,
        env={**os.environ, **scratch_build, "PIP_INDEX_URL": "http://127.0.0.1:9/simple"},
    )  # fmt: skip
    one_clear_line(result, r"step 2/8 \(source\): cannot download .*check the network")


@pytest.mark.parametrize(
    ("variable", "value", "pattern"),
    [
        ("HIPSTACK_PYTHON", "/absent/python", "/absent/python cannot be run"),
        ("HIPSTACK_BUILD_DIR", "/dev/null/x", "cannot write|Not a directory"),
    ],
)
def test_a_wrong_environment_is_one_clear_line(variable, value, pattern):
    one_clear_line(run("--arch", "gfx1201", env={variable: value}), pattern)


@pytest.mark.build
@pytest.mark.parametrize("kind", ["file", "small"])
def test_an_out_folder_that_cannot_take_the_wheel(tmp_path, kind, scratch_build):
    out = tmp_path / "out"
    base = ["--arch", "gfx1201", "--extensions", "none", "--out", str(out)]
    if kind == "file":
        out.write_text("in the way")
        one_clear_line(run(*base, env=scratch_build), r"step 1/8 \(machine\): cannot write to")
        return
    out.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(out)]
    if subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("this machine does not allow mounts")
    try:
        one_clear_line(run(*base, env=scratch_build), r"GB free, .* GB are needed")
    finally:
        subprocess.run(["umount", str(out)], check=True)


@pytest.mark.build
def test_a_patch_that_no_longer_applies_stops_the_build(tmp_path, sdist, the_pin):
    """The build names the patch, and leaves no tree behind."""
    from ci import check
    from ci.extensions import Extensions
    from ci.progress import Steps

    first = patches.load().patches[0]
    damaged = re.sub(rb"(?m)^ (\s*def )", rb" # gone\1", first.data)
    assert damaged != first.data
    series = patches.Series((patches.Patch(first.name, damaged),))
    plan = build.Plan(
        the_pin, "1", ("gfx1201",), series, Extensions("none", "x"), str(sdist),
        tmp_path, "0.31.0+x", "x.whl",
    )  # fmt: skip
    base = check.pristine(the_pin, str(sdist))

    def trees():
        return {p.name for p in paths.BUILD.iterdir() if p.name.startswith(("tree-", ".apply-"))}

    before = trees()
    with pytest.raises(StackError, match=f"patch {first.name} does not apply"):
        build.patched_tree(plan, base)
    assert trees() == before
    steps = Steps(1, tmp_path / "log", quiet=True)
    with pytest.raises(StackError), steps.step("series"):
        raise StackError("x", "y")
    assert steps.fail(StackError("x", "y")).startswith(
        "error: step 1/1 (series): x (try: y)\nlog: "
    )


@pytest.fixture(scope="module")
def whole_job(tmp_path_factory):
    """What `build.sh --arch gfx1201 --extensions none` printed, and its output folder."""
    out = tmp_path_factory.mktemp("whole") / "dist"
    first = run("--arch", "gfx1201", "--extensions", "none", "--out", str(out))
    assert first.returncode == 0, first.stdout + first.stderr
    return first, out


@pytest.mark.build
def test_the_whole_job_and_again(whole_job):
    """A proven wheel; then nothing to do."""
    first, out = whole_job
    command = ["--arch", "gfx1201", "--extensions", "none", "--out", str(out)]
    assert "[8/8]" in first.stdout and "ABSENT" in first.stdout
    made = next(out.glob("*.whl"))
    assert made.name.startswith("vllm-0.31.0+hipstack") and ".gfx1201-" in made.name
    assert subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=out, check=False).returncode == 0
    record = json.loads(next(out.glob("*.build.json")).read_text())
    assert record["stack"]["set_hash"] == patches.load().set_hash
    assert record["extensions"]["mode"] == "none" and "ABSENT" in record["extensions"]["note"]
    assert set(map(tuple, record["code_objects"].values())) == {("gfx1201",)}
    assert len(record["code_objects"]) == record["kernels"]["code_objects"] > 0
    with zipfile.ZipFile(made) as archive:
        assert json.loads(archive.read(wheel.STACK_JSON))["extensions"] == "none"
    assert json.loads(next(out.glob("*.cdx.json")).read_text())["bomFormat"] == "CycloneDX"

    again = run(*command)
    assert again.returncode == 0 and "unchanged: " in again.stdout
    assert "kernels" not in again.stdout

    made.write_bytes(made.read_bytes()[:-1])
    repaired = run(*command, "--quiet")
    assert repaired.returncode == 0 and Path(repaired.stdout.strip()) == made
    assert wheel.source.sha256(made) == record["sha256"], "the same inputs, other bytes"


@given(st.floats(0.5, 4096), st.integers(1, 512))
def test_jobs_fit_memory_and_cpus(memory, cpus):
    jobs = build.default_jobs(memory, cpus)
    assert 1 <= jobs <= cpus
    assert jobs == 1 or jobs * 5 <= memory


@pytest.mark.parametrize(
    ("bounds", "good"), [((">=3.10", "<3.14"), True), ((">=3.99",), False), (("<3.9",), False)]
)
def test_python_must_fit_the_pin(the_pin, bounds, good):
    import dataclasses

    other = dataclasses.replace(the_pin, python=bounds)
    if good:
        build._check_python(other)
    else:
        with pytest.raises(StackError, match="does not fit"):
            build._check_python(other)


@pytest.mark.build
def test_a_precompiled_wheel_gives_its_libraries(tmp_path, whole_job):
    """The ops come from a (made-up) ROCm wheel; one that lacks the card is refused."""
    from test_codeobjects import bundle, host_elf

    _, done = whole_job
    record = json.loads(next(done.glob("*.build.json")).read_text())
    with zipfile.ZipFile(next(done.glob("*.whl"))) as archive:
        code = archive.read(sorted(record["code_objects"])[0])
    entry = "hipv4-amdgcn-amd-amdhsa--gfx1201"
    library = host_elf({".hip_fatbin": bundle([(entry, code)])})
    rocm = tmp_path / made_name(record["tag"], "rocm723")
    with zipfile.ZipFile(rocm, "w") as archive:
        archive.writestr("vllm/_rocm_C.abi3.so", library)

    out = tmp_path / "out"
    base = ["--extensions", f"precompiled={rocm}", "--out", str(out)]
    made = run("--arch", "gfx1201", *base)
    assert made.returncode == 0, made.stdout + made.stderr
    assert "ABSENT" not in made.stdout and "precompiled (taken from" in made.stdout
    result = json.loads(next(out.glob("*.build.json")).read_text())
    assert result["code_objects"]["vllm/_rocm_C.abi3.so"] == ["gfx1201"]
    assert result["extensions"]["rocm"] == "7.2.3"
    with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
        assert archive.read("vllm/_rocm_C.abi3.so") == library
        metadata = next(n for n in archive.namelist() if n.endswith("/METADATA"))
        # Upstream's requirements for ROCm, not the common ones alone.
        assert b"Requires-Dist: conch-triton-kernels" in archive.read(metadata)

    one_clear_line(run("--arch", "gfx1100", *base), "has code for gfx1201, not for gfx1100")


def made_name(tag, local):
    return f"vllm-0.31.0+{local}-{tag}.whl"

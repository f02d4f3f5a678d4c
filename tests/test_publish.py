"""A release: its plan, notes and statement, and that a damaged one is found out."""

import argparse
import json
import re
import subprocess
import zipfile

import pytest
from conftest import make_patch, make_series, run_module
from test_image import code_object

from ci import arches, envs, patches, paths, provenance, publish, repository
from ci.errors import StackError
from ci.repository import Repository, web_address

KNOWN = Repository("https://example.org/owner/name", "c" * 40)
DIGEST = "a" * 64


@pytest.fixture(scope="module")
def release_python() -> str:
    """The environment with the linters and the in-toto library."""
    return str(envs.ensure_release())


def item(**changes) -> publish.Item:
    values = {"family": "gfx120x", "arches": ("gfx1200", "gfx1201"), "wheel": "w.whl",
              "tag": "0.31.0-hipstack1-gfx120x", "how": "none: asked for"}  # fmt: skip
    return publish.Item(**{**values, **changes})


def a_release(the_pin, series=None, repo=KNOWN, items=None, **changes) -> publish.Release:
    series = series or make_series(make_patch("core/x"))
    return publish.Release("0.31.0-hipstack1", the_pin, series, repo, items or (item(),), **changes)


# --- where the repository is


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("git@example.org:owner/name.git", "https://example.org/owner/name"),
        ("ssh://git@example.org:2222/owner/name.git", "https://example.org/owner/name"),
        ("https://user:secret@example.org/owner/name.git", "https://example.org/owner/name"),
        ("https://example.org/owner/name/", "https://example.org/owner/name"),
        ("http://example.org/a/b/c", "http://example.org/a/b/c"),
        ("/srv/git/name", ""),
        ("../name", ""),
        ("file:///srv/name", ""),
        ("https://example.org", ""),
        ("", ""),
    ],
)
def test_a_remote_becomes_an_address_that_can_be_opened(remote, address):
    assert web_address(remote) == address


def test_the_address_is_taken_from_the_nearest_word(monkeypatch, tmp_path):
    for name in ("HIPSTACK_REPOSITORY", "GITHUB_SERVER_URL", "GITHUB_REPOSITORY"):
        monkeypatch.delenv(name, raising=False)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert repository.find(root=tmp_path).url == ""
    assert repository.find(root=tmp_path).link("a/b") == "a/b"
    remote = ["git", "remote", "add", "origin", "git@example.org:o/git.git"]
    subprocess.run(remote, cwd=tmp_path, check=True)
    assert repository.find(root=tmp_path).url == "https://example.org/o/git"
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://example.org")
    monkeypatch.setenv("GITHUB_REPOSITORY", "o/actions")
    assert repository.find(root=tmp_path).url == "https://example.org/o/actions"
    monkeypatch.setenv("HIPSTACK_REPOSITORY", "https://example.org/o/env")
    assert repository.find(root=tmp_path).url == "https://example.org/o/env"
    assert repository.find("https://example.org/o/a", tmp_path).url == "https://example.org/o/a"
    with pytest.raises(StackError, match="no address of a repository"):
        repository.find("somewhere", tmp_path)


# --- the plan


def test_a_dry_run_lists_every_family_and_makes_nothing(tmp_path):
    done = run_module(
        "ci.publish", "--dry-run", "--extensions", "none", "--out", str(tmp_path / "r")
    )
    assert done.returncode == 0, done.stderr
    for family, members in arches.FAMILIES.items():
        assert f"hipstack:0.31.0-hipstack1-{family}" in done.stdout
        assert f"+hipstack1.{'.'.join(members)}-" in done.stdout
    assert "BLOCKED" not in done.stdout
    assert patches.load().set_hash in done.stdout
    assert not (tmp_path / "r").exists()


def test_what_is_in_the_way_is_said_in_the_plan_and_refused_by_the_release(tmp_path):
    words = ("--wheels", str(tmp_path), "--family", "gfx1151", "--out", str(tmp_path / "r"))
    done = run_module("ci.publish", "--dry-run", *words)
    assert done.returncode == 0
    assert re.search(r"BLOCKED +0 wheels for gfx1151", done.stdout)
    done = run_module("ci.publish", *words)
    assert done.returncode == 1
    assert "0 wheels for gfx1151" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "r").exists()


def options(**changes) -> argparse.Namespace:
    return argparse.Namespace(**{"allow_dirty": False, "push": False, "images": False,
                                 "registry": "", **changes})  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words", "reason"),
    [
        ({"repo": Repository("", "c" * 40, dirty=True)}, {}, "files differ from the commit"),
        ({"repo": Repository("", "")}, {}, "no git repository"),
        ({"items": (item(blocked=True, how="no compiler"),)}, {}, "gfx120x: no compiler"),
        ({}, {"push": True, "images": True, "registry": "name"}, "--push needs"),
        ({"series": make_series(make_patch("core/x", subject="no area"))}, {}, "Area"),
    ],
)
def test_a_release_that_could_not_be_explained_is_refused(
    the_pin, monkeypatch, changes, words, reason
):
    monkeypatch.delenv("GITHUB_REF_TYPE", raising=False)
    publish.preflight(a_release(the_pin), options())
    with pytest.raises(StackError, match=reason):
        publish.preflight(a_release(the_pin, **changes), options(**words))


def test_the_git_tag_must_be_the_version(the_pin, monkeypatch):
    monkeypatch.setenv("GITHUB_REF_TYPE", "tag")
    monkeypatch.setenv("GITHUB_REF_NAME", "v0.31.0-hipstack1")
    publish.preflight(a_release(the_pin), options())
    monkeypatch.setenv("GITHUB_REF_NAME", "v0.31.0-hipstack2")
    with pytest.raises(StackError, match=r"needs v0\.31\.0-hipstack1"):
        publish.preflight(a_release(the_pin), options())


# --- the notes


def test_the_notes_say_of_every_patch_what_why_and_whether_it_was_sent(the_pin):
    series = patches.load()
    text = publish.notes(a_release(the_pin, series), {"gfx120x": "compile"})
    for patch in series:
        assert f"**{patch.subject}**" in text
        assert f"{KNOWN.url}/blob/{KNOWN.commit}/patches/{patch.name}.patch" in text
        assert publish.first_paragraph(patch) in text
    assert text.count("\n  Forwarded: ") == len(series)
    assert "| gfx120x | gfx1200: Radeon RX 9060/9060 XT; gfx1201:" in text
    assert "| compile |" in text


def test_only_the_first_paragraph_of_why_is_taken():
    header = make_patch("core/x").data.decode().replace(
        "Why: because.", "Why: it was\nwrong.\n\nMuch more."
    )  # fmt: skip
    patch = patches.Patch("core/x", header.encode())
    assert publish.first_paragraph(patch) == "It was wrong."


# --- the statement


def facts(**changes) -> provenance.Facts:
    values = {"subjects": {"b.whl": DIGEST, "a.json": "b" * 64}, "build_type": "pkg:generic/h#d",
              "external": {"pin": "0.31.0"}, "internal": {}, "source": "git+https://e.org/o/n",
              "commit": "c" * 40, "dependencies": [("pkg:pypi/vllm@0.31.0", "sha256", "d" * 64)],
              "builder": "https://e.org/w@r", "invocation": "urn:uuid:1",
              "started": "2026-11-30T12:00:00Z", "finished": "2026-11-30T13:00:00Z"}  # fmt: skip
    return provenance.Facts(**{**values, **changes})


def test_a_statement_names_its_subjects_by_digest():
    said = provenance.statement(facts())
    assert [s["name"] for s in said["subject"]] == ["a.json", "b.whl"]
    assert said["subject"][1]["digest"] == {"sha256": DIGEST}
    for bad in ({}, {"a": "sha256:0"}, {"a": ""}):
        with pytest.raises(ValueError):
            provenance.statement(facts(subjects=bad))


def test_the_in_toto_library_accepts_it_and_finds_each_fault(release_python, tmp_path):
    good = provenance.statement(facts())
    wrong = {
        "good": good,
        "field": good | {"subjekt": []},
        "type": good | {"_type": "https://in-toto.io/Statement/v0.1"},
        "predicate": good | {"predicate": good["predicate"] | {"buildDefinitions": {}}},
        "digest": good | {"subject": [{"name": "b.whl"}]},
        "time": json.loads(json.dumps(good).replace("2026-11-30T12:00:00Z", "yesterday")),
        "builder": json.loads(json.dumps(good).replace("https://e.org/w@r", "me")),
    }
    (tmp_path / "all.json").write_text(json.dumps(wrong))
    code = (
        "import json, sys; from ci import provenance\n"
        "for name, said in json.load(open(sys.argv[1])).items():\n"
        "    print(name, bool(provenance.problems(json.dumps(said))))\n"
        "    if name == 'good':\n"
        "        files = {s['name']: s['digest']['sha256'] for s in said['subject']}\n"
        "        print('same', bool(provenance.problems(json.dumps(said), files)))\n"
        "        for change in ({'c': '0'}, {'b.whl': '0' * 64}):\n"
        "            print('other', bool(provenance.problems(json.dumps(said), files | change)))\n"
    )
    done = subprocess.run([release_python, "-c", code, str(tmp_path / "all.json")], cwd=paths.ROOT,
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [
        "good False", "same False", "other True", "other True", "field True", "type True",
        "predicate True", "digest True", "time True", "builder True",
    ]  # fmt: skip


def test_who_built_it_is_said_honestly(the_pin, monkeypatch):
    for name in ("GITHUB_SERVER_URL", "GITHUB_WORKFLOW_REF"):
        monkeypatch.delenv(name, raising=False)
    record = {"extensions": {"mode": "precompiled", "wheel": "u.whl", "wheel_sha256": DIGEST},
              "toolchain": {"python": "3"},
              "compiled": {"toolchain": {"hip": "7.2.4", "packages": [
                  {"name": "hipcc", "version": "7.2.4", "sha256": "e" * 64}]}}}  # fmt: skip
    words = (a_release(the_pin), {"gfx120x": record}, {"a": DIGEST}, ["x"], "s", "f")
    made = publish.facts(*words)
    assert made.builder.endswith("#built-by-hand")
    assert made.internal["wheels"]["gfx120x"]["compiler"] == {"hip": "7.2.4"}
    assert ("pkg:deb/debian/hipcc@7.2.4", "sha256", "e" * 64) in made.dependencies
    assert ("pkg:generic/u.whl", "sha256", DIGEST) in made.dependencies
    assert ("pkg:pypi/vllm@0.31.0", "sha256", the_pin.sdist_sha256) in made.dependencies
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://example.org")
    monkeypatch.setenv("GITHUB_WORKFLOW_REF", "o/n/.github/workflows/release.yml@refs/tags/v1")
    assert publish.facts(*words).builder.startswith("https://example.org/o/n/.github/workflows/")


# --- a whole release, from files alone


@pytest.fixture
def finished(tmp_path, the_pin):
    """A release of one made-up wheel with one code object."""
    folder = tmp_path / "release"
    folder.mkdir()
    series = make_series(make_patch("core/x"))
    name = "vllm-0.31.0+hipstack1.gfx1201-cp311-cp311-linux_x86_64"
    stack = {"set_hash": series.set_hash, "arches": ["gfx1201"]}
    with zipfile.ZipFile(folder / f"{name}.whl", "w") as archive:
        archive.writestr("vllm/hipstack/stack.json", json.dumps(stack))
        archive.writestr("vllm/hipstack/aot/k.hsaco", code_object())
    sha = publish.digests(folder)[f"{name}.whl"]
    record = {"sha256": sha, "version": "0.31.0+hipstack1.gfx1201", "stack": stack,
              "code_objects": {"vllm/hipstack/aot/k.hsaco": ["gfx1201"]},
              "extensions": {"mode": "none", "wheel": ""}, "toolchain": {}}  # fmt: skip
    sbom = {"metadata": {"component": {"version": record["version"], "hashes": [{"content": sha}]}}}
    (folder / f"{name}.build.json").write_text(json.dumps(record))
    (folder / f"{name}.cdx.json").write_text(json.dumps(sbom))
    only = item(family="gfx1201", arches=("gfx1201",), wheel=f"{name}.whl")
    release = a_release(the_pin, series, items=(only,))
    words = (release, {"gfx1201": record}, publish.digests(folder), ["x"],
             "2026-11-30T12:00:00Z", "2026-11-30T13:00:00Z")  # fmt: skip
    statement = provenance.statement(publish.facts(*words))
    publish.write(folder / release.statement_name, json.dumps(statement))
    sums = publish.digests(folder)
    publish.write(folder / publish.SUMS, "".join(f"{d}  {n}\n" for n, d in sums.items()))
    return folder, series, folder / f"{name}.whl"


def test_a_good_release_verifies_and_a_changed_wheel_does_not(finished, release_python):
    folder, series, wheel = finished
    assert publish.verify(folder, series) == []
    assert publish.verify(folder) == []
    wheel.write_bytes(wheel.read_bytes()[:-1] + b"\1")
    found = "; ".join(publish.verify(folder, series))
    assert f"{wheel.name} has another sha256" in found
    assert "is not as stated" in found
    assert "is not the file of its build record" in found
    assert "its SBOM describes another file" in found


def test_another_set_other_code_and_strange_files_are_found(finished, release_python, monkeypatch):
    folder, _, wheel = finished
    monkeypatch.setattr(publish, "run", lambda *a, **k: "")  # the statement has its own test
    other = make_series(make_patch("core/y"))
    assert any("was built from the set" in x for x in publish.verify(folder, other))
    (folder / "extra.txt").write_text("x")
    assert publish.verify(folder) == ["extra.txt is not listed"]
    (folder / "extra.txt").unlink()
    record_file = wheel.with_name(wheel.name.replace(".whl", ".build.json"))
    record = json.loads(record_file.read_text())
    record["code_objects"] = {}
    record_file.write_text(json.dumps(record))
    assert any("other code objects than its build record" in x for x in publish.verify(folder))
    record_file.unlink()
    found = publish.verify(folder)
    assert f"{record_file.name} is listed but absent" in found
    assert any("its records cannot be read" in x for x in found)


def test_a_wheel_for_other_cards_is_refused(finished):
    _, series, wheel = finished
    stem = wheel.name.removesuffix(".whl")
    record = json.loads(wheel.with_name(f"{stem}.build.json").read_text())
    sbom = json.loads(wheel.with_name(f"{stem}.cdx.json").read_text())
    found = publish.wheel_problems(wheel, record, sbom, item(), series.set_hash)
    assert "is for gfx1201, not gfx1200, gfx1201" in found
    assert "its kernels are for gfx1201" in found


def test_a_folder_without_sums_is_no_release(tmp_path):
    done = run_module("ci.publish", "--verify", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "SHA256SUMS" in done.stderr


def test_records_of_images_made_elsewhere_are_taken_over(tmp_path):
    for family in ("a", "b"):
        folder = tmp_path / "in" / family
        folder.mkdir(parents=True)
        (folder / "images.json").write_text(json.dumps({f"h/o/n:{family}": {"digest": DIGEST}}))
        (folder / f"hipstack-{family}.image.cdx.json").write_text("{}")
    out = tmp_path / "out"
    out.mkdir()
    assert set(publish.read_images(tmp_path / "in", out)) == {"h/o/n:a", "h/o/n:b"}
    assert len(list(out.glob("*.image.cdx.json"))) == 2
    with pytest.raises(StackError, match=r"no images\.json"):
        publish.read_images(out, out)


def test_an_images_sbom_lists_what_is_in_it():
    packages = [("pypi", "Torch", "2.13.0"), ("deb", "g++", "4:12")]
    text = publish.image_sbom("h/o/n:t", "sha256:1", {"sha256": DIGEST}, packages)
    assert text == publish.image_sbom("h/o/n:t", "sha256:1", {"sha256": DIGEST}, packages)
    document = json.loads(text)
    assert document["metadata"]["component"]["type"] == "container"
    assert {c["purl"] for c in document["components"]} == {
        "pkg:pypi/torch@2.13.0", "pkg:deb/debian/g%2B%2B@4:12",
    }  # fmt: skip


# --- linters, and what the workflows trust


def test_hadolint_has_nothing_to_say_about_the_dockerfile(release_python):
    tool = release_python.removesuffix("python") + "hadolint"
    done = subprocess.run([tool, "Dockerfile"], cwd=paths.ROOT, capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")
    bad = "FROM debian\nRUN cd / && apt-get install x\n"
    assert subprocess.run([tool, "-"], input=bad, text=True, capture_output=True).returncode == 1


def test_zizmor_has_nothing_to_say_about_the_workflows(release_python):
    tool = release_python.removesuffix("python") + "zizmor"
    words = [tool, "--offline", "--no-progress", "--persona=pedantic", ".github/workflows"]
    done = subprocess.run(words, cwd=paths.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_actions_are_pinned_by_commit_and_listed_for_whoever_checks_them():
    listed = (paths.ROOT / "docs" / "verify.md").read_text()
    used = set()
    for file in sorted((paths.ROOT / ".github" / "workflows").glob("*.yml")):
        lines = re.findall(r"uses: *(\S+) *(.*)", file.read_text())
        assert lines
        for action, comment in lines:
            name, _, commit = action.partition("@")
            assert re.fullmatch(r"[0-9a-f]{40}", commit), action
            assert f"| {name} | {comment.removeprefix('# ')} | `{commit}` |" in listed
            used.add(commit)
    assert set(re.findall(r"`([0-9a-f]{40})`", listed)) == used


def test_workflows_call_the_commands_of_this_repository_for_every_family():
    text = (paths.ROOT / ".github" / "workflows" / "release.yml").read_text()
    for found in re.findall(r"family: \[(.*)\]", text):
        assert found.split(", ") == list(arches.FAMILIES)
    assert "bash .ci/run" in (paths.ROOT / ".github" / "workflows" / "ci.yml").read_text()
    for option in set(re.findall(r"(?<= )--[a-z-]+", "".join(re.findall(
        r"python3 -m ci\.publish.*?(?=\n +(?:python3|\w+:|-))", text, re.S)))):  # fmt: skip
        assert option in run_module("ci.publish", "--help").stdout

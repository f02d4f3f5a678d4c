import dataclasses
import os
import shutil
import subprocess
import tarfile

import pytest

from ci import gitstack, source
from ci.errors import StackError


@pytest.fixture
def small_pin(the_pin, small_tree, tmp_path):
    """A pin of the made-up tree, with an sdist of it."""
    path = tmp_path / "vllm-0.31.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(small_tree, arcname="vllm-0.31.0")
    return dataclasses.replace(
        the_pin,
        sdist_sha256=source.sha256(path),
        tree_sha256=source.tree_digest(small_tree),
    )


def left_over(folder):
    return [p.name for p in folder.iterdir()] if folder.exists() else []


def test_a_good_sdist_gives_the_tree(small_pin, tmp_path):
    target = tmp_path / "out" / "tree"
    source.prepare(small_pin, target, str(tmp_path / small_pin.sdist))
    assert (target / "vllm" / "a.py").is_file()
    assert left_over(target.parent) == ["tree"]
    with pytest.raises(StackError, match="exists already"):
        source.prepare(small_pin, target, str(tmp_path / small_pin.sdist))


def test_what_the_release_process_adds_is_no_part_of_the_tree(small_pin, small_tree, tmp_path):
    (small_tree / "PKG-INFO").write_text("generated\n")
    (small_tree / "vllm.egg-info").mkdir()
    (small_tree / "vllm" / "_version.py").write_text("generated\n")
    assert source.tree_digest(small_tree) == small_pin.tree_sha256
    source.prepare(small_pin, tmp_path / "tree", str(small_tree))
    assert not (tmp_path / "tree" / "PKG-INFO").exists()


@pytest.mark.parametrize("keep", [0, 10, 200, -1])
def test_a_truncated_sdist_is_refused_and_leaves_nothing(small_pin, tmp_path, keep):
    path = tmp_path / small_pin.sdist
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StackError, match="truncated, damaged or another release"):
        source.prepare(small_pin, tmp_path / "out" / "tree", str(path))
    assert left_over(tmp_path / "out") == []


def test_a_truncated_archive_with_the_right_hash_is_refused_too(small_pin, tmp_path):
    path = tmp_path / small_pin.sdist
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    small_pin = dataclasses.replace(small_pin, sdist_sha256=source.sha256(path))
    with pytest.raises(StackError):
        source.prepare(small_pin, tmp_path / "out" / "tree", str(path))
    assert left_over(tmp_path / "out") == []


@pytest.mark.parametrize("damage", ["edit", "remove", "add"])
def test_a_dirty_tree_is_refused_and_leaves_nothing(small_pin, small_tree, tmp_path, damage):
    victim = small_tree / "vllm" / "a.py"
    if damage == "edit":
        victim.write_text(victim.read_text() + "x = 1\n")
    elif damage == "remove":
        victim.unlink()
    else:
        (small_tree / "vllm" / "new.py").write_text("x = 1\n")
    with pytest.raises(StackError, match="not the pinned one"):
        source.prepare(small_pin, tmp_path / "out" / "tree", str(small_tree))
    assert left_over(tmp_path / "out") == []


def test_a_path_that_is_no_source_is_refused(small_pin, tmp_path):
    with pytest.raises(StackError, match="no such path"):
        source.prepare(small_pin, tmp_path / "tree", str(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(StackError, match="neither an sdist nor"):
        source.prepare(small_pin, tmp_path / "tree", str(tmp_path / "empty"))


def test_a_clone_is_checked_against_the_commit(small_pin, small_tree, tmp_path):
    gitstack.init(small_tree, small_pin)
    gitstack.git(small_tree, "tag", small_pin.tag)
    head = gitstack.git(small_tree, "rev-parse", "HEAD").strip()
    good = dataclasses.replace(small_pin, git=str(small_tree), commit=head)
    source.prepare(good, tmp_path / "tree", "git")
    assert source.tree_digest(tmp_path / "tree") == small_pin.tree_sha256
    with pytest.raises(StackError, match="the pin says"):
        source.prepare(dataclasses.replace(good, commit="0" * 40), tmp_path / "out" / "t", "git")
    with pytest.raises(StackError, match="checked out is"):
        bad = dataclasses.replace(good, commit="0" * 40)
        source.prepare(bad, tmp_path / "out" / "t", str(small_tree))
    with pytest.raises(StackError, match="cannot clone"):
        absent = dataclasses.replace(good, git=str(tmp_path / "absent"))
        source.prepare(absent, tmp_path / "out" / "t", "git")
    assert left_over(tmp_path / "out") == []


def test_no_network_is_one_clear_line(small_pin, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(StackError, match=r"cannot download .* \(try: check the network"):
        source.prepare(small_pin, tmp_path / "out" / "tree", "sdist", cache=tmp_path / "cache")
    assert left_over(tmp_path / "out") == []
    assert left_over(tmp_path / "cache") == []


def test_a_damaged_cache_entry_is_not_trusted(small_pin, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    cache = tmp_path / "cache"
    cache.mkdir()
    shutil.copy(tmp_path / small_pin.sdist, cache)
    assert source.fetch_sdist(small_pin, cache) == cache / small_pin.sdist
    (cache / small_pin.sdist).write_bytes(b"half")
    with pytest.raises(StackError, match="cannot download"):
        source.fetch_sdist(small_pin, cache)
    assert left_over(cache) == []


@pytest.fixture(params=["with filters", "as on Debian 12"])
def any_python(request, monkeypatch):
    """Python 3.11.2, which Debian 12 ships, has no extraction filters."""
    if request.param == "as on Debian 12":
        monkeypatch.delattr(tarfile, "data_filter")
        real = tarfile.TarFile.extractall

        def extractall(self, path, members=None):
            # What a Python without filters does: it trusts the members.
            for member in members:
                assert ".." not in member.name and not member.issym()
            real(self, path, members, filter="fully_trusted")

        monkeypatch.setattr(tarfile.TarFile, "extractall", extractall)


@pytest.mark.parametrize("kind", ["above", "link"])
def test_an_archive_that_leaves_its_folder_is_refused(small_pin, tmp_path, any_python, kind):
    path = tmp_path / "evil.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo("x" if kind == "link" else "../outside.txt")
        if kind == "link":
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    evil = dataclasses.replace(small_pin, sdist_sha256=source.sha256(path))
    with pytest.raises(StackError, match="cannot be unpacked"):
        source.prepare(evil, tmp_path / "out" / "tree", str(path))
    assert not (tmp_path / "outside.txt").exists() and left_over(tmp_path / "out") == []


def test_neither_owner_nor_dangerous_modes_are_kept(tmp_path, any_python):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name, mode in (("run.sh", 0o6777), ("text", 0o646)):
            member = tarfile.TarInfo(name)
            member.mode, member.uid, member.gid = mode, 4242, 4242
            member.uname = member.gname = "nobody"
            archive.addfile(member)
    source.unpack(path, tmp_path / "out")
    found = {p.name: p.stat() for p in (tmp_path / "out").iterdir()}
    assert {name: oct(s.st_mode & 0o7777) for name, s in found.items()} == {
        "run.sh": "0o755", "text": "0o644",
    }  # fmt: skip
    assert {s.st_uid for s in found.values()} == {os.geteuid()}


def test_the_digest_sees_links_and_renames(small_tree):
    before = source.tree_digest(small_tree)
    os.rename(small_tree / "vllm" / "b.py", small_tree / "vllm" / "c.py")
    renamed = source.tree_digest(small_tree)
    os.symlink("a.py", small_tree / "vllm" / "b.py")
    assert len({before, renamed, source.tree_digest(small_tree)}) == 3


@pytest.mark.stack
def test_the_real_sdist_has_the_pinned_digest(the_pin, sdist, tmp_path):
    source.prepare(the_pin, tmp_path / "tree", str(sdist))
    assert source.tree_digest(tmp_path / "tree") == the_pin.tree_sha256
    assert subprocess.run(["git", "init", "-q", tmp_path / "tree"], check=False).returncode == 0

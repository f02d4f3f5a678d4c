"""What the tools do on machines that lack something."""

import shutil
import subprocess
import sys
import venv

import pytest

from ci import envs, paths, tree
from ci.errors import StackError


def test_no_quilt_and_no_right_to_install_it_names_the_command(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(tree.os, "geteuid", lambda: 1000)
    with pytest.raises(StackError, match=r"quilt is not installed \(try: sudo apt-get install"):
        tree.ensure_quilt()


def test_no_venv_module_and_no_right_to_install_it_names_the_command(monkeypatch, tmp_path):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'ensurepip is not available'; exit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(envs.sys, "executable", str(fake))
    monkeypatch.setattr(envs.os, "geteuid", lambda: 1000)
    with pytest.raises(StackError, match=r"no venv module \(try: sudo apt-get install"):
        envs._venv(tmp_path / "env")
    assert not (tmp_path / "env").exists()


@pytest.mark.parametrize("module", ["build", "stack", "test", "verify", "aot", "codeobjects"])
def test_the_tools_start_with_the_standard_library_alone(module):
    """A bare machine's python3 has nothing else; Python 3.10 not even a TOML parser."""
    code = (
        "import sys; sys.modules.update(tomllib=None, tomli=None); "
        f"sys.path.insert(0, {str(paths.ROOT)!r}); "
        f"import importlib; importlib.import_module('ci.{module}')"
    )
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_a_failed_environment_is_not_mistaken_for_a_good_one(tmp_path, monkeypatch):
    # Without pip an environment is made in a moment; it is not used here.
    monkeypatch.setattr(envs, "_venv", lambda folder: venv.create(folder, with_pip=False))
    folder = tmp_path / "env"
    with pytest.raises(StackError, match="installing Python packages failed"):
        envs._make(folder, ["x"], [["{python}", "-c", "raise SystemExit('no such package')"]])
    assert not folder.exists()
    made = envs._make(folder, ["x"], [["{python}", "-c", "pass"]])
    marker = folder / "marker"
    marker.write_text("")
    assert envs._make(folder, ["x"], []) == made and marker.exists()
    envs._make(folder, ["y"], [])
    assert not marker.exists(), "other requirements, same environment"


def test_a_local_cpu_build_of_torch_is_preferred(monkeypatch, tmp_path):
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert envs.torch_requirement("2.13.0") == ["--torch-backend", "cpu", "torch==2.13.0"]
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    (tmp_path / f"torch-2.13.0+cpu-{tag}-{tag}-linux_x86_64.whl").write_text("")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert envs.torch_requirement("2.13.0")[-1] == "torch==2.13.0+cpu"
    assert envs.torch_requirement("2.12.0")[-1] == "torch==2.12.0"

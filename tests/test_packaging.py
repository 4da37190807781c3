"""What is installed: metadata, exact versions, package data, and the commands of the Makefile."""

import re
import subprocess
import tomllib
from distutils.core import run_setup
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import megatron_allattn

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The distribution that setup.py describes."""
    monkeypatch.chdir(ROOT)
    return run_setup("setup.py", stop_after="init")


@pytest.fixture
def pinned() -> dict[str, Version]:
    """Every exact version of the two requirements files by normalised name."""
    versions = {}
    for name in ("requirements.txt", "requirements-dev.txt"):
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
            text = line.partition("#")[0].strip()
            if text:
                project, equals, number = text.partition("==")
                assert equals, f"{name}: {line} is not an exact version"
                versions[normal(project)] = Version(number)
    return versions


def normal(name: str) -> str:
    """A project's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def ranges(package: Any, *extras: str) -> list[Requirement]:
    """The requirements of the package and of these extras."""
    texts = [*package.install_requires, *(text for extra in extras for text in package.extras_require[extra])]
    return [Requirement(text) for text in texts]


def test_version_and_entry_point(package: Any) -> None:
    assert package.get_version() == megatron_allattn.__version__ == "0.1.0"
    assert package.get_name() == "megatron-allattn"
    assert package.entry_points == {"console_scripts": ["megatron-allattn-pretrain = pretrain:command"]}
    assert package.py_modules == ["pretrain"]


def test_every_folder_with_python_files_is_packaged(package: Any) -> None:
    folders = {path.parent for path in (ROOT / "megatron_allattn").rglob("*.py")}
    expected = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(package.packages) == expected | {"megatron_allattn.ds_configs"}


def test_deepspeed_files_travel_with_the_package(package: Any) -> None:
    folder = ROOT / package.package_dir["megatron_allattn.ds_configs"]
    (pattern,) = package.package_data["megatron_allattn.ds_configs"]
    shipped = {path.name for path in folder.glob(pattern)}
    offload = {f"zero{stage}-offload.json" for stage in (1, 2, 3)}
    assert shipped == {f"zero{stage}.json" for stage in range(4)} | offload | {"pipeline.json"}


def test_span_profiles_travel_with_the_package(package: Any) -> None:
    (pattern,) = package.package_data["megatron_allattn.benchmark"]
    shipped = {path.stem for path in (ROOT / "megatron_allattn/benchmark").glob(pattern)}
    assert shipped == {"fresh", "half-way", "late", "facts"}


def test_extras_are_the_documented_ones(package: Any) -> None:
    assert set(package.extras_require) == {"test", "plots", "tensorboard", "wandb", "watch", "hf", "triton"}


def test_ranges_admit_the_exact_versions_and_an_older_torch(package: Any, pinned: dict[str, Version]) -> None:
    for requirement in ranges(package, "test", "plots", "tensorboard", "wandb", "watch"):
        assert pinned[normal(requirement.name)] in requirement.specifier, requirement
    (torch,) = (r for r in ranges(package) if r.name == "torch")
    assert Version("2.11.0") in torch.specifier


def test_torch_comes_first_and_versions_are_the_tested_ones(pinned: dict[str, Version]) -> None:
    assert next(iter(pinned)) == "torch"
    assert pinned["torch"] == Version("2.13.0")
    assert pinned["deepspeed"] == Version("0.19.8")


def test_no_dependency_is_called_apex(package: Any, pinned: dict[str, Version]) -> None:
    """apex on PyPI is an unrelated web toolkit; NVIDIA's cannot be had from there."""
    names = {normal(r.name) for r in ranges(package, *package.extras_require)} | set(pinned)
    assert "apex" not in names


def test_pyproject_holds_tool_settings_only() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(settings) == {"tool"}
    assert settings["tool"]["ruff"]["line-length"] == 120


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("venv", "pip install"),
        ("system-deps", ".ci/system-deps"),
        ("lint", "ruff format --check ."),
        ("test", "-m pytest -q"),
        ("test-layouts", "-m pytest -q -m layouts"),
        ("demo", "--recipe demo"),
        ("benchmark", "tools/benchmark.py step"),
        ("gpu-check", "tests/gpu/check.py"),
        ("clean", "rm -rf build"),
    ],
)
def test_makefile_targets_run_their_command(target: str, command: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", target], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert command in done.stdout


def test_torch_is_installed_on_its_own_before_the_rest() -> None:
    done = subprocess.run(["make", "-n", "-B", "venv"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    torch, rest, own = re.findall(r"pip install -qq (.*)", done.stdout)
    shell = subprocess.run(["bash", "-c", f"echo {torch}"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert shell.stdout == "torch==2.13.0\n"
    assert rest == "-r requirements.txt -r requirements-dev.txt"
    assert own == "--no-deps --no-build-isolation --editable ."


@pytest.mark.parametrize("present", [["id", "grep"], ["id", "grep", "apt-get"]])
def test_system_packages_are_left_alone_without_apt_or_root(tmp_path: Path, present: list[str]) -> None:
    """With apt-get on the path but no root, as without apt-get, the script says so and succeeds."""
    for name in present:
        program = tmp_path / name
        program.write_text("#!/bin/bash\n" + {"id": "echo 1000", "grep": "exit 1", "apt-get": "exit 9"}[name] + "\n")
        program.chmod(0o755)
    done = subprocess.run(
        ["/bin/bash", ".ci/system-deps"],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    reason = "not root" if "apt-get" in present else "no apt-get here"
    packages = "openssh-server pdsh openmpi-bin numactl g++ slurmctld slurmd slurm-client munge iproute2 chromium"
    assert done.stdout.startswith(f"system-deps: {reason}; tests that need {packages} will skip")


def test_ci_runs_system_deps_lint_and_test() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    lines = script.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("make ")] == ["make system-deps", "make lint", "make test"]
    assert "set -euo pipefail" in lines

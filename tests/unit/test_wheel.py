"""What a user installs: the wheel, built as a release builds it, works away from the checkout."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from uv import find_uv_bin

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("events", "projections", "services")


def run(*command: str | Path, cwd: Path) -> str:
    # The child must find nothing of the checkout by a path that it inherits.
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of the checkout and the wheel made from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    build = (find_uv_bin(), "build", "--offline", "--no-build-isolation", "--python")
    run(*build, sys.executable, "--out-dir", out, ROOT, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    [wheel] = dist.glob("*.whl")
    return wheel


def test_the_wheel_holds_the_three_folders_under_one_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"plait"}
    packed = {name for name in names if name.startswith("plait/")}
    for folder in FOLDERS:
        assert f"plait/{folder}/py.typed" in packed
        sources = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py")}
        assert {f"plait/{source.as_posix()}" for source in sources} <= packed


def test_the_wheel_carries_the_license(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_source_distribution_holds_the_folders_and_not_the_links(dist: Path) -> None:
    [sdist] = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"{folder}/__init__.py" for folder in (*FOLDERS, "tests")} <= names
    assert not any(name.startswith(".ci") for name in names)


def test_the_installed_wheel_runs_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    uv, venv, elsewhere = find_uv_bin(), tmp_path / "venv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(uv, "venv", "--python", sys.executable, venv, cwd=elsewhere)
    python = venv / "bin" / "python"
    run(uv, "pip", "install", "--offline", "--no-deps", "--python", python, wheel, cwd=elsewhere)
    # The libraries come from this environment. A plain path is enough: the .pth files in it,
    # and with them its editable plait, are not followed.
    [site_packages] = venv.glob("lib/python*/site-packages")
    (site_packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")

    where = run(python, "-c", "import plait.services as s; print(s.__file__)", cwd=elsewhere)
    assert Path(where.strip()).is_relative_to(venv)
    assert "plait" in run(venv / "bin" / "plait", "--help", cwd=elsewhere)

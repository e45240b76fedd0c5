"""What is handed out: the wheel alone runs the demo, and the Dockerfile passes its linter."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what the repository holds, without the network: setuptools is the one that is here."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    built = subprocess.run([*command, str(folder / "source")], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (found,) = folder.glob("millionway-*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_holds_what_the_package_reads(wheel: Path) -> None:
    package = ROOT / "src"
    there = {str(path.relative_to(package)) for path in (package / "millionway").rglob("*") if path.is_file()}
    there = {name for name in there if "__pycache__" not in name}
    assert there == {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


@pytest.mark.slow
def test_the_wheel_alone_runs_the_demo(wheel: Path, tmp_path: Path) -> None:
    """In a new environment with the wheel and nothing else; the libraries of this one are lent by a path file."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    install = [python, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", str(wheel)]
    subprocess.run(install, check=True, cwd=tmp_path, env=clean)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # What a path file names comes last, and the path files there, one of which leads to this checkout, are not read.
    (site / "libraries.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    where = "import millionway; print(millionway.__file__)"
    found = subprocess.run([python, "-c", where], cwd=tmp_path, env=clean, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(tmp_path / "venv")
    demo = [tmp_path / "venv" / "bin" / "millionway", "demo", "--epochs", "2"]
    ran = subprocess.run(demo, cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "pretrained" in ran.stdout and (tmp_path / "runs" / "demo" / "report.html").is_file()


def test_the_dockerfile_passes_its_linter() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("there is no hadolint for this machine")
    said = subprocess.run([linter, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert said.returncode == 0, said.stdout

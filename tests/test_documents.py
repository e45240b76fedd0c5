"""Documents and code say the same; imports point one way."""

import ast
import re
from pathlib import Path

import pytest

from millionway.cli import VERBS, main

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "millionway"
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_tree_in_the_readme_is_the_tree() -> None:
    block = README.split("## The tree is the method")[1].split("```")[1]
    listed, folder = set(), ""
    for line in block.splitlines():
        if match := re.match(r"  (\w+)/", line):
            folder = match[1] + "/"
        elif line.startswith("benchmarks"):
            break
        elif line.startswith("    ") and folder:
            listed |= {folder + name for name in re.findall(r"\b\w+\.py", line)}
        elif line.startswith("  "):
            listed |= set(re.findall(r"^\s+(\w+\.py)", line))
    there = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if not path.name.startswith("__")}
    assert listed == there


def commands() -> list[str]:
    """Lines and inline code of the documents that begin with the program's name."""
    text = "\n".join(page.read_text() for page in PAGES)
    found = re.findall(r"^(millionway .*)$", text, re.M) + re.findall(r"`(millionway [^`]+)`", text)
    return sorted({command.split("#")[0].strip() for command in found})


@pytest.mark.parametrize("command", commands())
def test_commands_in_documents_exist(command: str, capsys) -> None:
    words = command.split()
    assert words[1] in VERBS, command
    if words[1] == "presets":
        return
    main([words[1], "--help-all" if words[1] == "pretrain" else "--help"])
    known = capsys.readouterr().out
    for flag in re.findall(r"--[\w-]+", command):
        assert flag in known or flag in ("--help", "--help-all"), f"{flag} of {command}"


def test_options_in_documents_exist(capsys) -> None:
    known = ""
    for verb in sorted(set(VERBS) - {"presets"}):
        main([verb, "--help-all" if verb == "pretrain" else "--help"])
        known += capsys.readouterr().out
    for page in PAGES:
        for flag in re.findall(r"`(--[a-z-]+)", page.read_text()):
            assert flag in known, f"{flag} in {page.name}"


def test_make_targets_in_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.M))
        assert named <= targets, page.name


def test_files_named_in_documents_exist() -> None:
    for page in PAGES:
        for name in re.findall(
            r"`((?:data|model|parallel|train|evaluation|reporting|exporting)/[\w/]*(?:\.py)?)`", page.read_text()
        ):
            assert (PACKAGE / name).exists(), f"{name} in {page.name}"
        for name in re.findall(r"\]\(([\w/]+\.\w+)\)", page.read_text()):
            assert (page.parent / name).exists(), f"{name} in {page.name}"


ALLOWED = {
    "data": {"data", "randomness", "files", "names"},
    "parallel": {"parallel"},
    "model": {"model", "parallel", "randomness", "files", "names"},
    "evaluation": {
        "evaluation",
        "model",
        "data",
        "parallel",
        "config",
        "randomness",
        "files",
        "names",
        "intervals",
        "verdict",
    },
    "train": {
        *("train", "evaluation", "model", "data", "parallel", "config", "randomness", "files"),
        *("console", "environment", "verdict"),
    },
    "studies": {
        *("studies", "train", "evaluation", "model", "data", "parallel", "config", "randomness", "files"),
        *("console", "environment", "names", "intervals"),
    },
    "reporting": {"reporting", "files", "intervals", "verdict"},
    "exporting": {"exporting", "model", "files"},
    "config": {"names"},
    "names": set(),
    "intervals": set(),
    "verdict": set(),
    "console": set(),
    "environment": set(),
    "files": set(),
    "presets": {"config", "names"},
    "randomness": set(),
}


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_point_one_way(part: str) -> None:
    files = [PACKAGE / f"{part}.py"] if (PACKAGE / f"{part}.py").exists() else sorted((PACKAGE / part).glob("*.py"))
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "millionway":
                module = (node.module or "").split(".")
                names = [module[1]] if len(module) > 1 else [alias.name for alias in node.names]
                assert set(names) <= ALLOWED[part], f"{path.name} imports {names}"


def test_no_address_or_path_of_a_machine() -> None:
    files = [
        path for pattern in ("*.md", "*.toml", "*.txt", "Makefile", "*.cff", ".ci/run") for path in ROOT.glob(pattern)
    ]
    files += [*PACKAGE.rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*")]
    for path in files:
        if path.is_file():
            assert not re.search(r"/home/|/root/|/work/|pypi\.org|pythonhosted", path.read_text()), path

"""Documents and code say the same; imports point one way."""

import ast
import re
from pathlib import Path

import pytest

from millionway.cli import VERBS, main

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "millionway"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_tree_in_the_documents_is_the_tree() -> None:
    block = (
        (ROOT / "docs" / "code.md")
        .read_text()
        .split("## The tree is the method")[1]
        .split("```")[1]
        .split("\nbenchmarks")[0]
    )
    listed, folders = set(), []
    for line in block.splitlines()[2:]:
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        if match := re.match(r"\s+(\w+)/", line):
            folders = [*folders[:depth], match[1]]
        else:
            names = re.findall(r"\b\w+\.py", line) if depth else re.findall(r"^\s+(\w+\.py)", line)
            listed |= {"/".join([*folders[:depth], name]) for name in names}
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
            r"`((?:settings|data|model|parallel|train|evaluation|reporting|exporting|studies|collection|explorer)/[\w/]*(?:\.py)?)`",
            page.read_text(),
        ):
            assert (PACKAGE / name).exists(), f"{name} in {page.name}"
        for name in re.findall(r"\]\(([\w/]+\.\w+)\)", page.read_text()):
            assert (page.parent / name).exists(), f"{name} in {page.name}"


BELOW_ALL = {"settings", "machine", "files", "seals", "tensor_file", "run_folder", "randomness", "console"}
ALLOWED = {
    "parallel": {"parallel", *BELOW_ALL},
    "data": {"data", *BELOW_ALL},
    "model": {"model", "parallel", *BELOW_ALL},
    "reporting": {"reporting", *BELOW_ALL},
    "exporting": {"exporting", "reporting", "model", *BELOW_ALL},
    "evaluation": {"evaluation", "reporting", "model", "data", "parallel", *BELOW_ALL},
    "train": {"train", "evaluation", "reporting", "model", "data", "parallel", *BELOW_ALL},
    "collection": {"collection", "train", "evaluation", "model", "data", *BELOW_ALL},
    "explorer": {"explorer", "collection", "evaluation", "reporting", "data", *BELOW_ALL},
    "studies": {"studies", "train", "evaluation", "reporting", "model", "data", "parallel", *BELOW_ALL},
    "settings": {"settings", "seals", "files"},
    "machine": set(),
    "files": set(),
    "seals": {"files"},
    "tensor_file": set(),
    "run_folder": {"files", "seals", "settings"},
    "randomness": set(),
    "console": {"files"},
}


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_point_one_way(part: str) -> None:
    for path in [PACKAGE / f"{part}.py", *(PACKAGE / part).rglob("*.py")]:
        for module in imported_modules(path.read_text()) if path.exists() else []:
            names = module.split(".")
            if names[0] == "millionway":
                assert len(names) > 1, f"{path.name} imports the whole package"
                assert names[1] in ALLOWED[part], f"{path.name} imports {module}"


def test_every_part_has_its_place_in_the_order() -> None:
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - {"__init__", "__main__", "cli"} == set(ALLOWED)


def imported_modules(text: str) -> list[str]:
    """By `import a.b` and by `from a import b`, also inside functions."""
    modules = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            whole = node.module == "millionway"
            modules += [f"millionway.{alias.name}" for alias in node.names] if whole else [node.module or ""]
    return modules


def test_both_forms_of_import_are_seen() -> None:
    text = "import millionway\nimport millionway.a.b\nfrom millionway import c\ndef f():\n  from millionway.d import e"
    assert imported_modules(text) == ["millionway", "millionway.a.b", "millionway.c", "millionway.d"]


def test_every_name_in_the_walkthrough_exists() -> None:
    """Files by their path; names of code as something that is defined, in a file named in the same item if one is."""
    page = (ROOT / "docs" / "walkthrough.md").read_text()
    code = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    defined = set(re.findall(r"^\s*(?:def|class) (\w+)", code, re.M)) | set(re.findall(r"^([A-Z_]+)\b", code, re.M))
    for item in re.split(r"\n\n|\n(?=\d\. |- )", page):
        quoted = re.findall(r"`([^`]+)`", item)
        files = [name for name in quoted if name.endswith(".py")]
        assert all((PACKAGE / name).is_file() for name in files), files
        here = "\n".join((PACKAGE / name).read_text() for name in files)
        for name in quoted:
            if (
                re.fullmatch(r"\w+(\.\w+)?", name)
                and not re.search(r"\.(arrow|jsonl|png|py)$", name)
                and name != "code"
            ):
                last = name.split(".")[-1]
                assert last in defined, name
                assert not files or last in here, f"{name} is not in {files}"


def test_no_address_or_path_of_a_machine() -> None:
    files = [
        path for pattern in ("*.md", "*.toml", "*.txt", "Makefile", "*.cff", ".ci/run") for path in ROOT.glob(pattern)
    ]
    files += [*PACKAGE.rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*")]
    for path in files:
        if path.is_file():
            assert not re.search(r"/home/|/root/|/work/|pypi\.org|pythonhosted", path.read_text()), path

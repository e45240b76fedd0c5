"""Files that are whole or not there, and that no link leads anywhere else."""

import multiprocessing
import os
from pathlib import Path

import pytest

from millionway.console import printable
from millionway.files import (
    BadFile,
    check_folder,
    make_folder,
    open_append,
    read_regular,
    remove,
    remove_leftovers,
    replacing,
    temporary_name,
    write_whole,
)


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "old")
    with pytest.raises(RuntimeError), replacing(tmp_path / "a") as aside:
        aside.write_text("half")
        raise RuntimeError
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_no_link_is_written_through(tmp_path: Path) -> None:
    victim, run = tmp_path / "victim", tmp_path / "run"
    run.mkdir()
    victim.write_text("mine")
    for name in ("page", "page.tmp", ".page.tmp"):
        (run / name).symlink_to(victim)
    write_whole(run / "page", "new")
    assert victim.read_text() == "mine"
    assert not (run / "page").is_symlink() and (run / "page").read_text() == "new"


def _write_many(path: Path, word: str) -> None:
    for _ in range(50):
        write_whole(path, word * 1000)


def test_several_processes_may_write_one_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(tmp_path / "a", letter)) for letter in "wxyz"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(set((tmp_path / "a").read_text())) == 1
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("kind", ["link", "dangling link", "second name", "pipe", "folder"])
def test_lines_are_added_to_a_file_of_its_own_only(tmp_path: Path, kind: str) -> None:
    path, victim = tmp_path / "log", tmp_path / "victim"
    if kind != "dangling link":
        victim.write_text("mine")
    if "link" in kind:
        path.symlink_to(victim)
    elif kind == "second name":
        os.link(victim, path)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(BadFile, match="log: it is a link"):
        open_append(path)
    assert not victim.exists() or victim.read_text() == "mine"


@pytest.mark.parametrize("kind", ["link", "pipe", "device", "large", "missing"])
def test_only_files_of_a_likely_size_are_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "state.json"
    if kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "large":
        with open(path, "wb") as file:
            file.truncate(1 << 40)
    with pytest.raises(BadFile, match=str(path)):
        read_regular(path, 1 << 20)


def test_a_folder_with_a_link_or_a_pipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_text("")
    check_folder(tmp_path)
    (tmp_path / "a" / "b" / "elsewhere").symlink_to("/")
    with pytest.raises(BadFile, match="elsewhere"):
        check_folder(tmp_path)
    with pytest.raises(BadFile, match="elsewhere"):
        make_folder(tmp_path / "a" / "b" / "elsewhere")
    (tmp_path / "a" / "b" / "elsewhere").unlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadFile, match="pipe"):
        check_folder(tmp_path)


def test_only_what_we_made_is_removed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.tex").write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    ours = [temporary_name("page"), temporary_name("step_00000001")]
    (run / ours[0]).write_text("half")
    (run / ours[1]).mkdir()
    (run / ours[1] / "link").symlink_to(elsewhere)
    (run / temporary_name("link")).symlink_to(elsewhere)
    for theirs in (".page.tmp", "page.tmp", ".page.0123.tmp"):
        (run / theirs).write_text("theirs")
    remove_leftovers(run, "page")
    assert sorted(os.listdir(run))[:2] != ours and (run / ours[1]).exists() and not (run / ours[0]).exists()
    remove_leftovers(run)
    assert sorted(os.listdir(run)) == [".page.0123.tmp", ".page.tmp", "page.tmp"]
    remove(run / "nothing")
    assert (elsewhere / "thesis.tex").read_text() == "mine"


def test_names_do_nothing_to_a_terminal() -> None:
    name = "a\nb\x1b[2J\r\u202egnp.\udcff ü漢"
    assert printable(name) == r"a\nb\x1b[2J\r\u202egnp.\udcff ü漢"

"""A run folder from somebody else, or damaged: it runs nothing, writes and removes nothing elsewhere, and is refused by
one line that names the file."""

import errno
import json
import multiprocessing
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

import millionway
from millionway.cli import main

SETTINGS = {"epochs": 2, "batch_size": 16, "image_size": 16, "threads": 1, "save_every": 4, "keep": 2, "hardest": 2}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, digit_folder: Path) -> Path:
    return millionway.pretrain(digit_folder, tmp_path_factory.mktemp("finished") / "run", **SETTINGS)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("mine")
    return path


def verb(run: Path, *words: str) -> list[str]:
    return [*words, "--out" if words[0] == "pretrain" else "--run", str(run)]


def one_line(capsys: pytest.CaptureFixture, name: str, command: list[str]) -> str:
    """What a command says that is refused, which must name the file."""
    capsys.readouterr()
    assert main(command) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("millionway: ") and name in line
    return line


# --- links ------------------------------------------------------------------------------------------------------------


def test_the_report_is_not_written_through_a_link(run: Path, victim: Path) -> None:
    for name in ("report.html", "report.html.tmp"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(victim)
    assert main(verb(run, "report")) == 0
    assert victim.read_text() == "mine" and "<html" in (run / "report.html").read_text()


@pytest.mark.parametrize("name", ["train.log", "metrics.jsonl", "config.json", "checkpoints/last", "anything"])
def test_a_run_does_not_go_on_through_a_link(run: Path, victim: Path, name: str, capsys) -> None:
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(victim)
    one_line(capsys, name, verb(run, "pretrain", "--resume"))
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "checkpoints/step_00000014"])
def test_nothing_is_removed_behind_a_link(run: Path, tmp_path: Path, name: str, capsys) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.move(run / name, elsewhere)
    for number in range(3):
        (elsewhere / f"step_{number:08d}").mkdir(exist_ok=True)
    before = sorted(elsewhere.rglob("*"))
    (run / name).symlink_to(elsewhere)
    one_line(capsys, name, verb(run, "pretrain", "--resume", "--keep", "1"))
    assert sorted(elsewhere.rglob("*")) == before


def test_results_do_not_go_through_a_link(run: Path, tmp_path: Path, capsys) -> None:
    shutil.rmtree(run / "evaluation")
    (tmp_path / "elsewhere").mkdir()
    (run / "evaluation").symlink_to(tmp_path / "elsewhere")
    one_line(capsys, "evaluation", verb(run, "evaluate", "knn"))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_checkpoint_names_no_file_outside_of_it(run: Path) -> None:
    """/dev/zero never ends. In a process of its own."""
    for folder in (run / "checkpoints").glob("step_*"):
        content = json.loads((folder / "manifest.json").read_text())
        content["files"]["/dev/zero"] = {"bytes": 0, "sha256": ""}
        content["files"]["../../../../../../../dev/zero"] = {"bytes": 0, "sha256": ""}
        (folder / "manifest.json").write_text(json.dumps(content))
    command = [sys.executable, "-m", "millionway", *verb(run, "pretrain", "--resume")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "is damaged" in done.stderr and "beginning at step 0" in done.stderr


# --- seals ------------------------------------------------------------------------------------------------------------


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def _change_json(path: Path, change: Callable[[dict], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_changed_step_is_not_believed(run: Path, capsys, finished: Path) -> None:
    _change_json(run / "checkpoints" / "step_00000014" / "state.json", lambda state: state.update(step=12))
    assert main(verb(run, "pretrain", "--resume")) == 0
    said = capsys.readouterr().err
    assert "step_00000014 is damaged (state.json: its content changed); trying the one before" in said
    assert (run / "encoder.safetensors").read_bytes() == (finished / "encoder.safetensors").read_bytes()


def test_a_changed_learning_rate_is_not_believed(run: Path, capsys) -> None:
    _change_json(run / "config.json", lambda config: config["training"].update(lr=9.0))
    assert "seal is broken" in one_line(capsys, "config.json", verb(run, "pretrain", "--resume"))
    assert "seal is broken" in one_line(capsys, "config.json", verb(run, "evaluate", "knn"))


def test_every_byte_of_the_list_counts(run: Path, capsys) -> None:
    """A changed label or content hash goes into no number."""
    path = run / "manifest.arrow"
    whole = path.read_bytes()
    labels = np.asarray(millionway.index(json.loads((run / "config.json").read_text())["data"], run.parent / "l.arrow",
                                         threads=1).manifest.column("label"))  # fmt: skip
    for place in (whole.index(labels.tobytes()) + 40, whole.index(b"0/000.png") + 4):
        path.write_bytes(whole)
        _flip(path, place)
        one_line(capsys, "manifest.arrow", verb(run, "evaluate", "knn"))


@pytest.mark.parametrize("value", [1e37, float("nan")])
@pytest.mark.parametrize("resealed", [False, True])
def test_changed_weights_are_refused(run: Path, value: float, resealed: bool, capsys) -> None:
    path = run / "encoder.safetensors"
    if resealed and value == value:
        pytest.skip("finite, and sealed by whoever wrote it: these are the weights")
    if resealed:
        from millionway.model.encoder_file import load_encoder, save_encoder

        encoder = load_encoder(path)
        encoder.backbone.state_dict()["conv1.weight"][0, 0, 0, 0] = value
        save_encoder(encoder, path)
    else:
        with safetensors.safe_open(path, "pt") as file:
            header = file.metadata()
        weights = safetensors.torch.load_file(path)
        weights["conv1.weight"][0, 0, 0, 0] = value
        safetensors.torch.save_file(weights, path, header)
    for command in (
        verb(run, "evaluate", "knn"),
        [*verb(run, "export"), "--out", str(run / "w.safetensors")],
        [*verb(run, "embed"), "--out", str(run / "f.npy"), "--data", "digits"],
    ):
        one_line(capsys, "encoder.safetensors", command)


def test_folders_from_before_there_were_seals_are_read_with_a_warning(run: Path, capsys) -> None:
    for name in ("config.json", "environment.json", "evaluation/neighbors.json"):
        _change_json(run / name, lambda content: content.pop("seal"))
    assert main(verb(run, "report")) == 0
    assert main(verb(run, "evaluate", "knn")) == 0
    assert "config.json has no seal" in capsys.readouterr().err


@pytest.mark.parametrize("left", [0, 3])
def test_lost_lines_are_missed(run: Path, left: int, capsys) -> None:
    """The newest checkpoint knows how many there were."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:left]))
    for command in (verb(run, "report"), verb(run, "pretrain", "--resume")):
        assert main(command) == 0
        assert re.search(r"metrics.jsonl: of \d+ lines \d+ are missing", capsys.readouterr().err)


def test_a_whole_run_misses_no_line(run: Path, capsys) -> None:
    assert main(verb(run, "report")) == 0
    assert main(verb(run, "pretrain", "--resume")) == 0
    assert "missing" not in capsys.readouterr().err


def test_features_of_an_epoch_are_sealed(run: Path) -> None:
    from millionway.evaluation.snapshots import read_snapshot

    path, other = run / "snapshots" / "epoch_00001.safetensors", run / "snapshots" / "epoch_00002.safetensors"
    assert len(read_snapshot(run, 1).ids) == 120
    path.write_bytes(other.read_bytes())
    with pytest.raises(ValueError, match=r"epoch_00001.safetensors: .* seal is broken"):
        read_snapshot(run, 1)
    _flip(other, other.stat().st_size - 1)
    with pytest.raises(ValueError, match=r"epoch_00002.safetensors: .* seal is broken"):
        read_snapshot(run, 2)


def test_a_result_is_not_taken_for_another(run: Path, capsys) -> None:
    """Both are sealed, and look alike."""
    shutil.copy(run / "evaluation" / "neighbors.json", run / "evaluation" / "samples.json")
    assert "it is of 'neighbors'" in one_line(capsys, "samples.json", verb(run, "report"))


def test_last_is_written_again(run: Path) -> None:
    for content in (None, b"", b"step_00000001\n"):
        (run / "checkpoints" / "last").unlink()
        if content is not None:
            (run / "checkpoints" / "last").write_bytes(content)
        assert main(verb(run, "pretrain", "--resume")) == 0
        assert (run / "checkpoints" / "last").read_text() == "step_00000014\n"


# --- what a file says -------------------------------------------------------------------------------------------------

ODD = [None, [], {}, "text", -1, 1e308, True, [1, 2, 3], {"a": {}}]


def test_what_no_run_writes_is_one_line_also_with_a_seal(run: Path, capsys) -> None:
    """Each setting of config.json in turn with a value of another kind, and sealed."""
    from millionway.seals import read_json, write_json

    content = read_json(run / "config.json")
    places = [(name,) for name in content] + [(n, m) for n, v in content.items() if isinstance(v, dict) for m in v]
    rng = np.random.default_rng(0)
    for place in places:
        changed = json.loads(json.dumps(content))
        inner = changed if len(place) == 1 else changed[place[0]]
        inner[place[-1]] = ODD[rng.integers(len(ODD))]
        write_json(run / "config.json", changed)
        capsys.readouterr()
        code = main(verb(run, "evaluate", "retrieval"))
        said = capsys.readouterr().err
        assert code in (0, 2) and "Traceback" not in said, (place, inner[place[-1]], said)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff\xfe", b'{"a": NaN}', b"{}"])
@pytest.mark.parametrize("name", ["config.json", "checkpoints/step_00000014/state.json", "metrics.jsonl"])
def test_no_json_ends_in_a_traceback(run: Path, name: str, content: bytes, capsys) -> None:
    (run / name).write_bytes(content)
    code = main(verb(run, "pretrain", "--resume"))
    assert code == (2 if name == "config.json" else 0)
    said = capsys.readouterr().err
    assert Path(name).name in said or (name == "metrics.jsonl" and b"\n" not in content)


def test_an_offset_out_of_the_list_is_found(run: Path) -> None:
    """In a process of its own: it used to end by a signal."""
    path = run / "manifest.arrow"
    data = bytearray(path.read_bytes())
    lengths = struct.pack("<4i", 0, 9, 18, 27)  # keys such as 0/000.png
    place = data.index(lengths)
    data[place + 4 : place + 8] = struct.pack("<i", 0x7FFFFFF0)
    path.write_bytes(data)
    command = [sys.executable, "-m", "millionway", *verb(run, "evaluate", "knn")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "manifest.arrow: not a manifest" in done.stderr, done.stderr


def test_an_encoder_of_any_name_is_no_program(run: Path, capsys) -> None:
    """`export` prints lines to paste."""
    path = run / "encoder.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["millionway_encoder"])
    about.pop("seal")
    for name in ("torchvision/resnet50(); import os; os.system('x') #", "timm/hf-hub:stranger/model", 3, None):
        about["name"] = name
        weights = safetensors.torch.load_file(path)
        safetensors.torch.save_file(weights, path, {"millionway_encoder": json.dumps(about)})
        one_line(capsys, "encoder.safetensors", [*verb(run, "export"), "--out", str(run / "w.safetensors")])


def test_a_disk_that_fails_is_told_with_how_to_go_on(
    tmp_path: Path, digit_folder: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    run, sync = tmp_path / "run", os.fsync

    def fsync(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith("metrics.jsonl"):
            raise OSError(errno.EIO, "Input/output error")
        sync(file)

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fsync)
        assert "--resume" in one_line(capsys, "Input/output error", _start(digit_folder, run))
    assert main(verb(run, "pretrain", "--resume")) == 0
    assert (run / "encoder.safetensors").read_bytes() == (finished / "encoder.safetensors").read_bytes()


def test_tensors_are_for_others_to_read(run: Path) -> None:
    """As every other file is, by the umask."""
    modes = {path.stat().st_mode for path in run.rglob("*") if path.is_file()}
    assert len(modes) == 1


# --- starts -----------------------------------------------------------------------------------------------------------


def _start(digit_folder: Path, run: Path) -> list[str]:
    options = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return ["pretrain", "--data", str(digit_folder), "--out", str(run), *options]


@pytest.mark.parametrize("word", ["the same command", "--resume"])
def test_a_start_that_was_killed_goes_on_by_either_word(
    tmp_path: Path, digit_folder: Path, finished: Path, word: str, capsys
) -> None:
    run, command = tmp_path / "run", [sys.executable, "-m", "millionway"]
    process = subprocess.Popen([*command, *_start(digit_folder, run)], stderr=subprocess.DEVNULL)
    while not (run / "starting.json").exists() and not (run / "config.json").exists():
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (run / "config.json").exists()
    assert main(_start(digit_folder, run) if word == "the same command" else verb(run, "pretrain", "--resume")) == 0
    assert (run / "encoder.safetensors").read_bytes() == (finished / "encoder.safetensors").read_bytes()
    assert not (run / "starting.json").exists()


def test_a_folder_with_only_a_log_is_a_start(tmp_path: Path, digit_folder: Path, capsys) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "train.log").write_text("2026-01-01 00:00:00,123 INFO 120 images\n")
    assert "give the first command again" in one_line(capsys, "run", verb(run, "pretrain", "--resume"))
    assert main(_start(digit_folder, run)) == 0


def _new_run(run: Path, begin: float, results: multiprocessing.Queue) -> None:
    from millionway.run_folder import new_run_folder
    from millionway.settings.pretrain import Pretrain
    from millionway.settings.stored import write_settings

    while time.monotonic() < begin:
        pass
    try:
        config = Pretrain(data="digits", out=run)
        with new_run_folder(run, config):
            (run / "environment.json").write_text(str(os.getpid()))
            write_settings(run, config)
        results.put("began")
    except ValueError as error:
        results.put(str(error))


def test_a_start_that_comes_an_instant_later_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one makes the folder, and begins, between its look for the folder and its own mkdir."""
    from millionway.run_folder import new_run_folder
    from millionway.settings.pretrain import Pretrain
    from millionway.settings.stored import write_settings

    run, mkdir = tmp_path / "run", os.mkdir
    config = Pretrain(data="digits", out=run)

    def late_mkdir(path: Path, *mode: int) -> None:
        if path == run:
            monkeypatch.setattr(os, "mkdir", mkdir)
            with new_run_folder(run, config):
                write_settings(run, config)
        mkdir(path, *mode)

    monkeypatch.setattr(os, "mkdir", late_mkdir)
    with pytest.raises(ValueError, match="exists already"), new_run_folder(run, config):
        pass
    assert sorted(os.listdir(run)) == ["config.json", "train.log"]


def test_of_several_starts_one_wins_and_keeps_its_files(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for number in range(20):
        run, results = tmp_path / f"run{number}", context.Queue()
        begin = time.monotonic() + 0.02
        starts = [context.Process(target=_new_run, args=(run, begin, results)) for _ in range(3)]
        for start in starts:
            start.start()
        said = sorted(results.get() for _ in starts)
        for start in starts:
            start.join()
        assert said.count("began") == 1, said
        assert all("in use" in line or "exists already" in line for line in said if line != "began")
        assert sorted(os.listdir(run)) == ["config.json", "environment.json", "train.log"]

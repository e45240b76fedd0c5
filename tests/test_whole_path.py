"""One whole small run by real commands: index, pretrain, kill, resume, evaluate, export, report."""

import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

COMMAND = [sys.executable, "-m", "millionway"]
TIMES = {"images_per_second", "peak_memory_bytes", "seconds", "hardest_seconds"}
TIMES |= {"data_share", "encoder_share", "classifier_share", "seal"}  # a seal covers the times of its line
SETTINGS = ["--epochs", "12", "--batch-size", "20", "--image-size", "16", "--log-every", "1", "--eval-every", "4"]
SETTINGS += ["--save-every", "4", "--hardest", "5", "--encoder", "narrow-resnet"]


def millionway(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, args)], capture_output=True, text=True)


def numbers(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def tensors(run: Path) -> dict[str, torch.Tensor]:
    newest = run / "checkpoints" / (run / "checkpoints" / "last").read_text().strip()
    files = [run / "encoder.safetensors", newest / "model.safetensors", *(newest / "classifier").iterdir()]
    return {f"{path.name}:{name}": t for path in files for name, t in safetensors.torch.load_file(path).items()}


def same(a: Path, b: Path) -> bool:
    """Every number that was logged and every bit of the state."""
    ours, theirs = tensors(a), tensors(b)
    equal = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    same_file = (a / "encoder.safetensors").read_bytes() == (b / "encoder.safetensors").read_bytes()
    return equal and same_file and numbers(a) == numbers(b)


def start(*args: object) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, *map(str, args)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    """Until the run has logged this step; the process must still be at work then."""
    while process.poll() is None:
        try:
            if max(line["step"] for line in numbers(run)) >= step:
                return
        except (OSError, ValueError):  # not there yet, or a line half written
            pass
        time.sleep(0.005)
    raise AssertionError(f"ended before step {step}: {process.communicate()[1]}")


@pytest.fixture(scope="module")
def undisturbed(digit_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    done = millionway("pretrain", "--data", digit_folder, "--out", run, *SETTINGS)
    assert done.returncode == 0, done.stderr
    assert len(numbers(run)) == 72 + 12 + 4  # steps, epochs, evaluations
    return run


@pytest.mark.slow
def test_kill_and_resume_end_in_the_same_numbers(undisturbed: Path, digit_folder: Path, tmp_path: Path) -> None:
    run, listed = tmp_path / "run", tmp_path / "manifest.arrow"
    assert millionway("index", digit_folder, "--out", listed).returncode == 0
    process = start("pretrain", "--data", digit_folder, "--manifest", listed, "--out", run, *SETTINGS)
    for step in (9, 59):  # each in the middle of an epoch of 6 steps, and between two checkpoints
        wait_for_step(process, run, step)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        process = start("pretrain", "--resume", "--out", run)
    message = process.communicate()[1]
    assert process.returncode == 0, message
    assert same(run, undisturbed)

    for protocol in ("knn", "linear"):
        done = millionway("evaluate", protocol, "--run", run)
        assert done.returncode == 0, done.stderr
        assert (run / "evaluation" / f"{protocol}.json").is_file()
    assert millionway("export", "--run", run, "--out", tmp_path / "encoder.pt", "--format", "torch").returncode == 0
    assert torch.load(tmp_path / "encoder.pt", weights_only=True)
    assert millionway("report", "--run", run).returncode == 0
    page = (run / "report.html").read_text()
    assert "linear top1" in page and page.count("data:image/svg+xml") >= 5 and page.count("data:image/png") >= 80


@pytest.mark.slow
def test_kill_before_the_first_checkpoint(undisturbed: Path, digit_folder: Path, tmp_path: Path) -> None:
    """The weights that a run starts from are not forgotten."""
    first = ("--init-from", undisturbed / "encoder.safetensors", *SETTINGS, "--epochs", "1")
    whole, run = tmp_path / "whole", tmp_path / "run"
    done = millionway("pretrain", "--data", digit_folder, "--out", whole, *first)
    assert done.returncode == 0, done.stderr
    process = start("pretrain", "--data", digit_folder, "--out", run, *first)
    while process.poll() is None and not (run / "config.json").exists():
        time.sleep(0.002)
    process.kill()
    process.communicate()
    assert not (run / "checkpoints" / "last").exists()
    done = millionway("pretrain", "--resume", "--out", run)
    assert done.returncode == 0 and "beginning at step 0" in done.stderr
    assert same(run, whole)


@pytest.mark.slow
def test_in_a_terminal_there_are_bars(digit_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    quoted = shlex.quote(str(run))
    command = f"{shlex.join(COMMAND)} pretrain --data {digit_folder} --out {quoted} {shlex.join(SETTINGS)} --epochs 2"
    command += f" && {shlex.join(COMMAND)} evaluate knn --run {quoted}"
    ours, theirs = pty.openpty()
    process = subprocess.Popen(["sh", "-c", command], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            shown += chunk
    except OSError:  # Linux says so when the other side is closed
        pass
    os.close(ours)
    text = shown.decode(errors="replace")
    assert process.wait() == 0, text
    assert "pretraining" in text and "steps" in text and "images/s" in text and "Traceback" not in text
    assert re.search(r"top-1\s+\d+\.\d%", text) and "knn_200" in text


def test_interrupt_saves_and_says_how_to_go_on(undisturbed: Path, digit_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "a run"
    process = start("pretrain", "--data", digit_folder, "--out", run, *SETTINGS)
    wait_for_step(process, run, 10)
    process.send_signal(signal.SIGINT)
    message = process.communicate()[1]
    assert process.returncode == 130
    command = f"millionway pretrain --resume --out '{run}'"
    assert command in message and "Traceback" not in message
    step = max(line["step"] for line in numbers(run))
    assert (run / "checkpoints" / "last").read_text().strip() == f"step_{step:08d}"
    done = millionway(*shlex.split(command)[1:])
    assert done.returncode == 0, done.stderr
    assert same(run, undisturbed)


def test_a_damaged_checkpoint_is_passed_over(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    newest = run / "checkpoints" / (run / "checkpoints" / "last").read_text().strip()
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 16
    (newest / "model.safetensors").write_bytes(data)
    done = millionway("pretrain", "--resume", "--out", run)
    assert done.returncode == 0 and f"{newest.name} is damaged" in done.stderr
    assert same(run, undisturbed)

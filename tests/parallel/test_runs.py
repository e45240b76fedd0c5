"""Whole runs by several real processes: the same as by one, and what happens when one of them breaks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

SETTINGS = ["--batch-size", "24", "--epochs", "3", "--warmup-epochs", "1", "--image-size", "16", "--log-every", "1"]
SETTINGS += ["--device", "cpu", "--threads", "1", "--eval-every", "3", "--dim", "16", "--hardest", "3"]
SETTINGS += ["--save-every", "2"]
SETTINGS += ["--row-norm", "1"]  # short rows would move far and make much of rounding


def command(size: int, *arguments: str, launcher: tuple[str, ...] = ("--standalone",)) -> list[str]:
    run = [sys.executable, "-m", "torch.distributed.run", *launcher, f"--nproc-per-node={size}"]
    return [*run, "-m", "millionway", "pretrain", *arguments]


def pretrain(size: int, data: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    arguments = ["--data", str(data), "--out", str(out), *SETTINGS, *more]
    return subprocess.run(command(size, *arguments), capture_output=True, text=True)


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


def newest(out: Path) -> Path:
    return out / "checkpoints" / (out / "checkpoints" / "last").read_text().strip()


def assert_same_end(a: Path, b: Path) -> None:
    """The last checkpoints, bit by bit."""
    assert losses(a) == losses(b)
    for one, other in zip(
        sorted(newest(a).rglob("*.safetensors")), sorted(newest(b).rglob("*.safetensors")), strict=True
    ):
        first, second = load_file(one), load_file(other)
        assert first.keys() == second.keys()
        for name in first:
            assert torch.equal(first[name], second[name]), name


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, digit_folder: Path) -> Path:
    """By two processes, without a fault."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    done = pretrain(2, digit_folder, out)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count("epoch 3/3: loss") == 1  # one process speaks
    assert (out / "report.html").exists()
    return out


@contextmanager
def begun(size: int, data: Path, out: Path, *more: str, restarts: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A run of its own process group, past its checkpoint of step 4."""
    launcher = ("--standalone", f"--max-restarts={restarts}", "--monitor-interval=0.2")
    arguments = ["--data", str(data), "--out", str(out), *SETTINGS, *more]
    process = subprocess.Popen(
        command(size, *arguments, launcher=launcher), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        wait_until(lambda: (out / "checkpoints" / "step_00000004").exists() or process.poll() is not None)
        assert process.poll() is None, process.stderr.read()[-4000:] if process.stderr else ""
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        for pid in ranks_of(out):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def wait_until(happened: Callable[[], bool], seconds: float = 600) -> None:
    """A hang of the code under test becomes a failure; the limit is far beyond what a loaded machine takes."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"nothing happened in {seconds:g} s"
        time.sleep(0.05)


def ranks_of(out: Path) -> list[int]:
    """The processes that train into this folder, by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            environment = dict(
                pair.partition(b"=")[::2] for pair in (folder / "environ").read_bytes().split(b"\0") if b"=" in pair
            )
        except OSError:
            continue
        if str(out).encode() in words and b"LOCAL_RANK" in environment and b"torch.distributed.run" not in words:
            found[int(environment[b"RANK"])] = int(folder.name)
    return [found[rank] for rank in sorted(found)]


@pytest.mark.slow
def test_with_synchronized_bn_a_run_does_not_depend_on_the_number_of_processes(
    tmp_path: Path, digit_folder: Path
) -> None:
    runs = []
    for size in (1, 2, 3):
        out = tmp_path / f"ranks_{size}"
        steady = ("--lr", "0.0003", "--row-lr", "10", "--prior", "running-bn")
        done = pretrain(size, digit_folder, out, "--sync-bn", *steady)
        assert done.returncode == 0, done.stderr[-4000:]
        runs.append(losses(out))
    assert len(runs[0]) == 15
    for run in runs[1:]:
        # BN of a few small images makes much of rounding: with another number of threads one process does the same.
        assert run[:6] == pytest.approx(runs[0][:6], rel=1e-5)
        assert run == pytest.approx(runs[0], rel=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_started_again(tmp_path: Path, digit_folder: Path, undisturbed: Path, victim: int) -> None:
    out = tmp_path / "run"
    with begun(2, digit_folder, out, restarts=1) as process:
        os.kill(ranks_of(out)[victim], signal.SIGKILL)
        _, errors = process.communicate()
    assert process.returncode == 0, errors[-4000:]
    assert "going on from" in errors
    assert_same_end(out, undisturbed)


@pytest.mark.slow
def test_rows_in_a_file_survive_a_kill_and_are_those_of_memory(
    tmp_path: Path, digit_folder: Path, undisturbed: Path
) -> None:
    out = tmp_path / "run"
    with begun(2, digit_folder, out, "--rows-in", str(tmp_path / "rows"), restarts=1) as process:
        os.kill(ranks_of(out)[1], signal.SIGKILL)
        _, errors = process.communicate()
    assert process.returncode == 0, errors[-4000:]
    assert "going on from" in errors and (tmp_path / "rows").stat().st_size > 4096
    assert_same_end(out, undisturbed)


@pytest.mark.slow
def test_three_processes_resume_to_the_same_numbers(tmp_path: Path, digit_folder: Path) -> None:
    """To rounding: DDP sums gradients in buckets, and orders them anew after a start."""
    whole, out = tmp_path / "whole", tmp_path / "cut"
    # So that rounding is not magnified by BN of a few small images, nor by who is among the hardest of near-equals.
    steady = ("--lr", "0.0003", "--row-lr", "10", "--smoothing", "0")
    assert pretrain(3, digit_folder, whole, *steady).returncode == 0
    with begun(3, digit_folder, out, *steady) as process:
        os.killpg(process.pid, signal.SIGKILL)
        for pid in ranks_of(out):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    done = subprocess.run(command(3, "--resume", "--out", str(out)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "going on from" in done.stderr
    assert losses(out) == pytest.approx(losses(whole), rel=1e-6)


@pytest.mark.slow
def test_two_processes_take_over_changed_images_as_one_does(
    tmp_path: Path, digit_folder: Path, digit_pixels: np.ndarray
) -> None:
    photos, alone, together = tmp_path / "photos", tmp_path / "alone", tmp_path / "together"
    shutil.copytree(digit_folder, photos)
    steady = ("--lr", "0.0003", "--row-lr", "10", "--smoothing", "0", "--sync-bn", "--keep", "99")
    steady += ("--views", "2", "--head", "mlp", "--temperature", "0.15")
    assert pretrain(1, photos, alone, *steady).returncode == 0
    for folder in (alone / "checkpoints").glob("step_0000001*"):
        shutil.rmtree(folder)  # as if it had been stopped after step 8, in the second epoch
    shutil.copytree(alone, together)
    for path in sorted(photos.rglob("*.png"))[::40]:
        path.unlink()
    for number in range(7):
        Image.fromarray(digit_pixels[200 + number]).resize((16, 16)).save(photos / "3" / f"new-{number}.png")
    for size, out in ((1, alone), (2, together)):
        done = subprocess.run(command(size, "--resume", "--data-changed", "--out", str(out)), capture_output=True)
        assert done.returncode == 0, done.stderr[-4000:]
    assert len(losses(alone)) == 15
    assert losses(together)[5:9] == pytest.approx(losses(alone)[5:9], rel=1e-5)


@pytest.mark.slow
def test_after_everything_was_killed_the_run_goes_on_with_any_number_of_processes(
    tmp_path: Path, digit_folder: Path, undisturbed: Path
) -> None:
    out = tmp_path / "run"
    with begun(2, digit_folder, out) as process:
        process.kill()  # the launcher; its ranks must not be left behind
        for pid in ranks_of(out):
            os.kill(pid, signal.SIGKILL)
    for size in (2, 3, 1):
        again = tmp_path / f"again_{size}"
        subprocess.run(["cp", "-r", str(out), str(again)], check=True)
        done = subprocess.run(command(size, "--resume", "--out", str(again)), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        assert len(losses(again)) == 15
        if size == 2:
            assert_same_end(again, undisturbed)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tmp_path: Path, digit_folder: Path) -> None:
    out = tmp_path / "run"
    with begun(2, digit_folder, out, "--timeout", "4", "--epochs", "300") as process:
        stopped = ranks_of(out)[1]
        os.kill(stopped, signal.SIGSTOP)
        assert process.stderr is not None
        said = ""
        while "rank 1 was last heard of at step" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        os.kill(stopped, signal.SIGKILL)
        process.communicate()
    assert process.returncode != 0


@pytest.mark.slow
@pytest.mark.root
def test_a_full_disk_stops_all_with_one_message(digit_folder: Path, disk_of) -> None:
    done = pretrain(2, digit_folder, disk_of("1m") / "run", "--dim", "128")
    assert done.returncode != 0
    assert "no space left in" in done.stderr, done.stderr[-4000:]


@contextmanager
def two_machines(tmp_path: Path, first: list[str], second: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Two launchers with a folder of their own each."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for number, arguments in enumerate((first, second)):
        folder = tmp_path / f"machine_{number}"
        folder.mkdir(exist_ok=True)
        launcher = ("--nnodes=2", f"--node-rank={number}", "--master-addr=127.0.0.1", f"--master-port={port}")
        run = command(1, "--out", str(tmp_path / "run"), *SETTINGS, *arguments, launcher=launcher)
        processes.append(subprocess.Popen(run, stderr=subprocess.PIPE, text=True, cwd=folder))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def pictures(folder: Path, num: int) -> None:
    folder.mkdir(parents=True)
    for index in range(num):
        Image.new("RGB", (16, 16), (index, 2 * index, 0)).save(folder / f"{index:02d}.png")


def test_different_settings_are_named_on_every_rank(tmp_path: Path, digit_folder: Path) -> None:
    data = ["--data", str(digit_folder)]
    with two_machines(tmp_path, [*data, "--lr", "0.1"], [*data, "--lr", "0.2"]) as machines:
        for machine in machines:
            _, errors = machine.communicate()
            assert machine.returncode != 0
            assert "--lr is 0.1 on rank 0 and 0.2 on rank 1" in errors
    assert not (tmp_path / "run").exists()


def test_missing_images_on_one_machine_stop_all(tmp_path: Path) -> None:
    pictures(tmp_path / "machine_0" / "photos", 48)
    pictures(tmp_path / "machine_1" / "photos", 47)
    with two_machines(tmp_path, ["--data", "photos"], ["--data", "photos"]) as machines:
        for machine in machines:
            _, errors = machine.communicate()
            assert machine.returncode != 0
            assert "the images of photos are not those of" in errors and "47.png" in errors, errors[-3000:]
    assert not (tmp_path / "run").exists()


def test_a_rank_that_nobody_joins_says_so(tmp_path: Path, digit_folder: Path) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    run = [sys.executable, "-m", "millionway", "pretrain", "--data", str(digit_folder), "--out", str(tmp_path / "run")]
    done = subprocess.run([*run, "--timeout", "2"], capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 2
    assert "rank 0 of 2 could not join the others" in done.stderr


def test_a_batch_that_cannot_be_shared_is_refused(tmp_path: Path, digit_folder: Path) -> None:
    done = pretrain(2, digit_folder, tmp_path / "run", "--batch-size", "25")
    assert done.returncode != 0
    assert "--batch-size 25 cannot be shared equally by 2 processes. The nearest that can: 24 and 26." in done.stderr


@pytest.mark.slow
def test_given_weights_rest_and_learn_alike_in_two_processes(
    undisturbed: Path, digit_folder: Path, tmp_path: Path
) -> None:
    """Their BN is fixed, so nothing depends on how a batch is split."""
    more = ["--init-from", str(undisturbed), "--frozen-epochs", "1", "--keep", "99", "--no-guard"]
    for size in (1, 2):
        done = pretrain(size, digit_folder, tmp_path / str(size), *more)
        assert done.returncode == 0, done.stderr[-4000:]
    one, two = losses(tmp_path / "1"), losses(tmp_path / "2")
    assert len(one) == 15 and np.allclose(one, two, rtol=1e-3)
    given = load_file(undisturbed / "encoder.safetensors")
    for size in (1, 2):
        tensors = load_file(tmp_path / str(size) / "checkpoints" / "step_00000004" / "model.safetensors")
        assert all(tensors[f"network.encoder.backbone.{name}"].equal(given[name]) for name in given)
        learned = load_file(tmp_path / str(size) / "encoder.safetensors")
        assert not all(learned[name].equal(given[name]) for name in given)

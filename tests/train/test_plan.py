import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch

import millionway
from millionway.cli import main
from millionway.settings.quantities import number
from millionway.train import outlook

STEPS = """
import json, sys, tempfile, torch
from pathlib import Path
from millionway.machine import has_bfloat16
from millionway.settings.pretrain import IMAGENET_MEAN, IMAGENET_STD
from millionway.model.classifier import InstanceClassifier
from millionway.model.encoder import EncoderSpec, build_encoder
from millionway.model.head import build_head
from millionway.model.network import Network
from millionway.parallel.group import Group
from millionway.train.checkpoint import Saver
from millionway.train.state import State
from millionway.train.step import train_step

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

def run(num, images, size, k):
    encoder = build_encoder(EncoderSpec("narrow-resnet", "small", size, IMAGENET_MEAN, IMAGENET_STD), 0)
    precision = "bfloat16" if has_bfloat16(torch.device("cpu")) else "float32"
    network = Network(encoder, build_head("linear", encoder.feature_dim, 64, 0), precision)
    classifier = InstanceClassifier(num, 64, keep_bytes=0)
    table = torch.zeros(num, k, dtype=torch.int32)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, 0.9)
    state = State(network, optimizer, classifier, table, step=0)
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(Path(folder) / "checkpoints", "", 2, Group.current(), 60.0)
        for number in range(5):
            if number % 2 == 0:
                state.hardest = classifier.hardest(k)
            views, ids = torch.rand(2 * images, 3, size, size), torch.arange(images).repeat(2)
            train_step(network, classifier, optimizer, views, ids, state.hardest, alpha=0.2, lr=0.1, row_lr=0.1,
                       momentum=0.9, weight_decay=0.0, pairs=3.0, num_classified=images)
            state.step += 1
            if number % 2 == 1:
                saver.save(state)  # beside the next search, as at the end of an epoch
        saver.wait()

torch.set_num_threads(2)
run(1000, 4, 16, 5)  # what libraries take once
before = status("VmRSS")
run(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
print(json.dumps(status("VmHWM") - before))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("instances", "images", "size", "k"), [(60_000, 16, 32, 100), (60_000, 128, 64, 50)])
def test_the_plan_is_what_search_step_and_checkpoint_take(instances: int, images: int, size: int, k: int) -> None:
    command = [sys.executable, "-c", STEPS, *map(str, (instances, images, size, k))]

    def most(times: int, **environment: str) -> int:
        run = partial(subprocess.check_output, command, text=True, env=os.environ | environment)
        return max(json.loads(run()) for _ in range(times))

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    planned = millionway.plan(
        instances, batch_size=images, encoder="narrow-resnet", image_size=size, hardest=k, device="cpu"
    )["hybrid"]
    torch.set_num_threads(threads)
    # malloc may keep what was freed, more or less of it from run to run, or return it at once.
    assert most(1, MALLOC_MMAP_THRESHOLD_="65536") <= planned.total <= 1.15 * most(2), planned.memory


def test_the_largest_number_fits_and_the_next_does_not() -> None:
    options = {"batch_size": 4096, "devices": 64, "encoder": "resnet50"}
    answers = millionway.plan("14.2M", device_memory="32GB", **options)
    for side in ("hybrid", "replicated"):
        largest = answers[side].largest_instances
        assert largest is not None
        assert millionway.plan(largest, **options)[side].total <= 32e9
        assert millionway.plan(int(1.01 * largest), **options)[side].total > 32e9
    assert answers["hybrid"].total < 32e9 < answers["replicated"].total  # as in the paper
    assert answers["hybrid"].largest_instances > 6 * (answers["replicated"].largest_instances or 0)


def test_the_search_for_hardest_classes_is_estimated() -> None:
    answer = millionway.plan("1.28M", devices=8, batch_size=4096)["hybrid"]
    assert 1 < answer.hardest_seconds < 20  # 5e13 operations on each of eight GPUs
    assert millionway.plan("1.28M", devices=8, batch_size=4096, hardest=0)["hybrid"].hardest_seconds is None
    measured = millionway.plan(
        20_000, batch_size=8, encoder="narrow-resnet", image_size=16, hardest=10, device="cpu", calibrate=True
    )["hybrid"]
    assert 0 < measured.hardest_seconds < 100 and set(measured.seconds) == {"rows", "encoder"}


def test_numbers_as_people_write_them() -> None:
    assert [number(text) for text in ("14.2M", "1,281,167", "32GB", "32GiB", "5k", "7")] == [
        *(14_200_000, 1_281_167, 32_000_000_000, 32 * 2**30, 5000, 7)
    ]
    for text in ("", "many", "-3M", "nan", "3 apples"):
        with pytest.raises(ValueError, match="is not a number such as"):
            number(text)


def test_impossible_questions_are_named() -> None:
    with pytest.raises(ValueError, match="cannot be shared equally by 3"):
        millionway.plan(1000, batch_size=64, devices=3)
    with pytest.raises(ValueError, match="--storage is one of"):
        millionway.plan(1000, storage="int8")
    with pytest.raises(ValueError, match="--devices must be positive, not 0"):
        millionway.plan(1000, devices=0)


def test_of_a_folder_of_images_it_answers_in_five_lines(digit_folder, capsys, monkeypatch) -> None:
    monkeypatch.setattr(outlook, "SECONDS", 0.1)
    assert main(["plan", "--data", str(digit_folder), "--epochs", "7", "--threads", "1"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("120 images at 16 px, narrow-resnet, 7 epochs, batches of 15")
    assert [line.split()[0] for line in lines] == ["memory", "batch", "time", "disk"]
    assert main(["plan", "--data", str(digit_folder), "--threads", "1", "--verbose"]) == 0
    assert "activations" in capsys.readouterr().out


def test_a_batch_that_does_not_fit_is_not_tried(digit_folder) -> None:
    found = millionway.plan(data=digit_folder, batch_size=64, image_size=64, device_memory="900MB", threads=1)
    assert not found.fits and found.fitting_batch < 64 and found.seconds is None
    assert "does not fit" in found.lines()[2] or "nothing fits" in found.lines()[2]


def test_two_measurements_agree_or_that_is_said(digit_folder, monkeypatch) -> None:
    """Steps whose time is made up: the third agrees with the second."""
    times = iter((9.0, 1.0, 2.0, 2.1))
    monkeypatch.setattr(outlook, "_steps", lambda *_: ({16: made_up(each)} for each in times))
    found = millionway.plan(data=digit_folder, epochs=10, threads=1)
    assert found.step_seconds == [1.0, 2.0, 2.1] and found.apart == pytest.approx(0.05)
    # 10 epochs of 8 steps, a pass for the prior, 11 evaluations over the images for health and snapshot, 7 for k-NN too
    assert found.seconds == pytest.approx(80 * 2.05 + (120 + (2 * 11 + 7) * 120) / (2 * 15) * 2.1 / 3, rel=0.05)
    assert "about 4 min" in found.lines()[3]
    times = iter((1, 1, 2, 1, 2, 1, 2))
    found = millionway.plan(data=digit_folder, epochs=10, threads=1)
    assert len(found.step_seconds) == outlook.MAX_TRIES
    assert "something else is running" in found.lines()[3]


def test_steps_of_both_sides_count_as_much_as_there_are_of_them(digit_folder, monkeypatch) -> None:
    asked = []

    def steps(question, dataset, device, sides):
        asked.append(sides)
        return ({32: made_up(1.0), 64: made_up(3.0)} for _ in range(9))

    monkeypatch.setattr(outlook, "_steps", steps)
    found = millionway.plan(data=digit_folder, epochs=10, threads=1, image_size=64)
    assert asked == [[32, 64]] and found.step_seconds == pytest.approx([1.6, 1.6])
    assert found.seconds == pytest.approx(80 * 1.6 + (120 + (2 * 11 + 7) * 120) / (2 * 15) * 3.0 / 3, rel=0.05)


def made_up(seconds: float) -> dict[str, float]:
    return {"data": 0.0, "encoder": seconds, "classifier": 0.0}


@pytest.mark.slow
def test_the_outlook_is_what_a_run_takes(digit_folder, tmp_path) -> None:
    """Time is left out: what else runs on the machine would decide."""
    settings = {"epochs": 3, "image_size": 64, "threads": 1}
    found = millionway.plan(data=digit_folder, **settings)
    code = f"import millionway; millionway.pretrain({str(digit_folder)!r}, {str(tmp_path / 'run')!r}, **{settings!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    peak = max(line.get("peak_memory_bytes", 0) for line in lines)
    assert found.memory_bytes == pytest.approx(peak, rel=0.3)
    on_disk = sum(path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert 0.8 * on_disk < found.disk_bytes < 2 * on_disk


def test_neither_images_nor_their_number() -> None:
    with pytest.raises(ValueError, match="give --data, your images, or --instances"):
        millionway.plan()

import subprocess
import sys

import pytest

import millionway
from millionway.settings.plan import Plan
from millionway.train.limits import GPUS, Work, bounds
from millionway.train.limits import work_of as work_of_question
from millionway.train.plan import Question


def work_of(asked: Plan, network_bytes: float) -> Work:
    assert asked.instances
    return work_of_question(Question.of(asked, asked.instances, None, "cuda", 1), network_bytes)


def test_the_work_of_a_step_is_counted() -> None:
    """By hand: 1,000 rows of 64 numbers on 3 devices, 334 on the first; 21 images, of which they see one view."""
    work = work_of(Plan(1000, 64, 21, 3, views=2, hardest=5), 77.0)
    assert work.products == 4 * (2 * 21 * 334 * 64)
    assert work.exponentials == 2 * 21 * 334
    assert work.memory_bytes == 334 * (5 * 64 * 4 + 3 * 4)
    assert work.kept_bytes == 334 * (2 * 64 * 4 + 4 + 5 * 4)
    assert work.network_bytes == 77


def test_the_slowest_part_is_the_limit() -> None:
    work = work_of(Plan(1_281_167, batch_size=4096, storage="bfloat16"), 1e9)
    found = {(bound.gpu, bound.precision): bound for bound in bounds(work, 8)}
    assert set(found) == {(gpu.name, precision) for gpu in GPUS for precision in gpu.products}
    for bound in found.values():
        assert bound.seconds[bound.limit] == max(bound.seconds.values())
    assert found["V100", "float32"].limit == "products"
    # Beyond one machine the same bytes take longer than over the links within it.
    for far in bounds(work, 16):
        assert far.seconds["network"] > found[far.gpu, far.precision].seconds["network"]


def test_the_rate_of_exponentials_is_that_of_the_special_function_units() -> None:
    assert {gpu.name: gpu.exponentials for gpu in GPUS}["A100"] == pytest.approx(16 * 108 * 1.41e9)


def test_rows_that_do_not_fit_are_said_so() -> None:
    fits = [bound.fits for bound in bounds(work_of(Plan(100_000_000), 0.0), 1)]
    assert not any(fits)


def test_plan_counts_what_the_classifier_sends_and_not_the_encoders_gradients() -> None:
    options = {"encoder": "narrow-resnet", "image_size": 16, "batch_size": 64}
    answer = millionway.plan(instances=5000, devices=4, limits=True, **options)["hybrid"]
    assert answer.work is not None
    encoder = answer.communication["encoder gradients (DDP)"]
    assert answer.work.network_bytes == sum(answer.communication.values()) - encoder > 0
    assert millionway.plan(instances=5000, devices=4, **options)["hybrid"].work is None


def test_the_command_shows_them() -> None:
    arguments = ["plan", "--instances", "14.2M", "--encoder", "narrow-resnet", "--image-size", "16", "--limits"]
    done = subprocess.run([sys.executable, "-m", "millionway", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "H100, bfloat16" in done.stdout and "products" in done.stdout

"""What a run on a user's images would take on this machine: memory, a batch that fits, hours, disk.

Time is that of real steps on some of the images, measured twice.
"""

import itertools
import shutil
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from millionway import randomness
from millionway.console import track
from millionway.data.batches import view_batches
from millionway.data.dataset import Dataset, has_test_images, open_some
from millionway.data.stores import MemoryStore
from millionway.data.views import view_keys
from millionway.evaluation.snapshots import MAX_IMAGES
from millionway.machine import free_memory_bytes, has_bfloat16, prepare
from millionway.parallel.group import Group
from millionway.parallel.layout import local_range
from millionway.reporting.words import duration
from millionway.settings.plan import Plan
from millionway.settings.pretrain import Pretrain, with_settings
from millionway.settings.resolve import FORWARD
from millionway.train.clock import PARTS, Clock
from millionway.train.metrics_file import peak_memory_bytes
from millionway.train.monitor import HEALTH_INSTANCES
from millionway.train.plan import Answer, Question, answers_to, facts_of, measure_hardest
from millionway.train.setup import build
from millionway.train.sizes import Sizes
from millionway.train.step import train_step

NUM_IMAGES = 2048  # are looked at
MAX_ROWS = 1 << 18  # are trained; more take as much longer as they are more
SECONDS, MIN_STEPS = 4.0, 4  # of a measurement
AGREE, MAX_TRIES = 0.2, 5
LR = 1e-6  # what is measured does not depend on it, and nothing diverges
BYTES_IN_THE_LIST = 200  # of an image: path, sizes, hash


@dataclass
class Outlook:
    """A run on these images, here."""

    question: Question
    """with the batch that was asked for, or pretrain's"""
    answers: dict[str, Answer]
    memory_bytes: int
    memory_there: int
    fitting_batch: int
    """the largest power of two; 0 if not even 2 images fit"""
    disk_bytes: int
    disk_there: int
    step_seconds: list[float] = field(default_factory=list)
    """of each measurement"""
    seconds: float | None = None
    """of all epochs, with the prior and the evaluations"""

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.memory_there

    @property
    def apart(self) -> float:
        """How far the last two measurements differ, as a share of the shorter one."""
        return max(self.step_seconds[-2:]) / min(self.step_seconds[-2:]) - 1

    def lines(self) -> list[str]:
        """For people."""
        config, question = self.question.config, self.question
        head = f"{question.instances:,} images at {question.image_size} px, {config.model.encoder}, "
        head += f"{config.training.epochs} epochs, batches of {question.batch_size}: pretrain's own settings"
        batch = f"{question.batch_size} fits"
        if self.fitting_batch >= 2 * question.batch_size:
            batch += f"; up to {self.fitting_batch:,} would"
        if not self.fits:
            batch = f"{question.batch_size} does not fit; --batch-size {self.fitting_batch} does"
            batch = batch if self.fitting_batch else "nothing fits; a smaller --image-size or --encoder would"
        return [
            head,
            f"memory  {_size(self.memory_bytes)}; {_size(self.memory_there)} are free",
            f"batch   {batch}",
            f"time    {self._time()}",
            f"disk    {_size(self.disk_bytes)} for the run folder; {_size(self.disk_there)} are free here",
        ]

    def _time(self) -> str:
        if self.seconds is None:
            return "not measured, since it does not fit"
        one, other = sorted(self.step_seconds[-2:])
        measured = f"two measurements: {one:.3g} and {other:.3g} s a step"
        if self.apart <= AGREE:
            return f"about {duration(self.seconds)} on this machine ({measured})"
        spread = 2 * self.seconds / (one + other)
        between = f"{duration(spread * one)} to {duration(spread * other)}"
        return f"between {between} on this machine ({measured}: something else is running here)"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def outlook(asked: Plan) -> Outlook:
    assert asked.data is not None
    device, num_threads = prepare(asked.device, asked.threads)
    started = time.monotonic()
    dataset, num_images = open_some(asked.data, asked.data_root, NUM_IMAGES, num_threads, track)
    reading = (time.monotonic() - started) / len(dataset.manifest)  # seconds an image
    there = asked.device_memory or _free(device)
    asked = replace(asked, device_memory=there, instances=asked.instances or num_images)
    side, bfloat16 = dataset.small_side(), has_bfloat16(device)
    question = Question.of(asked, asked.instances or num_images, side, device.type, num_threads, bfloat16)
    beside, answers = _beside(dataset, num_images, device), answers_to(question)
    memory = answers["hybrid"].total + beside
    largest = _largest_batch(question, there - beside)
    found = Outlook(question, answers, memory, there, largest, _disk_bytes(question), _free_disk())
    if found.fits:
        found.seconds = reading * question.instances + _training_seconds(found, dataset, device)
    dataset.store.close()
    return found


def _free(device: torch.device) -> int:
    """What is left for a run: of a GPU, or of the machine, where this process is already part of it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_memory_bytes() + peak_memory_bytes(torch.device("cpu"))


def _free_disk() -> int:
    """Where run folders are made, if nothing else is said."""
    return shutil.disk_usage(Path.cwd()).free


def _beside(dataset: Dataset, num_images: int, device: torch.device) -> int:
    """What a process takes besides its network and rows: its libraries, and pixels that are kept in memory."""
    if device.type == "cuda":
        return 0
    pixels = 0
    if isinstance(dataset.store, MemoryStore):
        pixels = dataset.store.pixels[0].numel() * (num_images - len(dataset.store.pixels))  # some are there already
    return peak_memory_bytes(torch.device("cpu")) + pixels


def _largest_batch(question: Question, memory: int) -> int:
    """By doubling; every rank has 2 images at least."""
    batch, largest = 2 * question.devices, 0
    while batch <= question.instances:
        sized = replace(question, config=with_settings(question.config, batch_size=batch))
        if answers_to(sized)["hybrid"].total > memory:
            break
        largest, batch = batch, 2 * batch
    return largest


def _disk_bytes(question: Question) -> int:
    """Checkpoints (one more while it is written), the encoder, features at each evaluation, the numbered list."""
    network = facts_of(question)
    itemsize = getattr(torch, question.storage).itemsize
    rows = question.instances * (2 * question.dim * itemsize + 4 * question.hardest)
    checkpoint = 2 * 4 * network.num_parameters + rows
    features = len(_evaluations(question.config)) * min(MAX_IMAGES, question.instances) * 4 * network.feature_dim
    listed = BYTES_IN_THE_LIST * question.instances
    return (question.config.running.keep + 1) * checkpoint + 4 * network.num_parameters + features + listed


def _evaluations(config: Pretrain) -> list[int]:
    """The epochs after which there is one, from that before the first step."""
    epochs = config.training.epochs
    return [*range(0, epochs, config.running.eval_every or 1), epochs]


# --- time -------------------------------------------------------------------------------------------------------------


def _training_seconds(found: Outlook, dataset: Dataset, device: torch.device) -> float:
    """Prior, epochs and evaluations of one device. What devices tell each other is not counted."""
    question = found.question
    config, images = question.config, question.instances
    shares = Sizes.of(config, 1).shares()
    steps = _steps(question, dataset, device, list(shares))
    measured, part = next(steps), {}
    for _, measured in zip(range(MAX_TRIES), steps):
        part = {name: sum(share * measured[side][name] for side, share in shares.items()) for name in PARTS}
        found.step_seconds.append(sum(part.values()))
        if len(found.step_seconds) > 1 and found.apart <= AGREE:
            break
    steps.close()
    hardest = measure_hardest(question) if question.hardest else 0.0
    found.answers["hybrid"].seconds, found.answers["hybrid"].hardest_seconds = part, hardest or None
    evaluations, epochs = _evaluations(config), config.training.epochs
    evaluated = len(evaluations) * (min(images, HEALTH_INSTANCES) + min(images, MAX_IMAGES))
    if dataset.labels is not None:  # the first weights are scored too, before rows are written
        num_scored = 1 + sum(config.running.has_knn(epoch, epochs) for epoch in evaluations)
        asked = 2 if has_test_images(config.data, config.images.test_data) else 1
        evaluated += num_scored * asked * min(images, config.running.eval_images)
    full = measured[question.image_size]
    forward = (full["data"] + FORWARD * full["encoder"]) / question.views / question.batch_size  # of an image
    epoch = images // question.batch_size * sum(found.step_seconds[-2:]) / 2 + hardest
    return epochs * epoch + (images + evaluated) * forward


Measured = dict[int, dict[str, float]]
"""{side of the views: {part: seconds of a step}}"""


def _steps(
    question: Question, dataset: Dataset, device: torch.device, sides: list[int]
) -> Generator[Measured, None, None]:
    """Measurements of steps as in a run, those of all sides in turns, without end, the first to warm up."""
    config = with_settings(question.config, batch_size=question.batch_size // question.devices)
    rows = local_range(question.instances, 0, question.devices)[1]
    some_rows = max(min(rows, MAX_ROWS), len(dataset.manifest))
    state, _ = build(config, dataset, device, Group.current(), some_rows)
    views_of = config.augmentation.of_a_view
    made = {side: view_batches(dataset.store, _ids(config, dataset), side, device, **views_of) for side in sides}
    turns = itertools.cycle(sides)
    while True:
        clocks, started, num = {side: Clock(device) for side in sides}, time.monotonic(), 0
        while num < MIN_STEPS or num % len(sides) or time.monotonic() - started < SECONDS:
            side = next(turns)
            clock = clocks[side]
            clock.start(True)
            views, instance_ids = next(made[side])
            clock.lap("data")
            train_step(
                state.network,
                state.classifier,
                state.optimizer,
                views,
                instance_ids,
                state.hardest,
                alpha=config.classifier.smoothing or 0.0,
                pairs=config.classifier.pairs or 0.0,
                num_classified=len(instance_ids) // question.views * question.row_views,
                lr=LR,
                row_lr=LR,
                momentum=config.training.momentum,
                weight_decay=0.0,
                views_at_once=config.training.micro_batch and config.training.micro_batch * question.views,
                clock=clock,
            )
            num += 1
        scale = {"data": 1.0, "encoder": 1.0, "classifier": rows / some_rows}
        yield {
            side: {part: scale[part] * total * len(sides) / num for part, total in clock.seconds.items()}
            for side, clock in clocks.items()
        }


def _ids(config: Pretrain, dataset: Dataset) -> Iterator[tuple[list[int], Tensor]]:
    """Batches of the images that were read, without end; images come twice if a batch is larger."""
    seed, size, num_views = config.training.seed, config.training.batch_size, config.augmentation.views
    assert size
    for number in itertools.count():
        keys = view_keys(seed, number, num_views)
        known = dataset.instance_ids.repeat(-(-size // len(dataset.instance_ids)))
        order = torch.randperm(len(known), generator=randomness.generator(seed, "order", number))
        yield from ((keys, batch) for batch in known[order].split(size) if len(batch) == size)

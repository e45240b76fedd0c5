"""Every training path once on a CUDA device that is not there: no mix of devices, and the host waits once per step."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from fake_cuda import CUDA, FakeCuda, fake_cuda, on_fake_cuda
from torch import nn

from millionway import randomness
from millionway.data import views
from millionway.data.dataset import Dataset
from millionway.evaluation.features import Labeled, Split, extract_split
from millionway.evaluation.knn import knn
from millionway.evaluation.linear import Fit, linear
from millionway.evaluation.retrieval import retrieval
from millionway.model import hardest
from millionway.model.classifier import InstanceClassifier
from millionway.model.encoder import Encoder, EncoderSpec
from millionway.model.head import build_head
from millionway.model.network import Network
from millionway.model.prior import PriorProgress, write_prior
from millionway.train.step import train_step

NUM, DIM, BATCH, SIZE = 5000, 16, 8, 16


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the fake device is that of this thread
    try:
        with fake_cuda() as mode:
            yield mode
    finally:
        torch.set_num_threads(num_threads)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA)


def ids_of(num: int) -> torch.Tensor:
    return torch.zeros(num, dtype=torch.int64, device=CUDA)


def network_of(cuda: FakeCuda) -> Network:
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    encoder = Encoder(EncoderSpec("of this test", "small", SIZE, (0.5,) * 3, (0.2,) * 3), backbone, 8)
    network = Network(encoder, build_head("mlp", 8, DIM, 0), "bfloat16")
    return on_fake_cuda(network, cuda)  # pyright: ignore[reportReturnType]


def make(**options) -> InstanceClassifier:
    return InstanceClassifier(NUM, DIM, device=CUDA, kernel="torch", **options)


def test_the_fake_device_counts_and_refuses(cuda: FakeCuda) -> None:
    x = numbers(3)
    assert x.device == CUDA and float(x.sum()) == 0.5 and cuda.syncs == ["test"]
    assert x.tolist() == [0.0, 0.0, 0.0] and len(cuda.syncs) == 2
    assert x.cpu().device.type == "cpu" and len(cuda.syncs) == 3
    torch.ones(2).to(CUDA)
    torch.ones(2).to(CUDA, non_blocking=True)
    assert len(cuda.syncs) == 4
    with pytest.raises(Exception, match="device"):
        x + torch.ones(3)
    assert len(x[x > 0]) == 2 and len(cuda.syncs) == 5


def test_views_are_made_without_waiting(cuda: FakeCuda) -> None:
    ids = torch.arange(40)
    sides = torch.full((40,), 30)
    parameters = views.draw_parameters(
        randomness.key_of(0, "view"), ids, sides, sides, crop_min=0.2, flip=0.5, jitter=1.0, grayscale=0.2, blur=0.5
    )
    made = torch.zeros(40, 3, SIZE, SIZE, dtype=torch.uint8).to(CUDA, non_blocking=True)
    result = views.distort(made, parameters)
    assert result.device == CUDA and result.shape == (40, 3, SIZE, SIZE) and result.dtype == torch.float32
    assert cuda.syncs == []


def test_numbers_that_travel_at_one_go_arrive_as_they_were() -> None:
    numbers = [torch.randn(5, 3), torch.randn(5)]
    places = [torch.tensor([0, 4]), torch.tensor([], dtype=torch.int64)]
    there, there_places = views._sent(numbers, places, torch.device("cpu"))
    for ours, theirs in zip([*there, *there_places], [*numbers, *places]):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


KINDS = {
    "float32": {},
    "bfloat16": {"storage": torch.bfloat16},
    "low temperature": {"temperature": 0.02},
    "tf32": {"precision": "tf32"},
    "products in bfloat16": {"precision": "bfloat16"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("smoothed", [False, True])
@pytest.mark.parametrize("dead", [False, True])
def test_a_step_waits_once(
    cuda: FakeCuda, kind: str, smoothed: bool, dead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, classifier = network_of(cuda), make(**KINDS[kind])
    if dead:
        classifier._dead_rows.of(classifier.alive)
        classifier._dead_rows.mask = ~classifier.alive  # numbers do not exist here, so it cannot be found out
    table = torch.zeros(NUM, 5, dtype=torch.int32, device=CUDA) if smoothed else None
    optimizer = torch.optim.SGD(network.parameters(), 0.1, 0.9, weight_decay=1e-4)
    counts = []

    def backward(loss: torch.Tensor) -> None:
        """torch's own engine asks for a driver; its results are stood in for."""
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    for _ in range(3):
        before = len(cuda.syncs)
        result = train_step(
            network,
            classifier,
            optimizer,
            torch.zeros(BATCH, 3, SIZE, SIZE).to(CUDA, non_blocking=True),
            torch.arange(BATCH).to(CUDA, non_blocking=True),
            table,
            alpha=0.2,
            lr=0.1,
            row_lr=0.1,
            momentum=0.9,
            weight_decay=1e-4,
        )
        counts.append(cuda.syncs[before:])
    assert result.loss.device == CUDA
    for waits in counts[1:]:  # the first step also asks whether all rows are alive
        assert len(waits) == 1 and waits[0].startswith("model/classifier.py"), counts


def test_sampled_classes(cuda: FakeCuda) -> None:
    classifier = make(classes_per_step=100)
    for _ in range(2):
        before = len(cuda.syncs)
        loss = classifier(numbers(BATCH, DIM).requires_grad_(), ids_of(BATCH))
        classifier.update(0.1)
        assert loss.device == CUDA
    waits = cuda.syncs[before:]  # classes are drawn on the host, from the batch's ids
    assert [wait.partition(":")[0] for wait in waits] == ["model/sampled.py", "model/classifier.py"], waits


@pytest.mark.parametrize("dead", [False, True])
def test_hardest(cuda: FakeCuda, dead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def first(batch: hardest._Alone, k: int) -> tuple[torch.Tensor, ...]:
        """How many candidates there are is not known here, and it needs k of each row."""
        row, ids, scores = (torch.cat(parts) for parts in zip(*batch.candidates))
        assert row.device == ids.device == scores.device
        return row, ids.new_zeros(len(batch.places) * k), scores

    monkeypatch.setattr(hardest._Alone, "first", first)
    monkeypatch.setattr(
        hardest.collectives, "all_reduce", lambda _, number: torch.tensor(NUM - dead) if number.ndim == 0 else number
    )
    table = make().hardest(7)
    assert table.device == CUDA and table.shape == (NUM, 7) and table.dtype == torch.int32


@pytest.mark.parametrize("mode", ["random", "fixed-bn", "batch-bn", "running-bn"])
def test_prior(cuda: FakeCuda, mode: str) -> None:
    images = torch.zeros(BATCH, 3, SIZE, SIZE, device=CUDA)
    write_prior(mode, network_of(cuda), make(), [(images, ids_of(BATCH))], 1.0, PriorProgress())


def test_compare(cuda: FakeCuda) -> None:
    classifier = make()
    classifier.compare(numbers(BATCH, DIM), ids_of(BATCH))
    before = len(cuda.syncs)
    compared = classifier.compare(numbers(BATCH, DIM), ids_of(BATCH))
    assert compared.own.device == compared.num_ahead.device == compared.nearest_other.device == CUDA
    assert len(cuda.syncs) == before + 1


def test_features_are_brought_to_the_device_that_computes_with_them(cuda: FakeCuda) -> None:
    ids, labels = torch.arange(6), torch.tensor([0, 1, 0, 1, 0, 1])
    part = Labeled(mock.Mock(spec=Dataset), ids, labels)
    found = extract_split(nn.Identity(), Split(part, part, ["a", "b"]), SIZE, CUDA, lambda *_: (torch.randn(6, 4), ids))
    assert [each.device for each in found] == [CUDA] * 4


def test_evaluations_compute_where_the_features_are(cuda: FakeCuda) -> None:
    bank, queries, labels = numbers(300, 12), numbers(50, 12), ids_of(300)
    assert [name for name, _ in knn(bank, labels, queries, ids_of(50))] == ["knn_20", "knn_200"]
    dict(linear(bank, labels, queries, ids_of(50), how=Fit(2, 100, 0.1, 0.0)))
    dict(retrieval(queries, ids_of(50)))

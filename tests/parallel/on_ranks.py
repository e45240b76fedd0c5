"""Run by torchrun, on every rank: each check compares the ranks' common work with a slow twin in one process."""

import gc
import sys
import time
import traceback
import weakref
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist  # noqa: TID251 (counted here)

sys.path.insert(0, str(Path(__file__).parent.parent))
import reference
from PIL import Image

from millionway.data.dataset import open_dataset
from millionway.data.kinds import folders
from millionway.model import hardest
from millionway.model.classifier import InstanceClassifier, NotFiniteError
from millionway.model.network import Network
from millionway.model.prior import PriorProgress, write_prior
from millionway.parallel import collectives
from millionway.parallel.group import Group, leave
from millionway.parallel.layout import local_range
from millionway.parallel.row_shards import load_shards, save_shards
from millionway.parallel.sync_bn import average_statistics, synchronize
from millionway.settings.pretrain import Pretrain
from millionway.train.run import _open_images as open_images_of_run
from millionway.train.step import train_step

COLLECTIVES = ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor", "all_gather_object", "broadcast")


def rows_of(num: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(num)
    rows = torch.randn(num, dim, generator=g, dtype=torch.float64)
    return (rows * 10 ** (2 * torch.rand(num, 1, generator=g, dtype=torch.float64) - 1)).to(dtype)


def part_of(group: Group, whole: torch.Tensor) -> torch.Tensor:
    return whole.view(group.size, -1, *whole.shape[1:])[group.rank]


@contextmanager
def counting(counts: Counter):
    def counted(name: str, original):
        def call(*args, **options):
            counts[name] += 1
            return original(*args, **options)

        return call

    patches = [mock.patch.object(dist, name, counted(name, getattr(dist, name))) for name in COLLECTIVES]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def equal_to_the_dense_reference(group: Group) -> None:
    """Losses, embedding gradients, rows and momentum; N uneven, smaller than the number of ranks, and one."""
    kinds = ((torch.float64, 1e-9, "float32"), (torch.float32, 1e-5, "float32"), (torch.float32, 0.02, "bfloat16"))
    for dtype, tolerance, precision in kinds:
        for num, k, tau in ((37, 5, 0.15), (3, 2, 0.15), (1, 0, 0.15), (50, 3, 0.02)):
            if tau < 0.05 and tolerance == 1e-5:
                tolerance = 1e-4
            classifier = InstanceClassifier(num, 8, tau, group, storage=dtype, precision=precision)
            rows = rows_of(num, 8, dtype)
            classifier.set_rows(torch.arange(num), rows)
            start, stop = classifier.local_range
            assert torch.equal(classifier.weight, rows[start:stop])
            dense = reference.DenseClassifier(rows.double(), tau)
            table = classifier.hardest(k) if k else None
            whole_table = torch.tensor(reference.hardest(rows, k)) if k else None
            if table is not None and whole_table is not None:
                assert torch.equal(table.long(), whole_table[start:stop])
            g = torch.Generator().manual_seed(7)
            for _ in range(4 if precision == "float32" else 1):  # short rows move far, and errors grow
                ids = torch.randint(num, (6 * group.size,), generator=g)
                x = torch.randn(len(ids), 8, generator=g, dtype=torch.float64).to(dtype)
                leaf = part_of(group, x).clone().requires_grad_()
                loss = classifier(leaf, part_of(group, ids), table, 0.2 if k else 0.0)
                (2.0 * loss).backward()
                classifier.update(0.05)
                expected, gradient = dense.step(x.double(), ids, 0.05, whole_table, 0.2 if k else 0.0)
                assert abs(float(loss.detach()) - float(expected)) <= tolerance * max(1.0, abs(float(expected)))
                assert leaf.grad is not None
                own = part_of(group, gradient)
                assert float((leaf.grad.double() / 2 - own).norm()) <= tolerance * max(1.0, float(own.norm()))
            if stop > start:
                assert reference.relative_error(classifier.weight, dense.rows.detach()[start:stop]) < 4 * tolerance
                assert reference.relative_error(classifier.momentum, dense.momentum[start:stop]) < 4 * tolerance


def collectives_are_counted(group: Group) -> None:
    classifier = InstanceClassifier(40, 8, group=group)
    table = classifier.hardest(4)
    for chosen, expected in ((None, 1), (table, 2)):
        x, ids = torch.randn(4, 8, requires_grad=True), torch.arange(4)
        counts: Counter = Counter()
        with counting(counts):
            classifier(x, ids, chosen, 0.2).backward()
            classifier.update(0.1)
        assert counts == {"all_gather_into_tensor": 1, "all_reduce": expected, "reduce_scatter_tensor": 1}, counts


def hardest_is_that_of_one_process(group: Group) -> None:
    g = torch.Generator().manual_seed(1)
    rows = torch.randn(250, 16, generator=g)[torch.randint(250, (2000,), generator=g)]
    rows += 0.7 * torch.randn(rows.shape, generator=g)
    rows[100:400] = rows[100] * torch.linspace(0.5, 2, 300)[:, None]
    whole, parts = InstanceClassifier(2000, 16), InstanceClassifier(2000, 16, group=group)
    ours = slice(*parts.local_range)
    for step, dead in enumerate(([], [5, 700, 1999])):
        rows += 0.01 * step
        for each in (whole, parts):
            each.set_rows(torch.arange(2000), rows)
        whole.alive[dead] = False
        parts.alive.copy_(whole.alive[ours])
        expected = whole.hardest(10)
        assert torch.equal(parts.hardest(10), expected[ours])
        panels = {"ONE_PANEL_BYTES": 0, "PANEL_BYTES": 0, "BLOCK_ROWS": {"cpu": 300}}
        with mock.patch.multiple(hardest, **panels):
            assert torch.equal(parts.hardest(10), expected[ours])


def numbers_of_all_rows(group: Group) -> None:
    """Classes ahead, own and nearest cosines; and sampled classes."""
    rows = rows_of(61, 8, torch.float64)
    x, ids = rows[: 4 * group.size] + 0.5, torch.arange(4 * group.size)
    results = []
    for who in (Group(), group):
        classifier = InstanceClassifier(61, 8, group=who, storage=torch.float64, classes_per_step=20)
        classifier.set_rows(torch.arange(61), rows)
        alive = torch.ones(61, dtype=torch.bool)
        alive[[40, 60]] = False
        classifier.alive.copy_(alive[slice(*classifier.local_range)])
        compared = classifier.compare(part_of(who, x), part_of(who, ids))
        losses = []
        for _ in range(3):
            leaf = part_of(who, x).clone().requires_grad_()
            losses.append(classifier(leaf, part_of(who, ids)).detach())
            classifier.update(0.1)
        moved = collectives.all_gather_uneven(who, classifier.weight)
        results.append((part_of(group, x), compared, torch.stack(losses), moved))
    (_, one, one_losses, one_rows), (_, ours, losses, moved) = results
    assert torch.equal(part_of(group, one.num_ahead), ours.num_ahead)
    assert torch.allclose(part_of(group, one.own), ours.own, atol=1e-12)
    assert torch.allclose(part_of(group, one.nearest_other), ours.nearest_other, atol=1e-12)
    assert torch.allclose(one_losses, losses, atol=1e-12) and torch.allclose(one_rows, moved, atol=1e-12)


def bad_input_is_refused_by_all(group: Group) -> None:
    classifier = InstanceClassifier(40, 8, group=group)
    x, ids = torch.randn(4, 8), torch.arange(4)
    last = group.rank == group.size - 1
    cases = [(NotFiniteError, torch.where(torch.tensor(last), torch.nan, x), ids), (ValueError, x, ids + 37 * last)]
    for kind, bad_x, bad_ids in cases:
        try:
            classifier(bad_x, bad_ids)
        except kind:
            continue
        raise AssertionError(f"{kind} was not raised")
    if group.rank == 0:
        classifier.alive[2] = False
    try:
        classifier(x, ids)
    except ValueError as error:
        assert "instance 2 of the batch is not alive" in str(error)
    else:
        raise AssertionError("a dead instance was not refused")


def small_network() -> Network:
    torch.manual_seed(0)
    encoder = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1)
    )
    encoder.append(torch.nn.Flatten())
    head = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    return Network(encoder, head).double()  # pyright: ignore[reportArgumentType]


def forward64(network: Network, views: torch.Tensor) -> torch.Tensor:
    return network.head(network.encoder(views))


def steps_do_not_depend_on_the_ranks(group: Group) -> None:
    """Prior and three steps with synchronized BN, in float64, and in micro-batches: as in one process."""
    g = torch.Generator().manual_seed(3)
    num = 12 * group.size + 1
    images = torch.randn(num, 3, 10, 10, generator=g, dtype=torch.float64)
    results = []
    with (
        mock.patch.object(Network, "forward", forward64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        for who in (Group(), group):
            network = small_network()
            synchronize(network, who, torch.device("cpu"))
            classifier = InstanceClassifier(num, 8, group=who, storage=torch.float64)
            order = torch.arange(12 * group.size)
            batches = [part_of(who, part) for part in order.split(4 * group.size)]
            write_prior(
                "running-bn", network, classifier, [(images[ids], ids) for ids in batches], 1.0, PriorProgress()
            )
            table = classifier.hardest(3)
            parallel = who.data_parallel(network)
            optimizer = torch.optim.SGD(network.parameters(), 0.1, 0.9, weight_decay=1e-4)
            losses = []
            for ids in batches:
                step = train_step(
                    parallel,
                    classifier,
                    optimizer,
                    torch.cat([images[ids], images[ids].flip(3)]),
                    ids.repeat(2),
                    table,
                    alpha=0.2,
                    lr=0.1,
                    row_lr=0.5,
                    momentum=0.9,
                    weight_decay=1e-4,
                    pairs=0.7,
                    num_classified=len(ids) if losses else None,
                    with_num_ahead=True,
                )
                losses.append(step.loss)
            average_statistics(network, who)
            results.append(
                (torch.stack(losses), network.state_dict(), collectives.all_gather_uneven(who, classifier.weight))
            )
    (one_losses, one_state, one_rows), (losses, state, rows) = results
    assert torch.allclose(one_losses, losses, rtol=1e-9), (one_losses, losses)
    assert reference.relative_error(rows, one_rows) < 1e-9
    for name in one_state:
        assert torch.allclose(one_state[name].double(), state[name].double(), rtol=1e-8, atol=1e-10), name


def gradients_are_the_same_after_a_new_start(group: Group) -> None:
    """torch arranges them anew after the first backward, and so adds up those of three ranks in another order."""
    torch.manual_seed(group.rank)
    inputs, found = torch.randn(3, 16, 40), []
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(40, 40),
        torch.nn.Tanh(),
        torch.nn.Linear(40, 30),
        torch.nn.Tanh(),
        torch.nn.Linear(30, 7),
    ]
    for first in (0, 2):  # from the beginning, and as a run that goes on
        network = torch.nn.Sequential(*layers)
        together = group.data_parallel(network)
        for batch in inputs[first:]:
            network.zero_grad()
            together(batch).square().sum().backward()
        found.append([each.grad.clone() for each in network.parameters() if each.grad is not None])
    assert all(torch.equal(*each) for each in zip(*found))


def a_network_is_let_go(group: Group) -> None:
    """Else its connections outlive `leave`, and their threads the interpreter."""
    network = group.data_parallel(torch.nn.Linear(3, 2))
    network(torch.ones(1, 3)).sum().backward()
    still_there = weakref.ref(network)
    del network
    gc.collect()
    assert still_there() is None


def rows_move_while_gradients_travel(group: Group) -> None:
    """One rank's backward is held up until another one has moved its rows: that one cannot have the gradients yet."""
    folder, ids = Path(sys.argv[1]), torch.arange(4)
    for early, views_at_once in ((0, None), (1, None), (0, 2)):
        said, events = folder / f"rows_of_{early}_{views_at_once}", []
        network = small_network().float()
        classifier = InstanceClassifier(40, 8, group=group)
        parallel = group.data_parallel(network)
        optimizer = torch.optim.SGD(network.parameters(), 0.1)
        hold = next(module for module in network.modules() if isinstance(module, torch.nn.Linear))

        def moved(update=classifier.update, said=said, events=events, early=early):
            def call(*arguments: float) -> None:
                update(*arguments)
                events.append("rows")
                if group.rank == early:
                    said.touch()

            return call

        def held(*_: object, said=said) -> None:
            deadline = time.monotonic() + 50
            while not said.exists():
                assert time.monotonic() < deadline, "the other rank waits for gradients before it moves its rows"
                time.sleep(0.01)

        classifier.update = moved()
        if group.rank != early:
            hold.register_full_backward_hook(held)
        optimizer.register_step_pre_hook(lambda *_, events=events: events.append("encoder"))
        options = {"alpha": 0.0, "lr": 0.1, "row_lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
        images = torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(group.rank))
        train_step(parallel, classifier, optimizer, images, ids, None, views_at_once=views_at_once, **options)
        assert events == ["rows", "encoder"], events
        gradients = torch.cat([each.grad.flatten() for each in network.parameters() if each.grad is not None])
        everybody = collectives.all_gather(group, gradients).view(group.size, -1)
        assert torch.equal(everybody[0], everybody[1])


def running_statistics_are_shared_in_the_priors_pass(group: Group) -> None:
    """Without synchronized BN: a checkpoint in mid-pass, which averages them, changes nothing."""
    g = torch.Generator().manual_seed(4)
    images = torch.randn(12 * group.size, 3, 10, 10, generator=g)
    batches = [part_of(group, part) for part in torch.arange(len(images)).split(4 * group.size)]
    rows = []
    for averaged_between in (False, True):
        network, progress = small_network().float(), PriorProgress()
        classifier = InstanceClassifier(len(images), 8, group=group)
        for ids in batches:
            write_prior("running-bn", network, classifier, [(images[ids], ids)], None, progress)
            if averaged_between:
                average_statistics(network, group)
        rows.append(classifier.weight.clone())
    assert torch.equal(*rows)


def shards_are_whole(group: Group) -> None:
    """Saved by these ranks; the test reads the folder with other numbers of ranks."""
    folder = Path(sys.argv[1])
    for num in (37, 3):
        tensors = {"rows": torch.arange(num * 4.0).view(num, 4), "hardest": torch.arange(num * 2).view(num, 2).int()}
        mine = slice(*local_range(num, group.rank, group.size))
        save_shards({name: t[mine].clone() for name, t in tensors.items()}, folder / f"{num}", group, num)
        for earlier in sorted(folder.parent.glob(f"ranks_*/{num}")):
            loaded = {name: torch.zeros_like(t[mine]) for name, t in tensors.items()}
            load_shards(loaded, earlier, group, num)
            for name in tensors:
                assert torch.equal(loaded[name], tensors[name][mine]), (earlier, name)


def only_the_first_asks_for_every_image(group: Group) -> None:
    folder, manifest = Path(sys.argv[1]) / "images", Path(sys.argv[1]) / "manifest.arrow"

    def prepare() -> None:
        folder.mkdir()
        for number in range(200):
            Image.new("L", (8, 8), number).save(folder / f"{number}.png")
        open_dataset(str(folder)).manifest.save(manifest)

    collectives.on_first_rank(group, prepare)
    config = Pretrain(str(folder), Path("nowhere"), resume=True)
    with mock.patch.object(folders, "status_of", wraps=folders.status_of) as asked:
        assert len(open_images_of_run(config, torch.device("cpu"), group, manifest).instance_ids) == 200
    assert asked.call_count == 200 if group.is_first else 0 < asked.call_count < 50


def synchronized_bn_takes_bfloat16(group: Group) -> None:
    """Statistics and gradients of its parameters are float32, and those of one process with all images."""
    g = torch.Generator().manual_seed(4)
    x = torch.randn(8 * group.size, 5, 3, 3, generator=g).mul_(2).add_(1).bfloat16()
    found = []
    for who in (Group(), group):
        network = torch.nn.Sequential(torch.nn.BatchNorm2d(5))
        synchronize(network, who, torch.device("cpu"))
        part = part_of(who, torch.arange(len(x)))
        inputs = x[part].clone().requires_grad_()
        output = network(inputs)
        (output.float() * torch.arange(len(x))[part].view(-1, 1, 1, 1)).sum().backward()
        layer = network[0]
        assert output.dtype == torch.bfloat16 and layer.running_mean.dtype == layer.weight.grad.dtype == torch.float32
        assert inputs.grad is not None and inputs.grad.dtype == torch.bfloat16
        whole = [collectives.all_gather(who, each.detach().float()) for each in (output, inputs.grad)]
        found.append([*whole, layer.running_mean, layer.running_var])
    for one, all_together in zip(*found):
        assert torch.allclose(one, all_together, rtol=2e-2, atol=2e-2 * float(one.abs().max()))


CHECKS = [
    synchronized_bn_takes_bfloat16,
    only_the_first_asks_for_every_image,
    equal_to_the_dense_reference,
    collectives_are_counted,
    hardest_is_that_of_one_process,
    numbers_of_all_rows,
    bad_input_is_refused_by_all,
    steps_do_not_depend_on_the_ranks,
    gradients_are_the_same_after_a_new_start,
    a_network_is_let_go,
    rows_move_while_gradients_travel,
    running_statistics_are_shared_in_the_priors_pass,
    shards_are_whole,
]

if __name__ == "__main__":
    torch.set_num_threads(1)
    us = Group.current(timeout=60)
    for check in CHECKS:
        try:
            check(us)
        except BaseException:
            print(f"rank {us.rank}: {check.__name__}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            raise SystemExit(1) from None
    print(f"rank {us.rank} of {us.size}: all well", flush=True)
    leave()

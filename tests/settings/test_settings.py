from pathlib import Path
from typing import Any

import pytest

from millionway.settings import presets
from millionway.settings import pretrain as config
from millionway.settings.checks import flag
from millionway.settings.pretrain import Pretrain, check, flat, with_settings
from millionway.settings.resolve import Facts, resolve
from millionway.settings.stored import from_json, to_json


def defaults(**settings) -> Pretrain:
    return with_settings(Pretrain(data="photos", out=Path("runs/x")), **settings)


def test_names_are_unique_over_the_groups() -> None:
    names = [
        field.name for group in config.GROUPS for field in getattr(defaults(), group).__dataclass_fields__.values()
    ]
    assert len(names) == len(set(names)) and not set(names) & {"data", "out", "preset", "resume", "init_from"}


def test_json_and_back() -> None:
    chosen = defaults(epochs=7, mean=(0.1, 0.2, 0.3), manifest=Path("m.arrow"), hardest=3, head="none")
    assert from_json(to_json(chosen)) == chosen
    assert defaults(mean=[0.1, 0.2, 0.3]) == defaults(mean=(0.1, 0.2, 0.3))


def test_unknown_setting_is_named() -> None:
    with pytest.raises(ValueError, match=r"'batchsize'.*'batch_size'"):
        defaults(batchsize=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("epochs", 0), ("lr", -0.1), ("temperature", 0.0), ("flip", 1.5), ("smoothing", 1.0), ("crop_min", 0.0)],
        *[
            ("momentum", 1.0),
            ("image_size", 7),
            ("prior", "fixed"),
            ("weight_decay", -1.0),
            ("lr", float("nan")),
            ("std", (0.1, 0.0, 0.1)),
            ("keep", 0),
        ],
    ],
)
def test_impossible_values_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=flag(name)):
        check(defaults(**{name: value}))


def test_given_weights_are_treated_with_care() -> None:
    """As the run begins; one that goes on has the values it began with, also if there were none."""
    names = ("frozen_epochs", "lr", "row_lr", "bn", "optimizer")
    facts = Facts(20_000)

    def chosen(**settings: Any) -> list[Any]:
        return [flat(resolve(defaults(**settings), facts))[name] for name in names]

    usual = [0, 0.03, 40.0, "batch", "muon"]
    assert chosen() == usual
    assert chosen(init_from="x.pth") == [1, pytest.approx(0.003), pytest.approx(400.0), "fixed", "muon"]
    assert chosen(init_from="x.pth", lr=0.06)[1:3] == [0.06, pytest.approx(20.0)]
    assert chosen(init_from="x.pth", **dict(zip(names, usual))) == usual
    assert chosen(init_from="x.pth", resume=True) == usual


def test_what_is_left_open_is_chosen() -> None:
    laptop = resolve(defaults(), Facts(20_000, num_cores=4))
    assert flat(laptop) | {
        "encoder": "narrow-resnet",
        "image_size": 64,
        "batch_size": 64,
        "optimizer": "muon",
        "lr": 0.03,
        "head": "linear",
        "temperature": 0.1,
        "row_norm": 1.0,
        "row_lr": 40.0,
        "smoothing": 0.0,
        "hardest": 0,
        "views": 2,
        "pairs": 3.0,
        "warmup_epochs": 10,
        "threads": 4,
        "eval_every": 10,
    } == flat(laptop)
    gpu = flat(resolve(defaults(epochs=50, smoothing=0.2), Facts(500, has_gpu=True)))
    assert (gpu["encoder"], gpu["image_size"], gpu["batch_size"], gpu["hardest"]) == (
        "torchvision/resnet50",
        224,
        62,
        5,
    )
    assert gpu["warmup_epochs"] == 3
    small = flat(resolve(defaults(epochs=10, smoothing=0.2), Facts(50, 32)))
    assert (small["image_size"], small["hardest"], small["warmup_epochs"]) == (32, 0, 1)


def test_knn_takes_about_a_tenth_of_the_time() -> None:
    def knn_every(num: int = 10_000, queries: bool = True, **settings: Any) -> int | None:
        config = resolve(defaults(**settings), Facts(num, has_test_images=queries)).running
        assert config.eval_every and config.knn_every and config.knn_every % config.eval_every == 0
        return config.knn_every

    assert knn_every(epochs=10, queries=False) == 2
    assert knn_every(epochs=10) == 4
    assert knn_every(epochs=10, views=1) == 7
    assert knn_every(epochs=100) == 10 and knn_every(num=200_000, epochs=10) == 1
    for settings in ({"eval_every": 1}, {"stop_when_flat": True}, {"init_from": "x.pth"}, {"knn_every": 1}):
        assert knn_every(epochs=10, **settings) == 1


@pytest.mark.parametrize(
    ("every", "evaluated", "epochs", "expected"),
    [(4, 1, 10, [0, 4, 8, 10]), (7, 3, 30, [0, 9, 15, 21, 30]), (2, 3, 8, [0, 3, 6, 8]), (20, 1, 5, [0, 5])],
)
def test_where_no_evaluation_is_the_next_one_has_knn(
    every: int, evaluated: int, epochs: int, expected: list[int]
) -> None:
    running = defaults(knn_every=every, eval_every=evaluated).running
    evaluations = [*range(0, epochs, evaluated), epochs]
    assert [epoch for epoch in evaluations if running.has_knn(epoch, epochs)] == expected


def test_rates_follow_the_batch() -> None:
    """Those that were tried: batches of 64 and 256 with SGD (a quarter of the pull wants about four times the rate)."""

    def rates(num: int = 10_000, **settings: Any) -> tuple[float, float]:
        found = flat(resolve(defaults(**settings), Facts(num)))
        return found["lr"], found["row_lr"]

    sgd = {"optimizer": "sgd"}
    assert rates(**sgd) == (0.06, 10.0) and rates(batch_size=256, **sgd) == (0.06, 40.0)
    assert rates(batch_size=512, **sgd) == (0.12, 80.0) and rates(batch_size=16, **sgd) == (0.03, 2.5)
    assert rates() == (0.03, 40.0) and rates(batch_size=128) == (0.03, 80.0)  # a step of Muon has its own length
    assert rates(1_000_000) == (0.03, 1.0)


def test_many_images_take_larger_batches_and_shorter_rows() -> None:
    names = ("batch_size", "dim", "lr", "row_lr", "optimizer", "pairs")
    few, many, very_many = (flat(resolve(defaults(), Facts(num))) for num in (24_999, 25_000, 250_000))
    assert [few[name] for name in names] == [64, 128, 0.03, 40.0, "muon", 3.0]
    assert [many[name] for name in names] == [128, 64, 0.04, 60.0, "muon", 3.0]
    assert [very_many[name] for name in names] == [256, 128, 0.03, 1.0, "sgd", 0.0]
    assert flat(resolve(presets.preset("cifar10"), Facts(50_000)))["dim"] == 128


@pytest.mark.parametrize("num", [1_000_000, 14_200_000])
def test_very_many_images_take_the_papers_values(num: int) -> None:
    chosen = flat(resolve(defaults(batch_size=4096), Facts(num, has_gpu=True)))
    expected = {"head": "mlp", "temperature": 0.15, "smoothing": 0.2, "hardest": 100, "views": 2, "lr": 0.48}
    expected |= {
        "optimizer": "sgd",
        "pairs": 0.0,
        "row_lr": 1.0,
        "row_norm": "prior",
        "encoder": "torchvision/resnet50",
        "image_size": 224,
    }
    assert {name: chosen[name] for name in expected} == expected


def test_what_is_given_stays() -> None:
    given = {"head": "mlp", "temperature": 0.3, "smoothing": 0.1, "views": 4, "row_norm": "prior", "row_lr": 2.0}
    for num in (1000, 1_000_000):
        chosen = flat(resolve(defaults(**given), Facts(num)))
        assert {name: chosen[name] for name in given} == given
    assert flat(resolve(defaults(hardest=5), Facts(1000)))["smoothing"] == 0.2
    # Sampled classes and smoothing exclude each other: only what was asked for is refused.
    assert flat(resolve(defaults(classes_per_step=100), Facts(1_000_000)))["smoothing"] == 0
    with pytest.raises(ValueError, match="--smoothing 0"):
        check(defaults(classes_per_step=100, smoothing=0.2))


def test_rows_are_multiplied_in_bfloat16_where_the_encoder_learns_in_it_on_a_cpu() -> None:
    def chosen(facts: Facts, **settings: Any) -> str:
        return flat(resolve(defaults(**settings), facts))["precision"]

    cpu, gpu = Facts(1000, has_bfloat16=True), Facts(1000, has_gpu=True, has_bfloat16=True)
    assert chosen(cpu) == "bfloat16"
    assert chosen(gpu) == chosen(Facts(1000)) == chosen(Facts(1_000_000, has_bfloat16=True)) == "float32"
    assert chosen(cpu, sync_bn=True) == chosen(cpu, encoder_precision="float32") == "float32"
    assert chosen(Facts(1000), encoder_precision="bfloat16") == "float32", "it would be emulated"
    assert chosen(cpu, temperature=0.04) == "float32", "its logits would lose too much"
    assert chosen(cpu, precision="float32") == "float32" and chosen(gpu, precision="tf32") == "tf32"


def test_views_have_half_their_side_at_first_where_that_was_measured_to_help() -> None:
    def chosen(facts: Facts, **settings: Any) -> int | str:
        return flat(resolve(defaults(**settings), facts))["first_size"]

    laptop, gpu = Facts(20_000), Facts(20_000, has_gpu=True)
    assert chosen(laptop) == 32 and chosen(gpu) == 112 and chosen(laptop, image_size=97) == 48
    assert chosen(laptop, image_size=63) == chosen(Facts(20_000, 32)) == "full"
    assert chosen(laptop, encoder="timm/vit_tiny_patch16_224") == chosen(laptop, init_from="x.pth") == "full"
    assert chosen(Facts(1_000_000, has_gpu=True)) == chosen(gpu, first_size="full") == "full"
    assert flat(resolve(presets.preset("imagenet1k"), gpu))["first_size"] == "full"


def test_the_encoder_computes_in_bfloat16_where_the_device_can() -> None:
    def chosen(facts: Facts, **settings: Any) -> str:
        return flat(resolve(defaults(**settings), facts))["encoder_precision"]

    cpu, gpu = Facts(1000, has_bfloat16=True), Facts(1000, has_gpu=True, has_bfloat16=True)
    assert chosen(Facts(1000)) == chosen(Facts(1000, has_gpu=True)) == "float32"
    assert chosen(cpu) == chosen(gpu) == chosen(gpu, sync_bn=True) == "bfloat16"
    assert chosen(cpu, sync_bn=True) == chosen(cpu, encoder_precision="float32") == "float32"
    assert chosen(cpu, encoder="torchvision/resnet18") == chosen(gpu, encoder="timm/convnext_tiny") == "bfloat16"
    assert chosen(cpu, encoder="timm/tf_efficientnet_lite0") == chosen(cpu, bn="fixed") == "float32"
    assert chosen(cpu, image_size=16) == "bfloat16" and chosen(cpu, image_size=8) == "float32"
    assert chosen(cpu, image_size=31, stem="standard") == "float32" and chosen(gpu, image_size=8) == "bfloat16"
    with pytest.raises(ValueError, match="--encoder-precision bfloat16 needs images of at least 16 px on a CPU, not 8"):
        chosen(cpu, image_size=8, encoder_precision="bfloat16")
    assert chosen(Facts(1000), encoder_precision="bfloat16", sync_bn=True) == "bfloat16"


def test_with_pairs_the_rows_see_one_view() -> None:
    def chosen(**settings: Any) -> int:
        return flat(resolve(defaults(**settings), Facts(1000)))["row_views"]

    assert chosen() == chosen(views=1) == chosen(views=4) == 1
    assert chosen(row_views=2) == chosen(pairs=0) == 2 and chosen(views=4, pairs=0) == 4
    assert flat(resolve(presets.preset("imagenet1k"), Facts(1_281_167)))["row_views"] == 2
    with pytest.raises(ValueError, match="--row-views 3 is more than an image has, --views 2"):
        chosen(row_views=3)
    with pytest.raises(ValueError, match=r"--row-views 1 leaves views out .* use --views 1"):
        chosen(row_views=1, pairs=0)


def test_data_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        resolve(defaults(), Facts(1))
    with pytest.raises(ValueError, match=r"--batch-size 64 is larger than the data: 10 .*--batch-size 10"):
        resolve(defaults(batch_size=64), Facts(10))
    with pytest.raises(ValueError, match="--hardest 10"):
        resolve(defaults(hardest=10), Facts(10))


def test_the_papers_values() -> None:
    paper = flat(resolve(presets.preset("imagenet1k"), Facts(1_281_167, has_gpu=True)))
    expected = {
        "encoder": "torchvision/resnet50",
        "image_size": 224,
        "dim": 128,
        "temperature": 0.15,
        "views": 2,
        "batch_size": 4096,
        "lr": 0.48,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "warmup_epochs": 10,
        "epochs": 200,
        "hardest": 100,
        "smoothing": 0.2,
        "prior": "running-bn",
        "crop_min": 0.08,
        "flip": 0.5,
        "jitter": 1.0,
        "grayscale": 0.2,
        "blur": 0.5,
        "head": "mlp",
        "row_lr": 1.0,
    }
    assert {name: paper[name] for name in expected} == expected


def test_unknown_preset_is_named() -> None:
    with pytest.raises(ValueError, match="Did you mean 'imagenet1k'"):
        presets.preset("imagenet1")
    for name in presets.PRESETS:
        check(presets.preset(name))
        assert presets.measured(name)


def test_every_process_has_two_images() -> None:
    assert flat(resolve(defaults(), Facts(100, num_ranks=8)))["batch_size"] == 16
    with pytest.raises(ValueError, match=r"leaves one image to each of 8 processes.*at least 16, or --sync-bn"):
        resolve(defaults(batch_size=8), Facts(100, num_ranks=8))
    assert flat(resolve(defaults(batch_size=8, sync_bn=True), Facts(100, num_ranks=8)))["batch_size"] == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mean": (0.5, float("nan"), 0.5)}, "--mean must be finite"),
        ({"std": (0.5, float("nan"), 0.5)}, "--std must be positive"),
    ],
)
def test_values_that_cannot_be_normalized(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(defaults(**settings))


def test_batch_normalization_compares_views() -> None:
    with pytest.raises(ValueError, match=r"--micro-batch 1 with --views 1: .*at least 2 views"):
        resolve(defaults(micro_batch=1, views=1), Facts(1000))
    resolve(defaults(micro_batch=1, views=2), Facts(1000))


def test_pairs_need_two_views() -> None:
    with pytest.raises(ValueError, match=r"--pairs 1 .*--views is 1; use --views 2"):
        resolve(defaults(pairs=1, views=1), Facts(1000))
    assert resolve(defaults(pairs=1, views=2), Facts(1000)).classifier.pairs == 1
    assert resolve(defaults(views=1), Facts(1000)).classifier.pairs == 0

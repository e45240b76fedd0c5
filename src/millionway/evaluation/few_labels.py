"""Few labels: the whole network trained on 1 % or 10 % of the labels, balanced over the classes, drawn by the seed."""

import math
from collections.abc import Iterator
from dataclasses import replace

from millionway import randomness
from millionway.evaluation.end_to_end import Recipe, top_k_accuracy, train
from millionway.evaluation.features import Labeled, draw_of_each
from millionway.evaluation.work import Work

ENCODER_LR = 0.001
MANY = 0.05  # from this share on the paper's values for 10 % are taken, below it those for 1 %
CLASSIFIER_LR = {False: 15.0, True: 10.0}
EPOCHS = {False: 10, True: 20}
BATCH_SIZE = 256
MIN_STEPS = 100  # small sets get more epochs, or nothing would move


def score(work: Work) -> Iterator[tuple[str, float]]:
    """few_labels_SHARE_top1, _top5 for each share of the labels, or few_labels_NUMBER for so many of each class."""
    options, bank = work.asked, work.split.bank
    subsets = {}
    if options.per_class is not None:
        subsets[f"{options.per_class}_each"] = draw(
            bank, work.seed, per_class=options.per_class, names=work.split.label_names
        )
    else:
        for share in options.shares:
            subsets[f"{100 * share:g}%"] = draw(bank, work.seed, share=share)
    for name, part in subsets.items():
        recipe = _recipe(work, len(part.labels), len(part.labels) / len(bank.labels))
        work.used[name] = {**vars(recipe), "num_images": len(part.labels), "instance_ids": part.instance_ids.tolist()}
        model = train(work, part, recipe, f"few-labels {name}")
        for k, accuracy in top_k_accuracy(work, model, work.split.queries).items():
            yield f"few_labels_{name}_top{k}", accuracy


def draw(
    part: Labeled, seed: int, share: float | None = None, per_class: int | None = None, names: list[str] | None = None
) -> Labeled:
    """So many images of each class (at least one), the same for the same seed."""

    def how_many(label: int, num: int) -> int:
        wanted = per_class if share is None else max(1, round(share * num))
        assert wanted is not None
        if wanted > num:
            what = names[label] if names else label
            raise ValueError(f"--per-class {wanted}: class {what} has only {num} images")
        return wanted

    drawn = draw_of_each(part.labels, part.instance_ids, randomness.key_of(seed, "few labels"), how_many)
    return replace(part, instance_ids=part.instance_ids[drawn], labels=part.labels[drawn])


def _recipe(work: Work, num_images: int, share: float) -> Recipe:
    options, many = work.asked, share >= MANY
    batch_size = options.batch_size or max(2, min(BATCH_SIZE, num_images // 4))
    steps_per_epoch = max(1, num_images // batch_size)
    return Recipe(
        epochs=options.epochs or max(EPOCHS[many], math.ceil(MIN_STEPS / steps_per_epoch)),
        batch_size=min(batch_size, num_images),
        encoder_lr=ENCODER_LR,
        classifier_lr=options.lr or CLASSIFIER_LR[many],
        weight_decay=options.weight_decay or 0.0,
        normalize=True,
        crop_min=options.crop_min,
        flip=options.flip,
    )

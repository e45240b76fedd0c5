"""Fine-tuning: the whole network trained with all labels of another set."""

from collections.abc import Iterator

from millionway.evaluation.end_to_end import Recipe, top_k_accuracy, train
from millionway.evaluation.work import Work

EPOCHS = 30
BATCH_SIZE = 128
LR = 0.05  # at batch 128, for encoder and classifier alike; smaller batches scale it linearly
WEIGHT_DECAY = 1e-4


def score(work: Work) -> Iterator[tuple[str, float]]:
    """finetune_top1, and _top5 where there are more than five labels."""
    options, bank = work.asked, work.split.bank
    batch_size = options.batch_size or max(2, min(BATCH_SIZE, len(bank.labels) // 8))
    lr = options.lr or LR * batch_size / BATCH_SIZE
    recipe = Recipe(
        epochs=options.epochs or EPOCHS,
        batch_size=min(batch_size, len(bank.labels)),
        encoder_lr=lr,
        classifier_lr=lr,
        weight_decay=WEIGHT_DECAY if options.weight_decay is None else options.weight_decay,
        normalize=False,
        crop_min=options.crop_min,
        flip=options.flip,
    )
    work.used.update(vars(recipe))
    model = train(work, bank, recipe, "finetune")
    for k, accuracy in top_k_accuracy(work, model, work.split.queries).items():
        yield f"finetune_top{k}", accuracy

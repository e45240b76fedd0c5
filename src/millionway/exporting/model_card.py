"""README.md of an exported folder: what was trained on what, how it scored, how it is loaded."""

from pathlib import Path

from millionway.model.encoder import EncoderSpec
from millionway.reporting import words
from millionway.reporting.contents import read_contents
from millionway.reporting.intervals import shown

HEADER = """---
library_name: timm
tags:
- image-feature-extraction
- self-supervised-learning
- millionway
---
"""


def model_card(spec: EncoderSpec, timm_name: str, run: Path, folder: str) -> str:
    """run: the run folder; of an encoder's file alone there is less to say."""
    lines = [f"# {timm_name}, pretrained without labels", ""]
    scores = []
    if run.is_dir():
        contents = read_contents(run)
        lines += [*words.summary(contents), ""]
        scores = contents.scores
    lines += [
        "The method: every image is a class of its own, and the encoder learns to recognize each of them from random"
    ]
    lines += ["views (instance classification over all images, a cosine softmax). It was trained with millionway.", ""]
    if scores:
        lines += [
            "## Scores",
            "",
            "| protocol | number | value | untrained | chance | scored on |",
            "|---|---|---|---|---|---|",
        ]
        for score in scores:
            untrained = shown(score.name, score.beside["untrained"]) if "untrained" in score.beside else ""
            chance = "" if score.chance is None else f"{score.chance:.1%}"
            value = shown(score.name, score.value, score.half_interval)
            cells = (score.protocol, words.name_of(score.name), value, untrained, chance, score.scored_on)
            lines.append(f"| {' | '.join(cell.replace('|', ' ') for cell in cells)} |")
        lines.append("")
    lines += ["## Use", "", "```python", *how_to_load_folder(folder), "```", ""]
    lines += [f"Input: {spec.image_size} px, RGB from 0 to 1, then (x - {spec.mean}) / {spec.std}.", ""]
    return HEADER + "\n".join(lines)


def how_to_load_folder(folder: str) -> list[str]:
    return [
        "import timm",
        f"model = timm.create_model('local-dir:{folder}', pretrained=True).eval()",
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)",
        "",
        "# or with transformers:",
        "# from transformers import AutoImageProcessor, AutoModel",
        f"# model, processor = AutoModel.from_pretrained('{folder}'), AutoImageProcessor.from_pretrained('{folder}')",
        "# features = model(**processor(image, return_tensors='pt')).pooler_output",
    ]

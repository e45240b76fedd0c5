"""One .pt2 file of torch.export: weights and graph, for torch.export.load on a machine without millionway."""

from pathlib import Path

import torch

from millionway.exporting.graph import Graph, difference, example, shapes
from millionway.files import replacing
from millionway.model.encoder import Encoder


def write_program(encoder: Encoder, out: Path, from_bytes: bool) -> float:
    """Returns the largest difference from the encoder's own features, as a share of the largest one."""
    graph = Graph(encoder, from_bytes).eval()
    with torch.no_grad():
        program = torch.export.export(graph, (example(graph),), dynamic_shapes=shapes(graph))
    with replacing(out) as aside:
        with open(aside, "wb") as file:
            torch.export.save(program, file)
        with open(aside, "rb") as file:
            return difference(graph, torch.export.load(file).module())

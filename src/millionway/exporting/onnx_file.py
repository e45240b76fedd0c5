"""One .onnx file: weights and graph, any number of images at a time; tried with onnxruntime before it gets its name."""

import warnings
from pathlib import Path

import torch

from millionway.exporting.graph import Graph, difference, example, shapes
from millionway.files import replacing
from millionway.model.encoder import Encoder

TOLERANCE = 1e-3  # of the largest feature: other kernels add up in another order


def write_onnx(encoder: Encoder, out: Path, from_bytes: bool) -> float:
    """Returns the largest difference from torch's features, as a share of the largest one."""
    _need("onnx", "onnxscript", "onnxruntime")
    import onnxruntime

    graph = Graph(encoder, from_bytes).eval()
    with replacing(out) as aside:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter about itself
            torch.onnx.export(
                graph,
                (example(graph),),
                aside,
                input_names=["images"],
                output_names=["features"],
                dynamic_shapes=shapes(graph),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
        session = onnxruntime.InferenceSession(aside.read_bytes(), providers=["CPUExecutionProvider"])
        run = lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
        off = difference(graph, run)
        if not off <= TOLERANCE:
            raise ValueError(
                f"--format onnx: onnxruntime's features differ from torch's by {off:.2%}; use --format pt2"
            )
    return off


def _need(*packages: str) -> None:
    from importlib.util import find_spec

    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ValueError(f"--format onnx needs {', '.join(missing)}: pip install 'millionway[onnx]'")

"""What do the kernels take of a GPU, and what do lower precisions cost? Answered without one.

    python benchmarks/kernels.py compile      # every kernel for three generations: shared memory, registers, spills
    python benchmarks/kernels.py precision    # error of tf32 and bfloat16 products against float64
    python benchmarks/kernels.py table        # both into docs/parallelism.md

Kernels are compiled by Triton with the assembler (ptxas) that comes with it. Lower precisions are emulated: operands
are rounded as tensor cores read them, then multiplied in float32.
"""

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from presets import write_between_marks  # beside this file
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource

from millionway.machine import describe_environment, has_bfloat16
from millionway.model import fused, kernels
from millionway.model.classifier import InstanceClassifier
from millionway.model.products import PRECISIONS
from millionway.settings.pretrain import Precision

RESULTS = Path(__file__).parent / "results"
# Shared memory that a program can have, by compute capability: CUDA C++ Programming Guide, "Technical Specifications".
SHARED_BYTES = {70: 96 << 10, 80: 163 << 10, 90: 227 << 10}
DEVICES = {70: "V100", 80: "A100", 90: "H100"}
DIMS = (64, 100, 128, 256)
STORAGE = {"float32": "fp32", "bfloat16": "bf16"}


def cases(dims: tuple[int, ...] = DIMS) -> list[dict[str, Any]]:
    """Every kernel as it may be started: also on generations whose products are float32 alone."""
    all_of_them = []
    for capability in SHARED_BYTES:
        has_tensor_cores = capability // 10 >= fused.TENSOR_CORES
        for dim in dims:
            for products in ("float32", "tf32", "bfloat16") if has_tensor_cores else ("float32",):
                for storage in STORAGE:
                    base = {"capability": capability, "dim": dim, "products": products, "storage": storage}
                    all_of_them += [{**base, "kernel": name} for name in ("sweep", "move", "largest", "at_pairs")]
    return all_of_them


def compiled(
    capability: int, dim: int, products: str, storage: str, kernel: str, masked: bool = True
) -> dict[str, int]:
    """Shared memory, registers and bytes of spilled registers, as the assembler says. With dead rows and a shift."""
    function = getattr(kernels, kernel)
    tiles = fused.second_tiles(dim, products) if kernel == "move" else fused.first_tiles(dim, products)
    constants: dict[str, Any] = {"DIM": dim, "PADDED": fused.padded(dim), "PRODUCTS": products, "EMULATED": False}
    constants |= {**tiles.numbers(), "MASKED": masked, "SHIFTED": True}
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    options = {"enable_fp_fusion": True} if kernel == "at_pairs" else tiles.launch()
    types = {name: "constexpr" if name in constants else _type(name, storage) for name in function.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(types) if name.endswith("_pointer")}
    binary = triton.compile(
        ASTSource(function, types, constants, aligned), target=GPUTarget("cuda", capability, 32), options=options
    )
    return {"shared_bytes": binary.metadata.shared, **_assembled(binary.asm["ptx"], capability)}


def _type(name: str, storage: str) -> str:
    if name in ("weight_pointer", "momentum_pointer"):
        return f"*{STORAGE[storage]}"
    if name == "dead_pointer":
        return "*i1"
    if name in ("pair_rows_pointer", "pair_samples_pointer", "bounds_pointer"):
        return "*i64"
    if name.endswith("_pointer"):
        return "*fp32"
    return {"key": "i64", "first_id": "i64", "lr": "fp32", "momentum": "fp32", "weight_decay": "fp32"}.get(name, "i32")


def _assembled(ptx: str, capability: int) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        options = ["-v", "--regAllocOptLevel=2", f"--gpu-name={sm_arch_from_capability(capability)}"]
        words = subprocess.run(
            [get_ptxas(capability).path, *options, str(source), "-o", str(source.with_suffix(".cubin"))],
            check=True,
            capture_output=True,
            text=True,
        ).stderr
    registers, spills = (
        re.search(pattern, words) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores, (\d+) bytes")
    )
    assert registers and spills, words
    return {"registers": int(registers[1]), "spilled_bytes": int(spills[1]) + int(spills[2])}


def errors(num: int = 1 << 14, dim: int = 128, batch: int = 256) -> list[dict[str, Any]]:
    """Of a step against the same in float64: loss, embedding gradients, momentum of the rows. With smoothing."""
    g = torch.Generator().manual_seed(0)
    rows, table = torch.randn(num, dim, generator=g), torch.randint(num, (num, 10), generator=g, dtype=torch.int32)
    ids = torch.randint(num, (batch,), generator=g)
    x = torch.nn.functional.normalize(rows[ids]) + 0.2 * torch.randn(batch, dim, generator=g)
    results = []
    for temperature in (1.0, 0.15, 0.05, 0.01):
        exact = _step(rows.double(), x.double(), ids, table, temperature, "float32")
        on_a_cpu = ["bfloat16 on a CPU"] if has_bfloat16(torch.device("cpu")) else []
        for precision in (*PRECISIONS, *on_a_cpu):
            native = precision in on_a_cpu
            with mock.patch("millionway.model.products.has_bfloat16", lambda device, native=native: native):
                ours = _step(rows, x, ids, table, temperature, "bfloat16" if native else precision)
            error = {name: float((ours[name].double() - exact[name]).norm() / exact[name].norm()) for name in exact}
            results.append({"temperature": temperature, "precision": precision, **error})
    return results


def _step(
    rows: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    table: torch.Tensor,
    temperature: float,
    precision: Precision,
) -> dict[str, torch.Tensor]:
    classifier = InstanceClassifier(*rows.shape, temperature, storage=rows.dtype, precision=precision)
    classifier.set_rows(torch.arange(len(rows)), rows)
    leaf = x.clone().requires_grad_()
    loss = classifier(leaf, ids, table, 0.2)
    loss.backward()
    classifier.update(0.1, weight_decay=0.0)
    assert leaf.grad is not None
    return {"loss": loss.detach(), "embedding gradients": leaf.grad, "row gradients": classifier.momentum}


def compile_table(results: list[dict[str, Any]]) -> str:
    """The most that any of the sizes takes, by device and kernel."""
    lines = [
        "| kernel | device | products | shared memory, KiB (limit) | registers (limit 255) | spilled bytes |",
        "|---|---|---|---|---|---|",
    ]
    for kernel in ("sweep", "move", "largest", "at_pairs"):
        for capability, limit in SHARED_BYTES.items():
            for products in PRECISIONS:
                chosen = [
                    each
                    for each in results
                    if (each["kernel"], each["capability"], each["products"]) == (kernel, capability, products)
                ]
                if not chosen:
                    continue
                shared, registers, spilled = (
                    max(each[name] for each in chosen) for name in ("shared_bytes", "registers", "spilled_bytes")
                )
                lines.append(
                    f"| {kernel} | {DEVICES[capability]} (sm_{capability}) | {products} "
                    f"| {shared / 1024:.0f} ({limit >> 10}) | {registers} | {spilled} |"
                )
    return "\n".join(lines)


def precision_table(results: list[dict[str, Any]]) -> str:
    names = [name for name in results[0] if name not in ("temperature", "precision")]
    lines = [f"| temperature | products | {' | '.join(names)} |", "|" + "---|" * (2 + len(names))]
    for each in results:
        numbers = " | ".join(f"{each[name]:.1e}" for name in names)
        lines.append(f"| {each['temperature']:g} | {each['precision']} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("compile", "precision", "table"))
    part = parser.parse_args().part
    path = RESULTS / "kernels.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    environment = json.loads(describe_environment(torch.device("cpu"))) | {"triton": triton.__version__}
    if part == "compile":
        compilations = [{**case, **compiled(**case)} for case in cases()]
        for each in compilations:
            assert each["shared_bytes"] <= SHARED_BYTES[each["capability"]], each
        result["compile"] = {"environment": environment, "results": compilations}
    elif part == "precision":
        result["precision"] = {"environment": environment, "results": errors()}
    path.write_text(json.dumps(result, indent=2) + "\n")
    page = Path(__file__).parent.parent / "docs" / "parallelism.md"
    for name, table in (("compile", compile_table), ("precision", precision_table)):
        if name in result:
            write_between_marks(page, f"kernels {name}", table(result[name]["results"]))


if __name__ == "__main__":
    main()

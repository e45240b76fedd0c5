"""The fused kernels without a GPU: interpreted for their numbers, compiled for what they take."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_interpreted_kernels_equal_the_dense_reference() -> None:
    """In a process of its own, because Triton decides at its import."""
    script = Path(__file__).with_name("on_interpreter.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("capability", [70, 80, 90])
def test_compiled_kernels_fit_the_device(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the paper's 128 dimensions and at 100, which are padded; benchmarks/kernels.py compiles all sizes."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("kernel_benchmark", BENCHMARKS / "kernels.py")
    assert spec and spec.loader
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    cases = [case for case in benchmark.cases((128,)) if case["capability"] == capability]
    cases += [{**case, "dim": 100} for case in cases if case["storage"] != case["products"] or case["kernel"] == "move"]
    assert cases
    for case in cases:
        taken = benchmark.compiled(**case)
        assert taken["shared_bytes"] <= benchmark.SHARED_BYTES[capability], (case, taken)
        assert taken["spilled_bytes"] == 0, (case, taken)

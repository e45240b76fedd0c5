import threading

import pytest
import torch

from millionway.model import products
from millionway.model.products import computed_in, rounded


@pytest.mark.parametrize("shape", [(3, 5, 7), (2048, 128, 64), (512, 128, 2048)])
def test_float32_products_keep_the_bits_of_float32(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b = torch.randn(m, k), torch.randn(k, n)
    exact = a.double() @ b.double()
    with computed_in("float32"):
        found = a @ b
    assert (found - exact).norm() < 1e-6 * exact.norm()
    assert (rounded(a, "bfloat16") @ b - exact).norm() > 1e-4 * exact.norm()


def test_the_switches_are_put_back() -> None:
    switch = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = switch.fp32_precision
    with pytest.raises(RuntimeError, match="inside"), computed_in("float32"):
        assert switch.fp32_precision == products._cpu_switch()
        raise RuntimeError("inside")
    assert switch.fp32_precision == before


def test_the_last_thread_to_leave_puts_the_switches_back() -> None:
    switch, entered, may_leave = torch.backends.cuda.matmul, threading.Event(), threading.Event()
    before = switch.fp32_precision

    def stay() -> None:
        with computed_in("float32"):
            entered.set()
            may_leave.wait()

    other = threading.Thread(target=stay)
    with computed_in("float32"):
        other.start()
        entered.wait()
    assert switch.fp32_precision == "ieee"
    may_leave.set()
    other.join()
    assert switch.fp32_precision == before


@pytest.mark.parametrize(
    ("name", "is_float32", "expected"),
    [("AMD EPYC", True, "bf16"), ("AMD EPYC", False, "ieee"), ("Intel Xeon", True, "ieee")],
)
def test_onednn_is_asked_only_where_it_computes_in_float32(
    monkeypatch: pytest.MonkeyPatch, name: str, is_float32: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": name})
    monkeypatch.setattr(products, "_is_float32", lambda value: is_float32)
    assert products._cpu_switch.__wrapped__() == expected
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert products._cpu_switch.__wrapped__() == "ieee"


def test_a_product_that_is_rounded_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products._is_float32("ieee") and not products._is_float32("no such value")
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: torch.mm(a.bfloat16(), b.bfloat16()).float())
    assert not products._is_float32("ieee")

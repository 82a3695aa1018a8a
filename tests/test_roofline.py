"""Work by hand: FLOPs and bytes of single operators, their roofline times, and the stream that a host feeds."""

import pytest
import torch

from gctutor.devices import find_device
from gctutor.roofline import (
    ATTENTION,
    ELEMENTWISE,
    GEMM,
    VIEW,
    Work,
    attention_flop,
    bytes_of,
    compute_seconds,
    kernel_seconds,
    work_of,
)

aten = torch.ops.aten


def work(func, *args, makes_new=True, **kwargs):
    out = func(*args, **kwargs)
    return work_of(func, args, kwargs, out if isinstance(out, (tuple, list)) else [out], makes_new=makes_new)


def test_a_product_counts_two_flop_a_pair_and_each_matrix_once():
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    assert work(aten.mm.default, a, b) == Work(GEMM, 2 * 3 * 5 * 7, 4 * (15 + 35 + 21), True)


def test_products_in_their_other_forms():
    batch = work(aten.bmm.default, torch.ones(2, 3, 5), torch.ones(2, 5, 7))
    assert (batch.kind, batch.flop) == (GEMM, 2 * 2 * 3 * 5 * 7)
    biased = work(aten.addmm.default, torch.ones(7), torch.ones(3, 5).bfloat16().float(), torch.ones(5, 7))
    assert (biased.kind, biased.flop) == (GEMM, 2 * 3 * 5 * 7)
    assert biased.bytes == 4 * (7 + 15 + 35 + 21)


def test_a_product_written_into_out_moves_it_once():
    a, b, out = torch.ones(3, 5), torch.ones(5, 7), torch.empty(3, 7)
    assert work(aten.mm.out, a, b, out=out, makes_new=False).bytes == 4 * (15 + 35 + 21)


@pytest.mark.parametrize(
    ("func", "args", "flop", "moved"),
    [
        (aten.add.Tensor, (torch.ones(4, 6), torch.ones(4, 6)), 24, 3 * 24 * 4),
        (aten.mul.Tensor, (torch.ones(4, 6), torch.ones(6).expand(4, 6)), 24, (24 + 6 + 24) * 4),
        (aten.silu.default, (torch.ones(8, dtype=torch.bfloat16),), 8, 2 * 8 * 2),
        (aten.embedding.default, (torch.ones(100, 4), torch.tensor([1, 2, 3])), 12, 2 * 12 * 4 + 3 * 8),
    ],
)
def test_element_wise_operators_count_one_flop_an_output(func, args, flop, moved):
    found = work(func, *args)
    assert (found.kind, found.flop, found.bytes) == (ELEMENTWISE, flop, moved)


def test_views_and_allocations_are_free():
    x = torch.ones(4, 6)
    assert work(aten.t.default, x, makes_new=False) == Work(VIEW, 0, 0, False)
    assert work(aten.empty.memory_format, [4, 6]) == Work(VIEW, 0, 0, False)
    assert kernel_seconds(Work(VIEW, 0, 0, False), find_device("H100")) == 0


def test_an_in_place_operator_reads_and_writes_what_it_changes():
    x, y = torch.ones(4, 6), torch.ones(4, 6)
    assert work(aten.add_.Tensor, x, y, makes_new=False).bytes == 3 * 24 * 4


def test_bytes_of_a_broadcast_tensor_count_what_is_there():
    assert bytes_of(torch.ones(1, 6).expand(4, 6)) == 6 * 4
    assert bytes_of(torch.ones(4, 6)[:, ::2]) == 12 * 4
    assert bytes_of(torch.ones(()).expand(0, 5)) == 0


def test_attention_is_two_products_halved_when_causal_and_backward_two_and_a_half():
    query, key = (1, 8, 16, 4), (1, 2, 16, 4)
    full = 2 * (2 * 8 * 16 * 16 * 4)
    assert attention_flop(query, key, causal=False) == full
    assert attention_flop(query, key, causal=True) == full // 2
    assert attention_flop(query, key, causal=True, backward=True) == full // 2 * 5 // 2


def test_the_attention_operator_is_recognised_with_its_shapes():
    q, k = torch.ones(1, 4, 16, 8), torch.ones(1, 4, 16, 8)
    func = aten._scaled_dot_product_flash_attention_for_cpu.default
    found = work(func, q, k, k, 0.0, True)
    assert (found.kind, found.flop) == (ATTENTION, attention_flop(q.shape, k.shape, causal=True))


def test_time_is_the_larger_of_arithmetic_and_traffic():
    device = find_device("H100")
    gemm, memory = device.efficiency.gemm, device.efficiency.bandwidth
    heavy, light = Work(GEMM, 10**12, 10**6, False), Work(ELEMENTWISE, 10**6, 10**9, False)
    assert kernel_seconds(heavy, device) == pytest.approx(10**12 / (device.bf16_flop_per_s * gemm))
    assert kernel_seconds(light, device) == pytest.approx(10**9 / (device.bandwidth_bytes_per_s * memory))
    assert compute_seconds(heavy._replace(fp32=True), device) == pytest.approx(10**12 / (device.fp32_flop_per_s * gemm))

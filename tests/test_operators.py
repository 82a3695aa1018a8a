"""The operators of a layer: exact work by formula, intensities, what is kept, and the ranking."""

import math

import pytest

from gctutor.devices import find_device
from gctutor.operators import layer_operators
from gctutor.workload import Workload

T, H, M, HEADS, KV, D = 128, 512, 1536, 8, 2, 64  # nano
NANO = Workload("nano", seqlen=T, layers=2)  # bf16


@pytest.fixture(scope="module")
def by_site():
    return {op.site: op for op in layer_operators(NANO, "H100")}


@pytest.mark.parametrize(
    ("site", "inner", "outer"),
    [
        ("self_attn.q_proj", H, HEADS * D),
        ("self_attn.k_proj", H, KV * D),
        ("self_attn.v_proj", H, KV * D),
        ("self_attn.o_proj", HEADS * D, H),
        ("mlp.gate_proj", H, M),
        ("mlp.up_proj", H, M),
        ("mlp.down_proj", M, H),
    ],
)
def test_a_linear_layer_is_one_product(by_site, site, inner, outer):
    op = by_site[site]
    assert (op.name, op.count) == ("mm", 1)
    assert op.flop == 2 * T * inner * outer
    assert op.bytes == 2 * (T * inner + inner * outer + T * outer)
    assert op.intensity == op.flop / op.bytes


def test_causal_attention_is_half_of_two_products(by_site):
    assert by_site["self_attn.core_attn"].flop == 2 * HEADS * T * T * D


def test_element_wise_sites(by_site):
    assert (by_site["mlp"].flop, by_site["mlp"].bytes) == (T * M, 3 * T * M * 2)
    assert (by_site[""].count, by_site[""].bytes) == (2, 2 * 3 * T * H * 2)
    assert by_site["input_layernorm"].count == 8


def test_kept_bytes_are_those_of_the_mlps_wide_tensors(by_site):
    wide = T * M * 2
    assert [by_site[site].kept_bytes for site in ("mlp.gate_proj", "mlp.up_proj", "mlp.act_fn", "mlp")] == [wide] * 4
    assert by_site["mlp.down_proj"].kept_bytes == 0
    assert by_site["mlp.down_proj"].roi == 0


def test_rows_are_sorted_and_their_shares_add_up(by_site):
    ops = list(by_site.values())
    assert [op.seconds for op in ops] == sorted((op.seconds for op in ops), reverse=True)
    assert math.isclose(sum(op.share for op in ops), 1)
    assert all(op.phase == "forward" for op in ops)


def test_by_operator_splits_the_same_work(by_site):
    split = layer_operators(NANO, "H100", by="operator")
    assert sum(op.flop for op in split) == sum(op.flop for op in by_site.values())
    assert sum(op.bytes for op in split) == sum(op.bytes for op in by_site.values())
    assert {op.name for op in split if op.site == "mlp"} == {"mul"}


def test_backward_has_two_products_for_each_linear_layer():
    backward = {op.site: op for op in layer_operators(NANO, "H100", phase="backward", by="site")}
    gate = backward["mlp.gate_proj"]
    assert gate.flop >= 2 * (2 * T * H * M)
    assert gate.flop - 2 * (2 * T * H * M) <= 2 * T * H * 2  # a gradient addition may be counted here
    assert gate.kept_bytes == 0


def test_the_device_decides_what_bounds_an_operator_not_its_intensity():
    workload = Workload(layers=1, seqlen=200)
    fast, slow = ({op.site: op for op in layer_operators(workload, find_device(name))} for name in ("H100", "RTX 4090"))
    assert fast["mlp.gate_proj"].intensity == slow["mlp.gate_proj"].intensity
    assert fast["mlp.gate_proj"].bound == "memory"
    assert slow["mlp.gate_proj"].bound == "compute"

"""`ops:`: names resolved to overloads when the policy is read, and the public reports about SAC (cases 09 to 14)."""

import warnings
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from gctutor.policies import PolicyError, ops as sac, parse
from gctutor.policies.ops import Ops, attention_operators, operators

EVERY_LAYER = set(range(4))


@pytest.mark.parametrize("name", ["mm", "aten.mm", "aten::mm", "torch.ops.aten.mm"])
def test_a_packet_stands_for_its_overloads_and_never_for_out_variants(name):
    policy = parse(f"ops:{name}")
    assert str(policy) == "ops:mm"
    found = operators("mm")
    assert torch.ops.aten.mm.default in found and torch.ops.aten.mm.out not in found
    assert all(isinstance(each, torch._ops.OpOverload) for each in found)


def test_one_overload_can_be_named():
    assert operators("mm.default") == [torch.ops.aten.mm.default]
    assert str(parse("ops:aten.mm.default")) == "ops:mm.default"


def test_names_have_one_order():
    text = "ops:-up_proj,core_attn,mm,-down_proj,bmm"
    assert str(parse(text)) == "ops:bmm,mm,core_attn,-down_proj,-up_proj"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ops:core_atn", "did you mean 'core_attn'"),
        ("ops:mn", "Unknown operator 'mn'"),
        ("ops:silu_", "works in place"),
        ("ops:-down_proj", "keeps no operator"),
        ("ops:", "keeps no operator"),
        ("ops:qqqqqqqq", "choose from mm, addmm, bmm, core_attn"),
        ("ops:mm,every2mm", "choose one"),
    ],
)
def test_what_is_no_operator_is_refused_when_read(text, message):
    with pytest.raises(PolicyError, match=message):
        parse(text)


def test_core_attn_is_every_backend_that_exists():
    aten = torch.ops.aten
    names = ["flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"]
    expected = {getattr(aten, f"_scaled_dot_product_{name}").default for name in names}
    assert expected | {aten._flash_attention_forward.default, aten._efficient_attention_forward.default} <= {
        each for each in attention_operators() if isinstance(each, torch._ops.OpOverload)
    }
    assert torch.ops.higher_order.flex_attention in attention_operators()
    assert not [each for each in attention_operators() if "backward" in str(each)]


def test_a_registered_flash_attn_operator_is_found():
    with torch.library._scoped_library("flash_attn", "DEF") as library:
        library.define("_flash_attn_forward(Tensor q, Tensor k, Tensor v) -> Tensor")
        library.define("_flash_attn_backward(Tensor q) -> Tensor")
        found = [str(each) for each in attention_operators() if "flash_attn." in str(each)]
    assert found == ["flash_attn._flash_attn_forward.default"]


@pytest.mark.parametrize(
    ("policy", "mm", "attention"),
    [
        ("ops:mm,core_attn", 58, 0),  # not 82: a packet would match nothing (case 09)
        ("ops:mm,core_attn,-down_proj", 58, 0),  # early stop never reruns down_proj
        ("ops:mm,core_attn,-up_proj", 62, 0),
        ("ops:mm", 58, 4),
        ("ops:core_attn", 82, 0),  # no attention forward in backward (case 10)
        ("ops:every2mm,core_attn", 70, 0),  # k, o and up of each layer are rerun
    ],
)
def test_what_is_kept_is_not_rerun(tiny, step, policy, mm, attention):
    model = tiny()
    expected = step(model)
    with parse(policy).applied(model) as applied:
        for _ in range(2):  # counters are made anew for each region
            done = step(model)
            assert done.equals(expected)
            assert done.mm == (29, mm)
            assert done.backward["_scaled_dot_product_flash_attention_for_cpu"] == attention
    applied.verify(EVERY_LAYER)


def test_hits_are_counted_by_name(tiny, step):
    model = tiny()
    with parse("ops:mm,core_attn,-down_proj").applied(model) as applied:
        step(model)
    assert dict(applied.hits[Ops(("mm", "core_attn"), ("down_proj",))]) == {"mm": 24, "core_attn": 4, "-down_proj": 4}


def test_bytes_are_the_kept_outputs(tiny, kept_bytes):
    """Case 13: 1024 tokens x 256 widths x 4 bytes x 4 layers, which saved-tensor hooks would not see."""
    model = tiny()

    def kept(policy):
        with parse(policy).applied(model):
            return kept_bytes(model)

    assert kept("ops:mm") - kept("block") == 4_194_304
    assert kept("ops:mm") - kept("ops:mm,-down_proj") == 1024 * 32 * 4 * 4


def test_a_name_that_no_step_calls_is_an_error_after_the_step(tiny, step):
    """Case 10: eager attention is no operator of its own; Qwen3's linear layers have no bias, hence no addmm."""
    model = tiny(attention="eager")
    with parse("ops:addmm,mm,core_attn").applied(model) as applied:
        step(model)
    with pytest.raises(PolicyError, match="addmm, core_attn"):
        applied.verify(EVERY_LAYER)


def test_an_exclusion_that_excludes_nothing_is_an_error(tiny, step):
    with pytest.raises(PolicyError, match="did you mean 'down_proj'"):
        parse("ops:mm,-down_prj").applied(tiny()).__enter__()
    model = tiny()
    with parse("ops:core_attn,-down_proj").applied(model) as applied:
        step(model)
    with pytest.raises(PolicyError, match="-down_proj"):
        applied.verify(EVERY_LAYER)


@pytest.mark.filterwarnings("ignore:.*in-place module")
def test_in_place_activations_are_warned_of(tiny, step):
    """Case 11: through `nn.Linear` SAC's own check is defeated, and the gradients are wrong without an error."""
    model = tiny()
    expected = step(model)
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.SiLU(inplace=True)
    assert step(model).equals(expected)
    with pytest.warns(UserWarning, match=r"in-place module mlp\.act_fn"), parse("ops:mm").applied(model):
        assert step(model).worst(expected) > 0.1
    with parse("block").applied(model):
        assert step(model).equals(expected)


def test_no_warning_without_in_place_modules(tiny):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with parse("ops:mm").applied(tiny()):
            pass


def test_offload_is_never_asked_of_sac(monkeypatch, tiny, step):
    """Case 14: SAC has offload policies in name only and recomputes instead."""
    answers = set()

    def recording(policy):
        def ask(*args, **kwargs):
            answers.add(policy(*args, **kwargs))
            return policy(*args, **kwargs)

        return original(ask)

    original = sac.create_selective_checkpoint_contexts
    monkeypatch.setattr(sac, "create_selective_checkpoint_contexts", recording)
    model = tiny()
    with parse("ops:mm,core_attn,-down_proj").applied(model):
        step(model)
    assert answers == {CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE}
    for text in ("ops:mm+offload", "ops:offload"):
        with pytest.raises(PolicyError):
            parse(text)


def test_a_torch_that_asks_again_in_the_replay_gets_the_same_answers(monkeypatch):
    """torch 2.11 may call the policy in the replay too: counts and hits must not run on."""
    monkeypatch.setattr(sac, "create_selective_checkpoint_contexts", lambda policy: policy)
    hits, mm = Counter(), torch.ops.aten.mm.default
    policy = sac._contexts({mm: "every2mm"}, hits)
    forward, replay = ([policy(SimpleNamespace(is_recompute=again), mm) for _ in range(3)] for again in (False, True))
    assert (
        forward == replay == [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE]
    )
    assert hits["every2mm"] == 3

"""`modules:`: gradients bitwise those of `none`, exactly the kept outputs in memory, and nothing kept that is rerun."""

import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from gctutor.policies import PolicyError, parse
from gctutor.policies.region import active_region

ALL = "modules:all"
TOKENS, LAYERS, F32 = 8 * 128, 4, 4
# Widths of the outputs in the tiny model; attention adds its logsumexp, one number a head.
WIDTH = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "core_attn": 32 + 4, "o_proj": 32, "gate_proj": 64, "up_proj": 64}


def padding(batch=2, seqlen=16):
    mask = torch.ones(batch, seqlen, dtype=torch.long)
    mask[0, :3] = 0
    return mask


def test_the_checkpoints_hooks_are_where_the_region_looks_for_them():
    """The two private calls of `region.py`, on this version of torch."""
    seen = []

    class Peek:
        def __enter__(self):
            seen.append((torch._C._autograd._top_saved_tensors_default_hooks(True), self.keeps_graph()))

        def __exit__(self, *error):
            pass

        def keeps_graph(self):
            return torch._C._autograd._get_current_graph_task_keep_graph()

    x = torch.ones(2, requires_grad=True)
    out = checkpoint(torch.sin, x, use_reentrant=False, context_fn=lambda: (Peek(), Peek()))
    out.sum().backward()
    (forward, _), (replay, keeps) = seen
    assert [hook[0].__qualname__.split(".")[0] for hook in (forward, replay)] == [
        "_checkpoint_hook",
        "_recomputation_hook",
    ]
    assert keeps is False


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2", "mistral"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_those_of_none(tiny, step, kind, attention, dropout):
    model = tiny(kind, attention=attention, attention_dropout=dropout)
    for precision in ({}, {"amp": True}):
        for inputs in ({}, {"attention_mask": padding()}):
            expected = step(model, **precision, **inputs)
            with parse(ALL).applied(model):
                assert step(model, **precision, **inputs).equals(expected), (precision, list(inputs))
    model = model.bfloat16()
    expected = step(model)
    with parse(ALL).applied(model):
        assert step(model).equals(expected)


def test_early_stop_and_kept_outputs_leave_no_matrix_product_to_rerun(tiny, step):
    model = tiny()
    for policy, mm, attention in (
        ("block", 82, 4),
        (ALL, 58, 0),
        ("modules:core_attn", 82, 0),
        ("modules:q_proj", 78, 4),
    ):
        with parse(policy).applied(model):
            done = step(model)
        assert done.mm == (29, mm), policy
        assert done.backward["_scaled_dot_product_flash_attention_for_cpu"] == attention, policy


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_bytes_are_blocks_and_the_kept_outputs(tiny, kept_bytes, amp, masked):
    model = tiny()
    inputs = {"attention_mask": padding(8, 128)} if masked else {}

    def kept(policy):
        with parse(policy).applied(model):
            return kept_bytes(model, amp=amp, **inputs)

    block = kept("block")
    size = 2 if amp else F32
    lse = TOKENS * LAYERS * 4 * (F32 - size)  # stays float32 under autocast
    for site in WIDTH:
        extra = lse if site == "core_attn" else 0
        assert kept(f"modules:{site}") - block == TOKENS * LAYERS * WIDTH[site] * size + extra, site
    assert kept(ALL) - block == TOKENS * LAYERS * sum(WIDTH.values()) * size + lse
    assert kept(ALL) == kept("ops:mm,core_attn,-down_proj")


def test_eager_probabilities_are_kept_only_with_the_attention_call(tiny, kept_bytes):
    model = tiny(attention="eager")
    probabilities = 8 * 4 * 128 * 128 * F32 * LAYERS

    def kept(policy):
        with parse(policy).applied(model):
            return kept_bytes(model)

    linear = TOKENS * LAYERS * F32 * (sum(WIDTH.values()) - WIDTH["core_attn"])
    assert kept("modules:q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj") - kept("block") == linear
    assert kept("modules:core_attn") - kept("block") >= probabilities


def test_rng_goes_on_as_if_the_kept_call_had_run(tiny, step):
    """Dropout after a kept call that draws numbers itself: attention's dropout, then one on its output."""
    model = tiny(attention_dropout=0.3)
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.2))
        layer.mlp.gate_proj = nn.Sequential(layer.mlp.gate_proj, nn.Dropout(0.1))
    expected = step(model)
    for policy in (ALL, "modules:core_attn", "modules:gate_proj"):
        with parse(policy).applied(model):
            assert step(model).equals(expected), policy


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_bias_tied_and_frozen_weights(tiny, step, kind):
    model = tiny(kind, attention_bias=True, tie_word_embeddings=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in ("embed", "layers.0", "k_proj", "gate_proj")))
    expected = step(model)
    with parse(ALL).applied(model):
        done = step(model)
    assert done.equals(expected)
    assert done.mm == expected.mm


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora(tiny, step, kept_bytes, dropout, dtype):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_dropout=dropout, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(tiny().to(dtype), config)
    expected = step(model)
    with parse("block").applied(model):
        block = kept_bytes(model)
    with parse("modules:q_proj").applied(model):
        assert step(model).equals(expected)
        adapter = TOKENS * LAYERS * 4 * F32  # lora_A's output, which PEFT computes in float32
        if not dropout:
            assert kept_bytes(model) - block == TOKENS * LAYERS * 32 * dtype.itemsize + adapter
    with parse("modules:q_proj,k_proj,v_proj,core_attn,o_proj,gate_proj,up_proj,down_proj").applied(model):
        done = step(model)
        assert done.equals(expected)
        assert done.mm == expected.mm  # with an adapter early stop would rerun down_proj: keeping it is no waste
    assert step(model).equals(expected)


def test_a_module_called_twice_and_views_of_its_output(tiny, step):
    model = tiny()

    def forward(mlp, x):
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        again = mlp.up_proj(x.flip(-1)).view(*x.shape[:-1], 2, -1).transpose(-1, -2).reshape(up.shape)
        return mlp.down_proj(mlp.act_fn(gate) * up[..., :] * again)

    for layer in model.model.layers:
        layer.mlp.forward = forward.__get__(layer.mlp)
    expected = step(model)
    with parse(ALL).applied(model) as applied:
        done = step(model)
    assert done.equals(expected)
    assert done.mm == expected.mm
    (hits,) = applied.hits.values()
    assert (hits["up_proj"], hits["gate_proj"]) == (8, 4)


def test_an_in_place_operation_on_a_kept_output_is_an_error(tiny, step):
    """pytorch/pytorch#119590: SAC is silently wrong here."""
    model = tiny()
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.SiLU(inplace=True)
    expected = step(model)
    with parse(ALL).applied(model), pytest.raises(PolicyError, match="overwrote what gate_proj kept"):
        step(model)
    with parse("modules:q_proj,up_proj").applied(model):
        assert step(model).equals(expected)


def test_the_graph_can_be_walked_twice_when_it_is_retained(tiny):
    model, ids = tiny(), torch.arange(16)[None]
    with parse(ALL).applied(model):
        loss = model(input_ids=ids, labels=ids).loss
        parameters = list(model.parameters())
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        second = torch.autograd.grad(loss, parameters)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_fake_tensors(tiny):
    with FakeTensorMode():
        model, ids = tiny(), torch.zeros(2, 16, dtype=torch.long)
        with parse(ALL).applied(model) as applied:
            model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad.shape == p.shape for p in model.parameters())
    applied.verify(set(range(LAYERS)))


def test_an_outer_function_mode_changes_nothing(tiny, step):
    class Outer(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model = tiny()
    expected = step(model, attention_mask=padding())
    with parse(ALL).applied(model), Outer():
        assert step(model, attention_mask=padding()).equals(expected)


def test_regions_belong_to_their_thread(tiny):
    """A plain model trained in another thread while a region runs sees nothing of it."""
    model, plain, ids, seen = tiny(), tiny(), torch.arange(16)[None], []

    def elsewhere():
        seen.append(active_region())
        plain(input_ids=ids, labels=ids).loss.backward()

    def meanwhile(*_):
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()

    model.model.layers[1].mlp.register_forward_pre_hook(meanwhile)
    with parse(ALL).applied(model):
        model(input_ids=ids, labels=ids).loss.backward()
    assert seen == [None, None]  # the forward and the replay
    grads = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(2 * a.grad, b.grad) for a, b in grads)


def test_nothing_is_kept_without_a_backward(tiny, kept_bytes):
    model = tiny()
    with parse(ALL).applied(model) as applied, torch.no_grad():
        kept_bytes(model)
    assert not any(applied.hits.values())


def test_a_site_that_the_layer_lacks_is_refused_at_once(tiny):
    model = tiny()
    for layer in model.model.layers:
        layer.mlp.w1 = layer.mlp._modules.pop("up_proj")
    with pytest.raises(PolicyError, match="cannot keep up_proj: Qwen3DecoderLayer has no module of that name"):
        parse("modules:up_proj").applied(model).__enter__()


def test_attention_lookup_is_restored_whatever_the_order(tiny, step):
    from transformers.modeling_utils import AttentionInterface

    before = AttentionInterface.get_interface
    one, two = parse(ALL).applied(tiny()), parse("modules:core_attn").applied(other := tiny())
    one.__enter__()
    state = two.__enter__()
    one.__exit__(None, None, None)
    step(other)
    state.verify(set(range(LAYERS)))
    two.__exit__(None, None, None)
    assert AttentionInterface.get_interface is before

"""Policies as values and in force: the grammar, exact undo, gradients equal to `none`'s, and the public reports."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import AttentionInterface

from gctutor.policies import PolicyError, Request, catalogue, family, parse
from gctutor.policies.grammar import FAMILIES
from gctutor.policies.modules import SITES
from gctutor.workload import Workload, decoder_layers

EAGER = [name for name in catalogue() if not name.startswith(("compile", "auto", "budget")) and "offload" not in name]
BITWISE = [*EAGER, "modules:core_attn@0-1;none@2", "none@1;ops:mm@2-3", "sub:mlp@0;modules:all@1;block+reentrant@3"]


# The grammar


@pytest.mark.parametrize("text", catalogue())
def test_the_catalogue_round_trips(text):
    assert str(parse(text)) == text
    assert parse(str(parse(text))) == parse(text)
    assert family(text) in FAMILIES


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("sub: mlp, attn", "sub:attn,mlp"),
        ("modules:" + ",".join(reversed(SITES[:-1])), "modules:all"),
        ("modules:core_attn,q_proj", "modules:q_proj,core_attn"),
        ("compile:1.0", "compile"),
        ("budget:0.40", "budget:0.4"),
        ("block@3-3", "block@3"),
        ("modules:core_attn@0-17;none@18-35", "modules:core_attn@0-17;none@18-35"),
    ],
)
def test_canonical_spelling(text, canonical):
    assert str(parse(text)) == canonical
    assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blok", "did you mean 'block'"),
        ("modules:q_prj", "did you mean 'q_proj'"),
        ("sub:mpl", "did you mean 'mlp'"),
        ("none/2", "is for block"),
        ("block/1", "at least 2"),
        ("block@5-3", "backwards"),
        ("none;block@1", "give each its layers"),
        ("budget:1.5", "at most 1"),
        ("modules:", "at least one of"),
        ("", "empty policy"),
        ("block@", "is not a policy"),
    ],
)
def test_what_is_no_policy_is_refused_in_one_sentence(text, message):
    with pytest.raises(PolicyError, match=message) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_requests_are_not_concrete():
    assert parse("auto") == Request("auto")
    assert parse("budget:0.4") == Request("budget", 0.4)
    assert not parse("auto").concrete and parse("block").concrete


MECHANISMS = st.one_of(
    st.sampled_from(["none", "block", "block+reentrant", "compile", "compile:0.3", "ops:core_attn,mm,-down_proj"]),
    st.lists(st.sampled_from(SITES), min_size=1).map(lambda names: "modules:" + ",".join(names)),
    st.lists(st.sampled_from(["mlp", "attn", "norms"]), min_size=1).map(lambda names: "sub:" + ",".join(names)),
)


@given(MECHANISMS, MECHANISMS, st.integers(0, 9), st.integers(0, 9))
def test_every_string_round_trips(one, two, first, more):
    if one.startswith("compile") and two.startswith("compile"):
        two = "block"
    policy = parse(f"{one}@{first}-{first + more};{two}@{first + more + 1}")
    assert parse(str(policy)) == policy
    assert str(parse(str(policy))) == str(policy)


def test_layers_of_a_mix():
    names = [str(kind) for kind in parse("modules:core_attn@0-1;none@3").layers(5)]
    assert names == ["modules:core_attn", "modules:core_attn", "block", "none", "block"]
    assert [str(kind) for kind in parse("block/2").layers(5)] == ["block", "none", "block", "none", "block"]


@pytest.mark.parametrize(("text", "message"), [("none@4", "layers 0 to 3"), ("none@0-2;block@2", "layer 2 twice")])
def test_ranges_are_checked_against_the_model(tiny, text, message):
    with pytest.raises(PolicyError, match=message):
        parse(text).applied(tiny()).__enter__()


def test_offload_is_refused_on_a_cpu():
    with pytest.raises(PolicyError, match="nothing to move"):
        parse("block+offload").refuse(Workload("nano", seqlen=16), "cpu")


# In force


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2", "mistral"])
@pytest.mark.parametrize("policy", BITWISE)
def test_gradients_are_those_of_none(tiny, step, kind, policy):
    if kind == "qwen2" and policy.startswith("ops:every2mm"):
        policy = policy.replace("every2mm", "every2mm,addmm")
    model = tiny(kind)
    expected = step(model)
    with parse(policy).applied(model):
        assert step(model).equals(expected)
    assert step(model).equals(expected)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["qwen3", "llama", "qwen2", "mistral"]),
    policy=st.sampled_from(BITWISE),
    attention=st.sampled_from(["sdpa", "eager"]),
    layers=st.integers(4, 5),
    kv_heads=st.sampled_from([1, 2, 4]),
    dropout=st.sampled_from([0.0, 0.2]),
    amp=st.booleans(),
    shape=st.tuples(st.integers(1, 3), st.integers(2, 17)),
)
def test_random_models(tiny, step, kept_bytes, kind, policy, attention, layers, kv_heads, dropout, amp, shape):
    """Gradients equal bitwise, and no checkpointing keeps more than `none`."""
    sizes = {"num_hidden_layers": layers, "num_key_value_heads": kv_heads, "attention_dropout": dropout}
    model = tiny(kind, attention=attention, **sizes)
    ids = torch.randint(0, 128, shape, generator=torch.Generator().manual_seed(layers))
    expected, kept = step(model, ids, amp=amp), kept_bytes(model, ids, amp=amp)
    with parse(policy).applied(model):
        assert step(model, ids, amp=amp).equals(expected)
        if not policy.startswith("sub:norms"):
            assert kept_bytes(model, ids, amp=amp) <= kept


def snapshot(model):
    """Everything of a model that a policy might touch, by identity."""
    state = [model.config.use_cache, AttentionInterface.get_interface]
    for name, module in model.named_modules():
        values = {key: value for key, value in module.__dict__.items() if not isinstance(value, dict)}
        hooks = {key: dict(value) for key, value in module.__dict__.items() if isinstance(value, dict)}
        state.append((name, type(module), values, hooks))
    return state


@pytest.mark.parametrize("policy", [*BITWISE, "compile:0.5"])
@pytest.mark.parametrize("cache", [True, False])
def test_undo_is_exact(tiny, step, policy, cache):
    model = tiny()
    model.config.use_cache = cache
    before = snapshot(model)
    with parse(policy).applied(model):
        assert not model.config.use_cache
        if "compile" not in policy:
            step(model)
    model.zero_grad()
    assert snapshot(model) == before


def test_undo_is_exact_after_an_error(tiny):
    model = tiny()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="half way"), parse("modules:all").applied(model):
        raise RuntimeError("half way")
    with pytest.raises(PolicyError), parse("none@0;ops:mm,-nothing@1-3").applied(model):
        pass
    assert snapshot(model) == before


def test_a_mix_puts_each_layer_under_its_own_mechanism(tiny, step):
    """`block`, which uses Hugging Face's switch for the whole model, must leave the other layers alone."""
    for order in ("modules:all@0;none@1;ops:mm,core_attn@2;block@3", "block@0;none@1;modules:all@2;ops:mm,core_attn@3"):
        model = tiny()
        with parse(order).applied(model) as applied:
            done = step(model)
        assert done.mm == (29, 64)  # the six of the one block layer
        assert sorted(sum(hits.values()) for hits in applied.hits.values()) == [0, 0, 7, 8]


@pytest.mark.parametrize("policy", ["block", "modules:all", "ops:mm", "sub:mlp"])
def test_applying_twice_equals_applying_once(tiny, step, policy):
    """ml-explore/mlx-lm PR #167. Early stop hides nesting from operator counts, so attributes are compared."""
    model = tiny()
    before = snapshot(model)
    with parse(policy).applied(model):
        once = [sorted(module.__dict__) for module in model.modules()]
        with parse(policy).applied(model):
            assert [sorted(module.__dict__) for module in model.modules()] == once
            forwards = [m.__dict__["forward"] for m in model.modules() if "forward" in m.__dict__]
            assert not any(hasattr(getattr(f, "__wrapped__", None), "__wrapped__") for f in forwards)
        assert snapshot(model) == before
    assert snapshot(model) == before
    assert step(model).mm == (29, 58)


def test_another_policy_replaces_the_first(tiny, step):
    model = tiny()
    with parse("modules:all").applied(model), parse("block").applied(model):
        assert step(model).mm == (29, 82)


@pytest.mark.parametrize("kind", ["block", "modules:all", "sub:mlp", "ops:mm"])
def test_a_peft_model_and_its_base_are_one(tiny, step, kind):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny(), peft.LoraConfig(r=4, target_modules="all-linear"))
    expected, before = step(model), snapshot(model)
    with parse(kind).applied(model):
        assert step(model).equals(expected)
        with parse("block").applied(model.get_base_model()):
            assert step(model).equals(expected)
    assert snapshot(model) == before


# The public reports


@pytest.mark.parametrize(
    "policy", ["block", "block+reentrant", "sub:attn", "sub:attn,mlp", "ops:mm,core_attn", "modules:all"]
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_cache_is_off_under_a_policy(tiny, step, policy, attention):
    """pytorch/pytorch#155171: with the cache on, a replay appends to it: errors, or gradients off by 100 %."""
    model = tiny(attention=attention)
    model.config.use_cache = True
    expected = step(model, use_cache=False)
    with parse(policy if attention == "sdpa" else policy.replace(",core_attn", "")).applied(model):
        assert step(model).equals(expected)
        assert set(model(input_ids=torch.arange(16)[None])) == {"logits"}
    assert model.config.use_cache is True


def test_another_tools_checkpointing_is_refused(tiny):
    wrapped = tiny()
    apply_activation_checkpointing(wrapped, check_fn=lambda m: isinstance(m, GradientCheckpointingLayer))
    with pytest.raises(PolicyError, match="checkpoint_wrapper"):
        parse("block").applied(wrapped).__enter__()
    switched = tiny()
    switched.activation_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(PolicyError, match="Hugging Face's own switch"):
        parse("modules:all").applied(switched).__enter__()


@pytest.mark.parametrize("policy", ["block", "block+reentrant", "modules:all", "ops:mm"])
def test_a_frozen_prefix_is_as_before_when_the_policy_is_off(tiny, step, policy):
    """modelscope/ms-swift PR #10214: the switch leaves a hook that sends backward through frozen layers."""
    model = tiny()
    for module in (model.model.embed_tokens, *decoder_layers(model)[:3]):
        module.requires_grad_(False)
    before = step(model)
    assert before.mm[1] == 16
    with parse(policy).applied(model):
        during = step(model)
        assert during.equals(before)
        assert during.mm[1] == {"block": 22, "block+reentrant": 65, "modules:all": 16, "ops:mm": 16}[policy]
    after = step(model)
    assert after.equals(before) and after.mm == before.mm


@pytest.mark.parametrize("policy", ["block", "sub:attn", "modules:all", "ops:mm"])
def test_dropout_is_the_same_in_the_replay(tiny, step, policy):
    """allenai/OLMo-core PR #828: without the RNG state kept, the loss is the same and the gradients are not."""
    model = tiny(attention="eager", attention_dropout=0.3)
    expected = step(model)
    with parse(policy).applied(model):
        assert step(model).equals(expected)


def test_verify_tells_what_did_not_happen(tiny):
    with parse("block").applied(tiny()) as applied:
        applied.verify({0, 1, 2, 3})
        with pytest.raises(PolicyError, match="layer 2 recomputed nothing"):
            applied.verify({0, 1, 3})
    with parse("none").applied(tiny()) as applied, pytest.raises(PolicyError, match="should recompute nothing"):
        applied.verify({1})

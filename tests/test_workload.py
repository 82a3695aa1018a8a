"""Workloads: the published sizes exactly, refusals in one sentence, and models built as Hugging Face builds them."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gctutor.errors import UserError
from gctutor.workload import SIZES, Workload, build, decoder_layers, inputs, make_optimizer

PARAMETERS = {
    "nano": 20_192_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
}
QWEN3_LAYER_8B = 192_946_432
TINY = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def parameters(model, trainable_only=False):
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable_only)


def one_sentence(caught):
    text = str(caught.value)
    return "\n" not in text and text.endswith((".", "?"))


@pytest.fixture
def tiny_folder(tmp_path):
    """A folder with a small Llama: config.json and weights."""
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path)
    return tmp_path


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", SIZES)
def test_sizes_have_exactly_their_published_parameters(name):
    assert parameters(build(Workload(name, seqlen=16), "meta")) == PARAMETERS[name]


@pytest.mark.parametrize(("name", "tied"), [("Qwen3-0.6B", True), ("Qwen3-8B", False)])
def test_embeddings_are_tied_where_published_so(name, tied):
    model = build(Workload(f"{name}@1", seqlen=16), "meta")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_fewer_layers_at_full_width():
    workload = Workload("Qwen3-8B@8")
    assert (workload.model, workload.layers, workload.name, workload.n_layers) == ("Qwen3-8B", 8, "Qwen3-8B@8", 8)
    assert workload == Workload("Qwen3-8B", layers=8)
    model = build(workload, "meta")
    assert len(decoder_layers(model)) == 8
    assert parameters(model) == PARAMETERS["Qwen3-8B"] - 28 * QWEN3_LAYER_8B
    assert workload.replace(model="Qwen3-4B").layers is None


def test_a_workload_survives_its_dictionary():
    workload = Workload(
        "Qwen3-8B@8", batch=2, kernels="liger:rope", trainable="lora:4", optimizer="adamw", mask="packed"
    )
    assert Workload.from_dict(workload.to_dict()) == workload


def test_the_label_names_what_differs_from_the_default():
    assert Workload().label == "Qwen3-8B, 1 × 4096, hf, bf16"
    assert Workload("nano@2", trainable="lora:4").label == "nano@2, 1 × 4096, hf, bf16, lora:4"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch": 0}, "batch must be a whole number"),
        ({"batch": 1.5}, "batch must be a whole number"),
        ({"batch": True}, "batch must be a whole number"),
        ({"seqlen": 1}, "seqlen must be a whole number"),
        ({"seqlen": 40961}, "made for at most 40960 tokens"),
        ({"model": "Qwen3-8B@"}, "number of layers after '@'"),
        ({"model": "Qwen3-8B@x"}, "number of layers after '@'"),
        ({"model": "Qwen3-8B@0"}, "layers must be at least 1"),
        ({"model": "Qwen3-8B@37"}, "has 36 layers, not 37"),
        ({"attention": "spda"}, "did you mean 'sdpa'"),
        ({"precision": "bf61"}, "did you mean 'bf16'"),
        ({"mask": "paddding"}, "did you mean 'padding'"),
        ({"optimizer": "adam"}, "did you mean 'adamw'"),
        ({"trainable": "lora"}, "'lora:RANK'"),
        ({"trainable": "lora:0"}, "'lora:RANK'"),
        ({"kernels": "lige"}, "did you mean 'liger'"),
        ({"kernels": "liger:rmsnorm"}, "did you mean 'rms_norm'"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(fields, message):
    with pytest.raises(UserError, match=message) as caught:
        Workload(**fields)
    assert one_sentence(caught)


def test_an_unknown_model_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'Qwen3-8B'") as caught:
        Workload("Qwen3-8b-base").config()
    assert one_sentence(caught)


@pytest.mark.parametrize(
    ("kernels", "parts"),
    [
        ("hf", ()),
        ("liger", ("rms_norm", "rope", "swiglu", "fused_linear_cross_entropy")),
        ("liger:swiglu, rope", ("rope", "swiglu")),
    ],
)
def test_liger_parts(kernels, parts):
    assert Workload(kernels=kernels).liger_parts == parts


def test_a_folder_with_a_config_is_a_model(tiny_folder):
    workload = Workload(str(tiny_folder), seqlen=16, precision="fp32")
    assert workload.n_layers == 3
    model = build(workload)
    assert type(model) is LlamaForCausalLM
    assert len(decoder_layers(build(workload.replace(layers=2)))) == 2
    assert model(**inputs(workload)).loss.isfinite()


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({"seqlen": 65}, {}, "at most 64 tokens"),
        ({"layers": 4}, {}, "has 3 layers, not 4"),
        ({}, {"num_key_value_heads": 3}, "has 4 attention heads, which 3 K/V heads do not divide"),
        ({}, {"hidden_size": 33, "head_dim": None}, "has no usable config.*not a multiple"),
    ],
)
def test_a_folder_that_cannot_work_is_refused(tiny_folder, changes, config, message):
    edit_config(tiny_folder, **config)
    with pytest.raises(UserError, match=message) as caught:
        build(Workload(str(tiny_folder), **{"seqlen": 16, **changes}))
    assert one_sentence(caught)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        Workload(str(tmp_path)).config()


def test_weights_come_from_a_checkpoint(tiny_folder):
    workload = Workload(str(tiny_folder), seqlen=16, precision="fp32")
    saved = LlamaForCausalLM.from_pretrained(tiny_folder).state_dict()
    loaded = build(workload, pretrained=True).state_dict()
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert len(decoder_layers(build(workload.replace(layers=1), pretrained=True))) == 1


def test_missing_weights_are_refused_in_one_sentence(tiny_folder):
    (tiny_folder / "model.safetensors").unlink()
    for model in (str(tiny_folder), "nano"):
        with pytest.raises(UserError, match="weights") as caught:
            build(Workload(model, seqlen=16), pretrained=True)
        assert one_sentence(caught)


@pytest.mark.parametrize("trainable", ["full", "lora:4"])
def test_random_weights_follow_the_seed_and_leave_the_global_generator_alone(trainable):
    workload = Workload("nano@1", seqlen=16, trainable=trainable)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    one, again, other = (list(build(workload, seed=seed).parameters()) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_model_is_ready_to_train():
    model = build(Workload("nano@1", seqlen=16))
    assert model.training
    assert model.config.use_cache is False


def test_lora_trains_its_adapters_only():
    workload = Workload("nano@2", seqlen=16, trainable="lora:4")
    model = build(workload)
    hidden, mlp, queries, keys = 512, 1536, 512, 128
    widths = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    widths += [(hidden, mlp), (hidden, mlp), (mlp, hidden)]
    assert parameters(model, trainable_only=True) == 2 * sum(4 * (a + b) for a, b in widths)
    assert parameters(build(workload, "meta"), trainable_only=True) == parameters(model, trainable_only=True)
    assert len(decoder_layers(model)) == 2
    model(**inputs(workload)).loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("precision", "weights", "computes"),
    [
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("amp", torch.float32, torch.bfloat16),
        ("fp32", torch.float32, torch.float32),
    ],
)
def test_precision_sets_the_weights_and_what_a_gemm_computes_in(precision, weights, computes):
    workload = Workload("nano@1", seqlen=16, precision=precision)
    model = build(workload)
    seen = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with workload.autocast("cpu"):
        loss = model(**inputs(workload)).loss
    loss.backward()
    assert seen == [computes]
    assert {p.dtype for p in model.parameters()} == {weights}
    assert {p.grad.dtype for p in model.parameters()} == {weights}


def test_every_autocast_block_is_a_new_one():
    workload = Workload("nano", precision="amp")
    assert workload.autocast("cpu") is not workload.autocast("cpu")


def test_inputs_are_seeded_and_labelled():
    workload = Workload("nano", batch=2, seqlen=16)
    batch = inputs(workload)
    assert set(batch) == {"input_ids", "labels", "use_cache"}
    assert batch["input_ids"].shape == (2, 16)
    assert batch["labels"] is batch["input_ids"]
    assert torch.equal(batch["input_ids"], inputs(workload)["input_ids"])
    assert not torch.equal(batch["input_ids"], inputs(workload, seed=1)["input_ids"])
    assert int(batch["input_ids"].max()) < 2048


def test_padding_masks_the_start_of_the_last_row_and_its_labels():
    batch = inputs(Workload("nano", batch=2, seqlen=16, mask="padding"))
    assert batch["attention_mask"].sum(1).tolist() == [16, 14]
    assert batch["labels"][1, :3].tolist() == [-100, -100, int(batch["input_ids"][1, 2])]


def test_packing_restarts_the_positions_in_the_middle():
    batch = inputs(Workload("nano", batch=2, seqlen=5, mask="packed"))
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2]] * 2


def test_packed_documents_do_not_see_each_other():
    workload = Workload("nano@2", seqlen=16, mask="packed", precision="fp32")
    model, batch = build(workload), inputs(workload)
    changed = batch["input_ids"].clone()
    changed[0, :8] = (changed[0, :8] + 1) % 2048
    with torch.no_grad():
        one = model(**batch).logits
        other = model(**{**batch, "input_ids": changed}).logits
    torch.testing.assert_close(one[:, 8:], other[:, 8:])
    assert not torch.allclose(one[:, :8], other[:, :8])


def test_padded_tokens_are_not_attended_to():
    workload = Workload("nano@2", seqlen=16, mask="padding", precision="fp32")
    model, batch = build(workload), inputs(workload)
    changed = batch["input_ids"].clone()
    changed[0, :2] = (changed[0, :2] + 1) % 2048
    with torch.no_grad():
        one = model(**batch).logits
        other = model(**{**batch, "input_ids": changed}).logits
    torch.testing.assert_close(one[:, 2:], other[:, 2:])
    assert not torch.allclose(one[:, :2], other[:, :2])


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_optimizers_take_the_trainable_parameters(name, kind):
    workload = Workload("nano@1", seqlen=16, trainable="lora:4", optimizer=name)
    model = build(workload)
    optimizer = make_optimizer(workload, model)
    assert type(optimizer) is kind
    held = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert held == parameters(model, trainable_only=True)


@pytest.mark.parametrize("optimizer", [None, "none", ""])
def test_no_optimizer(optimizer):
    workload = Workload("nano@1", optimizer=optimizer)
    assert workload.optimizer is None
    assert make_optimizer(workload, build(workload, "meta")) is None


def test_a_model_without_decoder_layers_is_refused():
    with pytest.raises(UserError, match="Linear has no Hugging Face decoder layers"):
        decoder_layers(torch.nn.Linear(2, 2))

"""Liger's kernels: in estimates by Liger's own code, patched without a leak, for real by Triton's interpreter."""

import contextlib
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import build_tiny
from torch.nn import functional

from gctutor import doctor, estimate, liger, plan
from gctutor.errors import UserError
from gctutor.estimation import trace
from gctutor.policies import PolicyError, parse
from gctutor.workload import Workload, build

needs_liger = pytest.mark.usefixtures("liger_kernel")
FULL, NORMS_ROPE_SWIGLU = Workload(kernels="liger"), "liger:rms_norm,rope,swiglu"
HEAD_GRADIENT = 151_936 * 4096 * 2


@pytest.fixture
def liger_kernel():
    pytest.importorskip("triton", reason="Liger's kernels need triton (Linux only)")
    return pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")


@functools.cache
def small(kernels, policy="none", **changes):
    return trace(Workload("Qwen3-8B@2", seqlen=256, kernels=kernels, **changes), policy, cache=False)


def names(step, where=None):
    return {kernel.name for s in step.segments if where is None or s.layer == where for kernel in s.kernels}


# --- bytes -----------------------------------------------------------------------------------------------------------


@needs_liger
def test_reproduces_the_reference_bytes():
    """The activations are an independent prototype's, traced at full depth on the same versions."""
    cost = estimate(FULL, "none", "H100")
    assert cost.activation_bytes == pytest.approx(21_590_852_452, abs=64)
    assert cost.breakdown["loss"] == pytest.approx(HEAD_GRADIENT + 4096 * 4096 * 2, abs=64)


@needs_liger
def test_the_loss_takes_another_path_on_cuda(monkeypatch):
    """The reference peak is that of the portable path: an fp32 copy of the head's gradient for each chunk of rows."""
    cuda, launches = trace(FULL, "none"), liger.launches
    monkeypatch.setattr(liger, "launches", lambda note, as_cuda: launches(note, as_cuda=False))
    portable = trace(FULL, "none", cache=False)
    assert portable.activation_bytes == cuda.activation_bytes
    assert portable.peak_bytes - portable.static_bytes == pytest.approx(25_397_334_888, abs=64)
    fp32_copy, product = 2 * HEAD_GRADIENT, HEAD_GRADIENT
    assert portable.peak_bytes - cuda.peak_bytes == pytest.approx(fp32_copy + product, rel=0.03)
    assert "addmm" in names(cuda, "head") and "add_" not in names(cuda, "head")
    added = [k for s in cuda.segments if s.layer == "head" for k in s.kernels if k.name == "addmm"]
    assert len(added) == 32 and all(k.work.bytes > 2 * HEAD_GRADIENT for k in added)  # read and written in each chunk
    assert "add_" in names(portable, "head") and "addmm" not in names(portable, "head")


@needs_liger
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["block", "ops:mm,core_attn,-down_proj", "modules:all"])
def test_short_and_full_depth_agree(policy):
    short, full = trace(FULL, policy), trace(FULL, policy, exact=True, cache=False)
    assert short.activation_bytes == pytest.approx(full.activation_bytes, rel=1e-3)
    assert short.peak_bytes == pytest.approx(full.peak_bytes, rel=1e-3)


@needs_liger
@pytest.mark.parametrize(
    ("part", "kernel", "absent"),
    [
        ("rms_norm", "_rms_norm_forward_kernel", "rsqrt"),
        ("rope", "_triton_rope", "cat"),
        ("swiglu", "_swiglu_forward_kernel", "silu"),
        ("cross_entropy", "liger_cross_entropy_kernel", "_log_softmax"),
        ("fused_linear_cross_entropy", "liger_cross_entropy_kernel", "_log_softmax"),
    ],
)
def test_one_part_alone(part, kernel, absent):
    plain, patched = names(small("hf")), names(small(f"liger:{part}"))
    launched = {name for name in patched if name.endswith("_kernel") or name == "_triton_rope"}
    assert kernel in launched and not {name for name in plain if name.endswith("_kernel")}
    where = 1 if part in ("rms_norm", "rope", "swiglu") else "head"
    assert absent in names(small("hf"), where) and absent not in names(small(f"liger:{part}"), where)
    alone = {"rms_norm": 2, "swiglu": 2, "rope": 1, "cross_entropy": 1, "fused_linear_cross_entropy": 1}
    assert len(launched - {"element_mul_kernel"}) == alone[part]


@needs_liger
def test_what_each_part_frees_adds_up():
    none = small("hf").activation_bytes
    freed = {part: none - small(f"liger:{part}").activation_bytes for part in liger.PARTS}
    assert none - small("liger").activation_bytes == sum(freed[part] for part in liger.PARTS[:4])
    assert freed["rope"] == 0  # it works in place, and HF's keeps no more
    assert freed["swiglu"] == 2 * 256 * 12288 * 2  # silu's output, for two layers: Liger computes it again
    hidden = 2 * 256 * 4096 * 4  # an fp32 copy of the input of each layer norm, for two of them
    assert freed["rms_norm"] > 2 * hidden


@needs_liger
def test_ligers_swiglu_is_not_recomputed_twice():
    """Kept gate and up are what its backward reads: the replay runs its small kernel and no matrix product."""
    for policy in ("modules:all", "ops:mm,core_attn,-down_proj"):
        step = small(NORMS_ROPE_SWIGLU, policy)
        assert step.flop("recompute") == 0
        assert not [place for place in step.unused if isinstance(place[0], int)]
        sites = {site for (layer, site) in step.kept if layer == 1}
        assert {"mlp.gate_proj", "mlp.up_proj"} <= sites and "mlp" not in sites and "mlp.act_fn" not in sites


@needs_liger
def test_autocast_on_cuda_multiplies_bf16_rows_and_adds_in_fp32():
    head = [k for s in small("liger", precision="amp").segments if s.layer == "head" for k in s.kernels]
    assert not any(k.work.fp32 for k in head if k.work.kind == "gemm")
    assert "add_" not in {k.name for k in head}


# --- patching --------------------------------------------------------------------------------------------------------


def surroundings():
    from transformers.models.qwen3 import modeling_qwen3

    classes = [value for value in vars(modeling_qwen3).values() if isinstance(value, type)]
    return [dict(vars(modeling_qwen3)), dict(vars(functional)), *(dict(vars(each)) for each in classes)]


@needs_liger
@pytest.mark.parametrize("kernels", ["liger", "liger:rope", NORMS_ROPE_SWIGLU, "liger:cross_entropy"])
def test_the_next_model_is_a_plain_one(kernels):
    from triton.runtime.jit import JITFunction

    before, run = surroundings(), JITFunction.run
    plain = trace(Workload("nano", seqlen=16), "none", cache=False)
    trace(Workload("nano", seqlen=16, kernels=kernels), "none", cache=False)
    patched = build(Workload("nano", seqlen=16, layers=1, kernels=kernels), "meta")
    assert surroundings() == before and JITFunction.run is run
    assert any({"forward", "_loss_function"} & vars(module).keys() for module in patched.modules())
    following = build(Workload("nano", seqlen=16, layers=1), "meta")
    assert not any({"forward", "_loss_function"} & vars(module).keys() for module in following.modules())
    assert trace(Workload("nano", seqlen=16), "none", cache=False) == plain


@needs_liger
def test_a_failed_patch_leaks_nothing(monkeypatch):
    before = surroundings()

    def half_done(**_):
        from transformers.models.qwen3 import modeling_qwen3

        modeling_qwen3.Qwen3RMSNorm = None
        raise RuntimeError("half done")

    monkeypatch.setattr(liger, "_apply_function", lambda model_type: half_done)
    with pytest.raises(RuntimeError, match="half done"):
        build(Workload("nano", seqlen=16, layers=1, kernels="liger"), "meta")
    assert surroundings() == before


# --- a package that is not there -------------------------------------------------------------------------------------


@pytest.fixture(params=[("liger_kernel",), ("triton",), ("liger_kernel", "triton")], ids="+".join)
def hidden(request, monkeypatch):
    """Liger, Triton or both cannot be imported, as on macOS."""
    for name in {*sys.modules, *request.param, "liger_kernel.transformers.monkey_patch", "triton.runtime.jit"}:
        if name.partition(".")[0] in request.param:
            monkeypatch.setitem(sys.modules, name, None)
    if request.param == ("triton",):  # its import fails in Liger's first lines
        monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", None)


def test_without_the_package_liger_is_refused_in_one_sentence(hidden):
    with pytest.raises(UserError, match=r"pip install 'gctutor\[liger\]'") as error:
        estimate(Workload("nano", seqlen=16, kernels="liger"), "none", "H100", cache=False)
    assert str(error.value).count(". ") == 0 and str(error.value).endswith(".")


def test_without_the_package_everything_else_works(hidden):
    workload = Workload("nano", seqlen=16)
    assert estimate(workload, "modules:all", "H100", cache=False).ok
    with contextlib.suppress(ImportError), liger.launches(lambda name, tensors: None):
        assert estimate(workload.replace(kernels="hf+chunked"), "none", "H100", cache=False).ok
    with parse("modules:all").applied(build_tiny()) as state:
        assert state.kinds


def test_a_model_that_liger_does_not_know(liger_kernel):
    model = build_tiny()
    model.config.model_type = "abacus"
    with pytest.raises(UserError, match="no kernels for 'abacus'"):
        liger.patch(model, ["rope"])


# --- in-place kernels on what a policy keeps -------------------------------------------------------------------------


def rotated(kind):
    model = build_tiny(kind)
    liger.patch(model, ["rope"])
    return model


@needs_liger
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
def test_kept_projections_that_ligers_rope_overwrites_are_refused(kind):
    model = rotated(kind)
    assert liger.overwritten(model.model.layers[0]) == ("q_proj", "k_proj")
    product = "addmm" if kind == "qwen2" else "mm"  # Qwen2's projections have a bias
    for policy in ("modules:all", "modules:k_proj", f"ops:{product}", "ops:addmm,every2mm"):
        with pytest.raises(PolicyError, match=r"k?q?_proj.*overwrites in place"), parse(policy).applied(model):
            pass
    for policy in ("block", "modules:v_proj,core_attn,up_proj", f"ops:{product},core_attn,-q_proj,-k_proj"):
        with parse(policy).applied(model):
            pass


@needs_liger
def test_norms_of_q_and_k_stand_in_between():
    model = rotated("qwen3")
    for policy in ("modules:all", "ops:mm,core_attn,-down_proj"):
        with parse(policy).applied(model):
            pass
    with pytest.raises(PolicyError, match="q_norm"), parse("modules:q_norm,core_attn").applied(model):
        pass


def test_without_liger_nothing_is_overwritten():
    assert liger.overwritten(build_tiny("llama").model.layers[0]) == ()


@needs_liger
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["modules:all", "ops:mm,core_attn"])
def test_the_doctor_fails_it_on_a_llama_and_passes_qwen3(tmp_path, policy):
    for kind in ("llama", "qwen3"):
        build_tiny(kind, num_hidden_layers=2).config.save_pretrained(tmp_path / kind)
    policy = parse(f"{policy},-down_proj" if policy.startswith("ops") else policy)
    reports = {
        k: doctor(Workload(str(tmp_path / k), seqlen=16, kernels="liger:rope"), policy) for k in ("llama", "qwen3")
    }
    assert "refused" in reports["llama"].codes and "overwrites in place" in str(reports["llama"])
    assert reports["qwen3"].codes == ()


# --- planning --------------------------------------------------------------------------------------------------------


@needs_liger
@pytest.mark.slow
def test_kernels_are_chosen_with_the_policy_under_the_budget_of_the_original():
    kernels = ("liger", f"{NORMS_ROPE_SWIGLU}+chunked")
    none = estimate(Workload(), "none", "H100")
    best = plan(Workload(), "H100", budget=0.36, kernels=kernels)
    assert best.limit_bytes == 0.36 * none.activation_bytes
    assert best.cost.activation_bytes <= best.limit_bytes and best.cost.step_s <= 0.80 * none.step_s
    brought = dict(best.brought)
    assert brought.keys() == {"hf", *kernels} and best.cost.step_s == min(c.step_s for c in brought.values())
    assert all(0.9 * best.limit_bytes < c.activation_bytes <= best.limit_bytes for c in brought.values())


# --- for real --------------------------------------------------------------------------------------------------------


@needs_liger
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands in for a GPU")
def test_ligers_kernels_run_for_real_through_tritons_interpreter(tmp_path):
    """Losses to 1e-6 and gradients to 1e-5 of Hugging Face's, relative; traced bytes equal to the estimated ones."""
    for kind in ("qwen3", "llama"):
        build_tiny(kind, num_hidden_layers=2).config.save_pretrained(tmp_path / kind)
    here = Path(__file__)
    run = subprocess.run(
        [sys.executable, str(here.with_name("liger_interpreted.py")), str(tmp_path / "qwen3"), str(tmp_path / "llama")],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(here.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    workload = Workload(str(tmp_path / "qwen3"), seqlen=8, precision="fp32", kernels="liger")
    plain = found["qwen3"].pop("hf")
    for policy, row in found["qwen3"].items():
        assert row["loss"] == pytest.approx(plain["loss"], rel=1e-6)
        assert row["worst"] < 1e-5, policy
        assert row["activation_bytes"] == trace(workload, policy, kind="cpu", cache=False).activation_bytes
    without_norms = found["llama"]
    assert without_norms["none"]["worst"] < 1e-5
    assert without_norms["modules:all"]["worst"] > 1e-2  # what the refusal is for: rotated twice, and no error

# %% [markdown]
# # 4. Choose operators by their intensity
#
# You will draw the roofline of one decoder layer, rank its operators by what recomputing them buys, write PyTorch's
# selective checkpointing by hand, and watch it do nothing because of one missing word.
#
# **Afterwards you can**
# - compute an operator's arithmetic intensity, and tell from a GPU's data sheet what will bound it;
# - rank the call sites of a layer by recompute ROI, and say what such a ranking leaves out;
# - write a policy function for selective activation checkpointing (SAC) that really matches, and prove it by counting;
# - say where a rule by intensity goes wrong.
#
# **Before you start:** [notebook 3](03_sub_block.ipynb): the accounts of a layer, early stop, and the Pareto plot.
#
# **Time:** 40 minutes of reading. The cells run in under a minute on a two-core laptop, in about two on a GPU.
# **Memory:** 3 GB of RAM; with a GPU the last part measures the full Qwen3-8B and wants 80 GB of GPU memory.

# %% tags=["parameters"]
MODEL = "Qwen3-8B"
BATCH = 1
SEQLEN = 4096
SHORT_SEQLENS = [256, 512, 4096]
DEVICE = "H100"
OTHER_DEVICE = "RTX 4090"
HERE = {
    "cpu": {"model": "nano", "batch": 1, "seqlen": 256, "precision": "fp32"},
    "cuda": {"model": "Qwen3-8B", "batch": 1, "seqlen": 4096, "precision": "bf16"},
}
BYTES_TOLERANCE = {"cpu": 0.0, "cuda": 0.02}
ROUNDS = 1
STEPS = 2
SEED = 0

# %%
from collections import Counter
from functools import partial

import pandas as pd
import torch
from IPython.display import Markdown, display
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import gctutor as gt
from gctutor import explorers, plots
from gctutor.claims import find_claim
from gctutor.measurement import default_device
from gctutor.operators import layer_operators
from gctutor.workload import build, inputs

# %% [markdown]
# ## Work, traffic, intensity
#
# An operator does arithmetic, and it moves bytes between the GPU's memory and its cores. Both take time, and they
# overlap, so the slower of the two decides. Their quotient is the **arithmetic intensity**, in FLOP per byte.
#
# Take `gate_proj`: it multiplies $T$ rows of width $h$ by a weight of $h \times m$. A multiplication and an addition
# for each of $T h m$ pairs make $2 T h m$ FLOP. Input, weight and output pass through memory once, in bf16, two bytes
# each. (Such a product of two matrices is a **GEMM**, a general matrix multiplication.)
#
# A GPU has an intensity, too: the FLOP it can do while it moves one byte, its **ridge**. An operator left of the ridge
# (below it) waits for memory, one right of it for arithmetic. What you need for a guess:

# %% tags=["exact"]
workload = gt.Workload(MODEL, batch=BATCH, seqlen=SEQLEN)
config = workload.config()
T, h, m = workload.tokens, config.hidden_size, config.intermediate_size
device, other = gt.find_device(DEVICE), gt.find_device(OTHER_DEVICE)
Markdown(
    f"$T$ = {T:,} tokens, $h$ = {h:,}, $m$ = {m:,}. {device.name} does {device.bf16_flop_per_s / 1e12:,.0f} TFLOP/s in "
    f"bf16 and moves {device.bandwidth_bytes_per_s / 1e12:.2f} TB/s (data sheet)."
)

# %% [markdown]
# **Predict:** does `gate_proj` lie left or right of the card's ridge, and by what factor?

# %% tags=["exact"]
by_formula = (2 * T * h * m) / (2 * (T * h + h * m + T * m))
operators = layer_operators(workload, DEVICE)
by_site = {op.site: op for op in operators}
gt.check_close(
    by_site["mlp.gate_proj"].intensity, by_formula, rel=1e-9, what="gate_proj, FLOP/byte, from the trace and by formula"
)
side, factor = (
    ("right", by_formula / device.ridge()) if by_formula > device.ridge() else ("left", device.ridge() / by_formula)
)
Markdown(
    f"With {T} tokens `gate_proj` does {by_formula:,.0f} FLOP for each byte. The ridge of {device.name} is at "
    f"{device.ridge():.0f} (data sheet): `gate_proj` lies {side} of it, by a factor of {factor:.1f}."
)

# %% [markdown]
# The trace of notebook 1 knows every operator with the shapes of its tensors, so it knows all intensities. A view moves
# nothing and costs nothing; an element-wise operator is given one FLOP for each number it writes. A Hugging Face norm
# is eight small operators, one after another, and each of them goes through memory.
#
# For the times one thing is missing: no kernel reaches the rates of the data sheet.

# %%
reached = device.efficiency
Markdown(
    f"So the times assume shares of them, here for {device.name} ({device.profile}): {reached.gemm:.0%} of the FLOP/s "
    f"for matrix products, {reached.attention_forward:.0%} for attention ({reached.attention_backward:.0%} in its "
    f"backward), and {reached.bandwidth:.0%} of the bandwidth. `gctutor calibrate` replaces them by what your card "
    f"reaches."
)

# %% [markdown]
# **Predict:** how much of the layer's forward time is spent left of the ridge, where there is hardly any arithmetic?

# %%
table = pd.DataFrame(
    [
        {
            "call site": op.site or "(the layer itself)",
            "operators": op.count,
            "GFLOP": op.flop / 1e9,
            "MB moved": op.bytes / 1e6,
            "FLOP/byte": op.intensity,
            "time (µs)": 1e6 * op.seconds,
            "share": f"{op.share:.0%}",
            "bound by": op.bound,
        }
        for op in operators
    ]
).set_index("call site")
rounded = table.round({"GFLOP": 1, "MB moved": 0, "FLOP/byte": 2, "time (µs)": 0})
rounded.rename_axis(f"call site, estimated for {device.name}")

# %% [markdown]
# ## The roofline
#
# A GPU has a rate of arithmetic and a rate of memory. An operator of intensity $I$ can do at most
# $\min(\text{FLOP/s},\ I \times \text{bytes/s})$: a slope that ends in a flat roof. The corner is the ridge. Left of it
# memory decides (*memory-bound*), right of it arithmetic (*compute-bound*). The dashed line is what the assumed shares
# leave of it.

# %%
ax = plots.plot_roofline(operators, device)
memory_share = sum(op.share for op in operators if op.bound == "memory")
products_share = sum(op.share for op in operators if op.bound == "compute")
caption = (
    f"One forward of a {workload.model} layer at {T} tokens on {device.name}: {memory_share:.0%} of the time goes to "
    f"operators left of the ridge at {device.ridge():.0f} FLOP/byte, the rest to matrix products and attention."
)
_ = plots.save_figure(ax.figure, "04_roofline", alt=caption, caption=caption)

# %%
Markdown(f"*{caption}* (FLOPs and bytes exact, times estimated: {device.profile}.)")

# %% [markdown]
# Another card has another ridge. The intensities stay where they are: they belong to the operators, not to the card.

# %%
elsewhere = layer_operators(workload, OTHER_DEVICE)
ax = plots.plot_roofline(elsewhere, other)
other_share = sum(op.share for op in elsewhere if op.bound == "memory")
caption = (
    f"On {other.name} arithmetic is scarcer, the ridge is at {other.ridge():.0f} FLOP/byte, and {other_share:.0%} of "
    f"the layer's forward time is spent left of it."
)
_ = plots.save_figure(ax.figure, "04_roofline_other", alt=caption, caption=caption)

# %%
display(Markdown(f"*{caption}* (Estimated: {other.profile}.)"))
gt.check(
    {op.site: op.intensity for op in elsewhere} == {op.site: op.intensity for op in operators},
    "intensities do not depend on the card",
)
gt.check(other_share < memory_share, "the card with the lower ridge spends a smaller share left of it")

# %% [markdown]
# Try it: how short must a sequence be until the products slide down the slope? In JupyterLab these are controls; on
# the page you see two lengths.

# %%
drawn = (64, 512)
explorers.explore(
    explorers.draw_roofline,
    {"seqlen": [64, 128, 256, 512, 1024, SEQLEN], "device": [DEVICE, OTHER_DEVICE, "L4", "B200"]},
    static=[{"seqlen": tokens, "device": DEVICE} for tokens in drawn],
)

# %% tags=["exact"]
products = {
    tokens: [op.intensity for op in layer_operators(gt.Workload(seqlen=tokens), DEVICE) if op.site.endswith("_proj")]
    for tokens in drawn
}
lowest, highest = min(products[drawn[1]]), max(products[drawn[0]])
gt.check(
    highest < device.ridge() < lowest,
    f"at {drawn[0]} tokens every product is left of the ridge at {device.ridge():.0f} FLOP/byte (at most "
    f"{highest:.0f}), at {drawn[1]} every one is right of it (at least {lowest:.0f})",
)

# %% [markdown]
# ## The article's table, corrected
#
# The article gives a table of intensities. We put ours beside it. For q, k and v together we add up work and bytes;
# RoPE is what the attention module does by itself; the two residual additions are the layer's own.


# %% tags=["exact"]
def intensity_of(*sites):
    chosen = [by_site[site] for site in sites]
    return sum(op.flop for op in chosen) / sum(op.bytes for op in chosen)


found = {
    "rms_norm_flop_per_byte": intensity_of("input_layernorm", "post_attention_layernorm"),
    "rope_flop_per_byte": intensity_of("self_attn"),
    "swiglu_product_flop_per_byte": intensity_of("mlp"),
    "residual_flop_per_byte": intensity_of(""),
    "qkv_flop_per_byte": intensity_of("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_flop_per_byte": intensity_of("self_attn.core_attn"),
    "mlp_gemm_flop_per_byte": intensity_of("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}
claimed = find_claim("G04").value
corrected = pd.DataFrame({"the article": claimed, "traced": found})
corrected["traced / article"] = corrected["traced"] / corrected["the article"]
corrected[f"of {device.name}'s ridge"] = [f"{value / device.ridge():.2%}" for value in corrected["traced"]]
corrected.index = corrected.index.str.removesuffix("_flop_per_byte").str.replace("_", " ")
corrected.round(2).rename_axis("FLOP/byte")

# %%
least = min(found[f"{name}_flop_per_byte"] / claimed[f"{name}_flop_per_byte"] for name in ("qkv", "mlp_gemm"))
gt.judge(
    "G04",
    value=found,
    tolerance=0.25,
    because=f"None is within a quarter. A GEMM's intensity grows with the tokens: at {T} rows q, k and v have "
    f"{found['qkv_flop_per_byte']:,.0f} FLOP/byte and the MLP {found['mlp_gemm_flop_per_byte']:,.0f}, at least "
    f"{least:.1f} times what is claimed, and flash attention, which never writes the scores, "
    f"{found['attention_flop_per_byte']:,.0f}",
)
gt.check(
    found["qkv_flop_per_byte"] > device.ridge() > claimed["qkv_flop_per_byte"],
    "by the article's figure q, k and v would be memory-bound; they are compute-bound",
)

# %% [markdown]
# By the article's own figures a rule by the ridge (keep what lies right of it) would recompute q, k, v and attention.
# That is why the numbers matter.
#
# ## Rank by what a recompute buys
#
# **Recompute ROI** is the bytes a call site keeps over the seconds it takes to run it again. High ROI: let it go. Low
# ROI: keep it. (The exchange rate of notebook 3, ms for a GB freed, is the same quotient the other way up.)
#
# **Predict:** which call site comes first, and which last?

# %%
ax = plots.plot_roi(operators, subtitle=f"estimated for {device.name} · one layer, {workload.label}")
ranked = sorted((op for op in operators if op.kept_bytes), key=lambda op: -op.roi)
first, last = ranked[0], ranked[-1]
caption = (
    f"A second spent on {first.site} frees {first.roi / last.roi:.1f} times the bytes that it frees at {last.site}: "
    f"every memory-bound site ranks above every compute-bound one."
)
_ = plots.save_figure(ax.figure, "04_roi", alt=caption, caption=caption)

# %%
display(Markdown(f"*{caption}* (Bytes exact, times estimated for {device.name}.)"))
worst_light = min(op.roi for op in ranked if op.bound == "memory")
best_heavy = max(op.roi for op in ranked if op.bound == "compute")
gt.check(
    worst_light > best_heavy, f"the worst light site frees {worst_light / best_heavy:.1f} times what the best GEMM does"
)

# %% [markdown]
# Two things this ranking does not say.
#
# *Not all sites are in it.* `q_proj` has no bar: `none` does not keep its result, since the norm behind it keeps a copy
# of its own. Yet when the layer is replayed, that product runs again, and keeping its result would spare it. What
# matters is the bytes that *keeping a result* adds to a replayed layer, against the seconds it saves there.
#
# *Almost free is not free.* Here is the bill for replaying everything that is light. In this series such a checkpoint
# is called `ops:mm,core_attn`: it keeps the results of the matrix products (`mm`) and of attention (`core_attn`) and
# replays all else. Further down you write it by hand.

# %%
none, block = gt.estimate(workload, "none", DEVICE), gt.estimate(workload, "block", DEVICE)
selective = gt.estimate(workload, "ops:mm,core_attn", DEVICE)
extra_s = selective.step_s - none.step_s
beta = extra_s / none.forward_s
gt.check(selective.recompute_flop == 0, "keeping every matrix product and attention recomputes neither")
best_light = max(op.roi for op in ranked if op.bound == "memory")
cheapest, dearest = best_heavy / best_light, best_heavy / worst_light
ALMOST_FREE = 0.1  # our reading: a tenth of what a GEMM costs for the same bytes
gt.judge(
    "G05",
    holds=dearest <= ALMOST_FREE,
    because=f"Per byte freed, light operators cost {cheapest:.0%} to {dearest:.0%} of what the cheapest GEMM costs: "
    f"less, but not almost nothing. Replaying them all takes {1e3 * extra_s:.0f} ms, {extra_s / none.step_s:.0%} of a "
    f"step. Of the MLP's GEMMs gate and up are worth keeping; down_proj is not (early stop never reruns it)",
    device=device.name,
)
gt.judge(
    "T04",
    value={"recompute_over_forward_ratio": beta, "extra_time_share": extra_s / none.step_s},
    tolerance=0.05,
    because=f"The extra time is {beta:.2f} forwards, but the article's β of 0.1 to 0.3 over a step of three "
    f"forwards is {0.1 / 3:.0%} to {0.3 / 3:.0%} more time by its own arithmetic; "
    f"here it is {extra_s / none.step_s:.1%}",
    device=device.name,
)

# %% [markdown]
# Is the ranking right where it can be checked? Spend the same bytes in two ways: keep the attention kernel's result in
# every layer, or `gate_proj`'s in as many layers as cost about as much. (`modules:` keeps results of modules; notebook
# 5 shows how.)

# %%
attention_bytes = gt.estimate(workload, "modules:core_attn", DEVICE).activation_bytes - block.activation_bytes
gate_layers = attention_bytes // (T * m * 2)
ways = ["modules:core_attn", f"modules:gate_proj@{workload.n_layers - gate_layers}-{workload.n_layers - 1}"]
spent = {way: gt.estimate(workload, way, DEVICE) for way in ways}
pd.DataFrame(
    {
        way: {
            "kept on top of block (GB)": (row.activation_bytes - block.activation_bytes) / 1e9,
            "saved (ms)": 1e3 * (block.step_s - row.step_s),
        }
        for way, row in spent.items()
    }
).T.round(2).rename_axis(f"estimated for {device.name}")

# %%
saved_attention, saved_gate = (block.step_s - spent[way].step_s for way in ways)
gt.judge(
    "G03",
    holds=saved_attention > saved_gate,
    when="bytes and seconds are those of keeping one more result in a replayed layer",
    because=f"For the same {attention_bytes / 1e9:.1f} GB, keeping attention saves {1e3 * saved_attention:.1f} ms and "
    f"keeping gate_proj {1e3 * saved_gate:.1f}. Ranked by what none keeps, q_proj, o_proj and down_proj would not be "
    f"listed at all",
    device=device.name,
)

# %% [markdown]
# ## Selective checkpointing by hand
#
# PyTorch lets you say, operator by operator, what a checkpointed region keeps: **selective activation checkpointing**,
# SAC. You write a *policy function*. While the layer runs forward, a dispatch mode (a hook that sees every operator)
# asks it: save this result, or recompute it? Saved results go into a store, and in the replay they are handed out
# instead of computed.
#
# Hugging Face's switch passes `context_fn` on to `torch.utils.checkpoint`, so SAC on Qwen3 is one call. We keep matrix
# products and attention. `torch.ops.aten.mm` is how PyTorch names the product behind every linear layer without a bias.


# %%
def keeping(operators):
    """A policy function that saves the results of `operators` and recomputes all others."""

    def policy(context, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if operator in operators else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def switched_on(policy):
    """The small model with selective checkpointing by `policy`."""
    model = build(small, seed=SEED)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    return model


aten = torch.ops.aten
first_try = keeping({aten.mm, aten._scaled_dot_product_flash_attention_for_cpu})

# %% [markdown]
# To see what a step runs we count: a dispatch mode of our own, in five lines.


# %%
class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ran = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.ran[operator.overloadpacket.__name__] += 1
        return operator(*args, **(kwargs or {}))


def backward_of(model):
    """What the backward pass runs, replay included, and the gradients."""
    loss = model(**batch).loss
    with Count() as count:
        loss.backward()
    return count.ran, [parameter.grad for parameter in model.parameters()]


small = gt.Workload("nano", layers=4, seqlen=64, precision="fp32")
batch = inputs(small, seed=SEED)

# %% [markdown]
# A layer of the small model has seven linear layers, and the head one more. Backward needs two products for each.
# **Predict:** how many `mm` will backward run without a checkpoint? With a whole-layer checkpoint? And with our policy,
# if it works?

# %% tags=["exact"]
plain = build(small, seed=SEED)
whole = build(small, seed=SEED)
whole.activation_checkpointing_enable({"use_reentrant": False})

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
counts, gradients = {}, {}
for name, model in {"none": plain, "block": whole, "first try": switched_on(first_try)}.items():
    counts[name], gradients[name] = backward_of(model)
pd.DataFrame({name: {"mm": ran["mm"], "attention": ran[ATTENTION]} for name, ran in counts.items()}).T

# %% tags=["exact"]
n = small.n_layers
gt.check(counts["none"]["mm"] == 2 * (7 * n + 1), f"none: two products for each of {7 * n + 1}")
gt.check(counts["block"]["mm"] == counts["none"]["mm"] + 6 * n, "block: six more a layer (early stop spares down_proj)")
gt.check(counts["first try"] == counts["block"], "our policy changed nothing at all: it matched no operator")

# %% [markdown]
# No error, no warning, the right gradients, and the full price. Why?
#
# `torch.ops.aten.mm` is a **packet**: a family of overloads under one name. What runs is one of them, such as
# `mm.default`, and a packet is not equal to its member.

# %% tags=["exact"]
display(Markdown(f"`aten.mm` has the overloads {', '.join(f'`{name}`' for name in aten.mm.overloads())}."))
gt.check(aten.mm != aten.mm.default, "the packet is not the overload")

second_try = keeping({aten.mm.default, aten._scaled_dot_product_flash_attention_for_cpu.default})
counts["repaired"], gradients["repaired"] = backward_of(switched_on(second_try))
pd.DataFrame({name: {"mm": ran["mm"], "attention": ran[ATTENTION]} for name, ran in counts.items()}).T

# %% tags=["exact"]
gt.check(
    counts["repaired"]["mm"] == counts["none"]["mm"] < counts["first try"]["mm"],
    f"one word, `.default`: {counts['first try']['mm']} products become {counts['repaired']['mm']}",
)
gt.check(counts["repaired"][ATTENTION] == 0, "and attention does not run again")
for name, found_gradients in gradients.items():
    gt.check(all(map(torch.equal, gradients["none"], found_gradients)), f"{name}: gradients equal to the last bit")

# %% [markdown]
# Where you give a *list* instead of a function, PyTorch looks at it and refuses a packet. A function it cannot inspect.
# **Count after the first step**: it is the only proof that a policy works.

# %% tags=["exact"]
try:
    create_selective_checkpoint_contexts([aten.mm])
    refused = False
except ValueError as error:
    refused = "OpOverload" in str(error)
gt.check(refused, "a list with a packet in it is refused")

# %% [markdown]
# The name of the attention kernel is a second trap: it is another one on a CPU, on a GPU with flash attention, with a
# mask, with cuDNN. And a linear layer *with* a bias is `addmm`, not `mm`.
#
# The policies called `ops:` in this series do the same with forgiving names: `mm` stands for every overload that
# returns a new tensor, `core_attn` for every attention kernel there is. After the first step the hits are counted, and
# a name that matched nothing is an error. One step of the small model:

# %% tags=["exact"]
model = build(small, seed=SEED)
with gt.parse("ops:mm,core_attn").applied(model) as applied:
    ran, _ = backward_of(model)
(hits,) = applied.hits.values()
gt.check(hits == {"mm": 7 * n, "core_attn": n}, f"hits in {n} layers of seven products: {dict(hits)}")
gt.check(ran["mm"] == counts["none"]["mm"] and not ran[ATTENTION], "no product and no attention runs again")

unmatched = gt.estimate(workload, "ops:mm,bmm,core_attn", DEVICE)
display(Markdown(f"`ops:mm,bmm,core_attn` is **{unmatched.status}**: {unmatched.error}"))
gt.check(unmatched.status == "refused", "a name that matches nothing is an error, not a silence")

# %% [markdown]
# ### Exercise 1: every second product (15 minutes)
#
# torchtitan's rule saves every second `mm` of a layer: the first, the third, and so on, and attention. The function
# must count, so it has a state, and the state must begin anew in each layer. Set `answer` to a function without
# arguments that returns the two contexts of a policy function with a fresh counter: Hugging Face calls it, as
# `context_fn`, once for each layer and step.

# %% tags=["exercise"]
answer = None  # a function without arguments


def check_exercise_1(contexts):
    gt.check(contexts is not None, "there is an answer")
    model = build(small, seed=SEED)
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    for step in ("first", "second"):
        ran, _ = backward_of(model)
        # Of q, k, v, o, gate, up, down the 2nd, 4th and 6th are recomputed: k, o and up.
        gt.check(ran["mm"] == counts["none"]["mm"] + 3 * n, f"{step} step: three products a layer run again")
        gt.check(ran[ATTENTION] == 0, f"{step} step: attention does not")


print("Exercise 1 is yours to do: set `answer`, then run check_exercise_1(answer).")


# %% tags=["solution", "hide-input"] jupyter={"source_hidden": true}
def every_second_mm():
    seen = 0

    def policy(context, operator, *args, **kwargs):
        nonlocal seen
        if operator == aten._scaled_dot_product_flash_attention_for_cpu.default:
            return CheckpointPolicy.MUST_SAVE
        if operator == aten.mm.default:
            seen += 1
            if seen % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


answer = every_second_mm
check_exercise_1(answer)

# %% [markdown]
# ## One product is kept in vain
#
# Back to the full model. Early stop, from notebook 2, ends a replay as soon as backward has all it needs. `down_proj`
# is the last operator but one, and backward wants its *input*, not its result: it never runs again anyway.
#
# **Predict:** how many bytes does `ops:mm,core_attn` waste on it?

# %% tags=["exact"]
POLICIES = ["block", "ops:mm,core_attn", "ops:mm,core_attn,-down_proj", "none"]
rows = gt.Results(gt.estimate(workload, policy, DEVICE) for policy in POLICIES)
wasteful, lean = rows["ops:mm,core_attn"], rows["ops:mm,core_attn,-down_proj"]
in_vain = wasteful.activation_bytes - lean.activation_bytes
gt.check(in_vain == workload.n_layers * T * h * 2, f"{in_vain:,} bytes: one result of the model's width a layer")
gt.check(wasteful.recompute_flop == lean.recompute_flop == 0, "and neither runs a matrix product again")

# %%
pd.DataFrame(
    [
        {
            "policy": row.policy,
            "activations (GB)": row.activation_bytes / 1e9,
            "saved": f"{1 - row.activation_bytes / none.activation_bytes:.0%}",
            "recompute (TFLOP)": row.recompute_flop / 1e12,
            "step (ms)": 1e3 * row.step_s,
            "extra": f"{row.step_s / none.step_s - 1:.1%}",
        }
        for row in rows
    ]
).set_index("policy").round(2).rename_axis(f"estimated for {device.name}")

# %%
on_gpu = gt.trace(workload, "none").attention_kernels
with_mask = gt.trace(workload.replace(mask="padding", layers=1), "none").attention_kernels
gt.check(on_gpu != with_mask, f"a padding mask brings another attention kernel: {', '.join(with_mask)}")
gt.judge(
    "S02",
    holds=wasteful.recompute_flop == 0,
    when="operators are given as overloads, no linear layer has a bias, and no mask changes the attention kernel",
    because=f"mm and {on_gpu[0]} are then all that is heavy; bmm matches nothing in a Qwen3 layer, and down_proj, one "
    f"of the mm, is kept in vain: {in_vain / 1e9:.2f} GB",
    device=device.name,
)

# %% [markdown]
# ## Since when?
#
# The article says that the API came with PyTorch 2.1. What 2.1 has is `context_fn`, the argument of `checkpoint`
# that takes any two contexts. The selective contexts were then private, with another name and another signature; they
# became public when [pytorch#125795](https://github.com/pytorch/pytorch/pull/125795) gave them their present names,
# first released in 2.4.

# %%
CLAIMED_RELEASE, PUBLIC_RELEASE = (2, 1), (2, 4)  # the second by the pull request above, merged in June 2024
here_since = tuple(int(part) for part in torch.__version__.split(".")[:2])
public = "create_selective_checkpoint_contexts" in torch.utils.checkpoint.__all__
gt.check(public and here_since >= PUBLIC_RELEASE, f"torch {torch.__version__.split('+')[0]} has the public API")
gt.judge(
    "S01",
    holds=PUBLIC_RELEASE <= CLAIMED_RELEASE,
    because="2.1 brought context_fn, on which SAC rests; create_selective_checkpoint_contexts and CheckpointPolicy are "
    f"public since {'.'.join(map(str, PUBLIC_RELEASE))}",
    source="recorded",
)

# %% [markdown]
# ## The rule, and where it fails
#
# The article's rule is: keep what lies right of the ridge, recompute what lies left of it. As a policy this is `auto`;
# `gt.resolve` turns it into one that can run, for a workload and a device.
#
# **Predict:** what will it keep at 256 tokens?

# %% tags=["exact"]
auto = {}
for tokens in SHORT_SEQLENS:
    shorter = workload.replace(seqlen=tokens)
    policy = gt.resolve("auto", shorter, DEVICE)
    step = gt.trace(shorter, policy)
    gate = {op.site: op for op in layer_operators(shorter, DEVICE)}["mlp.gate_proj"]
    auto[tokens] = {
        "gate_proj (FLOP/byte)": round(gate.intensity),
        "auto": str(policy),
        "recompute (TFLOP)": round(step.flop("recompute") / 1e12, 2),
        "share of forward": f"{step.flop('recompute') / step.flop('forward'):.0%}",
    }
pd.DataFrame(auto).T.rename_axis(f"tokens, ridge of {device.name} {device.ridge():.0f}")

# %% tags=["exact"]
short = workload.replace(seqlen=256)
longest = auto[max(SHORT_SEQLENS)]["auto"]
gt.check(
    str(gt.resolve("auto", short, DEVICE)) == "block", "at 256 tokens nothing is right of the ridge: auto is block"
)
gt.check(
    gt.trace(short, "ops:mm,core_attn,-down_proj").flop("recompute") == 0,
    "yet keeping the products would spare all of that work there too",
)
gt.check("-down_proj" not in longest, f"at {max(SHORT_SEQLENS)} tokens auto is {longest}: it keeps down_proj, in vain")

# %% [markdown]
# The ridge says what *bounds* an operator. It does not say what its recompute *costs*: a product left of the ridge
# still takes its time, for reading the weights, and with few tokens its result is small and cheap to keep. Nor does the
# ridge know that a replay stops early. The better rule asks for **seconds saved per byte kept**, in the replay as it
# really runs. It needs no threshold, and it is what the planner of notebook 5 goes by.
#
# ### Exercise 2: where a product crosses the ridge (10 minutes)
#
# From how many tokens on is `gate_proj` compute-bound on the second card? Solve the intensity's formula for $T$, by
# hand or by search.

# %% tags=["exercise"]
answer = None  # tokens, a whole number


def check_exercise_2(answer):
    gt.check(answer is not None, "there is an answer")

    def intensity(tokens):
        shorter = workload.replace(batch=1, seqlen=tokens, layers=1)
        return {op.site: op for op in layer_operators(shorter, OTHER_DEVICE)}["mlp.gate_proj"].intensity

    gt.check(intensity(answer - 1) < other.ridge() <= intensity(answer), f"{answer} tokens are the first right of it")


print("Exercise 2 is yours to do: set `answer`, then run check_exercise_2(answer).")

# %% tags=["solution", "hide-input"] jupyter={"source_hidden": true}
# T h m / (T h + h m + T m) >= R  <=>  T >= R h m / (h m - R (h + m))
R = other.ridge()
answer = int(-(-R * h * m // (h * m - R * (h + m))))
check_exercise_2(answer)

# %% [markdown]
# ## Measured on your machine
#
# The full model on a GPU, `nano` on a CPU. On a shared CPU times are noisy (notebook 1), even in their order: the two
# `ops:` policies do the same work, and their times may differ all the same.

# %%
kind = default_device()
here = gt.Workload(**HERE[kind])
measured = gt.measure(here, POLICIES, rounds=ROUNDS, steps=STEPS, seed=SEED)
fitting = measured.where(status="ok")
display(Markdown(plots.subtitle(measured)))
pd.DataFrame(
    [
        {
            "policy": row.policy,
            "activations (bytes)": f"{row.activation_bytes:,}",
            "recompute (GFLOP)": round(row.recompute_flop / 1e9, 2),
            "step (ms)": round(1e3 * row.step_s),
        }
        for row in fitting
    ]
).set_index("policy")

# %%
for row in fitting:
    predicted = gt.trace(here, row.policy, kind=kind)
    gt.check_close(
        row.activation_bytes,
        predicted.activation_bytes,
        rel=BYTES_TOLERANCE[kind],
        what=f"{row.policy}, activation bytes",
    )
    gt.check(
        row.recompute_flop == predicted.flop("recompute"), f"{row.policy}, recompute: {row.recompute_flop:,.0f} FLOP"
    )

# %% [markdown]
# ## In three lines
#
# - At thousands of tokens matrix products and attention sit right of the ridge, everything else far left: recompute
#   the light, keep the heavy.
# - A policy function must be given overloads (`mm.default`), and only counting shows that it matched.
# - Intensity is a guide, not a price: the price is seconds per byte in a replay that stops early.
#
# ## Further reading
#
# - S. Williams, A. Waterman, D. Patterson,
#   [Roofline: an insightful visual performance model](https://doi.org/10.1145/1498765.1498785), 2009.
# - PyTorch,
#   [Current and new activation checkpointing techniques](https://pytorch.org/blog/activation-checkpointing-techniques/),
#   2025, and [torch.utils.checkpoint](https://docs.pytorch.org/docs/stable/checkpoint.html).
# - T. Dao et al., [FlashAttention](https://arxiv.org/abs/2205.14135), 2022: attention that never writes its scores.
#
# **Next:** [5. Choose modules, and let the planner meet a budget](05_selective_by_module.ipynb)

# %%
print(gt.colophon(SEED))

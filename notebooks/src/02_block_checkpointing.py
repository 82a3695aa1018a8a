# %% [markdown]
# # 2. Switch block checkpointing on, and find what is left
#
# You will use Hugging Face's one-line switch, predict what it frees and what it costs, and then look for the memory
# that it does not touch.
#
# **Afterwards you can**
# - switch block checkpointing on, for every layer, for every n-th, or with its inputs moved to the host;
# - predict its bytes exactly and its work exactly, and say what *early stop* spares you;
# - find where the peak of a step really is, and what the logits have to do with it;
# - tell from its own figures whether a published benchmark is possible.
#
# **Before you start:** [notebook 1](01_store_or_recompute.ipynb), for the words *activation*, *recompute* and *T_f*.
#
# **Time:** 40 minutes of reading. The cells run in under a minute on a two-core laptop, in about two on a GPU.
# **Memory:** 3 GB of RAM; with a GPU the last part measures the full Qwen3-8B and wants 80 GB of GPU memory.

# %% tags=["parameters"]
MODEL = "Qwen3-8B"
BATCH = 1
LARGE_BATCH = 4
SEQLEN = 4096
SEQLENS = [2048, 4096, 8192, 16384, 32768]
DEVICE = "H100"
HERE = {
    "cpu": {"model": "nano", "batch": 1, "seqlen": 256, "precision": "fp32"},
    "cuda": {"model": "Qwen3-8B", "batch": 1, "seqlen": 4096, "precision": "bf16"},
}
BYTES_TOLERANCE = {"cpu": 0.0, "cuda": 0.02}
ROUNDS = 2
STEPS = 2
SEED = 0

# %%
import math
import weakref

import pandas as pd
from IPython.display import Markdown, display
from torch.utils.checkpoint import set_checkpoint_early_stop

import gctutor as gt
from gctutor import explorers, plots
from gctutor.claims import find_claim
from gctutor.measurement import default_device
from gctutor.planner import RESERVE_BYTES
from gctutor.tracing import trace_step
from gctutor.workload import build, decoder_layers, inputs

pd.set_option("display.max_colwidth", None)

# %% [markdown]
# ## The switch
#
# Every Hugging Face decoder can checkpoint its layers. We try it on `nano`, a small Qwen3 with six layers, on the CPU.
# `trace_step` runs one real training step and counts what it keeps alive.

# %%
small = gt.Workload("nano", seqlen=64, precision="fp32")
model, batch = build(small, seed=SEED), inputs(small, seed=SEED)
layers = decoder_layers(model)

off = trace_step(model, batch)
model.activation_checkpointing_enable()
on = trace_step(model, batch)

# %% [markdown]
# That is the call to remember. It exists only in recent releases of transformers; where it is missing, use
# `gradient_checkpointing_enable()`. (In `TrainingArguments` it is `gradient_checkpointing=True`.)
#
# **Predict:** how many of the layers are checkpointed now? And what does one of them keep until the backward pass?

# %% tags=["exact"]
switched = sum(layer.gradient_checkpointing for layer in layers)
layer_1 = {
    state: {site: size for (layer, site), size in step.kept.items() if layer == 1}
    for state, step in {"off": off, "on": on}.items()
}
print(f"{switched} of {len(layers)} layers are checkpointed")
print(f"off: layer 1 keeps {sum(layer_1['off'].values()):,} bytes from {len(layer_1['off'])} call sites")
print(f"on:  layer 1 keeps {sum(layer_1['on'].values()):,} bytes: {layer_1['on']}")

# %% tags=["exact"]
one_input = small.tokens * small.config().hidden_size * 4  # fp32: four bytes a number
gt.check(
    layer_1["on"] == {"input": one_input}, f"a checkpointed layer keeps its input, {one_input:,} bytes, and no more"
)

# %% [markdown]
# Everything else went, the result of a large matrix product as well as that of a cheap activation function. The switch
# does not ask what a tensor costs to compute again.
#
# (Notebook 1's table had fewer call sites. There a norm kept a copy of its input in fp32, under its own name; here all
# is fp32 and no copy is needed, so the input itself is kept, under the name of whoever made it.)

# %%
gt.judge(
    "H01",
    holds=switched == len(layers) and layer_1["on"] == {"input": one_input},
    because=f"The switch sets its flag on {switched} of {len(layers)} decoder layers of {small.model}, and each keeps "
    f"its input alone",
    source="measured",
    device="CPU",
)
gt.judge(
    "H02",
    holds=layer_1["on"].keys() == {"input"} and "mlp.gate_proj" in layer_1["off"] and "mlp.act_fn" in layer_1["off"],
    because=f"Without the switch {len(layer_1['off'])} call sites of a layer of {small.model} keep something, matrix "
    f"products and element-wise operators alike; with it none of them does",
    source="measured",
    device="CPU",
)

# %% [markdown]
# Three things to know before you rely on it.
#
# **It works in training mode only**, with gradients enabled. After `model.eval()` it does nothing.

# %% tags=["exact"]
model.eval()
evaluating = trace_step(model, batch)
model.train()
gt.check(evaluating.recomputed_layers == set(), "in eval mode nothing is recomputed, switch or no switch")
gt.check(on.recomputed_layers == set(range(len(layers))), "in train mode every layer is")

# %% [markdown]
# **Options replace the defaults, all of them.** Called without arguments the switch chooses the modern, non-reentrant
# implementation. If you pass any options, you must repeat that choice, or torch's old default comes back:

# %% tags=["exact"]
for options in (None, {"determinism_check": "default"}, {"determinism_check": "default", "use_reentrant": False}):
    model.activation_checkpointing_enable(options)
    print(f"{options!s:62} -> {layers[0]._gradient_checkpointing_func.keywords}")

# %% [markdown]
# **Switching it off leaves a trace.** `activation_checkpointing_disable()` does not always remove the hook that
# `enable` puts on the embedding. In this series we therefore use *policies*: short strings that are applied for a
# `with` block and undone exactly. `block` is this switch.

# %%
model.activation_checkpointing_disable()
model.disable_input_require_grads()
with gt.parse("block").applied(model):
    by_policy = trace_step(model, batch)
gt.check(by_policy.activation_bytes == on.activation_bytes, "the policy 'block' is the switch: the same bytes")
gt.check(trace_step(model, batch).activation_bytes == off.activation_bytes, "after the with block it is off again")

# %% [markdown]
# ## What it frees and costs on Qwen3-8B
#
# From here on, the full model on a GPU you may not have. Bytes come from running Hugging Face's own code on fake
# tensors and are exact; times are estimates by a roofline (notebook 1).

# %%
workload = gt.Workload(MODEL, batch=BATCH, seqlen=SEQLEN)
large = workload.replace(batch=LARGE_BATCH)
device = gt.find_device(DEVICE)
none, block = (gt.estimate(workload, policy, DEVICE) for policy in ("none", "block"))
none_large, block_large = (gt.estimate(large, policy, DEVICE) for policy in ("none", "block"))
layer_input_bytes = workload.tokens * workload.config().hidden_size * 2
Markdown(
    f"In notebook 1 `block` kept {block.activation_bytes / 1e9:.2f} GB of {workload.label}. **Predict** for "
    f"{large.label}: without checkpointing a step keeps {none_large.activation_bytes / 1e9:.1f} GB of activations. "
    f"A layer's input is {LARGE_BATCH / BATCH * layer_input_bytes / 1e6:.0f} MB and there are {workload.n_layers} "
    f"layers. How much does `block` keep, how much of it is layer inputs, and how much slower is the step?"
)

# %% tags=["exact"]
PARTS = {"layer_activations": "the layers' inputs", "loss": "the loss", "other": "the rest"}
kept = pd.DataFrame({f"batch {row.workload.batch}": row.breakdown for row in (block, block_large)}).rename(index=PARTS)
kept.loc["all"] = kept.sum()
(kept / 1e9).round(2).rename_axis("block keeps (GB)")

# %% tags=["exact"]
saved_share = 1 - block.activation_bytes / none.activation_bytes
extra_share = block.step_s / none.step_s - 1
large_saved_share = 1 - block_large.activation_bytes / none_large.activation_bytes
Markdown(
    f"At batch {LARGE_BATCH} `block` keeps {block_large.activation_bytes / 1e9:.1f} GB, {large_saved_share:.0%} less. "
    f"No layer can free what the loss keeps; *the rest* is nearly all the last norm's. The step takes "
    f"{1e3 * block_large.step_s:,.0f} ms, {block_large.step_s / none_large.step_s - 1:.0%} more than the "
    f"{1e3 * none_large.step_s:,.0f} that it would take without checkpointing, did it fit. At batch {BATCH} `block` "
    f"keeps {saved_share:.0%} less and takes {extra_share:.0%} more: {1e3 * block.step_s:.0f} ms instead of "
    f"{1e3 * none.step_s:.0f} (bytes exact, times estimated for {device.name})."
)

# %% tags=["exact"]
gt.check(
    block.breakdown["layer_activations"] == workload.n_layers * layer_input_bytes,
    f"{workload.n_layers} layer inputs, to the byte",
)

# %% [markdown]
# ## Early stop
#
# A textbook replay runs the whole forward again. PyTorch's does not: it stops as soon as the last tensor that backward
# asked for is there (notebook 1's toy showed it). What comes after that tensor in a layer?
#
# **Predict:** which of a layer's seven matrix products is never run a second time?


# %% tags=["exact"]
def gemm_flop(step, phase, layer):
    """Matrix-product FLOPs of one layer in one phase, by call site."""
    kernels = [k for s in step.segments if s.layer == layer for k in s.kernels]
    sites = dict.fromkeys(k.site for k in kernels if k.work.kind == "gemm" and k.phase == phase)
    return {
        site: sum(k.work.flop for k in kernels if k.site == site and k.work.kind == "gemm" and k.phase == phase)
        for site in sites
    }


step = gt.trace(workload, "block")
products = pd.DataFrame({phase: gemm_flop(step, phase, layer=1) for phase in ("forward", "recompute")})
(products / 1e9).fillna(0).round(1).rename_axis("GFLOP")

# %% tags=["exact"]
(skipped,) = products.index[products.recompute.isna()]
early_stop_share = products.recompute.sum() / products.forward.sum()
head_flop = sum(gemm_flop(step, "forward", "head").values())
with_head = products.recompute.sum() * workload.n_layers / (products.forward.sum() * workload.n_layers + head_flop)
gt.check(
    skipped == "mlp.down_proj", "down_proj is not run again: its result is added to the residual, and nobody needs it"
)
gt.check_close(early_stop_share, 0.74, rel=0.01, what="share of the layers' forward products that is replayed")
Markdown(
    f"The replay runs {early_stop_share:.0%} of the layers' matrix products again, or {with_head:.0%} of the whole "
    f"forward's, since `lm_head` is outside the layers. (With attention, which is replayed as well, it is "
    f"{step.flop('recompute') / step.flop('forward'):.2f} of a forward, notebook 1's figure.) That is why `block` "
    f"costs less than the famous third."
)

# %% [markdown]
# Is it really early stop? PyTorch lets us switch it off. We do so on `nano`, with real tensors.

# %% tags=["exact"]
with gt.parse("block").applied(model):
    early = trace_step(model, batch).flop("recompute")
    with set_checkpoint_early_stop(False):
        complete = trace_step(model, batch).flop("recompute")
layer_forward = sum(s.flop("forward") for s in off.segments if isinstance(s.layer, int))
gt.check(complete == layer_forward, f"without early stop the replay is the layers' whole forward: {complete:,} FLOP")
gt.check(early < complete, f"with it, {early:,} FLOP, {early / complete:.0%}")

# %% [markdown]
# ## Every n-th layer
#
# If `block` frees more than you need, checkpoint fewer layers. `activation_checkpointing_enable(every_n_layers=2)`
# takes every second one (only this new call has `every_n_layers`, and `offload` below); here the policy is written
# `block/2`. Layers do not influence one another, so the bytes add up: a checkpointed layer keeps its input, any other
# its activations.
#
# **Predict:** draw activation memory against time for `none`, `block/4`, `block/3`, `block/2` and `block`. What shape
# is it?

# %%
EVERY = {"none": None, "block/4": 4, "block/3": 3, "block/2": 2, "block": 1}
every_n = gt.Results([none, *(gt.estimate(workload, p, DEVICE) for p in ("block/4", "block/3", "block/2")), block])
ms_for_a_gb = 1e3 * (block.step_s - none.step_s) / ((none.activation_bytes - block.activation_bytes) / 1e9)
caption = (
    f"Every-n checkpointing moves along a straight line: each layer frees the same bytes for the same time, "
    f"{ms_for_a_gb:.1f} ms for a GB freed."
)
ax = plots.plot_pareto(
    every_n,
    line=[(row.activation_bytes, row.step_s) for row in (block, none)],
    title=f"Every n-th layer: a straight line, {ms_for_a_gb:.1f} ms for a GB freed",
)
_ = plots.save_figure(ax.figure, "02_every_n", alt=caption, caption=caption)

# %%
Markdown(f"*{caption}* (Bytes exact, times estimated for {device.name}.)")

# %% tags=["exact"]
layer_bytes = none.breakdown["layer_activations"] // workload.n_layers
for row in every_n:
    n = EVERY[row.policy]
    checkpointed = math.ceil(workload.n_layers / n) if n else 0
    by_hand = checkpointed * layer_input_bytes + (workload.n_layers - checkpointed) * layer_bytes
    gt.check(
        row.breakdown["layer_activations"] == by_hand, f"{row.policy}: {checkpointed} layers checkpointed, to the byte"
    )

# %% [markdown]
# A straight line is a fixed exchange rate. To beat it, one must choose *within* a layer what to keep: that is what
# notebooks 3 to 5 do.
#
# ### Exercise 1: as few as possible (10 minutes)
#
# At twice the sequence length a step no longer fits on the device without checkpointing, and `block` on every layer
# leaves room. Write a policy that checkpoints as few layers as possible and fits. A policy may name layers: `none@0-9`
# keeps layers 0 to 9 whole, and layers that no part names are `block`. (*Fits* means here that the live tensors do,
# without a reserve for what the allocator needs on top; notebook 7 leaves one.)

# %% tags=["exercise"]
answer = None  # a policy of the form "none@0-…"


def check_exercise_1(answer):
    gt.check(isinstance(answer, str), "there is an answer")
    longer = workload.replace(seqlen=2 * SEQLEN)
    whole = sum(str(kind) == "none" for kind in gt.parse(answer).layers(longer.n_layers))
    gt.check(gt.estimate(longer, answer, DEVICE).ok, f"{answer} fits, with {whole} layers kept whole")
    gt.check(not gt.estimate(longer, f"none@0-{whole}", DEVICE).ok, f"and with {whole + 1} it would not")


print("Exercise 1 is yours to do: set `answer`, then run check_exercise_1(answer).")

# %% tags=["solution", "hide-input"] jupyter={"source_hidden": true}
# Bytes are additive: the room that `block` leaves, over what one layer kept whole adds.
longer = workload.replace(seqlen=2 * SEQLEN)
all_kept, all_block = (gt.estimate(longer, policy, DEVICE) for policy in ("none", "block"))
one_more = (all_kept.activation_bytes - all_block.activation_bytes) / longer.n_layers
whole = int((device.usable_bytes - all_block.peak_bytes) // one_more)
answer = f"none@0-{whole - 1}"
check_exercise_1(answer)

# %% [markdown]
# ## Offload: keep the inputs on the host
#
# What `block` still keeps of the layers, their inputs, can go to the host's memory during the forward pass and come
# back when it is needed: `activation_checkpointing_enable(offload=True)`, here `block+offload`. The price is the link
# between GPU and host, which is far slower than the GPU's own memory.

# %% tags=["exact"]
Markdown(
    f"The link of {device.name} is {device.source.split('; ')[-1]}. We take it at "
    f"{device.host_link_bytes_per_s / 1e9:.0f} GB/s, four fifths of what its specification leaves for data: an "
    f"assumption (`data/devices.toml`). The data sheet's memory, at {device.bandwidth_bytes_per_s / 1e9:,.0f} GB/s, is "
    f"{device.bandwidth_bytes_per_s / device.host_link_bytes_per_s:.0f} times as fast. "
    f"**Predict:** how many bytes cross the link, there and back, and how long does it take?"
)

# %%
offload = gt.estimate(workload, "block+offload", DEVICE)
crossing = 2 * workload.n_layers * layer_input_bytes
Markdown(
    f"{workload.n_layers} inputs there and back are {crossing / 1e9:.2f} GB, "
    f"which takes {1e3 * crossing / device.host_link_bytes_per_s:.0f} ms. Hugging Face's switch copies on the stream "
    f"that computes, so nothing else runs meanwhile, and the step grows by all of it: "
    f"{1e3 * offload.step_s:.0f} ms instead of {1e3 * block.step_s:.0f} (estimated for {device.name}). "
    f"{offload.host_bytes / 1e9:.2f} GB lie on the host, {offload.activation_bytes / 1e9:.2f} GB are left on the "
    f"device instead of {block.activation_bytes / 1e9:.2f}."
)

# %% tags=["exact"]
gt.check(
    offload.activation_bytes + offload.host_bytes >= block.activation_bytes,
    "what left the device is on the host: nothing disappears",
)
gt.check_close(
    offload.step_s,
    block.step_s + crossing / device.host_link_bytes_per_s,
    rel=0.001,
    what="a step in seconds, against block and the crossing one after the other",
)

# %% [markdown]
# On a CPU there is no device to move from, and Hugging Face's switch fails in the middle of a step. Here the policy is
# refused before the first one, with a sentence. (A refusal is a row like any other, so a sweep goes on.)

# %%
refused = gt.measure(small, ["block+offload"], device="cpu", rounds=1)["block+offload"]
print(f"{refused.status}: {refused.error}")
gt.check(refused.status == "refused", "offload on a CPU is refused")

# %% [markdown]
# ## Where the peak really is
#
# `block` reduced the layers' activations to almost nothing. What is left when the forward has returned is mostly the
# *loss*'s.

# %%
loss_share = block_large.breakdown["loss"] / block_large.activation_bytes
caption = (
    f"Under block the loss keeps more than all {workload.n_layers} layers together: {loss_share:.0%} of the "
    f"activations "
    f"at batch {LARGE_BATCH}, {block_large.breakdown['loss'] / 1e9:.1f} of {block_large.activation_bytes / 1e9:.1f} GB."
)
ax = plots.plot_breakdown(
    gt.Results([none, block, block_large]),
    title=f"Under block the loss keeps more than all {workload.n_layers} layers together",
)
_ = plots.save_figure(ax.figure, "02_breakdown", alt=caption, caption=caption)

# %%
Markdown(f"*{caption}* (Exact bytes, traced on fake tensors.)")

# %% [markdown]
# The loss compares the **logits**, one number a token and vocabulary entry, with the labels. Qwen3's vocabulary has
# about 152 thousand entries.

# %% tags=["exact"]
vocabulary = workload.config().vocab_size
logits = {
    label: {
        "bf16": w.tokens * vocabulary * 2,
        "fp32": w.tokens * vocabulary * 4,
        "at the end of forward": row.breakdown["loss"],
    }
    for label, w, row in (
        ("1 step of batch 1", workload, block),
        (f"1 step of batch {LARGE_BATCH}", large, block_large),
    )
}
(pd.DataFrame(logits).T / 1e9).round(2).rename_axis("logits (GB)")

# %% [markdown]
# The loss keeps as much as one copy of the logits in fp32: cross entropy is computed in fp32, and for its backward pass
# it keeps the logarithm of each probability. But that is only what is left when the forward has returned. *During* the
# loss's backward pass more is alive at once.
#
# **Predict:** how many copies of the fp32 logits at its largest moment?

# %%
above_weights = block_large.peak_bytes - block_large.static_bytes
at_loss = above_weights - block_large.breakdown["layer_activations"] - block_large.breakdown["other"]
copies = at_loss / (large.tokens * vocabulary * 4)
caption = (
    f"At {large.batch} × {large.seqlen} under block the peak is the loss: {at_loss / 1e9:.1f} of the "
    f"{above_weights / 1e9:.1f} GB above the weights, "
    f"{copies:.1f} copies of the logits in fp32."
)
ax = plots.plot_memory_timeline(
    gt.timeline(large, "block", DEVICE),
    title=f"Under block the peak is the loss: {copies:.0f} copies of the logits in fp32",
)
_ = plots.save_figure(ax.figure, "02_peak_at_the_loss", alt=caption, caption=caption)

# %%
Markdown(f"*{caption}* (Bytes exact; the time axis is estimated for {device.name}.)")

# %% tags=["exact"]
owners = {w.label: gt.timeline(w, "block", DEVICE).peak_owner for w in (workload, large)}
gt.check("loss" in owners[large.label], f"batch {LARGE_BATCH} under block peaks at: {owners[large.label]}")
gt.check("loss" not in owners[workload.label], f"batch {BATCH} under block peaks at: {owners[workload.label]}")
gt.check_close(copies, 3, rel=0.02, what="copies of the fp32 logits at the peak")

# %% [markdown]
# Why three? The trace says who makes a tensor of this size, and when one is let go:

# %% tags=["exact"]
MEANING = {
    ("forward", "mm"): "the logits, in bf16",
    ("forward", "_to_copy"): "the logits, in fp32",
    ("forward", "_log_softmax"): "the log-probabilities, kept for backward",
    ("backward", "nll_loss_backward"): "the gradient with respect to the log-probabilities",
    ("backward", "_log_softmax_backward_data"): "the gradient with respect to the logits, in fp32: the peak",
    ("backward", "_to_copy"): "the gradient with respect to the logits, in bf16",
}
one_copy = large.tokens * vocabulary * 4


def copies_of(sizes):
    return sum(sizes) / one_copy if sum(sizes) >= one_copy / 2 else 0


alive, moments = 0, []
for kernel in (k for s in gt.trace(large, "block").segments if s.layer == "head" for k in s.kernels):
    alive += copies_of(kernel.born)
    if copies_of(kernel.born):
        what = MEANING[kernel.phase, kernel.name]
        moments.append({"in": kernel.phase, "operator": kernel.name, "makes": what, "copies alive": round(alive, 2)})
    alive -= copies_of(kernel.freed)
pd.DataFrame(moments).set_index("in")

# %% [markdown]
# So the peak is the largest of a few *moments*: the loss; the moment backward begins in the last layer; and the end of
# backward, when all gradients are there. At the first two all activations are alive, so checkpointing lowers both. What
# it cannot lower is the loss's own share of the first, and the gradients at the end. At batch 1 under `block` the
# gradients win, at batch 4 the loss does. Notebook 6 shows the kernel that lowers the loss's share: a fused loss.

# %%
peaks = [gt.timeline(workload, policy, DEVICE).peak_owner for policy in ("none", "block")]
Markdown(
    f"Try it: in JupyterLab these are controls. Here the peak at batch {BATCH} stands without and with checkpointing: "
    f"{none.peak_bytes / 1e9:.1f} GB at `{peaks[0]}`, and {block.peak_bytes / 1e9:.1f} GB at `{peaks[1]}`. All but "
    f"{(block.peak_bytes - 2 * block.static_bytes) / 1e9:.2f} GB of the second is weights and their gradients, so "
    f"nothing that frees activations will lower it further."
)

# %%
explorers.explore(
    explorers.draw_timeline,
    {"policy": ["none", "block/2", "block"], "seqlen": SEQLENS, "device": [DEVICE, "A100 80GB", "RTX 4090"]},
    static=[{"policy": policy, "seqlen": SEQLEN, "device": DEVICE} for policy in ("none", "block")],
)

# %% [markdown]
# ### Hold the loss, not the output
#
# One copy more is easily kept by accident. The output object of a Hugging Face model holds the logits, and as long as
# you hold the output, they live.

# %%
rounded = gt.Workload("nano", seqlen=64, precision="bf16")
out = build(rounded, seed=SEED)(**inputs(rounded, seed=SEED))
logits_alive = weakref.ref(out.logits.untyped_storage())

loss = out.loss
held_with_out = logits_alive() is not None
del out
held_with_loss = logits_alive() is not None

gt.check(held_with_out and not held_with_loss, "holding `out` keeps the bf16 logits alive, holding `out.loss` does not")
Markdown(f"On {workload.label} that is {workload.tokens * vocabulary * 2 / 1e9:.2f} GB for a careless variable name.")

# %%
logits_bytes = large.tokens * vocabulary * 2
gt.judge(
    "F02",
    value=logits_bytes,
    tolerance=0.1,
    because=f"At batch {large.batch} the logits are {large.batch} × {large.seqlen} × {vocabulary:,} numbers of 2 "
    f"bytes. In fp32 the loss keeps {block_large.breakdown['loss'] / 1e9:.1f} GB when the forward ends and holds "
    f"{at_loss / 1e9:.1f} GB at its peak, still not {find_claim('F02').value / 1e9:.0f}",
    device=device.name,
)

# %% [markdown]
# ## When to switch it on
#
# Peak memory grows with the sequence length, and every policy meets the device's limit somewhere. Below that point the
# fastest policy that fits is the right one.
#
# **Predict:** up to which length does each of `none`, `block/2` and `block` fit? (Weights and gradients in bf16, no
# optimizer state: that would come on top.)

# %% tags=["exact"]
Markdown(
    f"The limit is what a process can allocate on {device.name}, the card that PyTorch calls *{device.aliases[-1]}*. "
    f"Of this card it reports {device.reported_gib:.1f} GiB; that is {device.reported_gib * 2**30 / 1e9:.1f} GB, for a "
    f"GB here is 10⁹ bytes. Less what the process needs for itself, **{device.usable_bytes / 1e9:.1f} GB** are usable "
    f"(`data/devices.toml`)."
)

# %%
LADDER = ["none", "block/2", "block"]
scaling = gt.Results(gt.estimate(workload.replace(seqlen=n), policy, DEVICE) for policy in LADDER for n in SEQLENS)
ax = plots.plot_scaling(
    scaling,
    y="peak_bytes",
    limit_bytes=device.usable_bytes,
    limit_label=f"{device.name}: {device.usable_bytes / 1e9:.0f} GB",
)
fastest = {}
for n in SEQLENS:
    fitting = [row for row in scaling.where(seqlen=n) if row.ok]
    fastest[n] = min(fitting, key=lambda row: row.step_s).policy if fitting else "nothing"
caption = (
    "The fastest policy that fits, by length: " + ", ".join(f"{n:,} {policy}" for n, policy in fastest.items()) + "."
)
_ = plots.save_figure(ax.figure, "02_scaling", alt=caption, caption=caption)

# %%
Markdown(
    f"*{caption}* (Bytes of live tensors, exact, order by times estimated for {device.name}. *Fits* is without a "
    f"reserve; notebook 7 leaves {RESERVE_BYTES / 1e9:.0f} GB for what the allocator needs on top.)"
)

# %%
order = [*LADDER, "nothing"]
climbs = [order.index(policy) for policy in fastest.values()]
gt.check(climbs == sorted(climbs), "the longer the sequence, the more has to be recomputed")
gt.judge(
    "T06",
    holds=climbs == sorted(climbs) and {"none", "block/2", "block"} <= set(fastest.values()),
    because=f"On {device.name} the fastest policy that fits climbs from none through block/2 to block as the length "
    f"grows ({', '.join(f'{policy} at {n:,} tokens' for n, policy in fastest.items())}); where the step fits without "
    f"checkpointing, every checkpoint makes it slower",
    device=device.name,
)

# %% [markdown]
# ## Can these figures be?
#
# The article that this series grew out of gives times and memory for an H100. Before comparing, check whether they are
# possible at all. Two bounds need no benchmark:
#
# - **work**: the step's FLOPs over its time cannot exceed what the chip can do. The share that is reached is the
#   **MFU**, model FLOPs utilisation, recompute not counted; 40 to 60 % is good, 100 % is impossible;
# - **bytes**: what the step must keep alive cannot exceed what it is said to take.

# %% tags=["exact"]
h04, p01, p02 = (find_claim(claim_id).value for claim_id in ("H04", "P01", "P02"))
Markdown(
    f"**Predict:** at batch {LARGE_BATCH} a step is said to take {1e3 * p01['step_s']:.0f} ms without checkpointing "
    f"and {1e3 * p02['step_s']:.0f} ms with. Its work, recompute not counted, is {none_large.model_flop / 1e12:.0f} "
    f"TFLOP, and the peak of {device.name} is {device.bf16_flop_per_s / 1e12:.0f} TFLOP in a second. Which MFU is that?"
)

# %% tags=["exact"]
claimed = {
    "H04 none, batch 1": (none, h04["none_step_s"], h04["none_memory_bytes"]),
    "H04 block, batch 1": (block, h04["block_step_s"], h04["block_memory_bytes"]),
    "P01 none, batch 4": (none_large, p01["step_s"], p01["memory_bytes"]),
    "P02 block, batch 4": (block_large, p02["step_s"], p02["memory_bytes"]),
}
physics = pd.DataFrame(
    {
        name: {
            "claimed ms": 1e3 * seconds,
            "model TFLOP": row.model_flop / 1e12,
            "PFLOP/s needed": row.flop / seconds / 1e15,
            "MFU": row.model_flop / seconds / device.bf16_flop_per_s,
            "claimed GB": memory / 1e9,
            "activations GB": row.activation_bytes / 1e9,
            "peak GB": row.peak_bytes / 1e9,
        }
        for name, (row, seconds, memory) in claimed.items()
    }
).T
physics.round(2)

# %% tags=["exact"]
gt.check(
    (physics.MFU[["P01 none, batch 4", "P02 block, batch 4"]] > 1).all(),
    f"the batch-4 times need more than the chip's {device.bf16_flop_per_s / 1e15:.2f} PFLOP/s: they are impossible",
)
gt.check(
    (physics.MFU[["H04 none, batch 1", "H04 block, batch 1"]] < 0.6).all(), "the same times at batch 1 are possible"
)
gt.check((physics["peak GB"] > physics["claimed GB"]).all(), "as the peak of a step, every claimed memory is too small")
gt.check(
    (physics["activations GB"] > physics["claimed GB"])[["P01 none, batch 4", "P02 block, batch 4"]].all(),
    "at batch 4 the activations alone are more than the claimed memory",
)

# %% tags=["exact"]
claimed_gb, activations_gb = physics["claimed GB"], physics["activations GB"]
Markdown(
    f"The *times* are possible at batch {BATCH} only. The *bytes* fit no single batch. "
    f"{claimed_gb['H04 none, batch 1']:.0f} GB without checkpointing is more than the activations of batch {BATCH} "
    f"({activations_gb['H04 none, batch 1']:.1f} GB) and far less than those of batch {LARGE_BATCH} "
    f"({activations_gb['P01 none, batch 4']:.1f}); {claimed_gb['H04 block, batch 1']:.0f} GB with it is far more than "
    f"those of batch {BATCH} ({activations_gb['H04 block, batch 1']:.1f}) and near those of batch {LARGE_BATCH} "
    f"({activations_gb['P02 block, batch 4']:.1f}). H04 names no batch. It is judged at batch {BATCH}, where its times "
    f"are possible, with activation bytes as its memory."
)

# %%
gt.judge(
    "H04",
    value={
        "none_memory_bytes": none.activation_bytes,
        "none_step_s": none.step_s,
        "block_memory_bytes": block.activation_bytes,
        "block_step_s": block.step_s,
        "saved_share": saved_share,
        "extra_time_share": extra_share,
    },
    tolerance=0.1,
    because=f"At batch {BATCH} the switch frees {saved_share:.0%} of the activations, more than claimed, for "
    f"{extra_share:.0%} more time, less than claimed; the claimed {1e3 * h04['none_step_s']:.0f} ms would be an MFU of "
    f"{physics.MFU['H04 none, batch 1']:.0%}",
    device=device.name,
)
gt.judge(
    "P01",
    value={"memory_bytes": none_large.activation_bytes, "step_s": none_large.step_s},
    tolerance=0.1,
    because=f"Activations alone are {none_large.activation_bytes / 1e9:.1f} GB, more than an {device.name} has; and "
    f"{none_large.model_flop / 1e12:.0f} TFLOP in {1e3 * p01['step_s']:.0f} ms are "
    f"{physics['PFLOP/s needed']['P01 none, batch 4']:.2f} PFLOP/s, above the chip's peak",
    device=device.name,
)
gt.judge(
    "P02",
    value={"memory_bytes": block_large.activation_bytes, "step_s": block_large.step_s},
    tolerance=0.1,
    because=f"The memory is near ({block_large.activation_bytes / 1e9:.1f} GB of activations), the time is not: it "
    f"would need {physics['PFLOP/s needed']['P02 block, batch 4']:.2f} PFLOP/s, above the chip's peak",
    device=device.name,
)

# %% [markdown]
# ### Exercise 2: predict the loss (5 minutes)
#
# Write a function of a workload that returns the bytes of the logits' copies alive at the loss's peak, from
# `workload.tokens` and `workload.config().vocab_size`. It is checked on models you have not seen, within 2 %.

# %% tags=["exercise"]
answer = None  # your function of a workload


def check_exercise_2(answer):
    gt.check(answer is not None, "there is an answer")
    for other in (large, gt.Workload("Qwen3-0.6B", batch=8, seqlen=1024)):
        row = gt.estimate(other, "block", DEVICE)
        around = row.static_bytes + row.breakdown["layer_activations"] + row.breakdown["other"]
        gt.check_close(answer(other), row.peak_bytes - around, rel=0.02, what=other.label)


print("Exercise 2 is yours to do: set `answer`, then run check_exercise_2(answer).")


# %% tags=["solution", "hide-input"] jupyter={"source_hidden": true}
# Three copies in fp32: the log-probabilities that forward kept, the gradient with respect to them, and the gradient
# with respect to the logits.
def three_copies(workload):
    return 3 * workload.tokens * workload.config().vocab_size * 4


answer = three_copies
check_exercise_2(answer)

# %% [markdown]
# ## Measured on your machine
#
# The same policies on the hardware here: the full model on a GPU, `nano` on a CPU. Each policy is warmed up, forward
# and backward, and they take turns.

# %%
kind = default_device()
here = gt.Workload(**HERE[kind])
measured = gt.measure(here, ["none", "block/2", "block"], rounds=ROUNDS, steps=STEPS, seed=SEED)
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
# Bytes and FLOPs are exact. Times on a shared CPU are noisy, even in their order (notebook 1): `block/2` does all that
# `none` does and more, so where it comes out faster there, that is noise.
#
# ## In three lines
#
# - The switch keeps one input a layer and replays the rest, all but `down_proj`; `block/n` trades the two at a fixed
#   rate.
# - What it cannot touch decides next: the loss with its fp32 copies of the logits, and the gradients.
# - Work over time and bytes over capacity are enough to tell whether a benchmark can be true.
#
# ## Further reading
#
# - Hugging Face, [Methods and tools for efficient training](https://huggingface.co/docs/transformers/perf_train_gpu_one).
# - PyTorch, [torch.utils.checkpoint](https://docs.pytorch.org/docs/stable/checkpoint.html): early stop, the two
#   implementations.
# - A. Chowdhery et al., [PaLM](https://arxiv.org/abs/2204.02311), 2022, appendix B: the definition of MFU.
#
# **Next:** [3. Checkpoint part of a layer](03_sub_block.ipynb)

# %%
print(gt.colophon(SEED))

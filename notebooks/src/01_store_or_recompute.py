# %% [markdown]
# # 1. Store it or compute it again
#
# You will follow a training step operator by operator, from three lines of PyTorch to the whole of Qwen3-8B, and see
# what it keeps in memory, why, and what it costs to keep less.
#
# **Afterwards you can**
# - say which tensors a training step keeps alive, operator by operator;
# - derive the rules of thumb 3 T_f, 4 T_f, (3 + β) T_f and √n, and say where each is off;
# - read the memory timeline of a training step;
# - show that checkpointing does not change what a model learns.
#
# **Before you start:** you have trained or fine-tuned a model once with PyTorch. Nothing else is needed, no GPU either.
#
# **Time:** 40 minutes of reading. The cells run in under a minute on a two-core laptop, in about two on a GPU.
# **Memory:** 3 GB of RAM; with a GPU the last part measures the full Qwen3-8B and wants 80 GB of GPU memory.

# %% tags=["parameters"]
MODEL = "Qwen3-8B"
BATCH = 1
SEQLEN = 4096
DEVICE = "H100"
HERE = {
    "cpu": {"model": "nano", "batch": 1, "seqlen": 256, "precision": "fp32"},
    "cuda": {"model": "Qwen3-8B", "batch": 1, "seqlen": 4096, "precision": "bf16"},
}
BYTES_TOLERANCE = {"cpu": 0.0, "cuda": 0.02}
ROUNDS = 2
STEPS = 2
TRAIN_STEPS = 16
TRAIN_TOKENS = 128
SEED = 0

# %%
import math
from pathlib import Path

import pandas as pd
import torch
from IPython.display import Markdown, display
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import gctutor as gt
from gctutor import plots
from gctutor.measurement import default_device
from gctutor.workload import build

pd.set_option("display.max_colwidth", None)

# %% [markdown]
# ## Three operators
#
# Here is a very small network: a matrix product, an activation function, another matrix product. (It is the skeleton of
# an MLP, the larger half of every transformer layer.)

# %%
torch.manual_seed(SEED)
x = torch.randn(64, 128, requires_grad=True)  # 64 tokens, 128 numbers each
w1 = torch.randn(128, 512, requires_grad=True)
w2 = torch.randn(512, 128, requires_grad=True)


def toy(x):
    h = x @ w1
    a = F.silu(h)
    return a @ w2


# %% [markdown]
# To train, PyTorch must run the chain rule backwards through these three lines. Each line's derivative needs something
# from the way forward:
#
# - the gradient of `w1` in `x @ w1` is `x` transposed times the gradient that arrives: it needs **x**;
# - the slope of `silu` depends on where it was evaluated: it needs **h**;
# - the gradient of `w2` needs **a**.
#
# So PyTorch's *autograd* puts these tensors aside during the forward pass. A tensor kept for the backward pass is
# called an **activation**. Weights are needed too, but they stay in memory anyway, so nobody counts them as
# activations.
#
# **Predict:** `x` has 64 × 128 numbers of 4 bytes, `h` and `a` have 64 × 512. How many bytes will be kept?
# And is the result of the last line among them?
#
# PyTorch lets us look: a *saved tensors hook* is called with every tensor that autograd puts aside.


# %%
def saved_by(function, x):
    """Every activation that autograd keeps while `function` runs: each piece of memory once, weights left out."""
    saved = {}

    def pack(tensor):
        if tensor is not w1 and tensor is not w2 and tensor.numel():
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(x)
    return pd.DataFrame([{"shape": tuple(t.shape), "bytes": t.nbytes} for t in saved.values()])


kept_by_toy = saved_by(toy, x)
kept_by_toy

# %% tags=["exact"]
h_bytes = a_bytes = 64 * 512 * 4
gt.check(
    kept_by_toy.bytes.sum() == x.nbytes + h_bytes + a_bytes,
    f"the toy keeps x, h and a: {kept_by_toy.bytes.sum():,} bytes, and not its result",
)

# %% [markdown]
# The result is not kept: no derivative here asks for it. Remember that, it comes back twice.
#
# ## Computing it again
#
# `h` and `a` can be had from `x` at any time: run the two lines again. That is all there is to **gradient
# checkpointing** (also called activation checkpointing, or recomputation): throw activations away in the forward pass,
# keep enough to make them again, and make them again when the backward pass asks. PyTorch does it with one call:


# %%
def checkpointed(x):
    return checkpoint(toy, x, use_reentrant=False)


# %% [markdown]
# (`use_reentrant=False` chooses the modern implementation. The old one has traps, and notebook 8 walks into them.)
#
# **Predict:** what is left in memory when `checkpointed(x)` has returned?

# %%
kept_by_checkpoint = saved_by(checkpointed, x)
kept_by_checkpoint

# %% [markdown]
# Only the input of the region. Are the gradients still the same? Not *nearly*: the same numbers went through the same
# operators, so every bit should agree.


# %%
def gradients(function):
    x.grad = w1.grad = w2.grad = None
    function(x).square().mean().backward()
    return [t.grad for t in (x, w1, w2)]


gt.check(
    all(map(torch.equal, gradients(toy), gradients(checkpointed))),
    "the gradients of x, w1 and w2 agree to the last bit",
)

# %% [markdown]
# ## What it costs
#
# Work is counted in **FLOPs**, floating-point operations. Multiplying a matrix of m × k by one of k × n takes m · n dot
# products of k multiplications and k additions: 2 m k n FLOPs. In a transformer nearly all FLOPs sit in such products,
# so they are what is counted.
#
# **Predict:** call one of the toy's products 1. The forward pass does 2. How many does the backward pass do? And how
# many does it do when the toy is checkpointed?


# %%
def products(function):
    """Matrix products in the forward and in the backward pass, in units of one of the toy's products."""
    with FlopCounterMode(display=False) as forward:
        out = function(x)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    one = 2 * 64 * 128 * 512
    return {"forward": forward.get_total_flops() / one, "backward": backward.get_total_flops() / one}


work = pd.DataFrame({"toy": products(toy), "checkpointed": products(checkpointed)}).T
work["step in forwards"] = (work.forward + work.backward) / work.forward
work

# %% [markdown]
# Every product `y = x @ w` has two gradients to compute, one for `x` and one for `w`, and each is a product of the same
# size. So the backward pass does twice the forward's work, and if **T_f** is the time of a forward pass, a step takes
# T_f + 2 T_f = **3 T_f**.
#
# With checkpointing, the textbook adds one more forward: **4 T_f**, a third more. But the table shows less. The replay
# in the backward pass stopped when `a` was there: the last product's *result* is needed by nobody, so it was not
# computed again. This is **early stop**. In a real transformer it saves about a quarter of the replay's matrix
# products, as notebook 2 counts.

# %% tags=["exact"]
toy_step, checkpointed_step = work["step in forwards"]
gt.check(toy_step == 3, "the toy's step is exactly three forwards")
gt.check(
    3 < checkpointed_step < 4, f"checkpointed, it is {checkpointed_step:g} forwards: less than four, by early stop"
)

# %% [markdown]
# ### Exercise 1: keep x and h (10 minutes)
#
# `toy` keeps `x`, `h` and `a`; `checkpointed` keeps `x` and replays a product and the `silu`. The `silu` is the cheap
# part. Write a function that keeps `x` and `h`, and replays nothing but the `silu`. Where must the checkpointed region
# begin, and where must it end? (Ending it right after the `silu` is the obvious try. See what happens, and say why.)

# %% tags=["exercise"]
answer = None  # your function of x


def check_exercise_1(answer):
    gt.check(answer is not None, "there is an answer")
    gt.check(torch.equal(answer(x), toy(x)), "it computes what the toy computes")
    gt.check(saved_by(answer, x).bytes.sum() == x.nbytes + h_bytes, "it keeps x and h and nothing else")
    gt.check(products(answer) == products(toy), "it replays no matrix product")


print("Exercise 1 is yours to do: set `answer`, then run check_exercise_1(answer).")


# %% tags=["solution", "hide-input"] jupyter={"source_hidden": true}
# `a` is kept by whoever multiplies it by w2. As long as that product lies outside the region, the region frees nothing:
# its own result is somebody else's activation. So the region must take the product in; early stop keeps it from being
# run twice.
def thrifty(x):
    h = x @ w1
    return checkpoint(lambda h: F.silu(h) @ w2, h, use_reentrant=False)


answer = thrifty
check_exercise_1(answer)

# %% [markdown]
# ## From three operators to Qwen3-8B
#
# The real thing has dozens of operators in each decoder layer, dozens of layers, and no laptop to run on. We look at it
# the same way nevertheless. `gt.trace` runs Hugging Face's own Qwen3 code on **fake tensors**: they have a shape
# and a type but no memory, so the whole model fits anywhere. Every operator is recorded as it passes, with what it
# makes and what is still alive later. It is filed under its **call site**: the module of the layer in whose `forward`
# it ran, such as `mlp.gate_proj`. Nothing about memory is modelled: it is counted.

# %%
workload = gt.Workload(MODEL, batch=BATCH, seqlen=SEQLEN)
step = gt.trace(workload, "none")

layer_input_bytes = workload.tokens * workload.config().hidden_size * 2  # bf16: two bytes a number
kept = {site: size for (layer, site), size in step.kept.items() if layer == 1}
Markdown(
    f"One training step of {workload.label}, traced. (That label is the model, batch × tokens, kernels, precision. "
    f"`hf` is Hugging Face's own kernels, notebook 6 has others; `nano@4` would be the model `nano` cut to 4 layers.) "
    f"A layer's input is {layer_input_bytes / 1e6:.1f} MB. "
    f"**Predict:** how many times that does one layer keep for its backward pass?"
)

# %% tags=["exact"]
why = {
    "input_layernorm": "its input in fp32 for the statistics, the normalised rows, and its output for q, k and v",
    "self_attn.q_norm": "the same for the queries, head by head, but not the output: the rotary embedding that follows "
    "needs only its angles",
    "self_attn.k_norm": "the same for the keys",
    "self_attn.v_proj": "the values: attention's backward needs them",
    "self_attn": "queries and keys after the rotary embedding, which turns each by an angle that tells its position: "
    "attention's backward needs them",
    "self_attn.core_attn": "attention's result, needed by o_proj, and one number a row for its own backward",
    "post_attention_layernorm": "as input_layernorm, its output being needed by gate_proj and up_proj",
    "mlp.gate_proj": "needed for the slope of silu",
    "mlp.act_fn": "silu's result, a factor of the product below",
    "mlp.up_proj": "the other factor",
    "mlp": "their product, needed by down_proj",
}
one_layer = pd.DataFrame(
    [
        {
            "call site": site,
            "kept (MB)": round(size / 1e6, 1),
            "in layer inputs": round(size / layer_input_bytes, 2),
            "what it is": why.get(site, ""),
        }
        for site, size in kept.items()
    ]
)
one_layer.set_index("call site")

# %% tags=["exact"]
layer_bytes = sum(kept.values())
inside = layer_bytes / layer_input_bytes  # a layer's activations, in layer inputs
Markdown(
    f"One layer keeps {layer_bytes / 1e6:,.0f} MB, **{inside:.0f} times its input**. "
    f"Times {workload.n_layers} layers, plus what the loss keeps, that makes {step.activation_bytes / 1e9:.1f} GB "
    f"of activations; the weights themselves are {step.static_bytes / 1e9:.1f} GB "
    f"(exact bytes, traced on fake tensors)."
)

# %% tags=["exact"]
gt.check(
    layer_bytes * workload.n_layers == step.breakdown()["layer_activations"],
    f"{workload.n_layers} layers keep exactly {workload.n_layers} times what one keeps: bytes are additive",
)

# %% [markdown]
# It is the toy again, only longer: a product keeps its two factors; a non-linear function such as silu keeps its input.
# Note what is *missing*. The results of `down_proj` and `o_proj`: nobody needs them in the backward pass. And those of
# `q_proj`, of `k_proj`, and of the two additions to the **residual stream** (the layer's input, which runs past
# attention and MLP and takes up the result of each): the norm behind each of them keeps its fp32 copy instead.
#
# So there is a third way besides storing and computing again: dropping what nobody will ask for. How much of what a
# layer computes is that?

# %% tags=["exact"]
(forward_of_layer,) = [s for s in step.segments if s.layer == 1 and s.phase == "forward"]
made_bytes = sum(sum(kernel.born) for kernel in forward_of_layer.kernels)
Markdown(
    f"On its way forward the layer makes {made_bytes / 1e6:,.0f} MB and keeps {layer_bytes / 1e6:,.0f} MB "
    f"({layer_bytes / made_bytes:.0%}). The rest goes once used, and backward never misses it."
)

# %% [markdown]
# This series grew out of an article, *Getting the most out of gradient checkpointing on Qwen3-8B* (credited in
# `LICENSE-CONTENT.md`). Wherever a lesson can test one of its claims, numbered T01, H01 and so on, it does so in front
# of you: `gt.judge` prints the verdict, the claim, what was found, and the source. Notebook 11 lists them all.

# %%
gt.judge(
    "T01",
    holds=kept_by_checkpoint.bytes.sum() < kept_by_toy.bytes.sum() and layer_bytes < made_bytes,
    when="the backward pass needs it",
    because=f"A checkpointed toy of three operators keeps {kept_by_checkpoint.bytes.sum():,} of "
    f"{kept_by_toy.bytes.sum():,} bytes and runs the rest again; of the bytes that a layer of {workload.model} "
    f"computes, {1 - layer_bytes / made_bytes:.0%} are needed by no derivative and are neither stored nor computed "
    f"again",
)

# %% [markdown]
# ## T_f, 3 T_f, 4 T_f, (3 + β) T_f
#
# Now the same counting of work for the full model, under three **policies** (what to keep, what to recompute):
#
# - `none`: keep everything;
# - `block`: keep each layer's input, replay the whole layer. This is Hugging Face's switch (notebook 2);
# - `modules:all`: keep what the big matrix products and the attention kernel return, and replay the small stuff between
#   them. This is *selective* recomputation (notebook 5).
#
# **Predict:** how many forwards' worth of work is a step under each?

# %% tags=["exact"]
POLICIES = ["none", "block", "modules:all"]
traces = {policy: gt.trace(workload, policy) for policy in POLICIES}
t_f = traces["none"].flop("forward")
flops = pd.DataFrame(
    {
        policy: {phase: trace.flop(phase) / t_f for phase in ("forward", "recompute", "backward")}
        for policy, trace in traces.items()
    }
).T
flops["step"] = flops.sum(axis=1)
kernels = [kernel for segment in step.segments for kernel in segment.kernels if kernel.work.kind == "attention"]
attention = {phase: sum(k.work.flop for k in kernels if k.phase == phase) for phase in ("forward", "backward")}
flops.round(3)

# %% tags=["exact"]
Markdown(
    f"One forward is {t_f / 1e12:.1f} TFLOP. The step without checkpointing is **{flops.step['none']:.2f} T_f**: "
    f"two products backward for each forward, and attention's backward does "
    f"{attention['backward'] / attention['forward']:.1f} times its forward (it makes its score matrix once more, "
    f"notebook 6). "
    f"`block` is **{flops.step['block']:.2f} T_f**, not 4: early stop, and the output head lies outside the layers "
    f"(`lm_head`, the product that makes one number for every entry of the vocabulary). "
    f"`modules:all` replays no matrix product at all: **{flops.step['modules:all']:.2f} T_f**."
)

# %% [markdown]
# If only FLOPs took time, `modules:all` would be free. They are not all: norms, activation functions and additions do
# few FLOPs but read and write every byte, and a GPU's memory is slow next to its arithmetic. So we also estimate
# *time*. For each operator a **roofline** takes the larger of two times, arithmetic and memory traffic, from the data
# sheet of a named GPU with assumed efficiencies (notebook 4 builds it). These times are **estimates**; the bytes are
# not.
#
# Write the replay's time as β forwards, and a step is **(3 + β) T_f**: β = 1 in the textbook's 4 T_f.

# %%
timelines = {policy: gt.timeline(workload, policy, DEVICE) for policy in POLICIES}
device = gt.find_device(DEVICE).name


def seconds_of(timeline, phase):
    return sum(span.end_s - span.start_s for span in timeline.spans if span.phase == phase)


times = pd.DataFrame(
    {
        policy: {
            "forward (ms)": 1e3 * timeline.forward_s,
            "step (ms)": 1e3 * timeline.step_s,
            "step in forwards": timeline.step_s / timeline.forward_s,
            "beta": seconds_of(timeline, "recompute") / timeline.forward_s,
            "slower by": timeline.step_s / timelines["none"].step_s - 1,
        }
        for policy, timeline in timelines.items()
    }
).T
times.round(3).rename_axis(f"estimated for {device}")

# %% tags=["exact"]
Markdown(
    f"Estimated for {device}: `block` has β = {times.beta['block']:.2f} and makes the step "
    f"{times['slower by']['block']:.0%} slower. `modules:all` replays not a single matrix product and still has "
    f"β = {times.beta['modules:all']:.2f}, or {times['slower by']['modules:all']:.0%}: all of it memory traffic. "
    f"For that it keeps {traces['modules:all'].activation_bytes / 1e9:.1f} GB instead of "
    f"{step.activation_bytes / 1e9:.1f}; `block` keeps {traces['block'].activation_bytes / 1e9:.1f}."
)

# %% tags=["exact"]
gt.check_close(flops.step["none"], 3, rel=0.03, what="a step in forwards, by FLOPs")
gt.check(3 < flops.step["block"] < 4, "block checkpointing is less than four forwards")
gt.check(flops.recompute["modules:all"] == 0, "modules:all replays no matrix product")
gt.check(
    0 < times.beta["modules:all"] < times.beta["block"] < 1,
    "β by time: selective lies between nothing and block, block below 1",
)

# %%
gt.judge(
    "T02",
    value={"backward_over_forward_ratio": flops.backward["none"], "step_over_forward_ratio": flops.step["none"]},
    tolerance=0.05,
    because=f"Each matrix product has two gradients of its own size; attention's backward does "
    f"{attention['backward'] / attention['forward']:.1f} times its forward's work. By estimated time the backward pass "
    f"is {times['step in forwards']['none'] - 1:.2f} forwards",
    device=device,
)
kept_share = traces["block"].activation_bytes / step.activation_bytes
gt.judge(
    "T03",
    value={
        "step_over_forward_ratio": flops.step["block"],
        "extra_time_share": times["slower by"]["block"],
        "kept_share": kept_share,
    },
    tolerance=0.05,
    because=f"The replay stops early and spares the output head, which leaves {flops.recompute['block']:.2f} of a "
    f"forward to run again. Each layer keeps 1/{inside:.0f} of what it did; with the loss's own copies "
    f"{kept_share:.0%} stays",
    device=device,
)

# %% [markdown]
# ## The rule of √n
#
# The paper that made checkpointing popular ([Chen et al., 2016](https://arxiv.org/abs/1604.06174)) does not checkpoint
# every layer. It cuts the n layers into regions of g, keeps one input a region, and replays a region at a time. Two
# things are then in memory: n / g inputs, and, while a region is replayed, the activations of its g layers.
#
# Count in layer inputs, and let a layer's activations be `inside` of them: memory is n / g + g · inside. With
# `inside` = 1, as in a network that is one long chain of equal tensors, this is smallest at g = √n: hence the rule.
#
# **Predict:** the best g for Qwen3-8B, where a layer keeps what you saw above?


# %% tags=["exact"]
def held(g, inside):
    return math.ceil(workload.n_layers / g) + g * inside


regions = pd.DataFrame(
    {g: {"chain": held(g, 1), workload.model: held(g, inside)} for g in range(1, 13)},
).T.rename_axis("layers a region")
regions.round(1)

# %% tags=["exact"]
best_chain, best_here = (int(regions[name].idxmin()) for name in ("chain", workload.model))
gt.check(best_chain == round(math.sqrt(workload.n_layers)), f"the chain is best cut into regions of √n = {best_chain}")
gt.check(best_here == 1, f"{workload.model} is best cut into regions of {best_here} layer")
Markdown(
    f"The general optimum is g = √(n / inside): √({workload.n_layers} / {inside:.0f}) = "
    f"{math.sqrt(workload.n_layers / inside):.1f} here. A modern layer keeps so much more than its input "
    f"that checkpointing **every** layer is right, and larger regions only raise the peak of the replay."
)

# %% [markdown]
# ### Exercise 2: predict `block` by hand (10 minutes)
#
# You now know what `block` keeps of the layers. Write a function that takes a workload and returns these bytes, from
# `workload.batch`, `workload.seqlen` and `workload.config()` (`hidden_size`, `num_hidden_layers`), in bf16. It must be
# right to the byte for models and sizes you have not seen.

# %% tags=["exercise"]
answer = None  # your function of a workload


def check_exercise_2(answer):
    gt.check(answer is not None, "there is an answer")
    for other in (workload, gt.Workload("Qwen3-0.6B", batch=2, seqlen=512)):
        traced = gt.trace(other, "block").breakdown()["layer_activations"]
        gt.check(answer(other) == traced, f"{other.label}: {traced:,} bytes")


print("Exercise 2 is yours to do: set `answer`, then run check_exercise_2(answer).")


# %% tags=["solution", "hide-input"] jupyter={"source_hidden": true}
# One input a layer: batch × seqlen × hidden numbers of two bytes.
def block_bytes(workload):
    config = workload.config()
    return config.num_hidden_layers * workload.batch * workload.seqlen * config.hidden_size * 2


answer = block_bytes
check_exercise_2(answer)

# %% [markdown]
# ## The memory timeline
#
# Activations pile up on the way forward and are used up on the way back. Draw live memory over the time of one step and
# you see the whole story: weights at the bottom, which are always there; gradients, which grow in the backward pass;
# activations; what the loss needs; and what lives only for a moment.
#
# **Predict:** at which moment is memory highest, in the middle of the step or at its end?

# %%
ax = plots.plot_memory_timeline(timelines["none"])
peak = traces["none"].peak_bytes
caption = (
    f"Without checkpointing, memory climbs through the forward pass to a peak of {peak / 1e9:.1f} GB at the loss, "
    f"{(peak - step.static_bytes) / 1e9:.1f} GB above the weights, and falls again as backward uses the activations up."
)
_ = plots.save_figure(ax.figure, "01_memory_timeline", alt=caption, caption=caption)

# %%
Markdown(f"*{caption}* (Bytes exact; the time axis is estimated for {device}.)")

# %% [markdown]
# The peak is a moment, and it decides whether your step fits. Now the three policies on one time axis. The hatched
# pieces are forward work done again, each just before the backward pass of its layer: that is why only one layer's
# activations are ever back in memory at a time.

# %%
axes = plots.plot_gantt(timelines, subtitle=f"{workload.label} · estimated for {device}")
saved = {p: 1 - t.activation_bytes / step.activation_bytes for p, t in traces.items()}
caption = (
    f"block frees {saved['block']:.0%} of the activations for {times['slower by']['block']:.0%} more time; "
    f"modules:all frees {saved['modules:all']:.0%} for {times['slower by']['modules:all']:.0%}."
)
_ = plots.save_figure(axes[0].figure, "01_gantt", alt=caption, caption=caption)

# %%
Markdown(f"*{caption}* (Estimated for {device}.)")

# %%
replayed = {policy: seconds_of(timeline, "recompute") for policy, timeline in timelines.items()}
gt.judge(
    "T05",
    holds=replayed["none"] == 0 < replayed["modules:all"] < replayed["block"],
    because="One time axis shows them apart: "
    + "; ".join(
        f"{policy} recomputes for {1e3 * replayed[policy]:.0f} ms and peaks at {trace.peak_bytes / 1e9:.0f} GB"
        for policy, trace in traces.items()
    ),
    device=device,
)

# %% [markdown]
# ## Does the model learn the same?
#
# The gradients of the toy agreed to the last bit. A whole training run is a harder test: any difference would grow from
# step to step. We train `nano`, a small Qwen3 of this project (same code, 6 layers), on real text: the prose of this
# series, byte by byte. It runs on the CPU in fp32, where the same operators give the same bits.
#
# **Predict:** after some steps, how far apart are the losses with and without checkpointing?

# %%
lines = [line for path in sorted(Path("src").glob("*.py")) for line in path.read_text(encoding="utf-8").splitlines()]
prose = "\n".join(line[2:] for line in lines if line.startswith("# ") and not line.startswith("# %%"))
tokens = torch.tensor(list(prose.encode()))
batches = tokens[: TRAIN_STEPS * TRAIN_TOKENS].view(TRAIN_STEPS, 1, TRAIN_TOKENS)


def train(policy):
    model = build(gt.Workload("nano", seqlen=TRAIN_TOKENS, precision="fp32"), seed=SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    with gt.parse(policy).applied(model):
        for rows in batches:
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


curves = {policy: train(policy) for policy in POLICIES}

# %%
ax = plots.plot_loss_curves(curves, subtitle=f"nano, 1 × {TRAIN_TOKENS}, fp32, AdamW · measured on CPU")
caption = (
    f"In {TRAIN_STEPS} steps the loss falls from {curves['none'][0]:.2f} to {curves['none'][-1]:.2f}, "
    f"and {', '.join(POLICIES[:-1])} and {POLICIES[-1]} draw one and the same curve."
)
_ = plots.save_figure(ax.figure, "01_loss_curves", alt=caption, caption=caption)

# %%
Markdown(f"*{caption}* (Measured on this CPU.)")

# %%
for policy in POLICIES[1:]:
    gt.check(curves[policy] == curves["none"], f"{policy}: every loss equals none's to the last bit")
gt.check(min(curves["none"][-4:]) < 0.9 * curves["none"][0], "and the model learns")

# %% [markdown]
# ## Predicted against measured, on your machine
#
# So far the bytes came from fake tensors. Now real ones: on a machine with a GPU this cell runs the full model,
# elsewhere it runs `nano` on the CPU. On a GPU the bytes are read from CUDA's allocator, on a CPU they are counted by
# the tracer on the real tensors, in a step that is not timed. On a CPU this tests that fake and real tensors agree, not
# the allocator.
#
# **Predict:** by how many bytes will the prediction be off?

# %%
kind = default_device()
here = gt.Workload(**HERE[kind])
measured = gt.measure(here, POLICIES, rounds=ROUNDS, steps=STEPS, seed=SEED)
fitting = measured.where(status="ok")
predicted = {row.policy: gt.trace(here, row.policy, kind=kind) for row in fitting}
display(Markdown(plots.subtitle(measured)))
pd.DataFrame(
    [
        {
            "policy": row.policy,
            "predicted activations": f"{predicted[row.policy].activation_bytes:,}",
            "measured activations": f"{row.activation_bytes:,}",
            "measured step (ms)": f"{1e3 * row.step_s:,.0f}",
        }
        for row in fitting
    ]
).set_index("policy")

# %%
for row in fitting:
    gt.check_close(
        row.activation_bytes,
        predicted[row.policy].activation_bytes,
        rel=BYTES_TOLERANCE[kind],
        what=f"{row.policy}, activation bytes measured against predicted",
    )

# %% [markdown]
# These are bytes of live tensors. They are exact, so they can be planned with, but they are not the whole story: an
# out-of-memory error is decided by what CUDA's allocator has *reserved*, and that includes rounding, fragmentation, the
# kernels' workspaces and communication buffers. Notebook 7's planner leaves a stated reserve for them.
#
# Times on a shared CPU are noisy, even in their order: where a policy that does strictly more work than another comes
# out faster, that is noise. Trust the bytes and the FLOPs.
#
# ## In three lines
#
# - A product keeps its two factors, a non-linear function such as silu keeps its input; in Qwen3-8B a layer keeps many
#   times its input, and dropping all but the input is what checkpointing does.
# - The price is replayed work, β forwards on top of three. It is below one, since nobody replays what nobody needs, and
#   it can be small if the expensive results are kept.
# - The gradients stay the same to the last bit wherever the plain step repeats its own bits (notebook 9). What changes
#   is memory and time, and both can be known beforehand.
#
# ## Further reading
#
# - T. Chen, B. Xu, C. Zhang, C. Guestrin, [Training Deep Nets with Sublinear Memory
#   Cost](https://arxiv.org/abs/1604.06174), 2016: the √n rule.
# - V. Korthikanti et al., [Reducing Activation Recomputation in Large Transformer
#   Models](https://arxiv.org/abs/2205.05198), 2022: counts a layer's activations by hand, and introduces selective
#   recomputation.
# - PyTorch, [torch.utils.checkpoint](https://docs.pytorch.org/docs/stable/checkpoint.html) and [hooks for saved
#   tensors](https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html).
# - S. Williams, A. Waterman, D. Patterson, [Roofline](https://doi.org/10.1145/1498765.1498785), 2009.
#
# **Next:** [2. Switch block checkpointing on, and find what is left](02_block_checkpointing.ipynb)

# %%
print(gt.colophon(SEED))

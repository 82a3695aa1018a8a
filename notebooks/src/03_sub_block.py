# %% [markdown]
# # 3. Checkpoint part of a layer
#
# You will open the accounts of one decoder layer, write a checkpoint round its MLP by hand, and find out what replaying
# only the MLP, only the attention or only the norms frees, and for how much time.
#
# **Afterwards you can**
# - read off what each part of a layer keeps, and explain every entry;
# - checkpoint any submodule of a model in three lines, and check that it did what you meant;
# - compare partial policies by their exchange rate, milliseconds for a GB freed;
# - say why the widest part of a layer is not automatically the best one to replay.
#
# **Before you start:** [notebook 2](02_block_checkpointing.ipynb): the switch, early stop, and what the loss keeps.
#
# **Time:** 30 minutes of reading. The cells run in under a minute on a two-core laptop, in about two on a GPU.
# **Memory:** 3 GB of RAM; with a GPU the last part measures the full Qwen3-8B and wants 80 GB of GPU memory.

# %% tags=["parameters"]
MODEL = "Qwen3-8B"
BATCH = 1
LARGE_BATCH = 4
SEQLEN = 4096
DEVICE = "H100"
HERE = {
    "cpu": {"model": "nano", "batch": 1, "seqlen": 256, "precision": "fp32"},
    "cuda": {"model": "Qwen3-8B", "batch": 1, "seqlen": 4096, "precision": "bf16"},
}
BYTES_TOLERANCE = {"cpu": 0.0, "cuda": 0.02}
ROUNDS = 2
STEPS = 1
SEED = 0

# %%
import dataclasses
import functools
from collections import Counter

import pandas as pd
import torch
from IPython.display import Markdown, display
from torch.utils.checkpoint import checkpoint

import gctutor as gt
from gctutor import plots
from gctutor.claims import find_claim
from gctutor.measurement import default_device
from gctutor.tracing import trace_step
from gctutor.workload import build, decoder_layers, inputs

pd.set_option("display.max_colwidth", None)

# %% [markdown]
# ## The accounts of one layer
#
# A Qwen3 layer is a norm, the attention module, an addition, a second norm, the MLP, another addition. Inside
# attention, queries and keys have small norms of their own. Notebook 1 listed what each call site keeps; here we add it
# up by part.
#
# **Predict:** the MLP is three times as wide as the model. Which share of a layer's activations is the MLP's?


# %% tags=["exact"]
def part_of(site):
    """The part of a layer that a call site belongs to; what lies between the parts is an input of one of them."""
    if site.startswith("mlp"):
        return "MLP"
    if site.endswith("layernorm"):
        return "layer norms"
    if site in ("self_attn.q_norm", "self_attn.k_norm"):
        return "q and k norms"
    return "attention" if site.startswith("self_attn") else "inputs"


def layer_by_part(policy):
    """Bytes that a middle layer keeps under a policy, by part."""
    parts = Counter()
    for (layer, site), size in gt.trace(workload, policy).kept.items():
        if layer == 1:
            parts[part_of(site)] += size
    return dict(parts)


workload = gt.Workload(MODEL, batch=BATCH, seqlen=SEQLEN)
layer_input_bytes = workload.tokens * workload.config().hidden_size * 2
accounts = layer_by_part("none")
layer_bytes = sum(accounts.values())
pd.DataFrame(
    {
        part: {
            "kept (MB)": round(size / 1e6, 1),
            "in layer inputs": round(size / layer_input_bytes, 2),
            "share": f"{size / layer_bytes:.0%}",
        }
        for part, size in sorted(accounts.items(), key=lambda item: -item[1])
    }
).T.rename_axis(f"one layer of {workload.model}")

# %% tags=["exact"]
norms_share = (accounts["layer norms"] + accounts["q and k norms"]) / layer_bytes
Markdown(
    f"The MLP leads with {accounts['MLP'] / layer_bytes:.0%}: gate, up, silu's result and the product, each "
    f"three inputs "
    f"wide. But the norms, which do next to no arithmetic, hold {norms_share:.0%}. Hugging Face's RMSNorm computes in "
    f"fp32 for accuracy, and keeps an fp32 copy of its input, which counts double, the normalised rows, and (the layer "
    f"norms) its output."
)

# %% tags=["exact"]
gt.check(max(accounts, key=accounts.get) == "MLP", "the MLP is the largest keeper")
gt.check(
    accounts["MLP"] == 4 * workload.tokens * workload.config().intermediate_size * 2,
    "and it is four tensors of the MLP's width, to the byte",
)

# %% [markdown]
# ## A checkpoint round the MLP, by hand
#
# To replay a submodule, put `torch.utils.checkpoint` between the module and its `forward`. That is all a *sub-block*
# policy is. We write it for the MLP of `nano`, on real tensors.


# %%
def checkpoint_mlps(model):
    for layer in decoder_layers(model):
        layer.mlp.forward = functools.partial(checkpoint, layer.mlp.forward, use_reentrant=False)


def undo(model):
    for layer in decoder_layers(model):
        del layer.mlp.forward  # the class's own forward shows again


def gradients(model):
    model.zero_grad()
    model(**batch).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


small = gt.Workload("nano", seqlen=64, precision="fp32")
model, batch = build(small, seed=SEED), inputs(small, seed=SEED)
whole, whole_gradients = trace_step(model, batch), gradients(model)
checkpoint_mlps(model)
by_hand, by_hand_gradients = trace_step(model, batch), gradients(model)
undo(model)

# %% [markdown]
# **Predict:** of the MLP's three matrix products, how many run again? And does the checkpoint have to keep the MLP's
# input on top of what is kept anyway?

# %% tags=["exact"]
one_product = 2 * small.tokens * small.config().hidden_size * small.config().intermediate_size
replayed = by_hand.flop("recompute") / (one_product * small.n_layers)
mlp_bytes = 4 * small.tokens * small.config().intermediate_size * 4
gt.check(replayed == 2, f"{replayed:.0f} of three products run again: early stop spares down_proj")
gt.check(
    whole.activation_bytes - by_hand.activation_bytes == mlp_bytes * small.n_layers,
    f"all that the MLPs kept is freed, {mlp_bytes * small.n_layers:,} bytes, and the input costs nothing extra",
)
gt.check(all(map(torch.equal, whole_gradients, by_hand_gradients)), "every gradient agrees to the last bit")

# %% [markdown]
# The input is free because the layer keeps it whatever the MLP does: where the backward pass of one operator needs the
# result of another, the tensor is shared. Where a checkpointed region begins at such a tensor, it begins for nothing.
#
# In this series the same thing is the policy `sub:mlp`. It is applied for a `with` block, works on any Hugging Face
# decoder, and is counted after the first step to make sure that it took effect.

# %% tags=["exact"]
with gt.parse("sub:mlp").applied(model):
    by_policy = trace_step(model, batch)
gt.check(by_policy.activation_bytes == by_hand.activation_bytes, "sub:mlp keeps the bytes of the version by hand")
gt.check(by_policy.flop() == by_hand.flop(), "and does the same work")

# %% [markdown]
# ## MLP, attention, norms: what each frees
#
# Back to the full model. `sub:attn` replays the attention module, `sub:norms` every norm, and parts can be listed.
#
# **Predict:** sort `sub:mlp`, `sub:attn` and `sub:norms` by what they free, and by what they cost.

# %%
SUBS = ["sub:norms", "sub:attn", "sub:mlp", "sub:attn,mlp"]
device = gt.find_device(DEVICE)
rows = gt.Results(gt.estimate(workload, policy, DEVICE) for policy in ["none", *SUBS, "block"])
none, block = rows["none"], rows["block"]


def bought(row, none):
    freed, extra_ms = none.activation_bytes - row.activation_bytes, 1e3 * (row.step_s - none.step_s)
    return {
        "freed (GB)": freed / 1e9,
        "freed share": freed / none.activation_bytes,
        "recompute (TFLOP)": row.recompute_flop / 1e12,
        "extra (ms)": extra_ms,
        "extra share": row.step_s / none.step_s - 1,
        "ms for a GB freed": extra_ms / (freed / 1e9),
    }


exchange = pd.DataFrame({row.policy: bought(row, none) for row in rows if row.policy != "none"}).T
exchange.round(3).rename_axis(f"estimated for {device.name}")

# %% tags=["exact"]
best = exchange.loc[SUBS, "ms for a GB freed"].idxmin()
Markdown(
    f"`sub:mlp` frees most, {exchange['freed (GB)']['sub:mlp']:.1f} GB, for "
    f"{exchange['recompute (TFLOP)']['sub:mlp']:.0f} TFLOP of replay. `sub:norms` frees "
    f"{exchange['freed (GB)']['sub:norms']:.1f} GB and replays no matrix product at all; it costs "
    f"{exchange['extra (ms)']['sub:norms']:.0f} ms of memory traffic. `sub:attn` frees "
    f"{exchange['freed (GB)']['sub:attn']:.1f} GB for {exchange['extra (ms)']['sub:attn']:.0f} ms, since it "
    f"replays the products of q, k and v and the attention kernel. "
    f"By exchange rate (milliseconds for a GB freed, low is good) **{best}** is the best buy of these "
    f"(bytes exact, times estimated for {device.name})."
)

# %% tags=["exact"]
gt.check(exchange["recompute (TFLOP)"]["sub:norms"] == 0, "replaying norms runs no matrix product again")
gt.check(
    best == "sub:norms",
    f"by exchange rate the norms come first: {exchange['ms for a GB freed'][best]:.1f} ms for a GB freed (low is good)",
)
gt.check_close(
    exchange["freed (GB)"]["sub:attn,mlp"],
    exchange["freed (GB)"]["sub:attn"] + exchange["freed (GB)"]["sub:mlp"],
    rel=1e-9,
    what="attention and MLP together free the sum of what each frees, in GB",
)

# %% [markdown]
# Where do the bytes go? The same accounts for every policy, for all layers:

# %%
by_part = [
    dataclasses.replace(
        row, breakdown={part: size * workload.n_layers for part, size in layer_by_part(row.policy).items()}
    )
    for row in rows
]
left = by_part[-2].breakdown
norms_part = "all" if set(left) == {"layer norms"} else f"{left['layer norms'] / sum(left.values()):.0%}"
caption = (
    f"With attention and MLP both replayed the layers still keep {sum(left.values()) / 1e9:.1f} GB, "
    f"{norms_part} of it for the layer norms."
)
ax = plots.plot_breakdown(gt.Results(by_part), title=caption.rstrip("."))
_ = plots.save_figure(ax.figure, "03_by_part", alt=caption, caption=caption)

# %%
Markdown(f"*{caption}* (Exact bytes, traced on fake tensors; the loss is left out.)")

# %% tags=["exact"]
before, after = by_part[0].breakdown, by_part[1].breakdown
held = before["layer norms"] + before["q and k norms"]
Markdown(
    f"Look at the bar of `sub:norms`: {after['inputs'] / 1e9:.1f} GB of inputs appear, and attention's piece grows by "
    f"{(after['attention'] - before['attention']) / 1e9:.1f} GB. A replayed norm needs its *input*, which nobody kept "
    f"before, since the norm's own fp32 copy had replaced it. A layer norm's is the layer's input or the sum after "
    f"attention; the q and k norms' are the results of `q_proj` and `k_proj`, which count as attention's. "
    f"{after['layer norms'] / 1e9:.1f} GB of the layer norms stay as well, their outputs, which the products need. So "
    f"the norms held {held / 1e9:.1f} GB and free {exchange['freed (GB)']['sub:norms']:.1f}. A region is worth what it "
    f"holds **less** what its borders must keep."
)

# %% tags=["exact"]
gt.check_close(
    1e9 * exchange["freed (GB)"]["sub:norms"],
    held - after["inputs"] - (after["attention"] - before["attention"]) - after["layer norms"],
    rel=1e-9,
    what="bytes that the norms free, against what they held less what is kept now",
)

# %%
gt.judge(
    "G02",
    value={
        "expansion_ratio": workload.config().intermediate_size / workload.config().hidden_size,
        "saved_share": exchange["freed share"]["sub:mlp"],
    },
    tolerance=0.05,
    because=f"The MLP is three times as wide and the largest keeper, with {accounts['MLP'] / layer_bytes:.0%} of a "
    f"layer's activations, but no more than that can be won from it; attention and MLP together free "
    f"{exchange['freed share']['sub:attn,mlp']:.0%}, still not {find_claim('G02').value['saved_share']:.0%}",
    device=device.name,
)

# %% [markdown]
# ### Exercise 1: two regions that overlap (15 minutes)
#
# Attention and MLP add up exactly. `sub:attn,norms` does not: the attention module holds the q and k norms, which are
# then not taken a second time. Predict the activation bytes of `sub:attn,norms` from the rows you have and the accounts
# of the two layer norms. Within 0.1 %; do not estimate the policy itself.
#
# (Hint: a region is worth what it holds less what its borders must keep. Which tensors can a replayed layer norm let
# go, which one must it keep now, and which one stays because the next region begins with it?)

# %% tags=["exercise"]
answer = None  # bytes


def check_exercise_1(answer):
    gt.check(answer is not None, "there is an answer")
    row = gt.estimate(workload, "sub:attn,norms", DEVICE)
    gt.check_close(answer, row.activation_bytes, rel=1e-3, what="activation bytes of sub:attn,norms")


print("Exercise 1 is yours to do: set `answer`, then run check_exercise_1(answer).")

# %% tags=["solution", "hide-input"] jupyter={"source_hidden": true}
# Each of the two layer norms lets its fp32 copy (two inputs' worth) and its normalised rows (one) go, must now keep its
# bf16 input (one), and its output stays: it is the input of the next region. Net: two inputs a norm.
answer = rows["sub:attn"].activation_bytes - 2 * 2 * layer_input_bytes * workload.n_layers
check_exercise_1(answer)

# %% [markdown]
# ## All on one plot
#
# Activation memory against step time: a **Pareto plot**. A policy is *dominated* when another needs no more of either
# and less of one; what is left is the frontier, and only there is anything worth choosing. For comparison we add
# `modules:all`, the selective policy of notebook 1.
#
# **Predict:** which of these policies will be dominated?

# %%
selective = gt.estimate(workload, "modules:all", DEVICE)
everything = gt.Results([*rows, selective])
best_rows = plots.frontier(everything)
ax = plots.plot_pareto(everything)
dominated = [row.policy for row in everything if row.policy not in {r.policy for r in best_rows}]
on_it = " · ".join(row.policy for row in best_rows)
caption = f"On the frontier: {on_it}. Dominated: {' · '.join(dominated) or 'no policy'}."
_ = plots.save_figure(ax.figure, "03_pareto", alt=caption, caption=caption)

# %%
Markdown(f"*{caption}* (Bytes exact, times estimated for {device.name}.)")

# %%
with_selective = {**exchange.T.to_dict(), "modules:all": bought(selective, none)}
gt.check(
    "modules:all" not in dominated and "sub:mlp" in dominated, "the selective policy beats replaying the MLP on both"
)
a_gb = {policy: figures["ms for a GB freed"] for policy, figures in with_selective.items()}
gt.check(
    a_gb["modules:all"] < a_gb["sub:norms"],
    f"and frees a GB for {a_gb['modules:all']:.1f} ms, the norms for {a_gb['sub:norms']:.1f} (estimated)",
)
gt.judge(
    "G01",
    value={
        "block_extra_time_share": with_selective["block"]["extra share"],
        "block_saved_share": with_selective["block"]["freed share"],
        "sub_block_extra_time_share": with_selective["sub:mlp"]["extra share"],
        "sub_block_saved_share": with_selective["sub:mlp"]["freed share"],
        "selective_extra_time_share": with_selective["modules:all"]["extra share"],
        "selective_saved_share": with_selective["modules:all"]["freed share"],
    },
    tolerance=0.1,
    because=f"Each costs less time than claimed, and selective recompute beats the sub-block (sub:mlp) on both counts, "
    f"but it is not alone on the frontier ({on_it})",
    device=device.name,
)

# %% [markdown]
# ### Exercise 2: half the memory, cheaply (10 minutes)
#
# Of all combinations of `attn`, `mlp` and `norms`, find the sub-block policy that frees at least half of the
# activations for the least time.

# %% tags=["exercise"]
answer = None  # a policy string


def check_exercise_2(answer):
    gt.check(isinstance(answer, str) and answer.startswith("sub:"), "there is an answer")
    half = none.activation_bytes / 2
    names = ["attn", "mlp", "norms", "attn,mlp", "attn,norms", "mlp,norms", "attn,mlp,norms"]
    tried = [gt.estimate(workload, f"sub:{parts}", DEVICE) for parts in names]
    cheapest = min((row for row in tried if row.activation_bytes <= half), key=lambda row: row.step_s)
    mine = gt.estimate(workload, answer, DEVICE)
    gt.check(mine.activation_bytes <= half, f"{answer} frees half: {mine.activation_bytes / 1e9:.1f} GB are kept")
    gt.check(mine.step_s == cheapest.step_s, f"and none that does is faster: {1e3 * mine.step_s:.0f} ms")


print("Exercise 2 is yours to do: set `answer`, then run check_exercise_2(answer).")

# %% tags=["solution", "hide-input"] jupyter={"source_hidden": true}
# The two best exchange rates together: the norms and the MLP do not overlap, so their savings add up.
answer = "sub:mlp,norms"
check_exercise_2(answer)

# %% [markdown]
# ## At batch 4
#
# The article gives figures for `sub:mlp` at batch 4. Check first, as in notebook 2, whether they can be.

# %%
large = gt.estimate(workload.replace(batch=LARGE_BATCH), "sub:mlp", DEVICE)
claimed_s = find_claim("P03").value["step_s"]
needed = large.flop / claimed_s
gt.check(
    needed > device.bf16_flop_per_s,
    f"{1e3 * claimed_s:.0f} ms would need {needed / 1e15:.2f} PFLOP/s, more than {device.name} has",
)
gt.judge(
    "P03",
    value={"memory_bytes": large.activation_bytes, "step_s": large.step_s},
    tolerance=0.1,
    because=f"{large.activation_bytes / 1e9:.1f} GB of activations are kept at batch {LARGE_BATCH}, which "
    f"with the weights does not fit; and the step's {large.flop / 1e12:.0f} TFLOP in {1e3 * claimed_s:.0f} ms are "
    f"above the chip's peak. At batch {BATCH} it is "
    f"{rows['sub:mlp'].activation_bytes / 1e9:.1f} GB and {1e3 * rows['sub:mlp'].step_s:.0f} ms",
    device=device.name,
)

# %% [markdown]
# ## Measured on your machine
#
# The full model on a GPU, `nano` on a CPU. `nano` runs in fp32, where a norm needs no copy of its input in another
# type.
#
# **Predict:** on `nano`, does `sub:norms` free a larger or a smaller share than on the full model in bf16?

# %%
kind = default_device()
here = gt.Workload(**HERE[kind])
measured = gt.measure(here, ["none", *SUBS, "block"], rounds=ROUNDS, steps=STEPS, seed=SEED)
fitting = measured.where(status="ok")
predicted = {row.policy: gt.trace(here, row.policy, kind=kind) for row in measured}
display(Markdown(plots.subtitle(measured)))
pd.DataFrame(
    [
        {
            "policy": row.policy,
            "activations (bytes)": f"{row.activation_bytes:,}",
            "freed share": f"{1 - row.activation_bytes / predicted['none'].activation_bytes:.0%}",
            "recompute (GFLOP)": round(row.recompute_flop / 1e9, 2),
            "step (ms)": round(1e3 * row.step_s),
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
        what=f"{row.policy}, activation bytes",
    )
    gt.check(
        row.recompute_flop == predicted[row.policy].flop("recompute"),
        f"{row.policy}, recompute: {row.recompute_flop:,.0f} FLOP",
    )

# %%
freed_here = 1 - predicted["sub:norms"].activation_bytes / predicted["none"].activation_bytes
Markdown(
    f"`sub:norms` frees {freed_here:.0%} of {here.label}, and {exchange['freed share']['sub:norms']:.0%} of "
    f"{workload.label}. What a policy is worth depends on model and precision: ask for your own workload."
)

# %% [markdown]
# Bytes and FLOPs are exact. Times on a shared CPU are noisy, even in their order (notebook 1): every policy here does
# all that `none` does and more, so where one comes out faster there, that is noise.
#
# ## In three lines
#
# - A region frees what it holds, less what its borders must keep; where the border is kept anyway, it is free.
# - The MLP holds most, but its products are dear to replay; the norms hold a good part and are cheap.
# - Whole parts are still a coarse choice: keeping the results of the products and replaying all between them beats
#   replaying the MLP on both counts, and frees a GB for less than the norms do.
#
# ## Further reading
#
# - V. Korthikanti et al., [Reducing Activation Recomputation in Large Transformer
#   Models](https://arxiv.org/abs/2205.05198), 2022: replaying only the attention core, and why.
# - B. Zhang, R. Sennrich, [Root Mean Square Layer Normalization](https://arxiv.org/abs/1910.07467), 2019.
# - PyTorch, [torch.utils.checkpoint](https://docs.pytorch.org/docs/stable/checkpoint.html).
#
# **Next:** [4. Choose operators by their intensity](04_selective_by_intensity.ipynb)

# %%
print(gt.colophon(SEED))

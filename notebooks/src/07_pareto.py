# %% [markdown]
# # 7. Choose from the Pareto curve
#
# You will put every mechanism of the series on one plot, hold the source article's figures against it, find out what
# freed memory buys, and leave with a policy for your own GPU and the lines to paste.
#
# **Afterwards you can**
# - read a Pareto curve, and produce one for your own workload, with or without a GPU;
# - check in a minute whether a published figure can be true;
# - compute the longest sequence and the largest batch that a card takes under a policy;
# - decide, by a function of twenty lines, what to recompute on a given card.
#
# **Before you start:** notebooks [5](05_selective_by_module.ipynb) (the planner) and
# [6](06_flash_and_liger.ipynb) (Liger's kernels).
#
# **Time:** 40 minutes of reading. The cells run in about a minute on a two-core laptop, in about three on a GPU.
# **Memory:** 3 GB of RAM; with a GPU one part measures the full Qwen3-8B and wants 80 GB of GPU memory.

# %% tags=["parameters"]
MODEL = "Qwen3-8B"
SEQLEN = 4096
DEVICE = "H100"
MECHANISMS = [
    "none",
    "block",
    "block/2",
    "block+offload",
    "sub:mlp",
    "ops:mm,core_attn",
    "modules:all",
    "budget:0.2",
    "budget:0.36",
]
KERNELS = ["hf", "liger", "liger:rms_norm,rope,swiglu+chunked"]
HERE = {
    "cpu": {"model": "nano@3", "batch": 1, "seqlen": 256, "precision": "fp32"},
    "cuda": {"model": "Qwen3-8B", "batch": 1, "seqlen": 4096, "precision": "bf16"},
}
SWEEP_POLICIES = [
    "none",
    "block",
    "block/2",
    "block/4",
    "block+offload",
    "sub:mlp",
    "sub:attn",
    "sub:norms",
    "ops:mm",
    "ops:mm,core_attn",
    "ops:mm,core_attn,-down_proj",
    "modules:core_attn",
    "modules:all",
    "budget:0.2",
    "budget:0.36",
]
SWEEP_SEQLENS = [1024, 2048, 4096, 8192, 16384, 32768]
BYTES_TOLERANCE = {"cpu": 0.0, "cuda": 0.02}
ROUNDS = 2
STEPS = 1
FOUR_SIZES = {"24 GB": "RTX 4090", "48 GB": "L40S", "80 GB": "H100 SXM", "141 GB": "H200"}
CARDS = ["L4", "RTX 4090", "RTX 5090", "A100 40GB", "L40S", "H100 PCIe", "H100 SXM", "A100 80GB", "H200", "B200"]
GUIDE_BATCHES = [1, 4]
GUIDE_SEQLENS = [4096, 16384]
MY_GPU = "RTX 4090"
MY_BATCH = 1
MY_SEQLEN = 4096
MY_TRAINABLE = "lora:16"
SEED = 0

# %%
import functools

import pandas as pd
from IPython.display import Markdown, display

import gctutor as gt
from gctutor import campaign, comparison, explorers, guide, plots
from gctutor.claims import find_claim
from gctutor.measurement import default_device
from gctutor.planner import RESERVE_BYTES

pd.set_option("display.max_colwidth", None)
device = gt.find_device(DEVICE)
workload = gt.Workload(MODEL, batch=1, seqlen=SEQLEN)

# %% [markdown]
# ## Where the figures of this page come from
#
# A **recorded** row was measured on a real machine earlier and is kept with its date and versions. Where there is
# none, an **estimate** stands in: bytes traced exactly on fake tensors, time by the roofline of the named GPU. The two
# are never mixed up: every table says which it shows.


# %%
def on_same_chip(row):
    """Whether a recorded row comes from a GPU with the arithmetic of DEVICE (an H200 is an H100 with other memory)."""
    on_gpu = not row.device.startswith("CPU")
    return on_gpu and gt.find_device(row.device).bf16_flop_per_s == device.bf16_flop_per_s


@functools.cache
def cost(workload, policy):
    """The recorded row of this step on a GPU of the same chip, or else its estimate."""
    known = recorded.where(workload=workload, policy=policy, status="ok")
    return known.rows[0] if len(known) else gt.estimate(workload, policy, device)


every_row = campaign.recorded()
recorded = every_row.where(on_same_chip)
gpu_rows = every_row.where(lambda row: not row.device.startswith("CPU"))
Markdown(plots.subtitle(gpu_rows) if len(gpu_rows) else "No recorded GPU rows yet: GPU figures below are estimates.")

# %% [markdown]
# ## The article's table, beside ours
#
# The article that this series grew out of gives five configurations of Qwen3-8B on an H100, at batch 4 and 4096 tokens.
# Its figures are read from the list of claims, ours from the same settings.

# %%
CONFIGURATIONS = {
    "P01": ("none", "hf"),
    "P02": ("block", "hf"),
    "P03": ("sub:mlp", "hf"),
    "P04": ("ops:mm,core_attn", "hf"),
    "P05": ("ops:mm,core_attn", "liger"),
}


def ours(claim_id, batch):
    policy, kernels = CONFIGURATIONS[claim_id]
    return cost(workload.replace(batch=batch, kernels=kernels), policy)


Markdown(
    f"**Predict:** forward and backward of {4 * SEQLEN:,} tokens through {MODEL} are "
    f"{ours('P01', 4).model_flop / 1e12:,.0f} TFLOP, recompute not counted, and {device.name} does at most "
    f"{device.bf16_flop_per_s / 1e12:,.0f} in a second. Which of the article's {len(CONFIGURATIONS)} times can be true?"
)


# %%
def beside(claim_id):
    """One row of the table: memory is what activations take, in GB; times are in ms."""
    article = find_claim(claim_id).value
    one, four = (ours(claim_id, batch) for batch in (1, 4))
    return {
        "policy": four.policy,
        "kernels": four.workload.kernels,
        "article GB": article["memory_bytes"] / 1e9,
        "ours GB": four.activation_bytes / 1e9,
        "(batch 1) GB": one.activation_bytes / 1e9,
        "article ms": 1e3 * article["step_s"],
        "ours ms": 1e3 * four.step_s,
        "(batch 1) ms": 1e3 * one.step_s,
        "ours fits": four.ok,  # the traced peak on the card, no reserve; the guide below leaves one
        "ours is": four.source,
    }


table = pd.DataFrame({claim_id: beside(claim_id) for claim_id in CONFIGURATIONS}).T
display(Markdown(f"Ours: {plots.subtitle(ours(claim_id, 4) for claim_id in CONFIGURATIONS)}"))
table.infer_objects().round(1).rename_axis("batch 4")

# %% [markdown]
# **Model FLOPs utilisation** (MFU) is the work a step needs, without recompute, over what the chip could have done in
# that time. It cannot exceed 100 %, and good training runs reach 40 to 60 %. It needs no benchmark: the work is a
# matter of counting.


# %%
def utilisation(claim_id, batch, seconds):
    return ours(claim_id, batch).model_flop / (seconds * device.bf16_flop_per_s)


claimed_s = {claim_id: find_claim(claim_id).value["step_s"] for claim_id in CONFIGURATIONS}
physics = pd.DataFrame(
    {
        claim_id: {
            "MFU claimed (batch 4)": f"{utilisation(claim_id, 4, seconds):.0%}",
            "MFU if it was batch 1": f"{utilisation(claim_id, 1, seconds):.0%}",
            "MFU of ours": f"{utilisation(claim_id, 4, ours(claim_id, 4).step_s):.0%}",
        }
        for claim_id, seconds in claimed_s.items()
    }
).T
possible = [claim_id for claim_id, seconds in claimed_s.items() if utilisation(claim_id, 4, seconds) <= 1]
physics

# %%
keeps_all = ours("P01", 4)
gt.check(
    keeps_all.activation_bytes > device.usable_bytes,
    f"batch 4 without recompute keeps {keeps_all.activation_bytes / 1e9:.1f} GB, and {device.name} has "
    f"{device.usable_bytes / 1e9:.1f}",
)
gt.check(
    utilisation("P01", 4, claimed_s["P01"]) > 1,
    f"the article's step without recompute needs {utilisation('P01', 4, claimed_s['P01']):.0%} of the chip's peak; "
    f"{len(possible)} of its {len(claimed_s)} times stay below 100%",
)

# %% [markdown]
# So the table cannot have been measured at batch 4. Could it be batch 1?

# %%
slow = [claim_id for claim_id, seconds in claimed_s.items() if utilisation(claim_id, 1, seconds) <= 1]
claimed_bytes, ours_bytes = find_claim("P01").value["memory_bytes"], ours("P01", 1).activation_bytes
Markdown(
    f"At batch 1, {len(slow)} of its {len(claimed_s)} times are possible, and it would have {claimed_bytes / 1e9:.0f} "
    f"GB for `none` where we count {ours_bytes / 1e9:.1f}."
)

# %% [markdown]
# That is worth a habit: **before you believe a figure, divide the FLOPs by the time.**
#
# The verdicts on the article's table, each by the row that we have:


# %%
def shortfall(claim_id):
    row = ours(claim_id, 4)
    return (
        f"At batch 4 {row.policy} with {row.workload.kernels} kernels keeps {row.activation_bytes / 1e9:.1f} GB of "
        f"activations and takes {1e3 * row.step_s:.0f} ms; {1e3 * claimed_s[claim_id]:.0f} ms would be an MFU of "
        f"{utilisation(claim_id, 4, claimed_s[claim_id]):.0%}"
    )


def judge_row(claim_id, **shares):
    row = ours(claim_id, 4)
    gt.judge(
        claim_id,
        value={"memory_bytes": row.activation_bytes, "step_s": row.step_s, **shares},
        tolerance=0.1,
        because=shortfall(claim_id),
        source=row.source,
        device=row.device,
        notebook="07_pareto",
    )


for claim_id in ["P01", "P02", "P03", "P04"]:
    judge_row(claim_id)
last = ours("P05", 4)
judge_row(
    "P05",
    faster_share=1 - last.step_s / keeps_all.step_s,
    saved_share=1 - last.activation_bytes / keeps_all.activation_bytes,
)

# %%
none, block = cost(workload, "none"), cost(workload, "block")
saved, extra = 1 - block.activation_bytes / none.activation_bytes, block.step_s / none.step_s - 1
gt.judge(
    "H04",
    value={
        "none_memory_bytes": none.activation_bytes,
        "none_step_s": none.step_s,
        "block_memory_bytes": block.activation_bytes,
        "block_step_s": block.step_s,
        "saved_share": saved,
        "extra_time_share": extra,
    },
    tolerance=0.1,
    because=f"At batch 1 the switch frees {saved:.0%} of the activations for {extra:.0%} more time",
    source=none.source,
    device=none.device,
    notebook="07_pareto",
)

# %% [markdown]
# ## The curve at batch 1
#
# All mechanisms of the series on Hugging Face's own kernels, and two answers of the planner (`budget:0.2` may keep a
# fifth of what `none` keeps).
#
# **Predict:** which mechanism will be dominated by another on both axes: the switch, the sub-blocks, or the operators?

# %%
curve = gt.Results(cost(workload, policy) for policy in MECHANISMS)
on_curve = [row.policy for row in plots.frontier(curve)]
ax = plots.plot_pareto(curve)
caption = f"On the frontier at batch 1: {', '.join(on_curve)}; the other {len(curve) - len(on_curve)} are beaten."
_ = plots.save_figure(ax.figure, "07_pareto_batch_1", alt=caption, caption=caption)

# %%
Markdown(f"*{caption}* ({plots.subtitle(curve)}.)")

# %%
budgets = [policy for policy in MECHANISMS if policy.startswith("budget")]
gt.check(set(budgets) <= set(on_curve), f"nothing beats the planner's {' and '.join(budgets)}")
gt.check("sub:mlp" not in on_curve, "replaying the MLP is beaten: something keeps less and is faster")

# %% [markdown]
# ## Which kernels is a choice like which policy
#
# Notebook 6 took Liger apart. Here its parts meet the policies: norms, RoPE and SwiGLU with its own fused loss
# (`liger`), and the same three with torch's loss in chunks.
#
# **Predict:** can `block` with better kernels be faster than keeping everything with Hugging Face's?

# %%
crossed = gt.Results(cost(workload.replace(kernels=kernels), policy) for kernels in KERNELS for policy in guide.LADDER)
with_block = min((row for row in crossed if row.policy == "block"), key=lambda row: row.step_s)
ax = plots.plot_pareto(
    crossed,
    title=f"block on better kernels: {1e3 * with_block.step_s:.0f} ms; "
    f"none on Hugging Face's: {1e3 * none.step_s:.0f} ms",
)
best_row = min(crossed, key=lambda row: row.step_s)
least_row = min(crossed, key=lambda row: row.activation_bytes)
caption = (
    f"Fastest is {best_row.policy} with {best_row.workload.kernels}, {1e3 * best_row.step_s:.0f} ms; least memory has "
    f"{least_row.policy} with {least_row.workload.kernels}, {least_row.activation_bytes / 1e9:.1f} GB."
)
_ = plots.save_figure(ax.figure, "07_pareto_kernels", alt=caption, caption=caption)

# %%
Markdown(f"*{caption}* ({plots.subtitle(crossed)}.)")

# %% [markdown]
# Now put the article's headline to the planner.

# %%
share = 1 - find_claim("P05").value["saved_share"]
display(
    Markdown(
        f"The headline is {1 - share:.0%} less memory *and* a faster step. So: which is the fastest policy, over all "
        f"{len(KERNELS)} kernels, that keeps at most {share:.0%} of what plain `none` keeps? And how far down the "
        f"curve is a step still as fast as plain `none`?"
    )
)
headline = gt.plan(workload, DEVICE, budget=share, kernels=KERNELS)
tuned = headline.workload
same_kernels = gt.estimate(tuned, "none", DEVICE)
plain = gt.estimate(workload, "none", DEVICE)
as_fast = [choice for choice in gt.frontier(tuned, DEVICE) if same_kernels.step_s + choice.recompute_s <= plain.step_s]
leanest = min(choice.activation_bytes for choice in as_fast)
Markdown(
    f"With **{tuned.kernels}**, `{headline.policy}` keeps {headline.cost.activation_bytes / 1e9:.1f} GB, "
    f"{1 - headline.cost.activation_bytes / plain.activation_bytes:.0%} less than plain `none`, and a step takes "
    f"{headline.cost.step_s / plain.step_s:.2f} times as long. Down the same curve the step is no slower than plain "
    f"`none` until {1 - leanest / plain.activation_bytes:.0%} less. The honest comparison is with `none` on the *same* "
    f"kernels: {headline.cost.step_s / same_kernels.step_s - 1:+.1%} time for "
    f"{1 - headline.cost.activation_bytes / same_kernels.activation_bytes:.0%} less memory. "
    f"(Estimated for {device.name}.)"
)

# %%
gt.check(
    headline.cost.activation_bytes <= share * plain.activation_bytes,
    f"{headline.cost.activation_bytes / 1e9:.1f} GB are at least {1 - share:.0%} less than "
    f"{plain.activation_bytes / 1e9:.1f}",
)
gt.check(
    headline.cost.step_s < plain.step_s,
    f"and the step is faster: {1e3 * headline.cost.step_s:.0f} against {1e3 * plain.step_s:.0f} ms",
)

# %% [markdown]
# ## Batch 4
#
# Now the peak of the whole step on the x axis, with the card's limit.
#
# **Predict:** how many of these fit at batch 4?

# %%
large = workload.replace(batch=4)
at_four = gt.Results(
    [*(ours(claim_id, 4) for claim_id in CONFIGURATIONS)]
    + [cost(large.replace(kernels=guide.KERNELS), policy) for policy in guide.LADDER]
)
fitting = [f"{row.policy} with {row.workload.kernels}" for row in at_four if row.ok]
ax = plots.plot_pareto(
    at_four,
    x="peak_bytes",
    limit_bytes=device.usable_bytes,
    limit_label=device.name,
    title=f"At batch 4 only {len(fitting)} of these {len(at_four)} fit on {device.name}",
)
caption = f"At batch 4, {len(fitting)} of {len(at_four)} fit {device.name}: {'; '.join(fitting)}."
_ = plots.save_figure(ax.figure, "07_pareto_batch_4", alt=caption, caption=caption)

# %%
Markdown(f"*{caption}* ({plots.subtitle(at_four)}; weights and gradients included; no optimizer, and no reserve.)")

# %%
four_times = cost(large, "block").activation_bytes / block.activation_bytes
gt.check_close(four_times, 4, rel=0.01, what="activations at batch 4 over those at batch 1")

# %% [markdown]
# ## Does the choice change with the length?
#
# Every policy again at batch 1, at lengths from a page to a book. (All are estimated; with warm caches it takes a
# second, the first time half a minute.)
#
# **Predict:** the *share* of bytes that a policy keeps is the same at every length. What about the share of time that
# it adds: does it grow or shrink for `block`, and for `modules:all`?


# %%
def added_time(row):
    """Time over `none` at the same length; in brackets where the step does not fit the card."""
    share = row.step_s / without[row.workload.seqlen].step_s - 1
    return f"{share:.1%}" if row.ok else f"({share:.1%})"


with explorers.progress_bar(len(SWEEP_POLICIES) * len(SWEEP_SEQLENS)) as progress:
    lengths = [workload.replace(seqlen=seqlen) for seqlen in SWEEP_SEQLENS]
    swept = gt.sweep(lengths, SWEEP_POLICIES, device, progress=progress)
without = {row.workload.seqlen: row for row in swept.where(policy="none")}
frame = pd.DataFrame({"policy": row.policy, "tokens": row.workload.seqlen, "added": added_time(row)} for row in swept)
display(Markdown(f"Time added to `none`, estimated for {device.name}; in brackets: the step does not fit that card."))
frame.pivot(index="policy", columns="tokens", values="added").loc[SWEEP_POLICIES]


# %%
def added(policy, seqlen):
    (row,) = swept.where(lambda row: row.policy == policy and row.workload.seqlen == seqlen)
    return row.step_s / without[seqlen].step_s - 1


shortest, longest_swept = min(SWEEP_SEQLENS), max(SWEEP_SEQLENS)
kept_shares = {
    row.activation_bytes / without[row.workload.seqlen].activation_bytes for row in swept.where(policy="block")
}
gt.check(
    max(kept_shares) - min(kept_shares) < 0.01, "the share of bytes that block keeps does not depend on the length"
)
gt.check(
    added("modules:all", longest_swept) < added("modules:all", shortest),
    f"modules:all adds {added('modules:all', shortest):.1%} at {shortest:,} tokens and "
    f"{added('modules:all', longest_swept):.1%} at {longest_swept:,}; block {added('block', shortest):.1%} and "
    f"{added('block', longest_swept):.1%}",
)

# %% [markdown]
# `block` replays the whole forward, so its share of the step stays what it was. But attention's work grows with the
# *square* of the length and what it keeps only in proportion. So the longer the sequence, the better the bargain of
# keeping attention: whatever keeps it (`modules:core_attn`, `modules:all`) adds less and less, and whatever replays it
# (`ops:mm`, `sub:attn`) more and more.
#
# ## The same curve on your machine
#
# Real steps: the full model on a GPU, `nano` on a CPU. Bytes are predicted first.

# %%
kind = default_device()
here = gt.Workload(**HERE[kind])
measured = gt.measure(here, ["none", "modules:all", "block"], rounds=ROUNDS, steps=STEPS, seed=SEED)
compared = comparison.pairs(measured)
display(Markdown(plots.subtitle(measured)))
comparison.errors(compared).set_index("policy")[
    ["activation_bytes_estimated", "activation_bytes_measured", "peak_bytes_estimated", "peak_bytes_measured"]
]

# %%
ax = plots.plot_pareto(measured)
by_bytes = sorted((row for row in measured if row.ok), key=lambda row: row.activation_bytes)
caption = f"Measured here on {here.name}: {by_bytes[0].policy} keeps least, {by_bytes[-1].policy} most."
_ = plots.save_figure(ax.figure, "07_pareto_here", alt=caption, caption=caption)

# %%
for guess, row in compared:
    gt.check_close(
        row.activation_bytes,
        guess.activation_bytes,
        rel=BYTES_TOLERANCE[kind],
        what=f"{row.policy}, activation bytes measured against predicted",
    )

# %% [markdown]
# Bytes agree; the times of one short run on a CPU are noisy, and its bars say how much. For a careful run with every
# row recorded there is `gctutor campaign`.
#
# ## What freed memory buys
#
# Two things: a bigger batch, or a longer context. From here on the whole training step counts: weights, gradients,
# activations, the state of 8-bit AdamW (the usual optimizer, with its two averages a parameter kept in a byte each),
# and a reserve for what no trace sees: the CUDA context, and what the allocator rounds up or cannot use.
#
# How large a batch? No search is needed. With flash attention and no mask, the size of every tensor is a straight line
# in the batch (and in the length), and the same operators run in the same order. So two traces give the live bytes of
# *every* moment of a step at any size, and the peak is the largest of them.


# %%
def live_bytes(workload, policy):
    """The live bytes at every operator of a step, weights included."""
    return sum(gt.timeline(workload, policy, device).live.values())


def peak_at(size, sizes, lives):
    """The peak at another size, from the live bytes at two."""
    slope = (lives[1] - lives[0]) / (sizes[1] - sizes[0])
    return (lives[0] + slope * (size - sizes[0])).max()


def largest(sizes, lives, limit, step, most):
    """The largest multiple of `step` whose peak is within `limit`, at most `most`; 0 when there is none."""
    fits = [size for size in range(step, most + 1, step) if peak_at(size, sizes, lives) <= limit]
    return max(fits, default=0)


TWO_BATCHES = (2, 4)  # at batch 1 some copies become views, so that the operators differ
training = workload.replace(optimizer="adamw8bit")
OPTIONS = [("none", "hf"), ("block", "hf"), *((policy, guide.KERNELS) for policy in guide.LADDER)]
limit = device.usable_bytes - RESERVE_BYTES
print(f"The reserve is {RESERVE_BYTES / 1e9:.0f} GB.")


@functools.cache
def lives(policy, kernels, trainable, field, sizes):
    base = training.replace(kernels=kernels, trainable=trainable)
    return [live_bytes(base.replace(**{field: size}), policy) for size in sizes]


def throughput(policy, kernels):
    batch = largest(TWO_BATCHES, lives(policy, kernels, "full", "batch", TWO_BATCHES), limit, step=1, most=64)
    row = gt.estimate(training.replace(kernels=kernels, batch=batch), policy, DEVICE)
    return {
        "policy": policy,
        "kernels": kernels,
        "largest batch": batch,
        "peak (GB)": round(row.peak_bytes / 1e9, 1),
        "tokens/s": round(row.tokens_per_s),
    }


# %% [markdown]
# **Predict:** `block` frees the most and so has the largest batch. Does it also get the most tokens through?

# %%
bought = pd.DataFrame([throughput(*option) for option in OPTIONS])
display(Markdown(f"All of {training.name} trained at {SEQLEN:,} tokens, estimated for {device.name}:"))
bought

# %%
fastest, widest = (bought.loc[bought[column].idxmax()] for column in ("tokens/s", "largest batch"))
gt.check(bought["peak (GB)"].max() <= limit / 1e9, "each of these batches fits by its own estimate")
Markdown(
    f"Most tokens go through with **{fastest.policy}** ({fastest.kernels}) at batch {fastest['largest batch']}; "
    f"**{widest.policy}** reaches batch {widest['largest batch']} and {widest['tokens/s'] / fastest['tokens/s']:.0%} "
    f"of that speed. At {SEQLEN:,} tokens one sequence already fills the GPU, so a bigger batch buys hardly any "
    f"speed, and it must pay for its own recompute. Freed memory is worth most where it makes something *possible*: a "
    f"longer context."
)

# %% [markdown]
# ## The longest sequence, on four sizes of card
#
# The same two-trace argument, with the length in place of the batch, for full training and for **LoRA** (the weights
# are frozen, and only small low-rank matrices beside them are trained: `lora:16` has rank 16). The model's own limit
# is `max_position_embeddings`.
#
# **Predict:** on 80 GB with LoRA, by what factor does `block` lengthen the sequence that plain `none` takes?

# %%
LENGTHS = (4096, 16384)
LONGEST = workload.config().max_position_embeddings


def longest(policy, kernels, trainable, card):
    bytes_for_step = gt.find_device(card).usable_bytes - RESERVE_BYTES
    at_lengths = lives(policy, kernels, trainable, "seqlen", LENGTHS)
    return largest(LENGTHS, at_lengths, bytes_for_step, step=256, most=LONGEST)


reach = pd.DataFrame(
    {
        (trainable, policy, kernels): {
            size: longest(policy, kernels, trainable, card) for size, card in FOUR_SIZES.items()
        }
        for trainable in ("lora:16", "full")
        for policy, kernels in OPTIONS
    }
).T
display(Markdown(f"Longest sequence in tokens, batch 1, at most {LONGEST:,}; 0: not even 256. Cards: {FOUR_SIZES}"))
reach

# %% [markdown]
# Is the shortcut right? One entry, by tracing it and the next longer one:

# %%
card = gt.find_device(FOUR_SIZES["80 GB"])
tokens = int(reach["80 GB"]["lora:16", "none", "hf"])
stepped = [
    guide.peak_bytes(training.replace(trainable="lora:16", seqlen=length), "none") + RESERVE_BYTES
    for length in (tokens, tokens + 256)
]
gt.check(
    stepped[0] <= card.usable_bytes < stepped[1],
    f"{tokens:,} tokens take {stepped[0] / 1e9:.2f} GB with the reserve, {tokens + 256:,} take {stepped[1] / 1e9:.2f}; "
    f"{card.name} has {card.usable_bytes / 1e9:.2f}",
)

# %% [markdown]
# ## A decision, as a function
#
# With exact peaks the decision is short: keep everything if it fits; else keep the dear parts (`modules:all`: matrix
# products and attention); else `block`. `guide.advise` walks down these three rungs, on the best kernels:

# %%
advice = guide.advise("L40S", batch=1, seqlen=8192, trainable="lora:16")
print(advice.policy, "on", advice.workload.label)
print(advice.reason)
for note in advice.notes:
    print("Note:", note)

# %% [markdown]
# Now for ten cards, with LoRA and in full. A dash: not even `block` fits, and it takes another card, FSDP
# (notebook 10) or a smaller step.

# %%
answers = {
    (trainable, batch, seqlen, card): guide.advise(card, batch, seqlen, trainable)
    for trainable in ("lora:16", "full")
    for batch in GUIDE_BATCHES
    for seqlen in GUIDE_SEQLENS
    for card in CARDS
}
decisions = pd.Series({key: answer.policy or "–" for key, answer in answers.items()}).unstack()[CARDS]
decisions.rename_axis(["trainable", "batch", "tokens"])

# %%
recommended = [answer for answer in answers.values() if answer.policy]
tightest = {}
for answer in sorted(recommended, key=lambda a: -a.device.usable_bytes):
    tightest[answer.workload, answer.policy] = answer  # the smallest card stays
gt.check(
    all(answer.cost.peak_bytes + RESERVE_BYTES <= answer.device.usable_bytes for answer in tightest.values()),
    f"all {len(recommended)} recommendations fit by their own estimate, the reserve included",
)
rank = {policy: place for place, policy in enumerate([*guide.LADDER, None])}
by_memory = sorted(CARDS, key=lambda name: gt.find_device(name).usable_bytes)
ranks = pd.Series({key: rank[answer.policy] for key, answer in answers.items()}).unstack()[by_memory]
never_more = (ranks.diff(axis=1).iloc[:, 1:] <= 0).all(axis=None)
gt.check(never_more, "a card with more memory never has to recompute more")

# %% [markdown]
# ## Against the article's rule of thumb
#
# The article decides without estimates: with a fifth of the memory free, no recompute; for twice the sequence,
# selective recompute with Liger; if nothing else fits, `block`. We let the rule decide all the cells above, and ask
# what it costs.


# %%
def rule_of_thumb(answer):
    """The article's choice: `none` only where a fifth of the card stays free."""
    if answer.peaks["none"] <= 0.8 * answer.device.usable_bytes:
        return "none"
    limit = answer.device.usable_bytes - RESERVE_BYTES
    fits = [p for p in guide.LADDER[1:] if guide.peak_bytes(answer.workload, p, answer.device.kind) <= limit]
    return fits[0] if fits else None


thumbs = {key: rule_of_thumb(answer) for key, answer in answers.items()}
other = {key: answer for key, answer in answers.items() if answer.policy != thumbs[key]}
lost = [
    gt.estimate(answer.workload, thumbs[key], answer.device).step_s / answer.cost.step_s - 1
    for key, answer in other.items()
]
on_80 = reach["80 GB"]["lora:16"]
doubled = on_80["modules:all", guide.KERNELS] / on_80["none", "hf"]
kernels_alone = on_80["none", guide.KERNELS] / on_80["none", "hf"]
gt.judge(
    "P06",
    holds=doubled >= 2,
    when=f"up to {max(lost):.0%} of time does not matter" if lost else None,
    because=f"The rule decides {len(answers) - len(other)} of {len(answers)} cells as the estimates do; in the other "
    f"{len(other)} it recomputes where everything fits, for {max(lost, default=0):.0%} more time at worst. On 80 GB "
    f"with LoRA, selective with Liger takes {doubled:.1f} × the sequence of plain `none` ({kernels_alone:.1f} × by the "
    f"kernels alone)",
    device="10 cards",
)

# %% [markdown]
# ## Try it
#
# With a front end these are sliders; here they are drawn for a few cases. First the curve by batch, length and card:

# %%
POLICIES = ["none", "sub:mlp", "modules:all", "block"]
explorers.explore(
    functools.partial(explorers.draw_costs, POLICIES),
    {"batch": [1, 2, 4, 8], "seqlen": [2048, 4096, 8192, 16384], "device": CARDS},
    static=[{"batch": 1, "seqlen": SEQLEN, "device": DEVICE}, {"batch": 4, "seqlen": SEQLEN, "device": "B200"}],
)

# %% [markdown]
# And the planner by budget, the share of `none`'s activation bytes that it may keep:

# %%
explorers.explore(
    explorers.draw_plan,
    {"budget": [0.12, 0.2, 0.3, 0.36, 0.5, 0.7, 0.9], "device": CARDS},
    static=[{"budget": 0.2, "device": DEVICE}, {"budget": 0.5, "device": DEVICE}],
)

# %% [markdown]
# ## For your own GPU
#
# Set `MY_GPU`, `MY_BATCH`, `MY_SEQLEN` and `MY_TRAINABLE` in the parameters cell and run the page again. The guide
# gives the rung; the planner then fills the gap between two rungs, layer by layer and call site by call site.

# %%
mine = guide.advise(MY_GPU, MY_BATCH, MY_SEQLEN, MY_TRAINABLE)
planned = mine.plan()
print(f"{mine.workload.label}, estimated for {mine.device.name}")
print(f"guide:   {mine.policy or 'nothing fits'}. {mine.reason}")
if planned.fits:
    print(f"planner: {planned.policy}")
    print(f"         {planned.cost.peak_bytes / 1e9:.1f} GB at the peak, {1e3 * planned.cost.step_s:.0f} ms a step")
else:
    print("planner:", *planned.advice)

# %%
lines = gt.lines_to_paste(planned.policy) if planned.fits else {}
for framework, text in lines.items():
    display(Markdown(f"**{framework}**\n```\n{text}\n```"))
gt.check(
    not mine.policy or planned.cost.step_s <= mine.cost.step_s, "the planner is never slower than the guide's rung"
)

# %% [markdown]
# ### Exercise 1: the smallest card (5 minutes)
#
# You want to train LoRA on 2 sequences of 8,192 tokens. Which is the smallest of the ten cards that can?

# %% tags=["exercise"]
answer = None  # a card's name


def check_exercise_1(answer):
    gt.check(answer is not None, "there is an answer")
    given = guide.advise(answer, 2, 8192, "lora:16")
    gt.check(given.policy is not None, f"{given.device.name} can, with {given.policy}")
    smaller = [name for name in CARDS if gt.find_device(name).usable_bytes < given.device.usable_bytes]
    able = [name for name in smaller if guide.advise(name, 2, 8192, "lora:16").policy]
    gt.check(not able, f"and none of the {len(smaller)} smaller ones can")


print("Exercise 1 is yours to do: set `answer`, then run check_exercise_1(answer).")

# %% tags=["solution", "hide-input"] jupyter={"source_hidden": true}
answer = next(name for name in by_memory if guide.advise(name, 2, 8192, "lora:16").policy)
check_exercise_1(answer)

# %% [markdown]
# ### Exercise 2: what the claimed time is enough for (5 minutes)
#
# At a realistic MFU of 40 %, how many sequences of `SEQLEN` tokens can an H100 train in the time that the article gives
# for a step without recompute, `claimed_s["P01"]`? Give the number as a
# fraction, without estimating anything new. (Hint: `utilisation("P01", 1, claimed_s["P01"])` is the exact MFU of one
# sequence in that time.)

# %% tags=["exercise"]
answer = None  # sequences


def check_exercise_2(answer):
    gt.check(answer is not None, "there is an answer")
    work = answer * gt.estimate(workload, "none", DEVICE).model_flop
    reached = work / (claimed_s["P01"] * device.bf16_flop_per_s)
    gt.check_close(reached, 0.4, rel=0.01, what="the MFU at that many sequences")


print("Exercise 2 is yours to do: set `answer`, then run check_exercise_2(answer).")

# %% tags=["solution", "hide-input"] jupyter={"source_hidden": true}
# MFU is proportional to the work: scale the one of a single sequence.
answer = 0.4 / utilisation("P01", 1, claimed_s["P01"])
check_exercise_2(answer)

# %% [markdown]
# ## In three lines
#
# - Divide FLOPs by time before you believe a figure, and add up bytes before you believe another.
# - First the kernels, most of which save both memory and time; then as little recompute as the card allows, chosen by
#   the planner.
# - Freed memory seldom buys speed. It buys length, and models that would not fit.
#
# ## Further reading
#
# - A. Chowdhery et al., [PaLM](https://arxiv.org/abs/2204.02311), 2022, appendix B: MFU defined.
# - V. Korthikanti et al., [Reducing Activation Recomputation in Large Transformer
#   Models](https://arxiv.org/abs/2205.05198), 2022: MFU against hardware utilisation under recompute.
# - P. Jain et al., [Checkmate](https://arxiv.org/abs/1910.02653), 2020: the best recompute plan as an integer
#   programme.
# - PyTorch, [Activation checkpointing techniques](https://pytorch.org/blog/activation-checkpointing-techniques/).
#
# **Next:** [8. Reproduce, recognise and avoid the random-number and reentrant
# traps](08_pitfalls_rng_reentrant.ipynb)

# %%
print(gt.colophon(SEED))

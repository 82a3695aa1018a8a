# %% [markdown]
# # 6. Combine flash attention and Liger with selective checkpointing
#
# You will look for the recomputation that is already inside fast kernels, switch Liger's kernels on one at a time, take
# the loss apart, and let the planner choose kernels and policy together.
#
# **Afterwards you can**
# - say what flash attention recomputes by itself, and why its output is still worth keeping;
# - predict what each of Liger's kernels frees and saves;
# - find the memory of the loss at any batch, and choose among four ways to compute it;
# - tell from which memory limit on checkpointing pays once the kernels are right.
#
# **Before you start:** [notebook 5](05_selective_by_module.ipynb): keeping chosen modules, and the planner's budget.
#
# **Time:** 40 minutes of reading. The cells run in under a minute on a two-core laptop, in about three on a GPU.
# **Memory:** 3 GB of RAM; with a GPU the last part measures the full Qwen3-8B and wants 80 GB of GPU memory.

# %% tags=["parameters"]
MODEL = "Qwen3-8B"
BATCH = 1
LARGE_BATCH = 4
SEQLEN = 4096
DEVICE = "H100"
BUDGET = 0.36
CHUNK_TOKENS = [128, 256, 512, 1024, 4096]
LONGER = [8192, 16384]
HERE = {
    "cpu": {"model": "nano", "batch": 1, "seqlen": 128, "precision": "fp32"},
    "cuda": {"model": "Qwen3-8B", "batch": 1, "seqlen": 4096, "precision": "bf16"},
}
KERNELS_HERE = {
    "cpu": ["hf", "hf+chunked:64"],
    "cuda": ["hf", "liger", "liger:rms_norm,rope,swiglu", "liger:rms_norm,rope,swiglu+chunked"],
}
BYTES_TOLERANCE = {"cpu": 0.0, "cuda": 0.02}
ROUNDS = 1
STEPS = 1
SEED = 0

# %%
import itertools
import math
import tempfile
from collections import Counter

import pandas as pd
from IPython.display import Markdown, display
from transformers import LlamaConfig

import gctutor as gt
from gctutor import plots
from gctutor.claims import find_claim, run_folder
from gctutor.gradients import gradients_of
from gctutor.measurement import default_device
from gctutor.optimum import layer_costs
from gctutor.planner import RESERVE_BYTES
from gctutor.simulation import seconds_of
from gctutor.steptrace import MOVING
from gctutor.workload import build, inputs

pd.set_option("display.max_colwidth", None)
workload = gt.Workload(MODEL, batch=BATCH, seqlen=SEQLEN)
config, device = workload.config(), gt.find_device(DEVICE)

# %% [markdown]
# ## Flash attention is a checkpoint of its own
#
# Plain attention multiplies queries by keys, takes a softmax and multiplies by the values. Between the two products
# stands a matrix of T × T numbers for every head, and backward needs it. *Flash attention* works in tiles that never
# leave the chip: it keeps its inputs, its output, and one number a row, the logarithm of the softmax's denominator
# (*logsumexp*). In backward it multiplies queries by keys **once more** to get the matrix back.
#
# **Predict:** how many GB does a layer's attention keep with the plain kernel (`eager`), and how many with flash?

# %% tags=["exact"]
two_layers = workload.replace(model=f"{MODEL}@2")  # the model cut to 2 layers: a layer's bytes stay the same


def attention_bytes(attention, mask="none"):
    """What one layer keeps for attention itself: queries, keys, values, result, statistics; not the q and k norms."""
    kept = gt.trace(two_layers.replace(attention=attention, mask=mask), "none").kept
    own = {key: size for key, size in kept.items() if not key[1].endswith("_norm")}
    return sum(size for (layer, site), size in own.items() if layer == 1 and site.startswith("self_attn"))


heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
square = heads * BATCH * SEQLEN**2
logsumexp_bytes = heads * BATCH * SEQLEN * 4
eager_bytes, flash_bytes = attention_bytes("eager"), attention_bytes("sdpa")
Markdown(
    f"Plain attention: {eager_bytes / 1e9:.2f} GB a layer, of which {6 * square / 1e9:.2f} GB are the T × T matrix "
    f"(the softmax in fp32, and a bf16 copy). Flash: {flash_bytes / 1e9:.2f} GB, and in the place of the "
    f"matrix a logsumexp of {logsumexp_bytes / 1e6:.1f} MB. (Exact, traced on fake tensors.)"
)

# %% [markdown]
# The price is one product more in backward. A matrix product has two products in its backward, so plain attention's
# backward is 2 forwards. Flash's is 2.5: five products against two. We count the work of one layer.

# %% tags=["exact"]
step = gt.trace(two_layers, "none")
attention_flop = Counter()
for segment in step.segments:
    for kernel in segment.kernels:
        if kernel.work.kind == "attention":
            attention_flop[kernel.phase] += kernel.work.flop
inner = attention_flop["backward"] / attention_flop["forward"] - 2
gt.check(inner == 0.5, f"flash's backward contains {inner:g} of a forward of recomputation, whatever the policy")
gt.check(
    eager_bytes - flash_bytes > 6 * square,
    f"for which each layer frees {(eager_bytes - flash_bytes) / 1e9:.2f} GB: more than the T × T matrix itself",
)

# %% [markdown]
# Does checkpointing the block make it worse, "recomputed twice"? The block's replay calls attention's *forward*
# again, to get its output and logsumexp. We count the calls.

# %% tags=["exact"]
block = gt.trace(two_layers, "block")
calls = Counter(kernel.phase for s in block.segments for kernel in s.kernels if kernel.name in block.attention_kernels)
per_layer = {phase: count / two_layers.n_layers for phase, count in calls.items()}
gt.judge(
    "H03",
    value=per_layer["recompute"],
    tolerance=0.0,
    because=f"Under the switch the kernel's forward runs {per_layer['forward']:.0f} + {per_layer['recompute']:.0f} "
    f"times a layer: one recompute. The half forward inside flash's backward is there without any checkpoint, too",
    device=device.name,
)
kept = gt.trace(two_layers, "modules:core_attn")
replayed = [k for s in kept.segments for k in s.kernels if k.work.kind == "attention" and k.phase == "recompute"]
gt.check(not replayed, "with core_attn kept the forward is not run again")

# %% [markdown]
# So keeping attention's output (a query-sized tensor and the logsumexp) buys one forward of the kernel. Is that a
# better buy than a linear layer's output? It depends on the length: the work grows with T², the bytes with T.

# %%
exchange = {}
for seqlen in (SEQLEN // 4, SEQLEN):
    costs = layer_costs(workload.replace(seqlen=seqlen), device)
    exchange[seqlen] = {site.name: site.seconds_per_gb * 1e3 for site in costs.sites}
pd.DataFrame(exchange).T[["core_attn", "q_proj", "gate_proj"]].round(1).rename_axis(
    f"tokens · ms of recompute saved for a GB kept, estimated for {device.name}"
)

# %%
now = exchange[SEQLEN]
crossing = SEQLEN * now["q_proj"] / now["core_attn"]  # attention's rate is proportional to T, the product's is constant
gt.check(now["core_attn"] > 3.9 * exchange[SEQLEN // 4]["core_attn"], "attention's rate grows in proportion to T")
gt.judge(
    "F01",
    holds=now["core_attn"] > now["q_proj"],
    when=f"the sequence is longer than about {round(crossing, -2):,.0f} tokens; below, a linear layer's output is the "
    f"better buy",
    because=f"At {SEQLEN} tokens a GB of attention output saves {now['core_attn']:.1f} ms, one of q_proj's "
    f"{now['q_proj']:.1f} ms; the half forward inside the backward is not changed by it",
    device=device.name,
)

# %% [markdown]
# ### Grouped heads, and what a mask costs

# %%
Markdown(
    f"{workload.name} has {heads} query heads, but only {kv_heads} for keys and values (*grouped-query attention*, "
    f"GQA). A flash kernel reads the {kv_heads} as they are."
)

# %% [markdown]
# With a mask tensor, PyTorch's `sdpa` has to take another kernel, for which Hugging Face **repeats**
# keys and values for each group. Padding makes a mask, and so do several documents packed into a row. The
# `flash_attention_N` implementations take the documents' lengths instead and never see a T × T mask. (In the estimate
# torch's flash operator stands in for them.)

# %% tags=["exact"]
rows = []
for attention, mask in [("sdpa", "none"), ("sdpa", "padding"), ("sdpa", "packed"), ("flash_attention_2", "packed")]:
    masked = gt.trace(two_layers.replace(attention=attention, mask=mask), "none")
    rows.append(
        {
            "attention": attention,
            "mask": mask,
            "kernel traced": ", ".join(masked.attention_kernels).strip("_"),
            "kept a layer (MB)": round(attention_bytes(attention, mask) / 1e6, 1),
        }
    )
pd.DataFrame(rows).set_index(["attention", "mask"])

# %% tags=["exact"]
repeated = 2 * (heads - kv_heads) * config.head_dim * BATCH * SEQLEN * 2
mask_bytes = BATCH * SEQLEN**2 * 2
more = attention_bytes("sdpa", "padding") - attention_bytes("sdpa")
gt.check_close(
    more, repeated + mask_bytes, rel=1e-6, what="a mask's bytes a layer: repeated keys and values, and itself"
)
Markdown(
    f"A mask costs {more / 1e6:.0f} MB a layer: {repeated / 1e6:.0f} MB of repeated keys and values, and "
    f"{mask_bytes / 1e6:.0f} MB of the mask itself, turned into numbers anew in each layer. The T × T matrix is back, "
    f"once instead of once a head."
)

# %% [markdown]
# Which implementations can run on this machine?

# %%
pd.DataFrame([{"attention": a.name, "runs here": a.available, "why": a.reason} for a in gt.availability()]).set_index(
    "attention"
)

# %% [markdown]
# ## Liger's kernels, one at a time
#
# [Liger](https://github.com/linkedin/Liger-Kernel) replaces parts of a Hugging Face model by kernels written in Triton.
# Each does in one go what PyTorch does in several, and keeps less:
#
# - **RMSNorm** keeps its bf16 input and one number a row; PyTorch's version keeps an fp32 copy and the normalised rows;
# - **RoPE** (the rotary position embedding) rotates queries and keys in place;
# - **SwiGLU** keeps gate and up, and computes the activation between them again in backward: a checkpoint of its own;
# - the **fused linear cross entropy** computes logits and loss together, a few rows at a time.
#
# In the estimates below it is Liger's own code that runs, on tensors without memory, so every buffer is counted.
#
# **Predict:** which part frees most? Which saves most time?

# %%
PARTS = {"rms_norm": "RMSNorm", "rope": "RoPE", "swiglu": "SwiGLU", "fused_linear_cross_entropy": "fused loss"}
none = gt.estimate(workload, "none", DEVICE)
alone = {part: gt.estimate(workload.replace(kernels=f"liger:{part}"), "none", DEVICE) for part in PARTS}
liger = gt.estimate(workload.replace(kernels="liger"), "none", DEVICE)


def against_none(row):
    return {
        "frees (GB)": (none.activation_bytes - row.activation_bytes) / 1e9,
        "lowers the peak (GB)": (none.peak_bytes - row.peak_bytes) / 1e9,
        "saves (ms)": 1e3 * (none.step_s - row.step_s),
    }


brings = pd.DataFrame({PARTS[part]: against_none(row) for part, row in alone.items()} | {"all": against_none(liger)}).T
brings.round(2).rename_axis(f"estimated for {device.name}")

# %%
gt.check(
    none.activation_bytes - liger.activation_bytes
    == sum(none.activation_bytes - row.activation_bytes for row in alone.values()),
    f"what the parts free adds up to the byte: {none.activation_bytes:,} → {liger.activation_bytes:,}",
)
gt.check(brings["frees (GB)"].drop("all").idxmax() == "RMSNorm", "the norms free most")
gt.check(abs(brings["frees (GB)"]["RoPE"]) < 0.001, "RoPE frees nothing: it saves time only")
gt.check(
    brings["saves (ms)"]["fused loss"] < 0 < brings["saves (ms)"].drop(["fused loss", "all"]).min(),
    f"and the fused loss costs {-brings['saves (ms)']['fused loss']:.0f} ms, by this roofline, where the others save",
)

# %% [markdown]
# That the fused loss costs time is worth a chapter, below. First, what one layer keeps before and after, call site by
# call site:

# %% tags=["exact"]
LAYER_KERNELS = "liger:rms_norm,rope,swiglu"
three_layers = workload.replace(model=f"{MODEL}@3")  # we look at the middle one: behind the last comes the final norm
per_site = {
    kernels: {
        site or "(residual stream)": size
        for (layer, site), size in gt.trace(three_layers.replace(kernels=kernels), "none").kept.items()
        if layer == 1
    }
    for kernels in ("hf", LAYER_KERNELS)
}
sites = pd.DataFrame(per_site).fillna(0).sort_values("hf", ascending=False)
in_mb = pd.concat([sites, sites.sum().to_frame("total").T]) / 1e6
in_mb.round(1).rename_axis("call site (MB a layer)")

# %% tags=["exact"]
new = sites[LAYER_KERNELS][sites["hf"] == 0]
inputs_of_norms = 2 * workload.tokens * (2 * config.hidden_size + (heads + kv_heads) * config.head_dim)
gt.check(new.sum() == inputs_of_norms, f"new under Liger: {', '.join(new.index)}, the bf16 inputs of the four norms")

# %% [markdown]
# Liger's norms keep these inputs in the place of Hugging Face's fp32 copies, which are twice as large.
#
# What Liger's SwiGLU computes again in backward, a policy need not keep. Keeping *modules* gets this right without
# being told: gate and up are results of linear layers, and are kept; what SwiGLU makes of them is no module's result,
# so its small kernel runs once more in the replay. No matrix product does:

# %% tags=["exact"]
both = gt.trace(two_layers.replace(kernels=LAYER_KERNELS), "modules:all")
gt.check(both.flop("recompute") == 0, "modules:all under Liger recomputes no matrix product")
gt.check(not any(isinstance(layer, int) for layer, _ in both.unused), "and keeps nothing that backward does not read")

# %% [markdown]
# One combination is dangerous. Liger's RoPE overwrites what it is given. Qwen3 gives it the output of its q and k
# norms, which no policy keeps. **Llama has no such norms**: there it overwrites the outputs of `q_proj` and `k_proj`.
# A policy that keeps those would rotate them twice, with the same loss, wrong gradients and no error. Such a policy
# is refused:

# %%
with tempfile.TemporaryDirectory() as folder:
    LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4).save_pretrained(
        folder
    )
    llama = gt.Workload(folder, seqlen=64, kernels="liger:rope")
    refused = gt.estimate(llama, "modules:all", DEVICE)
    allowed = gt.estimate(llama, "modules:v_proj,core_attn,o_proj,gate_proj,up_proj", DEVICE)
gt.check(refused.status == "refused" and "overwrites in place" in refused.error, refused.error)
gt.check(allowed.ok, "without q_proj and k_proj it is fine")

# %% [markdown]
# ## The loss
#
# `lm_head` turns every hidden vector into logits, one for each entry of the vocabulary. Hugging Face computes all of
# them in bf16, copies them to fp32, and hands them to the cross entropy.
#
# Notebook 2 gave the GB at the peak. **Predict:** at batch 4, which operator makes the worst moment?

# %% tags=["exact"]
large = workload.replace(batch=LARGE_BATCH)
loss_step = gt.trace(large, "none")


def of_the_loss(sizes):
    """The bytes that belong to the loss, kept or temporary."""
    return sum(size for category, size in zip(MOVING, sizes, strict=True) if category in ("loss", "temporary"))


live, moments = 0, []
for segment in loss_step.segments:
    for kernel in segment.kernels:
        if segment.layer == "head" and kernel.site != "model.norm":
            live += of_the_loss(kernel.born)
            if of_the_loss(kernel.born) > 1e9:
                moments.append({"phase": segment.phase, "operator": kernel.name, "live in the loss (GB)": live / 1e9})
            live -= of_the_loss(kernel.freed)
worst = max(m["live in the loss (GB)"] for m in moments)
pd.DataFrame(moments).round(2)

# %% tags=["exact"]
logits_bytes = large.tokens * config.vocab_size * 2
held = loss_step.breakdown()["loss"]
gt.check_close(
    worst * 1e9, 6 * logits_bytes, rel=0.001, what="bytes at the worst moment, and six times those of the bf16 logits"
)
gt.check(held < worst * 1e9 / 2, f"when the forward has returned the loss holds {held / 1e9:.1f} GB")
Markdown(
    f"{config.vocab_size:,} logits a token take {logits_bytes / 1e9:.2f} GB in bf16. At the worst moment three fp32 "
    f"tensors of them are alive, each twice that size; the bf16 logits are gone by then, unless you hold the model's "
    f"output ([notebook 2](02_block_checkpointing.ipynb))."
)

# %% [markdown]
# ### Liger's fused loss
#
# It takes a few rows at a time: logits, loss, *and the gradients* of those rows, which need nothing from later. The
# logits never exist as a whole. What is held until backward is a finished gradient of the head's weight and of the
# hidden rows. The number of rows is chosen so that a chunk's logits are about as large as the hidden states: the tokens
# divided by $\lceil \text{vocabulary} / \text{width} \rceil$, rounded up, and up again to a power of two.

# %% tags=["exact"]
ratio = math.ceil(config.vocab_size / config.hidden_size)
rows_a_chunk = 2 ** math.ceil(math.log2(math.ceil(workload.tokens / ratio)))
fused = gt.trace(workload.replace(kernels="liger"), "none")
launches = Counter(k.name for s in fused.segments if s.layer == "head" for k in s.kernels)
chunks = launches["liger_cross_entropy_kernel"]
gt.check(
    chunks == workload.tokens / rows_a_chunk,
    f"⌈{config.vocab_size} / {config.hidden_size}⌉ = {ratio}, ⌈{workload.tokens} / {ratio}⌉ = "
    f"{math.ceil(workload.tokens / ratio)}, up to a power of two {rows_a_chunk}: the trace has {chunks} chunks of so "
    f"many rows",
)
head_bytes = config.vocab_size * config.hidden_size * 2
rows_bytes = workload.tokens * config.hidden_size * 2
gt.check_close(
    fused.breakdown()["loss"],
    head_bytes + rows_bytes,
    rel=1e-6,
    what="bytes held until backward: the gradients of the head and of the rows",
)

# %% [markdown]
# Every chunk reads the head's weight twice (for the logits and for the rows' gradient) and reads and writes the head's
# gradient. That is memory traffic which does not shrink with the chunk.
#
# And there are **two code paths**. On a CUDA card of compute capability 8 or more, with bf16 weights, the product is
# added to the gradient in place (`addmm`). Elsewhere each chunk makes a product of the head's size, copies it to
# fp32, and adds.
#
# **Predict:** take the number of chunks from above. What does the traffic cost? Two figures to reckon with:

# %%
Markdown(
    f"The head's weight is {head_bytes / 1e9:.2f} GB, and {device.name} moves "
    f"{device.bandwidth_bytes_per_s / 1e12:.2f} TB/s (data sheet), of which the estimates assume "
    f"{device.efficiency.bandwidth:.0%}."
)

# %% [markdown]
# The table has a fourth way, torch's own: `torch.nn.functional.linear_cross_entropy` with its options for chunks (torch
# 2.13 or newer). Here its suffix is `+chunked:1024`, for 1,024 rows a chunk.


# %%
def head_kernels(step):
    return [k for s in step.segments if s.layer == "head" for k in s.kernels]


def head_cost(step):
    """Time of everything after the last layer, both ways, and how far it raises memory above the weights."""
    seconds = sum(seconds_of(k, device) for k in head_kernels(step))
    return {
        "ms": 1e3 * seconds,
        "GB moved": sum(k.work.bytes for k in head_kernels(step)) / 1e9,
        "held after forward (GB)": step.breakdown()["loss"] / 1e9,
        "peak above weights (GB)": (step.peak_bytes - step.static_bytes) / 1e9,
    }


ways = {
    "Hugging Face": gt.trace(workload.replace(kernels=LAYER_KERNELS), "none"),
    "Liger, portable path": gt.trace(workload.replace(kernels="liger"), "none", kind="cpu"),
    "Liger, CUDA path": fused,
    "torch, 1024 rows": gt.trace(workload.replace(kernels=f"{LAYER_KERNELS}+chunked:1024"), "none"),
}
heads_table = pd.DataFrame({name: head_cost(step) for name, step in ways.items()}).T
heads_table.round(1).rename_axis(f"head and loss, with Liger's other kernels, estimated for {device.name}")

# %%
streamed_ms = 1e3 * chunks * 4 * head_bytes / (device.bandwidth_bytes_per_s * device.efficiency.bandwidth)
ms = heads_table["ms"]
others_win = brings["saves (ms)"].drop(["fused loss", "all"]).sum()
display(
    Markdown(
        f"Streaming the weight and its gradient, {chunks} times, takes {streamed_ms:.0f} ms, which products of "
        f"{rows_a_chunk} rows are too small to hide. On the CUDA path the loss takes "
        f"{ms['Liger, CUDA path']:.0f} ms against Hugging Face's "
        f"{ms['Hugging Face']:.0f}; on the portable path {ms['Liger, portable path']:.0f} ms, "
        f"{ms['Liger, portable path'] - ms['Hugging Face']:.0f} more than Hugging Face's, where Liger's other kernels "
        f"together win {others_win:.0f}. Torch's own chunked loss, the same idea with {1024 // rows_a_chunk} times as "
        f"many rows a chunk: {ms['torch, 1024 rows']:.0f} ms. (Its work is a formula here, not a trace: it is one "
        f"opaque operator. Estimated for {device.name}.)"
    )
)
peaks = heads_table["peak above weights (GB)"]
gt.check(ms["Liger, portable path"] > 2 * ms["Liger, CUDA path"], "the path decides: portable is over twice as slow")
gt.check(
    peaks["Liger, portable path"] - peaks["Liger, CUDA path"] > 2.9 * head_bytes / 1e9 * 0.95,
    "and its peak is higher by the product and its fp32 copy",
)
gt.check(ms["torch, 1024 rows"] < ms["Hugging Face"] < ms["Liger, CUDA path"], "fewer, larger chunks beat both")

# %% [markdown]
# ### The chunk size is a choice
#
# **Predict:** from how many rows on is a chunk's product bound by arithmetic and no longer by memory?

# %%
sizes = {
    rows: head_cost(gt.trace(workload.replace(kernels=f"{LAYER_KERNELS}+chunked:{rows}"), "none"))
    for rows in CHUNK_TOKENS
}
by_rows = pd.DataFrame(sizes).T
by_rows[["ms", "GB moved", "peak above weights (GB)"]].round(1).rename_axis(f"rows, estimated for {device.name}")

# %%
fast_enough = by_rows.index[by_rows["ms"] < 1.01 * by_rows["ms"].min()][0]
gt.check(
    by_rows["ms"].is_monotonic_decreasing and by_rows["peak above weights (GB)"].is_monotonic_increasing,
    f"more rows never take longer and never less memory; from {fast_enough} rows on time no longer falls",
)
gt.check_close(
    by_rows["ms"][rows_a_chunk],
    ms["Liger, CUDA path"],
    rel=0.1,
    what="torch's loss by formula at Liger's chunk size, against the trace of Liger's own code, ms",
)
Markdown(
    f"A product of r rows with a bf16 weight does about r FLOP for each byte of the weight, and the ridge of "
    f"{device.name} lies at {device.ridge():.0f} FLOP/byte: {rows_a_chunk} rows are left of it. One chunk of "
    f"{CHUNK_TOKENS[-1]} rows is no faster than one of {fast_enough}, and its fp32 logits show in the peak. (The "
    f"memory "
    f"inside torch's operator is a formula here, too.)"
)

# %%
gt.judge(
    "F03",
    holds=fused.breakdown()["loss"] < logits_bytes / LARGE_BATCH * BATCH + 2 * rows_bytes
    and launches["_log_softmax"] == 0,
    because=f"No logits are held: what the fused loss keeps ({fused.breakdown()['loss'] / 1e9:.2f} GB) are finished "
    f"gradients, which no checkpoint could free. The price is time at small batches, and that the head's gradient "
    f"exists from the forward on",
    device=device.name,
)

# %% [markdown]
# ### The same gradients?
#
# Sums in chunks are sums in another order. Liger's kernels do not run on a CPU, so we compare torch's chunked loss with
# Hugging Face's, on a real model in fp32, layer by layer:


# %%
def real_gradients(kernels):
    model = build(small.replace(kernels=kernels), seed=SEED)
    loss = model(**inputs(small, seed=SEED)).loss
    loss.backward()
    return loss.item(), gradients_of(model)


small = gt.Workload("nano", seqlen=128, layers=2, precision="fp32")
(plain_loss, plain), (chunked_loss, chunked) = real_gradients("hf"), real_gradients("hf+chunked:32")
differences = gt.compare_gradients(plain, chunked)
display(pd.DataFrame([{"layer": d.layer, "relative difference": f"{d.relative:.1e}"} for d in differences]))
gt.check_close(chunked_loss, plain_loss, rel=1e-6, what="the loss")
gt.check(max(d.worst for d in differences) < 1e-5, "every gradient agrees to five digits: rounding, not a bug")

# %% [markdown]
# ### Exercise 1: Liger's chunks at batch 4 (5 minutes)
#
# How many chunks does the fused loss make at batch 4, and of how many rows? Use the rule above, not a trace.

# %% tags=["exercise"]
answer = None  # (chunks, rows)


def check_exercise_1(answer):
    gt.check(answer is not None, "there is an answer")
    step = gt.trace(large.replace(kernels="liger"), "none")
    counted = sum(k.name == "liger_cross_entropy_kernel" for k in head_kernels(step))
    gt.check(answer == (counted, large.tokens / counted), f"{answer[0]} chunks of {answer[1]} rows")


print("Exercise 1 is yours to do: set `answer`, then run check_exercise_1(answer).")

# %% tags=["solution", "hide-input"] jupyter={"source_hidden": true}
# The ratio of vocabulary to width does not change, and four times the rows is a power of two again: exactly the same
# number of chunks. So the traffic is that of batch 1, spread over four times the work: it gets better with the batch.
rows_at_4 = 2 ** math.ceil(math.log2(math.ceil(large.tokens / ratio)))
answer = (large.tokens // rows_at_4, rows_at_4)
check_exercise_1(answer)

# %% [markdown]
# ## What is left for selective checkpointing
#
# What made recomputing cheap in notebook 4 were the element-wise operators: many bytes, few FLOPs. Liger removes just
# these.


# %%
def time_by_kind(kernels):
    time = Counter()
    for segment in gt.trace(workload.replace(kernels=kernels), "none").segments:
        for kernel in segment.kernels:
            time[kernel.work.kind] += 1e3 * seconds_of(kernel, device)
    row = {kind: time[kind] for kind in ("gemm", "attention", "elementwise")}
    return row | {"element-wise share": time["elementwise"] / sum(time.values())}


shares = {"hf": time_by_kind("hf")}
Markdown(
    f"With Hugging Face's kernels, element-wise ones take {shares['hf']['element-wise share']:.0%} of the step "
    f"(estimated for {device.name})."
)

# %% [markdown]
# **Predict:** how much is it with Liger's?

# %%
BEST_KERNELS = f"{LAYER_KERNELS}+chunked:1024"
shares |= {kernels: time_by_kind(kernels) for kernels in (LAYER_KERNELS, "liger", BEST_KERNELS)}
split = pd.DataFrame(shares).T
split.round(2).rename_axis(f"ms of a step without checkpointing, estimated for {device.name}")

# %%
share = split["element-wise share"]
gt.check(
    share[LAYER_KERNELS] < 0.5 * share["hf"], f"from {share['hf']:.0%} to {share[LAYER_KERNELS]:.0%}: less than half"
)

# %%
rows = []
for kernels in ("hf", BEST_KERNELS):
    case = workload.replace(kernels=kernels)
    whole, selective = (gt.estimate(case, policy, DEVICE) for policy in ("none", "modules:all"))
    freed, extra = whole.activation_bytes - selective.activation_bytes, selective.step_s - whole.step_s
    rows.append(
        {
            "kernels": kernels,
            "none (GB)": whole.activation_bytes / 1e9,
            "none (ms)": 1e3 * whole.step_s,
            "modules:all (GB)": selective.activation_bytes / 1e9,
            "modules:all (ms)": 1e3 * selective.step_s,
            "ms for a GB freed": 1e3 * extra / (freed / 1e9),
        }
    )
pays = pd.DataFrame(rows).set_index("kernels")
pays.round(2).rename_axis(f"kernels, estimated for {device.name}")

# %%
from_share = pays["none (GB)"][BEST_KERNELS] / pays["none (GB)"]["hf"]
display(
    Markdown(
        f"With the right kernels and **no checkpointing**, the step keeps {pays['none (GB)'][BEST_KERNELS]:.1f} GB in "
        f"{pays['none (ms)'][BEST_KERNELS]:.0f} ms: less memory *and* less time than Hugging Face's `none`. So a "
        f"limit above "
        f"{from_share:.0%} of that needs no policy at all; selective checkpointing starts to pay below it. There it "
        f"costs "
        f"{pays['ms for a GB freed'][BEST_KERNELS]:.1f} ms a GB, against {pays['ms for a GB freed']['hf']:.1f} with "
        f"Hugging "
        f"Face's kernels: fewer bytes are left to free, and what has to run again is quicker. (Estimated for "
        f"{device.name}.)"
    )
)
gt.check(
    pays["none (ms)"][BEST_KERNELS] < pays["modules:all (ms)"]["hf"]
    and pays["modules:all (ms)"][BEST_KERNELS] < pays["none (ms)"]["hf"],
    "kernels first: with them even the selective step is faster than Hugging Face's without checkpointing",
)

# %% [markdown]
# In sequence lengths: how far does a card get before a policy is needed? Here the whole card counts, without a reserve.

# %%
fits = {}
for seqlen in (SEQLEN, *LONGER):
    peaks = {
        kernels: gt.trace(workload.replace(seqlen=seqlen, kernels=kernels), "none").peak_bytes
        for kernels in ("hf", BEST_KERNELS)
    }
    fits[seqlen] = {
        kernels: f"{peak / 1e9:.0f} GB{'' if peak < device.usable_bytes else ', too much'}"
        for kernels, peak in peaks.items()
    }
display(Markdown(f"Notebook 7 leaves a reserve of {RESERVE_BYTES / 1e9:.0f} GB for the allocator and for workspaces."))
usable = f"{device.usable_bytes / 1e9:.0f} GB of 10⁹ bytes usable, {device.usable_bytes / 2**30:.1f} GiB"
pd.DataFrame(fits).T.rename_axis(f"tokens · peak of none, estimated for {device.name} ({usable})")

# %% [markdown]
# ## Kernels and policy together
#
# The planner tries every set of kernels under one limit: `BUDGET`, a share of what Hugging Face's `none` keeps.
#
# **Predict:** with that share of the memory, how does the step compare with `none`: slower, equal, faster?

# %%
plan = gt.plan(workload, DEVICE, budget=BUDGET, kernels=("liger", BEST_KERNELS))
pd.DataFrame(
    [
        {
            "kernels": kernels,
            "activations (GB)": cost.activation_bytes / 1e9,
            "step (ms)": 1e3 * cost.step_s,
            "of none (hf)": cost.step_s / none.step_s,
        }
        for kernels, cost in plan.brought
    ]
).set_index("kernels").round(3).rename_axis(f"kernels, estimated for {device.name}")

# %%
best = plan.cost
display(Markdown(f"The planner takes `{best.workload.kernels}` with\n\n`{plan.policy}`"))
gt.check(
    best.activation_bytes <= BUDGET * none.activation_bytes, f"{best.activation_bytes / none.activation_bytes:.1%} kept"
)
gt.check(best.step_s <= 0.80 * none.step_s, f"in {best.step_s / none.step_s:.0%} of the time of Hugging Face's none")

# %%
decisions = [("none (hf)", none), ("Liger's RMSNorm", alone["rms_norm"])]
for name, kernels in [("RoPE", "liger:rms_norm,rope"), ("SwiGLU", LAYER_KERNELS), ("chunked loss", BEST_KERNELS)]:
    decisions.append((name, gt.estimate(workload.replace(kernels=kernels), "none", DEVICE)))
decisions.append((f"keep modules, {BUDGET:.0%}", best))
caption = (
    f"Kernels bring the step from {1e3 * none.step_s:.0f} to {1e3 * decisions[-2][1].step_s:.0f} ms; the policy gives "
    f"{1e3 * (best.step_s - decisions[-2][1].step_s):.0f} ms back for the memory."
)
ax = plots.plot_waterfall(decisions, title=caption.rstrip("."))
_ = plots.save_figure(ax.figure, "06_waterfall_time", alt=caption, caption=caption)

# %%
Markdown(f"*{caption}* (Estimated for {device.name}.)")

# %%
memory_caption = (
    f"Activations fall from {none.activation_bytes / 1e9:.1f} to {best.activation_bytes / 1e9:.1f} GB: "
    f"{(none.activation_bytes - decisions[-2][1].activation_bytes) / 1e9:.1f} GB by kernels, "
    f"{(decisions[-2][1].activation_bytes - best.activation_bytes) / 1e9:.1f} GB by the policy."
)
that_free = [(name, row) for name, row in decisions if name != "RoPE"]  # it works in place and frees nothing
ax = plots.plot_waterfall(that_free, y="activation_bytes", title=memory_caption.rstrip("."))
_ = plots.save_figure(ax.figure, "06_waterfall_memory", alt=memory_caption, caption=memory_caption)

# %%
Markdown(f"*{memory_caption}* (Bytes traced; inside torch's chunked loss they follow a formula.)")

# %% [markdown]
# ### Exercise 2: which decision was worth most? (5 minutes)
#
# Name the decision of the two figures that saves most time, as it is called in `decisions`. Then say to yourself how it
# can free memory *and* save time, while the policy, which frees more, costs time.

# %% tags=["exercise"]
answer = None  # a name


def check_exercise_2(answer):
    gt.check(answer in dict(decisions), "there is an answer")
    pairs = itertools.pairwise(decisions)
    saved = {name: before.step_s - after.step_s for (_, before), (name, after) in pairs}
    gt.check(answer == max(saved, key=saved.get), f"{answer} saves {1e3 * saved[answer]:.0f} ms")


print("Exercise 2 is yours to do: set `answer`, then run check_exercise_2(answer).")

# %% tags=["solution", "hide-input"] jupyter={"source_hidden": true}
# The norms: their work was traffic, so keeping less is also faster. Only the policy frees more, and it pays in time.
answer = "Liger's RMSNorm"
check_exercise_2(answer)

# %% [markdown]
# ## The article's figures, judged
#
# The article gives times and memory at batch 4. As in the notebooks before, these are estimates; the rows are stored
# beside the verdicts, so that a run on a GPU can be held against them.

# %%
selective_4 = gt.estimate(large, "ops:mm,core_attn", DEVICE)
with_liger_4 = gt.estimate(large.replace(kernels="liger"), "ops:mm,core_attn", DEVICE)
none_4 = gt.estimate(large, "none", DEVICE)
claimed_s = find_claim("P04").value["step_s"]
needed = selective_4.model_flop / claimed_s
gt.check(
    needed > device.bf16_flop_per_s,
    f"{1e3 * claimed_s:.0f} ms would need {needed / 1e15:.2f} PFLOP/s, more than the card has",
)
faster, saved = 1 - with_liger_4.step_s / none_4.step_s, 1 - with_liger_4.activation_bytes / none_4.activation_bytes
more_or_less = "larger" if faster > find_claim("P05").value["faster_share"] else "smaller"
gt.judge(
    "P04",
    value={"memory_bytes": selective_4.activation_bytes, "step_s": selective_4.step_s},
    tolerance=0.1,
    because=f"At batch {LARGE_BATCH} operator-selective checkpointing keeps {selective_4.activation_bytes / 1e9:.1f} "
    f"GB; at "
    f"batch 1 it would be {gt.estimate(workload, 'ops:mm,core_attn', DEVICE).activation_bytes / 1e9:.1f}, near the "
    f"claim",
    device=device.name,
)
gt.judge(
    "P05",
    value={
        "memory_bytes": with_liger_4.activation_bytes,
        "step_s": with_liger_4.step_s,
        "faster_share": faster,
        "saved_share": saved,
    },
    tolerance=0.1,
    because=f"{faster:.0%} faster than no checkpointing at {saved:.0%} less memory: the direction is right, and the "
    f"gain in time {more_or_less} than claimed. Bytes and seconds are not those of batch {LARGE_BATCH}",
    device=device.name,
)

# %%
keeps_attention = [str(kind) for kind in gt.parse(plan.policy).layers(workload.n_layers)]
attention_kept = all("core_attn" in kind or kind in ("modules:all", "none") for kind in keeps_attention)
gt.judge(
    "F04",
    holds=attention_kept and best.workload.kernels.startswith("liger") and best.step_s < none.step_s,
    when=f"the loss is chosen apart: at {BATCH} × {SEQLEN} Liger's fused loss costs more than it frees",
    because=f"The planner's best keeps attention in every layer, uses Liger's kernels and recomputes "
    f"{best.recompute_flop / best.flop:.0%} of its FLOPs, in {best.step_s / none.step_s:.0%} of the time of none; "
    f"its loss "
    f"is the chunked one. What torch.compile keeps is compared in notebook 5",
    device=device.name,
)
predictions = run_folder().with_name("predictions") / "06_flash_and_liger.jsonl"
predictions.unlink(missing_ok=True)
predicted_rows = gt.Results([none, *alone.values(), liger, best, none_4, selective_4, with_liger_4])
predicted_rows.append_to(predictions)
gt.check(len(gt.Results.read(predictions)) == len(predicted_rows), f"{len(predicted_rows)} predictions stored")

# %% [markdown]
# ## Measured on your machine
#
# On a GPU the full model, with Liger; on a CPU `nano`, where Liger's kernels cannot run, with the chunked loss.

# %%
kind = default_device()
here = gt.Workload(**HERE[kind])
measured = {
    kernels: gt.measure(here.replace(kernels=kernels), ["none", "modules:all"], rounds=ROUNDS, steps=STEPS, seed=SEED)
    for kernels in KERNELS_HERE[kind]
}
display(Markdown(plots.subtitle(row for rows in measured.values() for row in rows)))
pd.DataFrame(
    [
        {
            "kernels": kernels,
            "policy": row.policy,
            "activations (bytes)": f"{row.activation_bytes:,}",
            "step (ms)": round(1e3 * row.step_s),
        }
        for kernels, rows in measured.items()
        for row in rows.where(status="ok")
    ]
).set_index(["kernels", "policy"])

# %% [markdown]
# Policies of one set of kernels were timed in turn; different kernels were not, so compare their bytes rather than
# their times.

# %%
if kind == "cpu":
    plain_here, chunked_here = (measured[kernels]["none"].activation_bytes for kernels in KERNELS_HERE[kind])
    more_here = chunked_here - plain_here
    gt.check(more_here > 0, f"on {here.name} the chunked loss keeps {more_here / 1e6:.1f} MB more")
    text = "The batch is short: the gradient of the head, which is held until backward, is larger than the logits."
    display(Markdown(text))

# %%
for kernels, rows in measured.items():
    for row in rows.where(status="ok"):
        gt.check_close(
            row.activation_bytes,
            gt.trace(here.replace(kernels=kernels), row.policy, kind=kind).activation_bytes,
            rel=BYTES_TOLERANCE[kind],
            what=f"{kernels}, {row.policy}: activation bytes, measured against predicted",
        )

# %% [markdown]
# ## In three lines
#
# - Flash attention and Liger recompute inside their kernels what nobody should keep; `modules:all` on top repeats no
#   matrix product and no attention, only small kernels.
# - The loss is a choice of its own: the fused one frees the logits, and pays in traffic for every chunk; larger
#   chunks are nearly free.
# - Kernels first, then the policy: in the same bytes the step takes less time than with the policy alone, and still
#   less than Hugging Face's `none`.
#
# ## Further reading
#
# - T. Dao et al., [FlashAttention](https://arxiv.org/abs/2205.14135), 2022, and
#   [FlashAttention-2](https://arxiv.org/abs/2307.08691), 2023.
# - P.-L. Hsu et al., [Liger Kernel: Efficient Triton Kernels for LLM Training](https://arxiv.org/abs/2410.10989), 2024.
# - J. Ainslie et al., [GQA](https://arxiv.org/abs/2305.13245), 2023: grouped heads.
# - E. Wijmans et al., [Cut Your Losses in Large-Vocabulary Language Models](https://arxiv.org/abs/2411.09009), 2024.
# - PyTorch, [scaled_dot_product_attention](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html).
#
# **Next:** [7. Choose from the Pareto curve](07_pareto.ipynb)

# %%
print(gt.colophon(SEED))

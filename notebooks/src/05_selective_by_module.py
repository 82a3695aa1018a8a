# %% [markdown]
# # 5. Choose modules, and let the planner meet a budget
#
# You will see what a dispatch mode costs, keep a module's result without one, and let an exact planner choose what to
# keep for any number of bytes.
#
# **Afterwards you can**
# - say where selective checkpointing by operator loses time, and count it;
# - explain in twenty lines how a replay can skip a module, and why the gradients stay the same bits;
# - state "which results to keep under this budget" as a small optimisation problem, and have it solved;
# - read a planner's frontier, and take its answer home as lines to paste.
#
# **Before you start:** [notebook 4](04_selective_by_intensity.ipynb): SAC by hand, recompute ROI, and counting.
#
# **Time:** 40 minutes of reading. The cells run in about a minute on a two-core laptop, in about three on a GPU.
# **Memory:** 3 GB of RAM; with a GPU the measured parts run the full Qwen3-8B and want 80 GB of GPU memory.

# %% tags=["parameters"]
MODEL = "Qwen3-8B"
BATCH = 1
SEQLEN = 4096
DEVICE = "H100"
BUDGET = 0.4
GREEDY_SHARES = [0.15, 0.25, 0.4, 0.6, 0.8]
SHORT = {
    "cpu": {"model": "nano", "layers": 4, "batch": 1, "seqlen": 32, "precision": "fp32"},
    "cuda": {"model": "Qwen3-8B", "batch": 1, "seqlen": 512, "precision": "bf16"},
}
HERE = {
    "cpu": {"model": "nano", "batch": 1, "seqlen": 64, "precision": "fp32"},
    "cuda": {"model": "Qwen3-8B", "batch": 1, "seqlen": 4096, "precision": "bf16"},
}
COMPILED = {"cpu": [], "cuda": ["compile", "compile:0.5"]}
BYTES_TOLERANCE = {"cpu": 0.0, "cuda": 0.02}
ROUNDS = 2
STEPS = 2
SEED = 0

# %%
import dataclasses
import itertools
import math
import sys
from collections import Counter
from contextlib import contextmanager
from functools import partial

import pandas as pd
import torch
from IPython.display import Markdown, display
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import gctutor as gt
from gctutor import optimum, plots
from gctutor.campaign import recorded
from gctutor.measurement import default_device
from gctutor.policies.ops import Ops
from gctutor.tracing import trace_step
from gctutor.workload import build, decoder_layers, inputs

# %% [markdown]
# ## The price of a dispatch mode
#
# SAC sees every operator because a **dispatch mode** stands in its way: each one makes a detour through Python, is
# looked at, and is passed on. The policy function of notebook 4 was part of that detour.
#
# **Predict:** how many operators of one small Qwen3 layer are looked at in the forward?

# %% tags=["exact"]
small = gt.Workload("nano", layers=4, seqlen=64, precision="fp32")
batch = inputs(small, seed=SEED)
looked_at = Counter()


def look(context, operator, *args, **kwargs):
    looked_at[str(operator)] += 1
    return CheckpointPolicy.MUST_SAVE if operator == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


model = build(small, seed=SEED)
contexts = partial(create_selective_checkpoint_contexts, look)
model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
model(**batch).loss.backward()
detours = sum(looked_at.values()) / small.n_layers
products = looked_at["aten.mm.default"] / small.n_layers
gt.check(products == 7, f"of {detours:.0f} operators a layer, {products:.0f} are the matrix products we were after")

# %% [markdown]
# Views count too: they move nothing on a GPU, but they take the detour. Each detour is many steps of Python, and those
# can be counted exactly: how many Python functions does one training step enter, by policy?
#
# **Predict:** `modules:all` does the job of this SAC policy without a mode. Is it nearer to `ops:` or to `block`?

# %%
PRICED = ["none", "block", "ops:mm,core_attn,-down_proj", "modules:all"]
plain = build(small, seed=SEED)


def python_calls(policy):
    """Python functions entered during one step of the small model, after a step of warm-up."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    with gt.parse(policy).applied(plain):
        plain(**batch).loss.backward()
        sys.setprofile(count)
        try:
            plain(**batch).loss.backward()
        finally:
            sys.setprofile(None)
    return calls


calls = {policy: python_calls(policy) for policy in PRICED}
pd.DataFrame(
    {"Python calls a step": calls, "against none": {p: f"{c / calls['none']:.1f} ×" for p, c in calls.items()}}
)

# %%
by_operator, by_module = PRICED[2:]
ratio = (calls[by_operator] - calls["none"]) / (calls[by_module] - calls["none"])
gt.check(ratio > 1.5, f"on top of none, SAC makes {ratio:.1f} times the Python calls of `modules:all`")

# %% [markdown]
# What this means in time depends on how much there is to do between the calls. We take short steps, where little is, on
# the machine at hand. (On a shared CPU these times are noisy; run the cell twice before you believe a difference.)

# %%
kind = default_device()
short_here = gt.Workload(**SHORT[kind])
priced = gt.measure(short_here, PRICED, rounds=ROUNDS, steps=STEPS, seed=SEED)
display(Markdown(plots.subtitle(priced)))
fastest = {row.policy: min(row.samples["step_s"]) for row in priced.where(status="ok")}
pd.DataFrame(
    {
        row.policy: {
            "fastest step (ms)": round(1e3 * fastest[row.policy], 1),
            "against none": f"{fastest[row.policy] / fastest['none'] - 1:+.0%}",
            "recompute (GFLOP)": round(row.recompute_flop / 1e9, 2),
        }
        for row in priced.where(status="ok")
    }
).T

# %%
gt.check(
    priced[by_operator].recompute_flop == priced[by_module].recompute_flop == 0 < priced["block"].recompute_flop,
    "by operator and by module, no matrix product runs again",
)
gt.check(priced[by_operator].activation_bytes == priced[by_module].activation_bytes, "and both keep the same bytes")

# %% [markdown]
# On so short a step SAC may take longer than the full replay of `block`, which computes far more. On a GPU the Python
# is hidden as long as the GPU has more to do. The estimate counts both:

# %%
workload = gt.Workload(MODEL, batch=BATCH, seqlen=SEQLEN)
device = gt.find_device(DEVICE)
short = gt.Workload(**SHORT["cuda"])
waits = {}
for shape in (short, workload):
    for policy in PRICED[2:]:
        row = gt.estimate(shape, policy, DEVICE)
        waits[f"{shape.batch} × {shape.seqlen}", policy] = {
            "step (ms)": round(1e3 * row.step_s, 1),
            "GPU busy": f"{row.provenance['busy_share']:.0%}",
        }
display(Markdown(f"For the mode, {1e6 * Ops.host_s_per_op:.0f} µs of Python an operator are assumed."))
pd.DataFrame(waits).T.rename_axis(["tokens", f"estimated for {device.name}"])

# %% [markdown]
# ## A module that is not run again
#
# Can a replay skip a *module*, without looking at operators? The checkpoint wants from a replay only the tensors that
# backward will ask for, in the order in which they were saved. A linear layer without a bias saves two: its weight and
# its input. Both are at hand in the replay. So there, instead of multiplying, hand out the result that was kept, and
# save these two again.
#
# First, the checkpoint must tell which of the two is going on. Its `context_fn` is made for that: it gives one context
# for the forward and one for the replay, and we let both share a store.

# %%
now = {"stage": None, "store": None}


@contextmanager
def stage(name, store):
    before = dict(now)
    now.update(stage=name, store=store)
    try:
        yield
    finally:
        now.update(before)


def two_stages():
    store = []  # anew for each layer and step
    return stage("forward", store), stage("replay", store)


# %% [markdown]
# Then the linear layer: in the forward it runs as ever and its result goes into the store; in the replay an
# `autograd.Function` stands in for it. Its `backward` is never called, since backward walks the graph of the *forward*;
# the replay's graph is thrown away.


# %%
class HandOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, result):
        ctx.save_for_backward(weight.t(), x.flatten(0, -2))  # what the product saved, in its order
        return result

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("the replay's graph is never walked")


def keep(linear):
    def forward(x):
        if now["stage"] == "replay":
            return HandOut.apply(x, linear.weight, now["store"].pop(0))
        result = torch.nn.functional.linear(x, linear.weight)
        now["store"].append(result.detach())
        return result

    linear.forward = forward


# %% [markdown]
# We keep `gate_proj` in every layer. **Predict:** how many fewer `mm` than under `block` will backward run?


# %% tags=["exact"]
def gradients(model):
    model.zero_grad()
    model(**batch).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


sketch = build(small, seed=SEED)
for layer in decoder_layers(sketch):
    keep(layer.mlp.gate_proj)
sketch.activation_checkpointing_enable({"use_reentrant": False, "context_fn": two_stages})
by_hand = trace_step(sketch, batch)
with gt.parse("block").applied(plain):
    replayed = trace_step(plain, batch)

n, width = small.n_layers, small.config().intermediate_size
one_product = 2 * small.tokens * small.config().hidden_size * width
gt.check(
    replayed.flop("recompute") - by_hand.flop("recompute") == n * one_product, "one product a layer is not run again"
)
gt.check(
    by_hand.activation_bytes - replayed.activation_bytes == n * small.tokens * width * 4,
    "its result is kept, and nothing else",
)
gt.check(all(map(torch.equal, gradients(plain), gradients(sketch))), "every gradient agrees to the last bit")

# %% [markdown]
# This sketch knows what a product saves. The policies called `modules:` *watch* it instead: in the forward they note,
# for each tensor that the module saves, whether it is a view of an input or a parameter (then its geometry is enough)
# or something of its own (then the value is kept). So attention, biases, custom kernels and LoRA adapters (small
# trained matrices beside a frozen weight) can be kept too, and early stop and random numbers stay right. `modules:all`
# keeps q, k, v, attention, o, gate and up.

# %% tags=["exact"]
with gt.parse("modules:gate_proj").applied(plain):
    by_policy = trace_step(plain, batch)
gt.check(by_policy.activation_bytes == by_hand.activation_bytes, "modules:gate_proj keeps the bytes of the sketch")
gt.check(by_policy.flop() == by_hand.flop(), "and does the same work")

with gt.parse("modules:all").applied(plain):
    kept_gradients = gradients(plain)
gt.check(all(map(torch.equal, gradients(plain), kept_gradients)), "modules:all: gradients equal to the last bit")

# %% [markdown]
# On the full model it gives the bytes of the best SAC, without the mode:

# %%
NAMED = [
    "none",
    "block",
    "block/2",
    "sub:mlp",
    "sub:attn",
    "sub:norms",
    "ops:core_attn",
    "ops:every2mm,core_attn",
    "ops:mm,core_attn",
    "ops:mm,core_attn,-down_proj",
    "modules:all",
]
named = gt.Results(gt.estimate(workload, policy, DEVICE) for policy in NAMED)
none, block, selective = (named[policy] for policy in ("none", "block", "modules:all"))
sac = named["ops:mm,core_attn,-down_proj"]
gt.check(selective.activation_bytes == sac.activation_bytes, f"{selective.activation_bytes:,} bytes by either way")
gt.check(selective.recompute_flop == 0, "modules:all runs no matrix product and no attention again")


def extra(row):
    return row.step_s / none.step_s - 1


def saved(row):
    return 1 - row.activation_bytes / none.activation_bytes


gt.judge(
    "S03",
    value={"block_extra_time_share": extra(block), "selective_extra_time_share": extra(selective)},
    tolerance=0.1,
    because=f"Both cost less than claimed, {extra(block):.0%} and {extra(selective):.0%}, and selective recompute "
    f"is cheaper by more than half; but it does not keep the saving: {saved(selective):.0%} of the activations against "
    f"block's {saved(block):.0%}",
    device=device.name,
)

# %% [markdown]
# ## What a byte buys
#
# `modules:` can keep any subset, layer by layer, and layers can be left alone. Which choice is best for a given number
# of bytes? Each call site has a price and a yield, taken from three traces and the roofline: the bytes that keeping
# its result adds to a replayed layer, and the seconds that this saves there. Their quotient, in ms for a GB kept, is
# the ROI of notebook 4 the other way up, for what a replay really runs.
#
# **Predict:** which site yields most per byte? And what does `down_proj` yield?

# %%
costs = optimum.layer_costs(workload, device)
sites = pd.DataFrame(
    {
        site.name: {
            "keeps (MB)": site.bytes / 1e6,
            "saves (µs)": 1e6 * site.seconds,
            "ms saved for a GB kept": 1e3 * site.seconds_per_gb,
        }
        for site in costs.sites
    }
).T
alone = 1e3 * costs.replay_s / (costs.none_bytes - costs.block_bytes) * 1e9
display(sites.round(2).rename_axis(f"one layer, estimated for {device.name}"))
Markdown(f"Leaving a layer alone altogether saves {alone:.2f} ms for a GB kept.")

# %% tags=["exact"]
yields = sites["ms saved for a GB kept"]
gt.check(yields.idxmax() == "core_attn", "attention yields most per byte")
gt.check(yields["down_proj"] == 0, "down_proj yields nothing: early stop never reruns it")
PRODUCTS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]
gt.check(
    all(math.isclose(yields[product], yields["q_proj"], rel_tol=1e-6) for product in PRODUCTS),
    "q, k, v, o, gate and up all yield the same",
)

# %% [markdown]
# The last line is no accident. A product with an inner width of $h$ spends $2h$ FLOP on each number of its result, and
# a number is two bytes; q, k, v, gate and up all have the model's width inside (and so has o, where all heads together
# are as wide as the model). Attention looks at every earlier token for each number, so its yield grows with the
# sequence.
#
# ## The best choice as an integer programme
#
# All layers are alike, so a choice is a few whole numbers: $k_0$, the layers left alone, and for each site $s$ the
# number $k_s$ of replayed layers that keep it. With $n$ layers and a budget of $B$ bytes:
#
# $$\min\ (n - k_0)\, t_\text{replay} - \sum_s k_s t_s \quad\text{such that}\quad b_\text{base} + (n - k_0)\,
# b_\text{block} + k_0\, b_\text{none} + \sum_s k_s b_s \le B, \quad k_0 + k_s \le n.$$
#
# In words: replay costs what a whole replay takes, less what is spared; bytes add up; a layer left alone keeps no site
# on top. Such a problem is an **integer programme**. It is small, and an exact solver (HiGHS, in SciPy) answers in
# milliseconds. Where the kept layers sit does not matter to the sums, only to the peak, so they go last: backward frees
# the last layers first.

# %%
budget_bytes = BUDGET * none.activation_bytes
planned = gt.estimate(workload, f"budget:{BUDGET}", DEVICE)
display(Markdown(f"`budget:{BUDGET}` for {workload.label} on {device.name} is the policy\n\n`{planned.resolved}`"))
Markdown(
    f"It keeps {planned.activation_bytes / 1e9:.2f} of {budget_bytes / 1e9:.2f} GB allowed and takes "
    f"{1e3 * planned.step_s:.0f} ms a step, {extra(planned):+.1%} (bytes exact, time estimated). The products q, k, v, "
    f"o, gate and up all yield the same per byte, so any set of them that fills the budget is as good; the solver took "
    f"this one."
)

# %% tags=["exact"]
gt.check(planned.activation_bytes <= budget_bytes, "the traced bytes keep the budget")
gt.check(budget_bytes - planned.activation_bytes < 1.5 * max(site.bytes for site in costs.sites), "and nearly fill it")
gt.check(str(gt.parse(planned.resolved)) == planned.resolved, "the plan is a policy string like any other")

# %% [markdown]
# ### Exercise 1: believe no solver (15 minutes)
#
# Check it by brute force. `tiny` below is the same problem with two layers and four sites. Try every choice,
# `optimum.Choice(tiny, k0, (k1, k2, k3, k4))`; it knows its `activation_bytes` and `recompute_s`. What is the least
# recompute time within `limit` bytes?

# %% tags=["exercise"]
tiny = dataclasses.replace(costs, n_layers=2, sites=costs.sites[2:6])
limit = tiny.least_bytes + 0.15 * (tiny.most_bytes - tiny.least_bytes)
answer = None  # seconds


def check_exercise_1(answer):
    gt.check(answer is not None, "there is an answer")
    exact = optimum.best(tiny, limit)
    gt.check_close(
        exact.recompute_s, answer, rel=1e-9, what="least recompute time in seconds, solver against brute force"
    )


print("Exercise 1 is yours to do: set `answer`, then run check_exercise_1(answer).")

# %% tags=["solution", "hide-input"] jupyter={"source_hidden": true}
layers = range(tiny.n_layers + 1)
choices = [
    optimum.Choice(tiny, left_alone, kept)
    for left_alone in layers
    for kept in itertools.product(layers, repeat=len(tiny.sites))
    if left_alone + max(kept) <= tiny.n_layers
]
answer = min(choice.recompute_s for choice in choices if choice.activation_bytes <= limit)
check_exercise_1(answer)

# %% [markdown]
# ## The planner's frontier over every other policy
#
# The programme answers for any budget, so we draw its answers as a line: bytes from the sums, time as `none`'s step
# plus the recompute. Into the same plot go the policies of the last notebooks and torchtitan's rule
# (`ops:every2mm,core_attn`).
#
# **Predict:** which named policies touch the planner's line?

# %%
line = gt.frontier(workload, DEVICE, points=60)
slack = costs.most_bytes - none.activation_bytes  # the sums take the first layer for a middle one


def above_the_line(row):
    """Seconds by which a policy is slower than the planner's answer with the same bytes."""
    return row.step_s - none.step_s - optimum.best(costs, row.activation_bytes + slack).recompute_s


above = {row.policy: above_the_line(row) for row in named}
touching = [policy for policy, seconds in above.items() if seconds < 1e-4]
farthest = max(above, key=above.get)
title = f"No named policy lies below the planner's line; {farthest} is {1e3 * above[farthest]:.0f} ms above it"
answers = [(choice.activation_bytes, none.step_s + choice.recompute_s) for choice in line]
ax = plots.plot_pareto(named, line=answers, line_name="the planner", title=title)
caption = (
    f"The line is the planner's answer at every budget. {', '.join(touching)} touch it; {farthest} is "
    f"{1e3 * above[farthest]:.0f} ms slower than the planner with the same bytes."
)
_ = plots.save_figure(ax.figure, "05_frontier", alt=caption, caption=caption)

# %%
display(Markdown(f"*{caption}* (Bytes exact, times estimated for {device.name}.)"))
gt.check(min(above.values()) > -1e-4, "no named policy lies below the line (within a tenth of a millisecond)")

# %% [markdown]
# The line rests on sums. So we let the planner duel with full traces on both sides: it gets the very bytes of a policy,
# and its answer is traced and timed by the same roofline.

# %%
duels = {}
for policy in ["block/2", "sub:mlp", "sub:norms", "ops:every2mm,core_attn"]:
    row = named[policy]
    rival = gt.estimate(workload, optimum.best(costs, row.activation_bytes).policy, DEVICE)
    duels[policy] = {
        "its bytes (GB)": row.activation_bytes / 1e9,
        "the planner's (GB)": rival.activation_bytes / 1e9,
        "its step (ms)": 1e3 * row.step_s,
        "the planner's (ms)": 1e3 * rival.step_s,
    }
duels = pd.DataFrame(duels).T
display(duels.round(2).rename_axis(f"estimated for {device.name}"))
gt.check((duels["the planner's (GB)"] <= duels["its bytes (GB)"]).all(), "traced in full, the planner keeps no more")
gt.check((duels["the planner's (ms)"] < duels["its step (ms)"]).all(), "and is faster each time")

# %% [markdown]
# ## How good is greedy?
#
# A simpler way is to buy by rank: keep whole sites in the order of seconds per byte until the bytes are used up.
#
# **Predict:** at which budgets does buying by rank lose most?

# %%
gaps = {}
for share in GREEDY_SHARES:
    allowed = share * none.activation_bytes
    exact, ranked = optimum.best(costs, allowed), optimum.greedy(costs, allowed)
    gaps[share] = {"exact (ms)": 1e3 * exact.recompute_s, "greedy (ms)": 1e3 * ranked.recompute_s}
gaps = pd.DataFrame(gaps).T.rename_axis(f"share of none's bytes, estimated for {device.name}")
gaps["gap (ms)"] = gaps["greedy (ms)"] - gaps["exact (ms)"]
gaps.round(2)

# %%
gt.check((gaps["gap (ms)"] >= -1e-6).all(), "the ranking is never better than the optimum")
tight, loose = gaps["gap (ms)"].iloc[0], gaps["gap (ms)"].iloc[-1]
Markdown(
    f"With a tight budget the gap is {tight:.2f} ms: nearly every byte yields the same, and the order hardly matters. "
    f"With a loose one it is {loose:.1f} ms, because greedy by site never thinks of leaving a layer alone, which pays "
    f"once every product is kept."
)

# %% [markdown]
# ### Exercise 2: what attention is worth at 16k tokens (10 minutes)
#
# At four times the tokens, how many times as many seconds per byte does keeping attention yield as keeping `gate_proj`?
# Predict first; `optimum.layer_costs` answers for any workload.

# %% tags=["exercise"]
answer = None  # a ratio


def check_exercise_2(answer):
    gt.check(answer is not None, "there is an answer")
    found = {site.name: site for site in optimum.layer_costs(workload.replace(seqlen=4 * SEQLEN), device).sites}
    ratio = found["core_attn"].seconds_per_gb / found["gate_proj"].seconds_per_gb
    gt.check_close(answer, ratio, rel=0.02, what="yield of attention over yield of gate_proj")


print("Exercise 2 is yours to do: set `answer`, then run check_exercise_2(answer).")

# %% tags=["solution", "hide-input"] jupyter={"source_hidden": true}
# Attention's work grows with the square of the tokens, its bytes with the tokens: four times the yield per byte.
# A product's work and bytes both grow with the tokens: the same yield.
answer = 4 * yields["core_attn"] / yields["gate_proj"]
check_exercise_2(answer)

# %% [markdown]
# ## The neighbour: torch.compile's memory budget
#
# `torch.compile` traces forward and backward of a layer together, and its *partitioner* decides what crosses from one
# to the other. It has a budget, too: `activation_memory_budget`, where 1 is what the compiled layer keeps by itself.
# It solves a knapsack on the layer's graph, with its own estimates, and may also recompute where fusion makes it free.
# In this series it is `compile:0.5`, per layer. Three differences: its 1 is not `none`'s bytes, since compiled code
# keeps less; the budget holds within a layer, so all layers are alike; and it needs a compiler and the time to run it.

# %% [markdown]
# Compiling takes long on a CPU and shows nothing about speed there, so by default only a GPU machine does it, and we
# look at bytes. The table has the compiled rows recorded earlier, and what this machine compiles now, each beside
# `none` and `modules:all` of the same workload (recorded or measured as well, or else traced). `COMPILED` in the
# parameters lists what is compiled here; add `"compile"` and `"compile:0.5"` for your CPU.
#
# **Predict:** does a compiled layer keep more than `modules:all`, or less?

# %%
compiled_here = gt.measure(short_here, COMPILED[kind], rounds=1, steps=STEPS, seed=SEED)
compiled = [row for row in [*recorded(), *compiled_here] if row.policy.startswith("compile") and row.ok]
on_file = {(row.workload, row.policy, row.device): row for row in [*recorded(), *priced] if row.ok}


def kept_beside(row, policy):
    """Bytes that `policy` keeps of a compiled row's workload, and their source: a row of that device, else a trace."""
    found = on_file.get((row.workload, policy, row.device))
    if found:
        return found.activation_bytes, f"{found.source} on {found.device}"
    where = "cpu" if row.device.startswith("CPU") else "cuda"
    return gt.trace(row.workload, policy, kind=where).activation_bytes, "traced"


rows = []
for row in compiled:
    beside = [(policy, *kept_beside(row, policy)) for policy in ("none", "modules:all")]
    for policy, size, source in [*beside, (row.policy, row.activation_bytes, f"{row.source} on {row.device}")]:
        rows.append(
            {
                "workload": row.workload.label,
                "policy": policy,
                "activations (MB)": size / 1e6,
                "of none's": size / beside[0][1],
                "source": source,
            }
        )
neighbours = pd.DataFrame(rows).drop_duplicates().set_index(["workload", "policy"])
if not COMPILED[kind]:
    display(Markdown("On this machine nothing was compiled for this page."))
neighbours.round(2)

# %%
most = max(row.activation_bytes / kept_beside(row, "none")[0] for row in compiled)
gt.check(most < 1, f"what is compiled keeps less than `none`: {most:.0%} of its bytes at most")

# %% [markdown]
# ## Lines to paste
#
# The plan is a policy string, and the string is all a training script needs. Where another trainer has the same choice
# under a name of its own, that is listed as well.


# %%
def pasted(policy):
    lines = gt.lines_to_paste(policy)
    return "\n\n".join(f"**{where}**\n```\n{text}\n```" for where, text in lines.items())


display(Markdown(f"### The plan for {BUDGET:.0%} of the bytes\n\n{pasted(planned.resolved)}"))
display(Markdown(f"### `block`, for comparison\n\n{pasted('block')}"))

# %% [markdown]
# ## Measured on your machine
#
# The request is resolved for the machine that runs it: the full model on a GPU, `nano` on a CPU.

# %%
here = gt.Workload(**HERE[kind])
measured = gt.measure(here, ["none", "block", "modules:all", f"budget:{BUDGET}"], rounds=1, steps=STEPS, seed=SEED)
fitting = measured.where(status="ok")
display(Markdown(plots.subtitle(measured)))
pd.DataFrame(
    [
        {
            "policy": row.policy,
            "activations (bytes)": f"{row.activation_bytes:,}",
            "of none's": f"{row.activation_bytes / measured['none'].activation_bytes:.0%}",
            "recompute (GFLOP)": round(row.recompute_flop / 1e9, 2),
            "step (ms)": round(1e3 * row.step_s),
        }
        for row in fitting
    ]
).set_index("policy")

# %%
mine = measured[f"budget:{BUDGET}"]
gt.check_close(
    mine.activation_bytes,
    gt.trace(here, mine.resolved, kind=kind).activation_bytes,
    rel=BYTES_TOLERANCE[kind],
    what=f"budget:{BUDGET}, activation bytes",
)
gt.check(
    mine.activation_bytes <= BUDGET * measured["none"].activation_bytes * (1 + BYTES_TOLERANCE[kind]),
    "the budget is kept on real tensors",
)

# %% [markdown]
# ## In three lines
#
# - SAC pays Python for every operator; keeping modules pays only at the modules, with the same bytes and the same bits.
# - What counts is seconds saved per byte kept: attention first (at shorter lengths the products: notebook 6), then
#   every product alike, `down_proj` never.
# - The planner solves for the best choice under a budget exactly, and no named policy lies below its frontier.
#
# ## Further reading
#
# - T. Chen et al., [Training Deep Nets with Sublinear Memory Cost](https://arxiv.org/abs/1604.06174), 2016.
# - P. Jain et al., [Checkmate: Breaking the Memory Wall with Optimal Tensor
#   Rematerialization](https://arxiv.org/abs/1910.02653), 2020: recomputation as an integer programme.
# - PyTorch,
#   [Current and new activation checkpointing techniques](https://pytorch.org/blog/activation-checkpointing-techniques/),
#   2025: SAC and the memory budget.
# - Q. Huangfu, J. Hall,
#   [Parallelizing the dual revised simplex method](https://doi.org/10.1007/s12532-017-0130-5), 2018: the solver HiGHS.
#
# **Next:** [6. Combine flash attention and Liger with selective checkpointing](06_flash_and_liger.ipynb)

# %%
print(gt.colophon(SEED))

# %% [markdown]
# # 8. Reproduce, recognise and avoid the random-number and reentrant traps
#
# You will break a tiny Qwen3 in eleven ways that people have really reported, see what each looks like from the
# outside, and repair it.
#
# **Afterwards you can**
# - say which random generators a recompute restores and which it does not;
# - choose between the two implementations of checkpointing and defend the choice;
# - spot wrong gradients although the loss is right;
# - switch checkpointing on and off without leaving anything behind.
#
# **Before you start:** [notebook 2](02_block_checkpointing.ipynb): the switch, and early stop.
#
# **Time:** 30 minutes of reading. The cells run in under a minute on a CPU or a GPU.
# **Memory:** 1 GB of RAM. Everything here is about autograd's mechanics, so it runs on the CPU whatever the machine;
# only the section on generators also visits the GPU where there is one. All numbers are measured here, on this model.

# %% tags=["parameters"]
SEED = 0
BATCH = 2
SEQLEN = 16
DROPOUT = 0.3

# %%
import contextlib
import functools
import random
import warnings

import numpy as np
import pandas as pd
import torch
import transformers
from IPython.display import Markdown, display
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import gctutor as gt
from gctutor.diagnosis import doctor
from gctutor.gate import step_of
from gctutor.pitfalls import attempt, hook_calls, matmuls, tiny_qwen3

torch.set_num_threads(1)  # the model is so small that threads only get in its way
pd.set_option("display.max_colwidth", 80)  # room for what PyTorch says
ids = torch.randint(0, 128, (BATCH, SEQLEN), generator=torch.Generator().manual_seed(SEED))
batch = {"input_ids": ids, "labels": ids}

# %% [markdown]
# A few words used throughout. *Checkpointing* (or *recompute*) drops the activations of a region in the forward pass
# and runs the region again, the *replay*, when backward needs them. PyTorch has two implementations of it:
#
# - **reentrant** (2018): the region runs without recording a graph; in backward the replay records one, and backward
#   is called *inside* backward, which gives the name;
# - **non-reentrant** (2022): the region records its graph as usual, but each saved tensor is replaced by a placeholder;
#   the first placeholder that backward asks for its tensor starts the replay.
#
# Both are reached through `torch.utils.checkpoint.checkpoint(..., use_reentrant=...)`, and in Hugging Face models
# through `model.activation_checkpointing_enable({"use_reentrant": ...})`. Only recent releases of transformers have
# that method; where it is missing, `gradient_checkpointing_enable` takes the same dictionary.
#
# The model below has a few narrow layers and takes milliseconds a step, so that it can be broken often. `step_of` runs
# one seeded step and returns its loss and gradients; `.off(...)` gives the relative distance of another step's
# gradient. `doctor` examines a model as it stands; you can call it on your own, and at most traps below you will see
# the sentence to look for.


# %%
def tiny(switch=None, **changes):
    """A fresh tiny Qwen3, checkpointed with the keyword arguments `switch` unless they are None."""
    model = tiny_qwen3(seed=SEED, **changes)
    if switch is not None:
        model.activation_checkpointing_enable(switch)
    return model


def doctor_says(model):
    """Print the doctor's faults and warnings about a model as it stands; return their codes."""
    report = attempt(lambda: doctor(model, batch=batch)).value
    for finding in report.findings:
        if finding.severity != "ok":
            print(finding)
    return report.codes


plain = step_of(tiny(), batch, seed=SEED)
for reentrant in (True, False):
    replayed = step_of(tiny({"use_reentrant": reentrant}), batch, seed=SEED)
    gt.check(
        plain.same_bits(replayed), f"use_reentrant={reentrant}: without traps, the gradients are equal bit for bit"
    )

# %% [markdown]
# ## Trap 1: dropout that is drawn afresh
#
# Dropout throws a part of the numbers away at random. A replay must throw away the *same* ones, so the generator must
# stand where it stood in the forward. The switch for that is `preserve_rng_state`.
#
# **Predict**: with the switch off, which differs from a step without checkpointing, the loss or the gradients?
# And which of the two implementations restores the state when the switch is on?

# %%
dropping = {"attention": "eager", "attention_dropout": DROPOUT}
without = step_of(tiny(**dropping), batch, seed=SEED)

rows, rng_error = [], {}
for reentrant in (True, False):
    for preserve in (True, False):
        model = tiny({"use_reentrant": reentrant, "preserve_rng_state": preserve}, **dropping)
        replayed = step_of(model, batch, seed=SEED)
        rng_error[reentrant, preserve] = without.off(replayed)
        rows.append((reentrant, preserve, replayed.loss == without.loss, without.off(replayed)))
pd.DataFrame(rows, columns=["use_reentrant", "preserve_rng_state", "same loss", "gradient off by"])

# %%
display(
    Markdown(
        f"The loss is the same in {sum(row[2] for row in rows)} of {len(rows)} rows, for the forward always draws the "
        f"same masks. With the switch off the gradients are {rng_error[False, False]:.0%} off: they belong to masks "
        f"that the forward never used. **Both** implementations restore the state when it is on, which is the default "
        "and costs a copy of the generator's state."
    )
)
gt.check(all(row[2] for row in rows), "the loss never shows it")
gt.check(all(error == 0 for (_, preserve), error in rng_error.items() if preserve), "preserved: the difference is 0")
gt.check(all(error > 0.1 for (_, preserve), error in rng_error.items() if not preserve), "not preserved: wrong")

# %% [markdown]
# *Recognise it*: a training curve that shifts when only checkpointing is switched (a report in
# [OLMo-core](https://github.com/allenai/OLMo-core/pull/828) saw 2.495 against 2.195 after 150 steps). *Repair*: leave
# `preserve_rng_state` alone unless every dropout is 0. There is a quieter sign too: without the switch, the step takes
# more numbers from the generator than it should, so the *next* step's dropout differs as well.


# %%
def next_number(switch):
    """The first number that the step after this one would draw."""
    model = tiny(switch, **dropping)
    torch.manual_seed(SEED)
    model(**batch).loss.backward()
    return torch.rand(()).item()


expected = next_number(None)
kept = next_number({"use_reentrant": False})
lost = next_number({"use_reentrant": False, "preserve_rng_state": False})
print(f"next number: {expected:.4f} without checkpointing, {kept:.4f} with, {lost:.4f} with the switch off")
gt.check(kept == expected and lost != expected, "only the preserved state leaves the next step untouched")

# %%
codes = doctor_says(tiny({"use_reentrant": False, "preserve_rng_state": False}, **dropping))
gt.check("rng_not_preserved" in codes, "the doctor knows this one")

# %%
gt.judge(
    "R01",
    holds=rng_error[True, True] > 0 and rng_error[False, True] == 0,
    because=(
        f"under dropout with the default preserve_rng_state=True the reentrant gradients are {rng_error[True, True]:g} "
        f"off and the non-reentrant {rng_error[False, True]:g}; with False both are wrong "
        f"({rng_error[True, False]:.0%} and {rng_error[False, False]:.0%}), so that switch decides and not the "
        "implementation"
    ),
    source="measured",
    device="CPU",
)

# %% [markdown]
# ## Trap 2: generators nobody restores
#
# Chance has more than one source: torch's default generator, a `torch.Generator` of your own, numpy's and Python's.
#
# **Predict**, for a drop-out layer fed by each of them: is the gradient right under non-reentrant checkpointing, with
# `preserve_rng_state` on?

# %%
own = torch.Generator()
SOURCES = {
    "torch, default": lambda shape: torch.rand(shape),
    "torch, own generator": lambda shape: torch.rand(shape, generator=own),
    "numpy": lambda shape: torch.from_numpy(np.random.rand(*shape)),
    "python": lambda shape: torch.tensor([random.random() for _ in range(shape.numel())]).view(shape),
}


class DropOut(nn.Module):
    """Zeroes a share of its input where `draw(shape)` falls below it."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        kept = self.draw(x.shape).to(x) >= DROPOUT
        return x * kept / (1 - DROPOUT)


def noisy(draw, switch=None):
    model = tiny(switch)
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, DropOut(draw))
    return model


def noisy_step(draw, switch=None):
    own.manual_seed(SEED)
    return step_of(noisy(draw, switch), batch, seed=SEED)  # seeds torch, numpy and Python


# %%
source_error = {}
for name, draw in SOURCES.items():
    without = noisy_step(draw)
    replayed = noisy_step(draw, {"use_reentrant": False})
    source_error[name] = without.off(replayed)
    print(f"{name:22} loss equal: {without.loss == replayed.loss}   gradient off by {source_error[name]:.0%}")
gt.check(source_error["torch, default"] == 0, "torch's default generator is restored")
gt.check(all(e > 0.1 for name, e in source_error.items() if name != "torch, default"), "the three others are not")

# %%
codes = doctor_says(noisy(SOURCES["numpy"], {"use_reentrant": False}))
gt.check("gradients_differ" in codes, "no structure gives it away: the doctor finds it by comparing gradients")

# %% [markdown]
# So `preserve_rng_state` means torch's *default* generators only: the CPU's, and those of the devices on which the
# region's tensor arguments live. On a GPU that device's is saved because the region's inputs live there; a region that
# gets only CPU tensors and draws on the GPU inside is not covered. The cell runs on every device of this machine.

# %%
for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
    x = torch.ones(4, 64, device=device, requires_grad=True)
    torch.manual_seed(SEED)
    y = checkpoint(nn.functional.dropout, x, 0.5, use_reentrant=False)
    y.sum().backward()
    gt.check(torch.equal(x.grad, y.detach()), f"{device}: the gradient passes exactly where the forward let through")

# %% [markdown]
# **Repair.** The best is to draw with torch's default generator. Where you cannot, the non-reentrant implementation
# takes a `context_fn`: a function called once per region that returns two context managers, one round the forward and
# one round the replay. That is enough to remember a state and put it back. Hugging Face hands it through.


# %%
def numpy_restored():
    """The contexts of one region: remember numpy's state now, and lend it to the replay."""
    state = np.random.get_state()

    @contextlib.contextmanager
    def replay():
        now = np.random.get_state()
        np.random.set_state(state)
        try:
            yield
        finally:
            np.random.set_state(now)

    return contextlib.nullcontext(), replay()


repaired = noisy_step(SOURCES["numpy"], {"use_reentrant": False, "context_fn": numpy_restored})
gt.check(noisy_step(SOURCES["numpy"]).same_bits(repaired), "numpy's state restored: equal bit for bit")

# %% [markdown]
# ## Trap 3: keyword arguments that choose the implementation for you
#
# Hugging Face's switch takes a dictionary of keyword arguments for PyTorch's `checkpoint`, and has a default for it.
#
# **Predict** which of these four lines trains with the reentrant implementation.

# %%
choices = {}
for switch in ({"use_reentrant": False}, {"preserve_rng_state": True}, {}, None):
    model = tiny()
    model.activation_checkpointing_enable(switch)
    seen = attempt(lambda model=model: matmuls(model, batch))
    choices[str(switch)] = (seen.value, seen.warnings[0].split(": ", 1)[-1].split(". ")[0] if seen.warnings else "")
pd.DataFrame(
    [(switch, forward, backward, warning) for switch, ((forward, backward), warning) in choices.items()],
    columns=["activation_checkpointing_enable(…)", "mm in forward", "mm in backward", "warning"],
)

# %% [markdown]
# Hugging Face's own default is non-reentrant (since [transformers#43203](https://github.com/huggingface/transformers/pull/43203);
# reentrant before it). But that default is a whole dictionary: pass your own, for whatever reason, and what you leave
# out falls back to *PyTorch's* default, which is reentrant.
#
# The count of matrix products gives it away. Backward has products of its own, the first count below; the non-reentrant
# replay stops as soon as the last saved tensor is there (*early stop*) and never runs `down_proj` again; the reentrant
# replay runs everything. PyTorch warns at each call, but Python shows a warning only the first time that it comes from
# one place: a single line, early in the log.

# %%
(_, none_mm), (_, block_mm) = matmuls(tiny(), batch), choices[str({"use_reentrant": False})][0]
full_mm = choices["{}"][0][1]
layers = len(tiny().model.layers)
print(f"backward: {none_mm} mm without checkpointing, {block_mm} non-reentrant, {full_mm} reentrant")
gt.check(full_mm - block_mm == layers, f"early stop spares one mm, down_proj, in each of the {layers} layers")
gt.check(choices[str({"preserve_rng_state": True})][0][1] == full_mm, "a dict without use_reentrant selects reentrant")
gt.check(choices["None"][0][1] == block_mm, "no dict at all selects non-reentrant")

# %% [markdown]
# A neighbour of this trap is the option that does not exist. The non-reentrant implementation hands unknown keywords on
# to the region, and a Hugging Face layer takes any keyword, so a typing error trains on without a word.

# %%
misspelt = attempt(lambda: matmuls(tiny({"use_reentrant": False, "preserve_rng_sate": False}), batch))
print("misspelt option:", misspelt.error or f"no complaint, {misspelt.value[1]} mm in backward")
gt.check(not misspelt.failed and not misspelt.warnings, "a misspelt option is swallowed")
refused = attempt(lambda: gt.parse("blok"))
codes = doctor_says(tiny({"preserve_rng_state": True})) + doctor_says(
    tiny({"use_reentrant": False, "preserve_rng_sate": False})
)
gt.check(codes == ("reentrant", "unknown_kwarg"), "the doctor names the silent choice and the misspelt option")
gt.check(refused.failed, f"gctutor's own names are checked: {refused.error}")

# %% [markdown]
# *Repair*: always write `use_reentrant=False` out, and count after the first step.
#
# ## Trap 4: gradients asked for in another way
#
# Losses are not only sent through `loss.backward()`. A second backward over the same graph needs `retain_graph`;
# `torch.autograd.grad` and `backward(inputs=...)` ask for chosen gradients; gradient penalties differentiate a gradient
# (`create_graph=True`).
#
# **Predict** which of the four fail under the reentrant implementation.


# %%
def twice(model):
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    loss.backward()
    return {name: p.grad / 2 for name, p in model.named_parameters()}


def chosen(model):
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(model(**batch).loss, parameters), strict=True))


def to_inputs(model):
    model(**batch).loss.backward(inputs=[*model.parameters()])
    return {name: p.grad for name, p in model.named_parameters()}


def penalty(model):
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embeddings, labels=ids).loss.backward(create_graph=True)
    embeddings.grad.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


WAYS = {"retain_graph, twice": twice, "autograd.grad": chosen, "backward(inputs=…)": to_inputs, "create_graph": penalty}


# %%
def outcome(run, make, reference):
    """`right`, `wrong` or `error` for the gradients of `run(make())`, and the complaint."""
    seen = attempt(lambda: run(make()))
    if seen.failed:
        return "error", seen.error
    same = seen.value.keys() == reference.keys() and all(torch.equal(seen.value[n], g) for n, g in reference.items())
    return ("right" if same else "wrong"), "; ".join(seen.warnings)


eager = functools.partial(tiny, attention="eager")  # the fused attention kernel has no second derivative
table = {}
for name, way in WAYS.items():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # create_graph warns about a reference cycle
        reference = way(eager())
    table[name] = {
        "reentrant": outcome(way, lambda: eager({"use_reentrant": True}), reference),
        "non-reentrant": outcome(way, lambda: eager({"use_reentrant": False}), reference),
    }
for name, results in table.items():
    print(f"{name:20} reentrant: {results['reentrant'][0]:6} non-reentrant: {results['non-reentrant'][0]}")
    if results["reentrant"][0] == "error":
        print(f"{'':20} {results['reentrant'][1][:100]}")

# %%
gt.check(all(r["non-reentrant"][0] == "right" for r in table.values()), "non-reentrant: all four right")
gt.check(table["retain_graph, twice"]["reentrant"][0] == "right", "reentrant: retain_graph works, and replays twice")
gt.check(table["autograd.grad"]["reentrant"][0] == "error", "reentrant: autograd.grad is refused")
gt.check(table["create_graph"]["reentrant"][0] != "right", "reentrant: no gradient of a gradient")

# %% [markdown]
# ## Trap 5: hooks that fire twice, or unevenly
#
# A forward hook is a function that runs with a module's forward; people use them to log activations, to collect
# statistics, to steer. A replay is a forward too.
#
# **Predict**: how often does a hook on `q_proj` fire in a step? And one on `down_proj`, the last module of the layer?

# %%
counts = {}
for name, switch in {
    "none": None,
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
}.items():
    model = tiny(switch)
    layer = model.model.layers[0]
    places = {"layer": layer, "q_proj": layer.self_attn.q_proj, "down_proj": layer.mlp.down_proj}
    for place, module in places.items():
        counts[name, place] = hook_calls(model, module, batch)
pd.DataFrame(counts).T

# %% [markdown]
# Hooks on the layer itself fire once, because the release of transformers used here (the next cell names it)
# checkpoints the layer's `forward`, and hooks sit outside it. (In older releases the hooks were inside, too.)
#
# Inside the layer, each forward hook fires twice. And at `down_proj` the non-reentrant counts are uneven: the replay
# enters it (one more *pre* hook) but early stop leaves before its forward hook. Code that pairs the two, a timer or a
# stack of module names, ends up out of step. Backward hooks fire once everywhere.

# %%
version = transformers.__version__
gt.check(counts["non-reentrant", "layer"]["forward"] == 1, f"in transformers {version} the layer's own hook fires once")
gt.check(counts["non-reentrant", "q_proj"]["forward"] == counts["reentrant", "q_proj"]["forward"] == 2, "inside: twice")
uneven = counts["non-reentrant", "down_proj"]
gt.check(uneven["forward pre"] == 2 and uneven["forward"] == 1, "early stop leaves down_proj's hooks uneven")
with set_checkpoint_early_stop(False):
    model = tiny({"use_reentrant": False})
    even = hook_calls(model, model.model.layers[0].mlp.down_proj, batch)
gt.check(even["forward"] == even["forward pre"], "with early stop off they are even, at the price of running down_proj")

# %% [markdown]
# A hook that only looks is a nuisance when it counts double. A hook with a *state* that changes the numbers is worse:
# the replay sees the next state. Here, a steering factor that changes from call to call.


# %%
def steered(switch=None):
    model = tiny(switch)
    calls = iter(range(1000))
    module = model.model.layers[0].mlp.up_proj
    module.register_forward_hook(lambda module, args, output: output * (1 + 0.5 * next(calls)))
    return model


expected = step_of(steered(), batch, seed=SEED)
replays = {r: step_of(steered({"use_reentrant": r}), batch, seed=SEED) for r in (True, False)}
hook_error = {r: expected.off(step) for r, step in replays.items()}
print(f"gradient off by {hook_error[True]:.1%} (reentrant) and {hook_error[False]:.1%} (non-reentrant)")
gt.check(all(step.loss == expected.loss for step in replays.values()), "the loss is right")
gt.check(min(hook_error.values()) > 1e-3, "a stateful hook breaks both implementations")
hooked = "model.layers.0.mlp.up_proj.weight"
right = {r: torch.equal(step.gradients[hooked], expected.gradients[hooked]) for r, step in replays.items()}
gt.check(right == {True: False, False: True}, "the hooked module's own gradient is wrong under reentrant only")
codes = doctor_says(steered({"use_reentrant": False}))
gt.check("not_reproducible" in codes, "the doctor sees that the step does not even repeat itself without recompute")

# %% [markdown]
# Why are the two not equally wrong? Reentrant checkpointing differentiates the graph of the *replay*, with the later
# factor in it. Non-reentrant checkpointing differentiates the graph of the *forward*, in which the factor is the right
# one; only the tensors that backward asks for come from the replay.
#
# *Repair*: let the state change between steps, not between calls, or hook the layer instead of what is inside it.
#
# ## Trap 6: frozen inputs, as with LoRA
#
# The reentrant implementation is an autograd function: it joins the graph only if one of its *inputs* needs a gradient.
# With LoRA the embeddings are frozen, so the first layer's input needs none. Hugging Face's switch knows and installs a
# hook that marks the embedding's output. Two common ways pass it by: PyTorch's own wrapper put round the layers from
# outside, and training from `inputs_embeds` (multi-modal models).

# %%
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)


def lora(switch=None):
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks the model by a name that transformers has renamed
        torch.manual_seed(SEED)
        model = get_peft_model(tiny(), config).train()
        if switch is not None:
            model.activation_checkpointing_enable(switch)
    return model


def wrapped(model, reentrant):
    """`model` with PyTorch's checkpoint wrapper round each decoder layer."""
    implementation = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    kinds = type(tiny().model.layers[0])
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=implementation),
        check_fn=lambda module: isinstance(module, kinds),
    )
    return model


# %%
adapters = step_of(lora(), batch, seed=SEED)
embedded = {"inputs_embeds": torch.randn(BATCH, SEQLEN, 32, generator=own.manual_seed(SEED)), "labels": ids}
frozen = {}
for reentrant in (True, False):
    switch = {"use_reentrant": reentrant}
    frozen["switch", reentrant] = attempt(lambda switch=switch: step_of(lora(switch), batch, seed=SEED))
    frozen["wrapper", reentrant] = attempt(
        lambda reentrant=reentrant: step_of(wrapped(lora(), reentrant), batch, seed=SEED)
    )
    frozen["inputs_embeds", reentrant] = attempt(lambda switch=switch: step_of(lora(switch), embedded, seed=SEED))
for (how, reentrant), seen in frozen.items():
    print(f"{how:14} use_reentrant={reentrant!s:6} {(seen.error or 'trains')[:75]}")

# %%
gt.check(all(not seen.failed for (_, reentrant), seen in frozen.items() if not reentrant), "non-reentrant: all train")
gt.check(adapters.same_bits(frozen["switch", True].value), "the switch's hook saves the reentrant implementation")
gt.check(frozen["wrapper", True].failed and frozen["inputs_embeds", True].failed, "without the hook it is cut off")
print("what PyTorch says:", frozen["wrapper", True].warnings[0])
codes = doctor_says(wrapped(lora(), True))
gt.check("step_fails" in codes and "reentrant" in codes, "the doctor names the implementation, and the failing step")

# %% [markdown]
# Here the first layer's cut runs through the whole model and ends in an error. In a model where only a *part* is cut
# off, the same warning is all you get, and the part does not train.
#
# The hook has a price. It stays when checkpointing is switched off, and it makes backward walk through frozen layers
# that nobody asked for. Below, the embeddings and the first three layers are frozen.

# %%
model = tiny()
for name, parameter in model.named_parameters():
    parameter.requires_grad_("layers.3." in name or name.startswith(("lm_head", "model.norm")))
before = matmuls(model, batch)[1]
model.activation_checkpointing_enable({"use_reentrant": False})
during = matmuls(model, batch)[1]
model.activation_checkpointing_disable()
after = matmuls(model, batch)[1]
codes = doctor_says(model)
model.disable_input_require_grads()
repaired = matmuls(model, batch)[1]
with gt.parse("block").applied(model):
    ours = matmuls(model, batch)[1]
print(
    f"mm in backward: {before} before, {during} during, {after} after switching off, {repaired} with the hook removed"
)
print(
    f"gctutor's block, which installs no hook where none is needed: {ours}, and {matmuls(model, batch)[1]} afterwards"
)
gt.check("input_hook" in codes, "the doctor finds the hook left behind")
gt.check(after > before == repaired, "off is not off until the hook is removed")
gt.check(ours < during and matmuls(model, batch)[1] == before, "gctutor's policies undo exactly")

# %% [markdown]
# ## Trap 7: inputs in containers, in closures, by keyword
#
# The reentrant implementation looks at its *positional tensor arguments*. It cuts exactly those from the graph for the
# replay. A tensor inside a tuple, or one that the function finds in its surroundings (a *closure*), is not cut: the
# inner backward runs straight through it into the graph outside.
#
# **Predict**, for `h` a tensor with a history (not a leaf), which of these fail.

# %%
weight = torch.randn(4, 4, generator=own.manual_seed(SEED))
start = torch.randn(2, 4, generator=own)


def scaled(x, *, by):
    return x @ weight * by


def pair(both):
    return both[0] @ weight * both[1]


INPUTS = {
    "a plain tensor": lambda run, h: run(lambda x: x @ weight, h),
    "keyword only": lambda run, h: run(scaled, h, by=2.0),
    "a tuple": lambda run, h: run(pair, (h, h)) + h,
    "a tuple and a tensor": lambda run, h: run(lambda x, both: pair(both) + x, h, (h, h)),
    "a closure": lambda run, h: run(lambda x: x @ weight * h, h) + h,
}


def gradient(use, run):
    """The gradient of `start` through `use`, the region called by `run`."""
    x = start.clone().requires_grad_()
    use(run, 2 * x).square().sum().backward()
    return {"x": x.grad}


def direct(function, *args, **kwargs):
    return function(*args, **kwargs)


# %%
def compare(uses):
    """What each use gives under the two implementations: `right`, `wrong` or `error`."""
    results = {}
    for name, use in uses.items():
        reference = gradient(use, direct)
        for label, reentrant in (("reentrant", True), ("non-reentrant", False)):
            run = functools.partial(checkpoint, use_reentrant=reentrant)
            results.setdefault(name, {})[label] = outcome(
                lambda run, use=use: gradient(use, run), lambda run=run: run, reference
            )
    return results


def show(results):
    return pd.DataFrame(
        [
            (name, r["reentrant"][0], r["non-reentrant"][0], r["reentrant"][1].split(" (")[0])
            for name, r in results.items()
        ],
        columns=["", "reentrant", "non-reentrant", "what reentrant says"],
    ).set_index("")


inputs_table = compare(INPUTS)
show(inputs_table)

# %%
gt.check(all(r["non-reentrant"][0] == "right" for r in inputs_table.values()), "non-reentrant: all right")
gt.check(inputs_table["a plain tensor"]["reentrant"][0] == "right", "reentrant: a plain non-leaf tensor is fine")
gt.check(inputs_table["keyword only"]["reentrant"][0] == "error", "reentrant: keywords are refused")
gt.check(inputs_table["a closure"]["reentrant"][0] == "error", "reentrant: closures over the graph fail")
gt.check(inputs_table["a tuple"]["reentrant"][0] == "wrong", "reentrant: a tuple is cut off, with a warning only")

# %% [markdown]
# The third row is the dangerous one: it trains. The region's part of the gradient is missing, and all that is left of
# it is a warning. *Repair for reentrant code you must keep*: pass every tensor as an argument of its own.
#
# ## Trap 8: outputs that are detached, no tensors, or in a dictionary
#
# The same rule at the other end.

# %%
OUTPUTS = {
    "a number and None beside it": lambda run, h: run(lambda x: (x @ weight, 3, None), h)[0],
    "a detached tensor beside it": lambda run, h: sum(run(lambda x: (x @ weight, (x @ weight).detach()), h)),
    "a dictionary": lambda run, h: run(lambda x: {"h": x @ weight}, h)["h"] + h,
}
outputs_table = compare(OUTPUTS)
show(outputs_table)

# %%
x = start.clone().requires_grad_()
flags = {}
for reentrant in (True, False):
    _, aside = checkpoint(lambda x: (x @ weight, (x @ weight).detach()), x, use_reentrant=reentrant)
    flags[reentrant] = aside.requires_grad
print(f"the detached output requires a gradient: {flags[True]} (reentrant), {flags[False]} (non-reentrant)")
gt.check(all(r["non-reentrant"][0] == "right" for r in outputs_table.values()), "non-reentrant: all right")
gt.check(
    outputs_table["a dictionary"]["reentrant"] == ("wrong", ""), "reentrant: a dictionary loses its gradient, silently"
)
gt.check(flags[True] and not flags[False], "reentrant marks a detached output as if it were not")

# %% [markdown]
# ## Trap 9: the KV cache left on
#
# For generation, attention layers append their keys and values to a cache. In training that is useless, but
# `config.use_cache` is true by default. Hugging Face turns it off when *its own* switch is on; a wrapper put round the
# layers from outside tells nobody. Then the replay appends a second time: it is not the same function any more
# ([pytorch#155171](https://github.com/pytorch/pytorch/issues/155171)).
#
# **Predict** what you see: an error, or wrong gradients?

# %%
cache = {}
for attention in ("eager", "sdpa"):
    for reentrant in (True, False):
        for on in (True, False):
            untouched = step_of(tiny(attention=attention), batch, seed=SEED)
            model = wrapped(tiny(attention=attention, use_cache=on), reentrant)
            seen = attempt(lambda model=model: step_of(model, batch, seed=SEED))
            if seen.failed:
                found = "error"
            elif untouched.same_bits(seen.value):
                found = "right, bit for bit"
            else:
                found = f"gradient off by {untouched.off(seen.value):.0%}"
            cache[attention, reentrant, on] = (seen, found)
pd.DataFrame(
    [(a, "reentrant" if r else "non-reentrant", on, found) for (a, r, on), (_, found) in cache.items()],
    columns=["attention", "implementation", "use_cache", "what happens"],
)

# %%
silent, _ = cache["sdpa", True, True]
untouched = step_of(tiny(), batch, seed=SEED)
print(f"sdpa, reentrant: loss {silent.value.loss:.6f} against {untouched.loss:.6f} untouched")
gt.check(
    silent.value.loss == untouched.loss and untouched.off(silent.value) > 0.1, "same loss, wrong gradients, no error"
)
gt.check(
    not any(g.any() for name, g in silent.value.gradients.items() if "k_proj" in name or "v_proj" in name),
    "the key and value projections get no gradient at all",
)
gt.check(cache["sdpa", False, True][1].startswith("right"), "non-reentrant with sdpa: right, by luck")
gt.check(cache["eager", False, True][0].failed, "with eager attention the shapes no longer fit: an error")
off = [found for (*_, on), (_, found) in cache.items() if not on]
gt.check(all(found.startswith("right") for found in off), "use_cache=False mends all")
codes = doctor_says(wrapped(tiny(use_cache=True), True))
gt.check({"cache_on", "gradients_differ"} <= set(codes), "the doctor finds the cache, and what it did")

# %% [markdown]
# In the replay the cache hands out the forward's keys followed by the same keys again. Eager attention fails on their
# length. Before the fused kernel (`sdpa`), this transformers cuts keys that are longer than the queries to their first
# part, which under a causal mask is all that counts: so shapes and values fit again, and PyTorch's check of shapes and
# types has nothing to find. But that first part was made in the *forward*. The reentrant forward recorded no graph, so
# keys and values get no gradient; the non-reentrant one did, and differentiates it on equal values. That it comes out
# right hangs on this cut alone.
#
# *Repair*: `use_cache=False`, in the configuration or in the call, wherever something else than the model's own switch
# checkpoints it. Policies of this package turn it off themselves, and back on afterwards.
#
# ## Trap 10: the same thing applied twice
#
# A notebook cell that is run again, or a `train()` called twice, wraps what is wrapped already.
#
# **Predict**: does the count of matrix products show it?

# %%
twofold = {}
for reentrant in (True, False):
    model = wrapped(wrapped(tiny(), reentrant), reentrant)
    wrappers = sum(type(module).__name__ == "CheckpointWrapper" for module in model.modules())
    twofold[reentrant] = (wrappers, attempt(lambda model=model: matmuls(model, batch)).value[1])
    print(
        f"use_reentrant={reentrant}: {wrappers} wrappers round {layers} layers, {twofold[reentrant][1]} mm in backward"
    )
gt.check(twofold[False] == (2 * layers, block_mm), "non-reentrant: the wrappers nest and the count does not show it")
gt.check(twofold[True][1] > full_mm, "reentrant: the inner region is replayed once more, and the count shows it")
gt.check("nested_wrappers" in doctor_says(model), "the doctor counts wrappers, not operators")

# %%
model = tiny()
policy = gt.parse("block")
with policy.applied(model), policy.applied(model):
    once = matmuls(model, batch)[1]
gt.check((once, matmuls(model, batch)[1]) == (block_mm, none_mm), "gctutor: applied twice equals once, and it undoes")
foreign = attempt(lambda: policy.applied(wrapped(tiny(), False)).__enter__())
gt.check(foreign.failed, f"and somebody else's checkpointing is refused: {foreign.error}")

# %% [markdown]
# ## Trap 11: eval mode
#
# `from_pretrained` returns a model in eval mode. Hugging Face's switch acts only in train mode.

# %%
model = tiny({"use_reentrant": False}).eval()
in_eval, in_train = matmuls(model, batch)[1], matmuls(model.train(), batch)[1]
print(f"mm in backward: {in_eval} in eval mode, {in_train} in train mode, {none_mm} without checkpointing")
gt.check(in_eval == none_mm and in_train == block_mm, "in eval mode the switch is on and nothing is recomputed")
gt.check("eval_mode" in doctor_says(model.eval()), "the doctor asks for train mode first")

# %% [markdown]
# *Recognise it*: memory that checkpointing does not lower. *Repair*: `model.train()` before the first step.
#
# ## What the article says
#
# Two claims are left. First, what the reentrant implementation cannot do; then whether to use it at all.

# %%
broken = {
    "stateful hooks": hook_error[True] > 0,
    "retain_graph": table["retain_graph, twice"]["reentrant"][0] != "right",
    "non-leaf tensors": any(
        inputs_table[name]["reentrant"][0] != "right" for name in ("a tuple", "a tuple and a tensor", "a closure")
    ),
}
gt.judge(
    "R03",
    holds=all(broken.values()),
    because=(
        f"retain_graph {'fails' if broken['retain_graph'] else 'works, with equal gradients'}; stateful hooks give "
        f"wrong gradients under it ({hook_error[True]:.0%} off), but under the non-reentrant as well "
        f"({hook_error[False]:.0%}); "
        f"non-leaf tensors are fine as arguments and {'fail' if broken['non-leaf tensors'] else 'work'} in tuples and "
        "closures. What it really lacks is torch.autograd.grad, backward(inputs=…) and create_graph"
    ),
    source="measured",
    device="CPU",
)

# %%
everything = {**table, **inputs_table, **outputs_table}
worse = [n for n, r in everything.items() if r["reentrant"][0] != "right" and r["non-reentrant"][0] == "right"]
better = [n for n, r in everything.items() if r["reentrant"][0] == "right" and r["non-reentrant"][0] != "right"]
gt.judge(
    "R02",
    holds=bool(worse) and not better,
    because=(
        f"of {len(everything)} uses tried, {len(worse)} go wrong under the reentrant implementation only and "
        f"{len(better)} under the other only; for want of early stop it also replays the last matrix product of each "
        "layer. Where none of these uses occurs its gradients are equal bit for bit; hooks inside it fire evenly, but "
        "set_checkpoint_early_stop(False) gives the non-reentrant that too"
    ),
    source="measured",
    device="CPU",
)

# %% [markdown]
# ## Exercises
#
# **Exercise 1 (10 minutes).** Python's `random` is not restored either. Write `python_restored`, a `context_fn`
# like `numpy_restored` above, that makes the drop-out layer fed by `random.random()` right.


# %%
def check_exercise_1(context_fn):
    switch = {"use_reentrant": False, "context_fn": context_fn}
    seen = attempt(lambda: noisy_step(SOURCES["python"], switch))
    right = not seen.failed and noisy_step(SOURCES["python"]).same_bits(seen.value)
    gt.check(right, "Python's generator is restored in the replay")


# %% tags=["exercise"]
answer_1 = None  # your function here
print("Exercise 1 is still to do: write it, then run check_exercise_1(answer_1).")


# %% tags=["solution", "hide-input"] jupyter={"source_hidden": true}
def python_restored():
    state = random.getstate()

    @contextlib.contextmanager
    def replay():
        now = random.getstate()
        random.setstate(state)
        try:
            yield
        finally:
            random.setstate(now)

    return contextlib.nullcontext(), replay()


check_exercise_1(python_restored)

# %% [markdown]
# **Exercise 2 (10 minutes).** `region` returns a dictionary, takes its second tensor by keyword, and must run under the
# reentrant implementation for once. Write `safe(h, scale)` that checkpoints it reentrantly and returns the same
# dictionary with the right gradient.


# %%
def region(x, *, scale):
    return {"h": (x @ weight) * scale}


def check_exercise_2(safe):
    def through(call):
        x = start.clone().requires_grad_()
        scale = 3 * x
        return gradient_of(call(2 * x, scale)["h"], x)

    def gradient_of(h, x):
        h.square().sum().backward()
        return x.grad

    right = through(lambda h, scale: region(h, scale=scale))
    seen = attempt(lambda: through(safe))
    gt.check(
        not seen.failed and torch.equal(seen.value, right), "the gradient is that of the region without checkpointing"
    )


# %% tags=["exercise"]
answer_2 = None  # your function here
print("Exercise 2 is still to do: write it, then run check_exercise_2(answer_2).")


# %% tags=["solution", "hide-input"] jupyter={"source_hidden": true}
def safe(h, scale):
    return {"h": checkpoint(lambda h, scale: region(h, scale=scale)["h"], h, scale, use_reentrant=True)}


check_exercise_2(safe)

# %% [markdown]
# ## In three lines
#
# - Of the sources of chance, a recompute restores torch's default generators only (CPU and the inputs' devices).
# - Write `use_reentrant=False` out: the other implementation needs care with inputs, outputs, hooks and frozen layers.
# - Compare gradients once before you train, and count what backward runs: the worst of these traps leave that step's
#   loss untouched.
#
# **Further reading**: [torch.utils.checkpoint](https://docs.pytorch.org/docs/stable/checkpoint.html), whose notes list
# the differences; [Chen et al. 2016](https://arxiv.org/abs/1604.06174), where it began;
# [saved-tensor hooks](https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html), on
# which the non-reentrant one is built; [activation checkpointing techniques in PyTorch](https://pytorch.org/blog/activation-checkpointing-techniques/).
#
# **Next:** [9. Tell rounding from a bug: bf16 gradients under recompute](09_pitfalls_bf16.ipynb)

# %%
print(gt.colophon(SEED))

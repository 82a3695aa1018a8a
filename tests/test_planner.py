"""The planner: optimum against brute force and ranking, budgets kept in traced bytes, plans that fit, advice."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from gctutor import planner
from gctutor.devices import find_device
from gctutor.errors import UserError
from gctutor.estimation import trace
from gctutor.optimum import Choice, LayerCosts, Site, best, frontier, greedy, layer_costs
from gctutor.paste import lines_to_paste
from gctutor.planner import plan, resolve
from gctutor.policies import PolicyError, catalogue, concrete, parse
from gctutor.policies.modules import ALL
from gctutor.simulation import seconds_of
from gctutor.workload import Workload, build, inputs

NANO = Workload("nano", seqlen=128)
DEEP = Workload("nano", seqlen=1024)  # its layers, not its loss, make the peak
H100 = find_device("H100")
NAMED = [
    "none",
    "block",
    "block/2",
    "sub:mlp",
    "sub:attn",
    "sub:norms",
    "sub:attn,mlp",
    "sub:mlp,norms",
    "ops:core_attn",
    "ops:mm,core_attn",
    "ops:mm,core_attn,-down_proj",
    "ops:every2mm,core_attn",
    "modules:core_attn",
    "modules:all",
]


@pytest.fixture(scope="module")
def costs() -> LayerCosts:
    return layer_costs(NANO, H100)


def recompute_s(policy, workload=NANO, device=H100) -> float:
    """Seconds of what the traced step runs again, by the roofline."""
    step = trace(workload, policy, kind=device.kind)
    return sum(seconds_of(k, device) for s in step.segments for k in s.kernels if k.phase == "recompute")


# --- costs ---


def test_a_site_costs_its_output_and_saves_its_product(costs):
    tokens, width, mlp = 128, 512, 1536
    sites = {site.name: site for site in costs.sites}
    assert sites["gate_proj"].bytes == sites["up_proj"].bytes == tokens * mlp * 2
    assert sites["q_proj"].bytes == sites["o_proj"].bytes == sites["down_proj"].bytes == tokens * width * 2
    assert costs.block_bytes == tokens * width * 2
    assert sites["down_proj"].seconds == 0, "early stop never reruns it, and the addition before it is not its own"
    assert all(sites[name].seconds > 0 for name in ALL)
    assert sum(site.seconds for site in costs.sites) < costs.replay_s


def test_lora_makes_down_proj_worth_keeping():
    sites = {site.name: site for site in layer_costs(NANO.replace(trainable="lora:8"), H100).sites}
    assert sites["down_proj"].seconds > 0


def test_yield_per_byte_of_a_site_without_bytes_or_seconds():
    assert Site("free", 0, 1e-3).seconds_per_gb == math.inf
    assert Site("useless", 10, 0.0).seconds_per_gb == 0
    assert Site("gate", 2 * 10**9, 0.5).seconds_per_gb == 0.25


def test_sums_are_those_of_the_trace(costs):
    step = trace(NANO, "modules:all")
    everything = Choice(costs, 0, tuple(6 * (site.name in ALL) for site in costs.sites))
    assert everything.activation_bytes == step.activation_bytes
    assert everything.recompute_s == pytest.approx(recompute_s("modules:all"), rel=0.02)
    assert costs.least_bytes == trace(NANO, "block").activation_bytes


# --- the optimum ---


def by_brute_force(costs: LayerCosts, budget: float) -> float:
    layers = range(costs.n_layers + 1)
    times = [
        choice.recompute_s
        for left, kept in itertools.product(layers, itertools.product(layers, repeat=len(costs.sites)))
        if left + max(kept) <= costs.n_layers and (choice := Choice(costs, left, kept)).activation_bytes <= budget
    ]
    return min(times)


sizes = st.integers(1, 50).map(lambda n: n * 10_000_000)
times = st.floats(1e-5, 1e-3)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(sizes, times), min_size=1, max_size=3), st.integers(1, 3), st.floats(0, 1.1))
def test_the_optimum_is_that_of_brute_force_and_greedy_is_never_better(sites, n_layers, share):
    sites = tuple(Site(f"s{i}", size, seconds) for i, (size, seconds) in enumerate(sites))
    total = sum(site.seconds for site in sites)
    costs = LayerCosts(n_layers, 10**9, 10**7, 10**7 + 2 * sum(s.bytes for s in sites), 1.2 * total, sites)
    budget = costs.least_bytes + share * (costs.most_bytes - costs.least_bytes)
    found, ranked = best(costs, budget), greedy(costs, budget)
    assert found.activation_bytes <= budget + 1
    assert ranked.activation_bytes <= budget
    assert found.recompute_s == pytest.approx(by_brute_force(costs, budget), abs=1e-9)
    assert found.recompute_s <= ranked.recompute_s + 1e-9


def test_of_the_real_costs_too(costs):
    small = dataclasses.replace(costs, n_layers=2, sites=costs.sites[2:6])
    for share in (0, 0.2, 0.5, 0.8, 1):
        budget = small.least_bytes + share * (small.most_bytes - small.least_bytes)
        assert best(small, budget).recompute_s == pytest.approx(by_brute_force(small, budget), abs=1e-12)


def test_the_ends_are_block_and_none_and_below_block_there_is_nothing(costs):
    assert str(best(costs, costs.least_bytes).policy) == "block"
    assert str(best(costs, costs.most_bytes).policy) == "none"
    assert best(costs, costs.least_bytes - 1) is None
    assert greedy(costs, costs.least_bytes - 1) is None


def test_greedy_keeps_whole_sites_by_yield_and_never_what_saves_nothing(costs):
    ranked = greedy(costs, costs.most_bytes)
    kept = dict(zip((site.name for site in costs.sites), ranked.kept, strict=True))
    assert kept == dict.fromkeys(ALL, 6) | {"down_proj": 0}


def test_the_layers_that_keep_most_come_last(costs):
    kept = tuple({"q_proj": 2, "core_attn": 4}.get(site.name, 0) for site in costs.sites)
    choice = Choice(costs, 1, kept)
    assert str(choice.policy) == "block@0;modules:core_attn@1-2;modules:q_proj,core_attn@3-4;none@5"


def test_the_frontier_falls_and_every_point_of_it_round_trips():
    points = frontier(NANO, "H100", points=9)
    assert [str(points[0].policy), str(points[-1].policy)] == ["block", "none"]
    assert all(a.activation_bytes < b.activation_bytes for a, b in itertools.pairwise(points))
    assert all(a.recompute_s > b.recompute_s for a, b in itertools.pairwise(points))
    for point in points:
        assert str(parse(str(point.policy))) == str(point.policy)
        assert trace(NANO, point.policy).activation_bytes == pytest.approx(point.activation_bytes, abs=10_000)


@pytest.mark.parametrize("policy", NAMED)
def test_no_named_policy_lies_below_the_frontier(policy):
    workload = Workload(layers=4)
    costs, none, kept = layer_costs(workload, H100), trace(workload, "none"), trace(workload, policy)
    slack = costs.most_bytes - none.activation_bytes  # the sums take the first layer for a middle one
    choice = best(costs, kept.activation_bytes + slack)
    assert trace(workload, choice.policy).activation_bytes <= kept.activation_bytes + slack
    assert recompute_s(choice.policy, workload) <= recompute_s(policy, workload) + 1e-8


# --- requests ---


@settings(max_examples=5, deadline=None)
@given(st.floats(0.15, 1.0))
def test_a_budget_is_kept_in_traced_bytes(share):
    policy = resolve(f"budget:{share:.3f}", NANO, "H100")
    none = trace(NANO, "none").activation_bytes
    assert trace(NANO, policy).activation_bytes <= round(share, 3) * none
    assert concrete(str(policy)) == policy


def test_a_budget_of_all_is_none_and_too_small_a_one_is_refused_with_figures():
    assert str(resolve("budget:1", NANO, "H100")) == "none"
    with pytest.raises(UserError, match=r"budget:0.01 allows .* GB, but block, which keeps least, keeps"):
        resolve("budget:0.01", NANO, "H100")


def test_a_concrete_policy_resolves_to_itself():
    policy = concrete("block/2")
    assert resolve(policy, NANO, "H100") is policy


def test_auto_keeps_what_is_right_of_the_ridge():
    workload = Workload(layers=1)
    assert str(resolve("auto", workload, "H100")) == "ops:mm,core_attn"
    assert str(resolve("auto", workload.replace(seqlen=256), "H100")) == "block"
    between = str(resolve("auto", workload.replace(seqlen=450), "H100"))
    assert between == "ops:mm,-k_proj,-v_proj"


@pytest.mark.parametrize("text", [*catalogue(), "auto", "budget:0.4", "modules:core_attn@0-17;none@18-35"])
def test_every_policy_string_round_trips(text):
    assert str(parse(str(parse(text)))) == str(parse(text))
    assert parse(str(parse(text))) == parse(text)


# --- plans ---


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_a_plan_within_a_budget(share):
    found = plan(NANO, "H100", budget=share)
    assert found.fits
    assert found.cost.activation_bytes <= share * found.none.activation_bytes
    assert found.best_recompute_s <= found.greedy_recompute_s + 1e-12
    assert str(parse(found.policy)) == found.policy


def test_a_plan_for_a_card_fits_by_its_own_estimate_and_is_faster_than_block():
    none, block = (trace(DEEP, policy).peak_bytes for policy in ("none", "block"))
    limit = (none + block) / 2
    found = plan(DEEP, "H100", fits_in=limit, reserve_bytes=0)
    assert block < found.cost.peak_bytes <= limit
    assert recompute_s(found.policy, DEEP) < recompute_s("block", DEEP)


def test_a_reserve_is_held_back_and_plenty_of_room_needs_no_checkpoint():
    none = trace(DEEP, "none").peak_bytes
    assert plan(DEEP, "H100", fits_in=none, reserve_bytes=0).policy == "none"
    assert plan(DEEP, "H100", fits_in=none, reserve_bytes=1).policy != "none"
    assert plan(DEEP, "H100").policy == "none"


@pytest.mark.parametrize("optimizer", [None, "adamw", "adamw8bit"])
def test_when_nothing_fits_the_plan_says_by_how_much_and_what_would(optimizer):
    workload = Workload("nano", batch=2, seqlen=256, optimizer=optimizer)
    block = trace(workload, "block").peak_bytes
    found = plan(workload, "H100", fits_in=0.95 * block, reserve_bytes=0)
    assert not found.fits
    assert "Even block peaks at" in found.advice[0]
    suggestions = " ".join(found.advice[1:])
    assert "LoRA (lora:16) would fit" in suggestions
    assert ("8-bit AdamW would fit" in suggestions) == (optimizer == "adamw")
    with pytest.raises(UserError, match="Nothing fits"):
        _ = found.policy


def test_each_piece_of_advice_is_true():
    workload = Workload("nano", batch=2, seqlen=256, optimizer="adamw")
    limit = 0.9 * trace(workload, "block").peak_bytes
    for words, change in planner._changes(workload):
        promised = any(words in line for line in plan(workload, "H100", fits_in=limit, reserve_bytes=0).advice)
        assert promised == (trace(change, "block").peak_bytes <= limit)


def test_further_kernels_are_tried_and_the_fastest_wins():
    found = plan(NANO, "H100", budget=0.6, kernels=["hf", "hf+chunked"])
    assert [kernels for kernels, _ in found.brought] == ["hf", "hf+chunked"]
    assert found.cost.step_s == min(cost.step_s for _, cost in found.brought)
    assert found.workload.kernels in ("hf", "hf+chunked")


# --- lines to paste ---


def test_lines_of_a_plan_apply_the_very_policy():
    text = "modules:core_attn@0-2;none@3-5"
    lines = lines_to_paste(text)
    assert set(lines) == {"transformers", "Trainer / TRL"}
    assert all(f'parse("{text}").applied(model)' in line for line in lines.values())
    for line in lines.values():
        compile(line, "pasted", "exec")


def test_what_a_plan_takes_for_granted_comes_first_and_runs():
    workload = NANO.replace(kernels="hf+chunked", trainable="lora:4", optimizer="sgd", layers=1)
    lines = lines_to_paste("block", workload)
    assert next(iter(lines)) == "setting" and "setting" not in lines_to_paste("block", NANO)
    scope = {"model": build(NANO.replace(layers=1))}
    exec(lines["setting"], scope)
    ours = [name for name, p in build(workload).named_parameters() if p.requires_grad]
    assert [name for name, p in scope["model"].named_parameters() if p.requires_grad] == ours
    assert isinstance(scope["optimizer"], torch.optim.SGD)
    assert scope["model"](**inputs(NANO)).logits is None
    assert (
        "liger.patch(model, ('rms_norm', 'rope'))"
        in lines_to_paste("none", Workload(kernels="liger:rms_norm,rope"))["setting"]
    )


def test_native_switches_are_named_where_they_exist():
    assert "use_reentrant: false" in lines_to_paste("block")["Axolotl"]
    assert "every_n_layers=2" in lines_to_paste("block/2")["transformers"]
    assert "selective" in lines_to_paste("ops:core_attn,every2mm")["torchtitan"]
    with pytest.raises(PolicyError, match="did you mean"):
        lines_to_paste("blok")

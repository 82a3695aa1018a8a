# %% [markdown]
# # 11. Read the scorecard
#
# You will see every claim of the source article next to what this series showed, with the verdict that code gave.
#
# **Afterwards you can**
# - tell which advice on gradient checkpointing to keep, which with a condition, and which to drop;
# - trace each verdict to the figure and the notebook behind it;
# - say which verdicts a measurement on a GPU could change.
#
# **Before you start:** nothing; but each row links to the notebook that explains it.
#
# **Time:** 15 minutes of reading. The cells run in seconds anywhere. **Memory:** next to nothing.

# %% tags=["parameters"]
SEED = 0

# %%
import pandas as pd
from IPython.display import Markdown, display

import gctutor as gt
from gctutor.claims import decide, find_claim, list_claims, verdict_of, verdicts

pd.set_option("display.max_colwidth", None)

# %% [markdown]
# ## How a verdict comes about
#
# Whether a claim holds is computed. Where a notebook makes a figure, it calls `gt.judge` with the value and a
# tolerance, or with a test that is true or false. What to test was our choice, and most conditions after "when" are our
# words. The verdicts are collected, and this page only reads them:
#
# - **holds**: the figure agrees with the claim;
# - **holds when …**: it does under the condition named;
# - **does not hold**: it does not, and the reason has the figure that shows it;
# - **not judged here**: the notebook has not been run, or the claim needs a GPU.
#
# Several notebooks may judge one claim. What was *measured* then outweighs what was *recorded* elsewhere, and both
# outweigh an *estimate*.
#
# **Predict:** of the article's claims, what share holds as it was said?

# %%
card = gt.scorecard()
ORDER = ["holds", "holds when", "does not hold", "not judged here"]
card["outcome"] = [next(o for o in reversed(ORDER) if verdict.startswith(o)) for verdict in card.verdict]
judged = card[card.outcome != "not judged here"]
card.outcome.value_counts().reindex(ORDER, fill_value=0).rename("claims").to_frame()

# %%
Markdown(
    f"Of {len(card)} claims {len(judged)} are judged: **{(judged.outcome == 'holds').sum()}** hold as they were said, "
    f"**{(judged.outcome == 'holds when').sum()}** hold under a condition, "
    f"**{(judged.outcome == 'does not hold').sum()}** do not hold."
)

# %% [markdown]
# By part of the article:

# %%
sections = pd.crosstab(card.section, card.outcome)
sections.reindex(index=card.section.unique(), columns=ORDER, fill_value=0).rename_axis(None, axis=1)

# %% [markdown]
# ## Every claim
#
# The number in the last column is the notebook where the verdict was given.


# %%
def cell(text):
    return str(text).replace("|", "\\|").replace("\n", " ")


def line(row):
    link = f"[{row.notebook.partition('_')[0]}]({row.notebook}.ipynb)"
    figures = f"claimed {row.claimed}; found {row.value}. " if row.claimed and row.value else ""
    found = f"{figures}{row.because}" if row.because else row.status
    return f"| {row.id} | {cell(row.claim)} | **{cell(row.verdict)}** | {cell(found)} | {cell(row.source)} | {link} |"


head = "| | the article says | verdict | what was found | source | shown in |\n|---|---|---|---|---|---|"
for section in card.section.unique():
    rows = card[card.section == section].itertuples()
    display(Markdown(f"### {section}\n\n{head}\n" + "\n".join(map(line, rows))))

# %% [markdown]
# ## What is not judged, and how firm the rest is

#
# An estimate is two things: bytes and FLOPs, counted exactly, and seconds by a roofline. Where the article gives
# figures, we can tell which of the two decides: does the verdict stay what it is, whatever the seconds turn out to be?

# %%
TIMES = ("_s", "time_share", "faster_share")  # how the names of figures end that are seconds, or shares of them
given = {(verdict.id, verdict.notebook): verdict for verdict in verdicts()}


def rests_on(row):
    """What decides the verdict of this row: its source, and for an estimate the kind of figures."""
    verdict, claimed = given[row.id, row.notebook], find_claim(row.id).value
    if verdict.source != "estimated":
        return verdict.source
    if claimed is None or verdict.value is None:
        return "estimated: a test, named in its reason"
    if not isinstance(claimed, dict) or not any(name.endswith(TIMES) for name in claimed):
        return "estimated: bytes and counts"
    timeless = {name: figure for name, figure in claimed.items() if not name.endswith(TIMES)}
    allowed = verdict.tolerance or 0.0
    stands = all(verdict_of(verdict.value[name], figure, allowed) == "holds" for name, figure in timeless.items())
    return "estimated: seconds" if stands else "estimated: bytes and counts"


def grouped(labels):
    """How many claims have each label, and which."""
    groups = pd.Series(labels, dtype=object).rename_axis("id").reset_index(name="").groupby("").id
    return groups.agg(claims="count", which=", ".join)


grouped({row.id: rests_on(row) for row in judged.itertuples()})

# %% [markdown]
# - *bytes and counts*: a claimed figure that is no time is already off, or no time is claimed. No GPU will change it.
# - *seconds*: the claimed bytes and counts stand, or there are none. A measured time could change the verdict, unless
#   its reason says more.
# - *a test*: no figure is claimed. The reason says whether bytes or seconds decide.
#
# And what is open, or out of date:

# %%
unsettled = card[~card.status.str.startswith("judged")].set_index("id").status
grouped(unsettled) if len(unsettled) else Markdown("Nothing: every verdict is there and newer than its notebook.")

# %% [markdown]
# - *older than its notebook*: the notebook was edited after it gave the verdict. Run it again.
# - *has not been run*, *needs a GPU*: run the series with `gctutor notebooks run`.
#
# No claim that a CPU can settle may stay open once its notebook has been run:

# %%
needs = {claim.id: claim.needs for claim in list_claims()}
ran = set(judged.notebook)
overlooked = [
    row.id
    for row in card.itertuples()
    if row.outcome == "not judged here" and needs[row.id] == "any" and row.notebook in ran
]
gt.check(not overlooked, f"no claim was passed over by the {len(ran)} notebooks that have given verdicts")
gt.check(set(card.id) == set(needs), f"and all {len(needs)} claims of the article are listed")
waiting = sorted(set(card.notebook[card.outcome == "not judged here"]) - ran)
print("Notebooks yet to be run:", ", ".join(waiting) or "none")

# %% [markdown]
# ### Exercise: what would change your mind? (10 minutes)
#
# Most claims come with several figures, and all of them must agree. Some have one:

# %%
ALLOWED = 0.1
lone = [claim for claim in list_claims() if isinstance(claim.value, float)]
lone_ids = ", ".join(claim.id for claim in lone)
Markdown(f"Claims with one figure: {lone_ids}. Say that {ALLOWED:.0%} either way is allowed.")

# %% [markdown]
# Choose one of these. Find in the table what is claimed, and give a value at which the verdict would turn:
# `answer = (claim, value)`.

# %% tags=["exercise"]
answer = None  # (claim, value)


def check_exercise_1(answer):
    gt.check(answer is not None, "there is an answer")
    claim_id, value = answer
    below, above = (
        decide(claim_id, value=value * factor, tolerance=ALLOWED, because="an exercise").verdict
        for factor in (0.99, 1.01)
    )
    gt.check(below != above, f"at {value:,.3g} the verdict on {claim_id} turns from '{below}' to '{above}'")


print("The exercise is yours to do: set `answer`, then run check_exercise_1(answer).")

# %% tags=["solution", "hide-input"] jupyter={"source_hidden": true}
# F02 would hold from its claimed bytes less what is allowed. (The upper end would do as well.)
answer = ("F02", (1 - ALLOWED) * find_claim("F02").value)
check_exercise_1(answer)

# %% [markdown]
# ## In three lines

# %%
figured = {claim.id for claim in list_claims() if claim.value is not None}
counts = pd.crosstab(judged.id.isin(figured).map({True: "figures", False: "advice"}), judged.outcome)
counts = counts.reindex(index=["advice", "figures"], columns=ORDER, fill_value=0)
total, stand, fall = counts.sum(axis=1), counts["holds"] + counts["holds when"], counts["does not hold"]
Markdown(
    f"- Judged statements without a figure that stand: {stand['advice']} of {total['advice']}, "
    f"{counts['holds when']['advice']} under a condition.\n"
    f"- Judged claims with figures that stand: {stand['figures']} of {total['figures']}.\n"
    "- A claim with a computed verdict can be checked again tomorrow, on other versions and another machine."
)

# %%
gt.check(
    counts.sum(axis=None) == len(judged) and (stand + fall == total).all(),
    f"each of the {len(judged)} judged claims is counted once",
)

# %% [markdown]
# ## Further reading
#
# - T. Hoefler, R. Belli, [Scientific Benchmarking of Parallel Computing
#   Systems](https://htor.inf.ethz.ch/publications/index.php?pub=222), 2015: twelve rules for figures others can check.
# - PyTorch, [torch.utils.checkpoint](https://docs.pytorch.org/docs/stable/checkpoint.html).
#
# **Next:** your own model. `gctutor plan --help` and `gctutor doctor --help` are where to begin.

# %%
print(gt.colophon(SEED))

"""The prose of the accuracy page. Every figure in it is filled in from data."""

from __future__ import annotations

#: What the fit had not seen, by scheme.
SEEN = {
    "group": "one architecture on one GPU type is left out. Other runs of that architecture on other GPU types, and of "
    "other architectures on that GPU type, took part",
    "architecture": "an architecture is left out on all GPU types",
    "gpu": "a generation of GPUs is left out with all architectures on it",
    "hidden": "a hidden size is left out; vTrain's runs only, whose models form a grid",
    "anchor": "as `group`, but one run of the same framework, release, GPU type and precision is known; that run "
    "itself is not counted",
    "shipped": "nothing is left out. These are the corrections that ship, on the runs that they were fitted to: how "
    "well they describe, not how well they predict",
}

INTRO = """How far estimates of step time and memory are from published training runs. The page is made from data
({runs} published runs, in `benchmarks/data`) by"""

DATA = """The runs stand in `benchmarks/data/published_runs.csv.gz`, each with repository, file and commit. {measured}
pretraining runs of {frameworks} frameworks on {gpus} GPU types with {architectures} architectures are judged: their
source states a step time or a throughput and the plan, and they can be priced. Nobody ran them for this project;
settings that a source leaves out are assumed."""

LEFT_OUT = """Runs are left out of the fit of the corrections by whole groups, never one by one, because neighbours in
a table are nearly copies; each is then predicted by corrections that have not seen it. What is left out together is
the `scheme`:"""

NOT_HIDDEN = """What no split shows: the form of the model was chosen with these runs in sight; the fits without a
group linearise prices around the point that all runs together gave; rates of operators and collectives come from
measurements of kernels and are the same in every split; the T4's rates were fitted on AMP's runs, so its rows are not
unseen. Of vTrain's runs on one node only a fifth takes part in any fit. Four runs of torchtitan on B200, under a power
limit that their source does not state, take part in none; they are judged like all others."""

FIGURES = """An error is predicted over measured step time, less one. Tables show mean, median and 90th percentile of
its size; `bias` is its signed median, below zero where estimates are too short. `inside` is the share of measured
times within an interval that promises {level}; here it is set for each run from the left-out errors of the other
groups of its stack and kind."""

TIMES = """Scheme `group`. Some sources have hundreds of runs of one model; `median of groups` counts each
architecture on each GPU type once, with its median."""

FRAMEWORKS = """By framework and kind. The modes of a framework are put together; `Megatron-DeepSpeed` is nearly all
vTrain's runs, which state no precision."""

NODES = """Of vTrain's runs by the number of nodes:"""

SCATTER = """Predicted over measured step time against measured step time, on logarithmic axes, one mark a run, by
framework. The table by framework holds the figures.""".replace("\n", " ")

BOXES = """Box plots of signed errors by {}: the box holds the middle half of the runs, the whiskers 90% of them. The
table above holds the figures.""".replace("\n", " ")

COVERAGE = """Share of measured times inside the interval by framework, beside the share that the interval promises.
The column inside of the table above holds the figures.""".replace("\n", " ")

ORDER = """Share of pairs of plans that are predicted in the measured order, by how far apart their measured times
are. The table above holds the figures.""".replace("\n", " ")

SCHEMES = """Each scheme on the runs that it can be made for, so that their number differs."""

ANCHOR = """Scheme `anchor`: the run's group is left out, but one measured run of the same framework, release, GPU
type and precision, of whatever model, takes part with a larger weight. The last two columns are scheme `group` on the
same runs. [Calibrate](calibrate.md) corrects estimates by runs of yours."""

WEAK = """Of {groups} groups (an architecture on a GPU type) with {fewest} runs or more, {weak} have a median error
above {limit} under scheme `group`. Do not trust an estimate of such a kind without a run of your own. An architecture
is named by its kind, its layers and hidden size, and a digest of the rest."""

RELEASES = """Runs with the same settings in two neighbouring releases of one framework: the longer over the shorter
measured time, less one. By that much a perfect estimate for one release errs on the other."""

RANKING = """A planner needs the order of plans more than their seconds. These are pairs of runs of one source,
architecture, GPU type, number of GPUs, framework, release, precision and batch that differ in their plan and whose
measured times are more than 3% apart (6% for mixtures of experts), predicted under scheme `group`. An equal
prediction counts as wrong."""

MEMORY = """Nothing in the memory model is fitted on these peaks, but its formulas were written with them in sight.
Like is compared with like: torch's allocated peak with allocated, reserved with reserved, on the rank that the source
read. Test runs are functional and convergence tests whose settings are only partly known. {others} more peaks are
those of other allocators or of a device and are left aside. `python -m benchmarks.memory_accuracy` with `--rows`
lists every run."""

SPEED = """## Speed

Pricing in bulk, as the search does it, is measured by

```text
python -m benchmarks.bulk_pricing 10000
```

which prices 10,000 plans of DeepSeek-V3 on 256 H100 and prints milliseconds a plan. The figure belongs to the machine,
so none stands here. `meshwright backtest` writes the time of every single estimate into its table (`ms`)."""

OTHERS = """Errors of the step time of public tools: their code run on published runs, or what their authors claim.
The last columns are our errors (scheme `group`) on the runs here of the same kind. **They are not the same runs**:
the selections differ in number, a tool's own validation set is in-sample, and some tools needed adjustments to run at
all (calculon has no gated feed-forward, SimuMax no FSDP). Our corrections saw other runs of the same sources, which
the other tools did not."""

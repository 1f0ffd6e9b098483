"""Launchers run: scripts and manifests find their place on shuffled hosts, and stages land on their GPU type."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sysconfig
from pathlib import Path

import jsonschema
import pytest
import yaml

from meshwright.megatron_export.launch import LAUNCHERS, Site, in_plan_order, read_hosts
from meshwright.megatron_export.megatron import export_megatron, read_arguments
from meshwright.specs.cluster_io import cluster_from_data, load_cluster
from meshwright.specs.errors import SpecError
from meshwright.specs.model_io import load_model

from .megatron_plans import document

SCHEMAS = json.loads((Path(__file__).parent / "data" / "kubernetes_schemas.json").read_text())
NUMERICS = {"precision": "fp16", "params_dtype": "fp16"}
POOLS = {
    "pools": [
        {"name": "old cards", "gpu": "V100-32GB", "nodes": 2, "gpus_per_node": 8},
        {"name": "new", "gpu": "A100-80GB", "nodes": 2, "gpus_per_node": 8},
    ]
}
#: Hosts in an order that is neither the plan's nor sorted.
HOSTS = {"zeta": "new", "beta": "V100-SXM2-32GB", "alpha": "A100-SXM-80GB", "omega": "old cards"}
TYPES = {"zeta": "A100", "alpha": "A100", "beta": "V100", "omega": "V100"}
STAGE_TYPES = ["V100", "V100", "A100", "A100"]
HOSTILE = ["it's", 'a "b"', "$(touch pwned)", "`touch pwned`", "a\nb", "naïve 漢字", "}; touch pwned", "-x", "*", ""]
SITE = {
    "account": "llm",
    "partition": "gpu,big",
    "time_limit": "1-04:00:00",
    "image": "nvcr.io/nvidia/nemo:26.06",
    "mounts": [{"source": "/data/it's $(here)", "target": "/data", "read_only": True}],
    "environment": {f"V{index}": text for index, text in enumerate(HOSTILE)},
    "megatron_path": "/opt/it's {$(touch pwned)} here",
}


@pytest.fixture(scope="module")
def mixed():
    return document(
        load_model("llama-2-13b"), cluster_from_data(POOLS), tp=2, pp=4, layers=[6, 6, 14, 14], workload=NUMERICS
    )


def stub(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def place(tmp_path):
    """A folder with stand-ins on PATH: ``torchrun`` notes the host and its arguments, ``srun`` and ``ssh`` run each
    host's share, in an order of their own."""
    tools = tmp_path / "tools"
    tools.mkdir()
    stub(tools, "hostname", '[[ ${1:-} == -f ]] && echo "$FAKE_HOST.example.com" || echo "$FAKE_HOST"')
    stub(tools, "torchrun", 'printf "%s\\n" "$@" >"$NOTES/$FAKE_HOST"; env -0 >"$NOTES/$FAKE_HOST.env"')
    stub(tools, "scontrol", 'printf "%s\\n" $FAKE_HOSTS')
    stub(
        tools,
        "srun",
        'while [[ $1 == -* ]]; do echo "$1" >>"$NOTES/srun"; shift; done\n'
        'for host in $FAKE_HOSTS; do FAKE_HOST=$host "$@"; done',
    )
    stub(tools, "ssh", 'while [[ $1 == -* ]]; do shift 2; done; FAKE_HOST=$1; export FAKE_HOST; shift; bash -c "$*"')
    notes, checkout = tmp_path / "notes", tmp_path / "checkout"
    notes.mkdir()
    checkout.mkdir()
    (checkout / "pretrain_gpt.py").touch()
    run = tmp_path / "run"
    run.mkdir()
    return run, {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "NOTES": str(notes),
        "FAKE_HOSTS": "alpha beta omega zeta",
        "MEGATRON_LM": str(checkout),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "all",
    }


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)


def run(folder: Path, env: dict[str, str], *command: str) -> None:
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def ranks_of(env: dict[str, str]) -> dict[str, range]:
    """The ranks that torchrun would start on each host, after its own arguments."""
    out = {}
    for path in Path(env["NOTES"]).iterdir():
        if path.suffix == ".env" or path.name == "srun":
            continue
        lines = path.read_text().splitlines()
        value = {name: lines[lines.index(name) + 1] for name in ("--node-rank", "--nproc-per-node", "--nnodes")}
        assert value["--nnodes"] == "4"
        assert not any("rdzv" in line for line in lines)
        size = int(value["--nproc-per-node"])
        out[path.name] = range(int(value["--node-rank"]) * size, (int(value["--node-rank"]) + 1) * size)
    return out


def stage_types(ranks: dict[str, range], types: dict[str, str], world: int = 32, pp: int = 4) -> list[str]:
    """GPU types of every stage: Megatron's default order gives stage p the ranks from p * world / pp on."""
    assert sorted(rank for share in ranks.values() for rank in share) == list(range(world))
    found: list[set[str]] = [set() for _ in range(pp)]
    for host, share in ranks.items():
        for rank in share:
            found[rank // (world // pp)].add(types[host])
    return ["+".join(sorted(kinds)) for kinds in found]


@pytest.mark.parametrize(
    ("launcher", "command"),
    [("slurm", ["bash", "job.sbatch"]), ("ssh", ["bash", "launch_ssh.sh"])],
)
def test_a_mapping_of_shuffled_hosts_puts_every_type_under_its_stage(mixed, place, launcher, command):
    folder, env = place
    write(folder, export_megatron(mixed, launcher, HOSTS))
    run(folder, env, *command)
    assert stage_types(ranks_of(env), TYPES) == STAGE_TYPES


def test_torchrun_on_every_host_by_itself(mixed, place):
    folder, env = place
    write(folder, export_megatron(mixed, "torchrun", HOSTS))
    for host in env["FAKE_HOSTS"].split():
        run(folder, {**env, "FAKE_HOST": host}, "bash", "launch_torchrun.sh")
    assert stage_types(ranks_of(env), TYPES) == STAGE_TYPES


def start_pod(folder: Path, env: dict[str, str], pod: dict, name: str, variables: dict[str, str]) -> None:
    (container,) = pod["containers"]
    given = {item["name"]: item["value"] for item in container.get("env", [])}
    *shell, script = container["command"]
    run(folder, {**env, **given, **variables, "FAKE_HOST": name}, *shell, script.replace("/plan/", f"{folder}/"))


def test_jobset_pods_on_labelled_nodes(mixed, place):
    folder, env = place
    files = export_megatron(mixed, "kubernetes")
    write(folder, files)
    ranks_types = {}
    for job in yaml.safe_load(files["jobset.yaml"])["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        pod = spec["template"]["spec"]
        kind = {"old-cards": "V100", "new": "A100"}[pod["nodeSelector"]["meshwright/pool"]]
        for index in reversed(range(spec["completions"])):
            name = f"{job['name']}-{index}"
            ranks_types[name] = kind
            start_pod(folder, env, pod, name, {"JOB_COMPLETION_INDEX": str(index)})
    assert stage_types(ranks_of(env), ranks_types) == STAGE_TYPES


def test_pytorchjob_pods_take_the_operators_rank(place):
    folder, env = place
    cluster = load_cluster("32xA100-80GB")
    files = export_megatron(document(load_model("llama-2-13b"), cluster, tp=2, pp=4, workload=NUMERICS), "pytorchjob")
    write(folder, files)
    spec = yaml.safe_load(files["pytorchjob.yaml"])["spec"]
    assert "elasticPolicy" not in spec
    rank = 0
    for role in ("Master", "Worker"):
        replica = spec["pytorchReplicaSpecs"][role]
        for _ in range(replica["replicas"]):
            variables = {"RANK": str(rank), "MASTER_ADDR": "m"}
            start_pod(folder, env, replica["template"]["spec"], f"pod-{rank}", variables)
            rank += 1
    assert ranks_of(env) == {f"pod-{index}": range(8 * index, 8 * index + 8) for index in range(4)}


def test_a_pytorchjob_of_mixed_pools_is_refused(mixed):
    with pytest.raises(SpecError, match="workers of a PyTorchJob are of one kind") as caught:
        export_megatron(mixed, "pytorchjob")
    assert caught.value.faults[0].alternatives == ("kubernetes",)


@pytest.mark.parametrize("launcher", ["kubernetes", "pytorchjob"])
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("site", [{}, SITE | {"mounts": [{"claim": "data", "target": "/d"}, *SITE["mounts"]]}])
def test_manifests_match_the_schemas(launcher, nodes, site):
    model = load_model("llama-3.1-8b").model_copy(update={"name": HOSTILE[2] + "9\n"})
    doc = document(model, load_cluster(f"{8 * nodes}xH100"))
    files = export_megatron(doc, launcher, site=Site.read(site))
    manifest = yaml.safe_load(files["jobset.yaml" if launcher == "kubernetes" else "pytorchjob.yaml"])
    valid(manifest)
    manifest["spec"]["replicas"] = 3
    with pytest.raises(jsonschema.ValidationError, match="replicas"):
        valid(manifest)


def valid(manifest: dict) -> None:
    jsonschema.validate(manifest, {**SCHEMAS, "$ref": f"#/$defs/{manifest['kind']}"})
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", manifest["metadata"]["name"])


def test_a_mixed_jobset_matches_the_schema(mixed):
    valid(yaml.safe_load(export_megatron(mixed, "kubernetes")["jobset.yaml"]))


def test_a_hostile_site_is_quoted_everywhere(mixed, place):
    folder, env = place
    files = export_megatron(mixed, "slurm", HOSTS, Site.read(SITE | {"arguments": ["--data-path", "it's $(x)"]}))
    write(folder, files)
    found = shutil.which("shellcheck", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]))
    scripts = [name for name in files if name.endswith((".sh", ".sbatch"))]
    assert found
    assert "site.sh" in scripts
    done = subprocess.run([found, *scripts], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    default = {key: value for key, value in env.items() if key != "MEGATRON_LM"}
    refused = subprocess.run(
        ["bash", "job.sbatch"], env=default, cwd=folder, capture_output=True, text=True, check=False
    )
    assert f"no pretrain_gpt.py in {SITE['megatron_path']};" in refused.stderr
    run(folder, env, "bash", "job.sbatch")
    seen = (Path(env["NOTES"]) / "alpha.env").read_bytes().split(b"\0")
    for index, text in enumerate(HOSTILE):
        assert f"V{index}={text}".encode() in seen
    options = (Path(env["NOTES"]) / "srun").read_text().splitlines()
    assert "--container-image=nvcr.io/nvidia/nemo:26.06" in options
    assert f"--container-mounts={folder}:{folder},/data/it's $(here):/data:ro" in options
    assert not list(folder.glob("pwned"))
    head = [line for line in files["job.sbatch"].splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --account=llm", "#SBATCH --partition=gpu,big", "#SBATCH --time=1-04:00:00"} <= set(head)


@pytest.mark.parametrize("launcher", sorted(set(LAUNCHERS) - {"pytorchjob"}))
def test_a_site_replaces_placeholders_and_nothing_else(mixed, launcher):
    given = ["--data-path", "0.3", "/d/a", "0.7", "/d/b", "--tokenizer-type=HuggingFaceTokenizer", "--lr", "3e-4"]
    plain = read_arguments(export_megatron(mixed)["train_args.sh"]).given
    site = Site.read({"arguments": given})
    told = read_arguments(export_megatron(mixed, launcher, site=site)["train_args.sh"]).given
    changed = {name for name in {*plain, *told} if plain.get(name) != told.get(name)}
    assert changed == {"data_path", "mock_data", "tokenizer_type", "lr"}
    assert told["data_path"] == ["0.3", "/d/a", "0.7", "/d/b"]


@pytest.mark.parametrize(
    ("site", "words"),
    [
        ({"arguments": ["--tensor-model-parallel-size", "4"]}, "decided by the plan"),
        ({"arguments": ["--recompute-granularity", "selective"]}, "recompute selective"),
        ({"arguments": ["--no-such-flag"]}, "is not a Megatron argument"),
        ({"arguments": ["stray"]}, "belongs to no flag"),
        ({"account": "a b"}, "one word"),
        ({"account": "a\n#SBATCH --evil"}, "one word"),
        ({"time_limit": "soon"}, "time_limit"),
        ({"environment": {"A B": "x"}}, "environment"),
        ({"environment": {"NODE_RANK": "0"}}, "set by the launch scripts"),
        ({"mounts": [{"target": "/x"}]}, "source or a claim"),
        ({"mounts": [{"source": "data", "target": "/x"}]}, "absolute path"),
        ({"colour": "red"}, "not a known field"),
    ],
)
def test_wrong_sites_are_refused_by_field(mixed, site, words):
    with pytest.raises(SpecError) as caught:
        export_megatron(mixed, site=Site.read(site))
    assert any(words in f"{fault.pointer} {fault.message}" for fault in caught.value.faults)
    assert all(fault.pointer.startswith("/site/") for fault in caught.value.faults)


def test_forms_of_a_host_file(mixed):
    plan, cluster = mixed.plan, mixed.inputs.cluster
    assert read_hosts("# mine\nb # A100\n\na\n") == ["b", "a"]
    assert read_hosts("[b, a]") == read_hosts("- b\n- a\n") == ["b", "a"]
    assert read_hosts("# mine\nb: new # fast\na: old cards\n") == read_hosts('{"b": "new", "a": "old cards"}')
    assert in_plan_order(HOSTS, plan, cluster) == ["omega", "beta", "zeta", "alpha"]
    # A host named by its pool goes before one named by its type; the last is spare.
    assert in_plan_order({**HOSTS, "more": "new"}, plan, cluster) == ["omega", "beta", "zeta", "more"]
    short = {host: kind for host, kind in HOSTS.items() if host != "beta"}
    with pytest.raises(SpecError, match="names 1 too few hosts of pool old cards"):
        in_plan_order(short, plan, cluster)
    with pytest.raises(SpecError, match="no pool or GPU type") as caught:
        in_plan_order({**HOSTS, "zeta": "H100"}, plan, cluster)
    assert caught.value.faults[0].pointer == "/hosts/zeta"
    for text in ("", "# none\n", "a: 3\n", "{a: {b: c}}"):
        with pytest.raises(SpecError):
            read_hosts(text)

"""The exported files: scripts that shells and linters accept, hosts in plan order, nothing unquoted."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sysconfig
from pathlib import Path

import pytest
import yaml

from meshwright.megatron_export import EXPORTERS, LAUNCHERS
from meshwright.megatron_export.megatron import export_megatron, read_arguments
from meshwright.specs.cluster_io import cluster_from_data, load_cluster
from meshwright.specs.document import PlanDocument
from meshwright.specs.errors import SpecError
from meshwright.specs.model_io import load_model

from .megatron_plans import document

HOSTILE = 'it\'s $(touch pwned) `touch pwned` "x"\n#SBATCH --evil ; touch pwned'
MIXED = {
    "pools": [
        {"gpu": "A100-80GB", "nodes": 2, "gpus_per_node": 8, "hosts": ["amber", "azure"]},
        {"gpu": "V100-32GB", "nodes": 2, "gpus_per_node": 8, "hosts": ["violet", "vanilla"]},
    ]
}


@pytest.fixture(scope="module")
def llama():
    return load_model("llama-3.1-8b")


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def shellcheck() -> str:
    found = shutil.which("shellcheck", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]))
    assert found, "shellcheck comes with the dev extra"
    return found


@pytest.mark.parametrize("launcher", sorted(LAUNCHERS))
@pytest.mark.parametrize("cluster", ["8xH100", "16xH100", "mixed", "1x8xA100-80GB+1x8xV100-32GB"])
def test_scripts_pass_bash_and_shellcheck(tmp_path, launcher, cluster):
    model = load_model("llama-2-13b").model_copy(update={"name": HOSTILE})
    spec = cluster_from_data(MIXED) if cluster == "mixed" else load_cluster(cluster)
    numerics = {"precision": "fp16", "params_dtype": "fp16"}
    if launcher == "pytorchjob" and len(spec.pools) > 1:
        pytest.skip("refused: its workers are of one kind")
    files = export_megatron(document(model, spec, tp=2, pp=2, workload=numerics), launcher)
    write(tmp_path, files)
    scripts = [name for name in files if name.endswith((".sh", ".sbatch"))]
    assert {"train_args.sh", "env.sh", "launch_torchrun.sh"} <= set(scripts)
    for name in scripts:
        subprocess.run(["bash", "-n", name], cwd=tmp_path, check=True)
    done = subprocess.run([shellcheck(), *scripts], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def stub(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def launch(folder: Path, hostname: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run launch_torchrun.sh where ``torchrun`` prints its arguments and ``hostname`` a chosen name."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    stub(tools, "torchrun", 'printf "%s\\n" "CDMC=${CUDA_DEVICE_MAX_CONNECTIONS-unset}" "$@"')
    stub(tools, "hostname", f"[[ ${{1:-}} == -f ]] && echo {hostname}.example.com || echo {hostname}")
    checkout = folder / "megatron"
    checkout.mkdir(exist_ok=True)
    (checkout / "pretrain_gpt.py").touch()
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "MEGATRON_LM": str(checkout), **environment}
    return subprocess.run(
        ["bash", str(folder / "launch_torchrun.sh")], env=env, cwd=folder, capture_output=True, text=True, check=False
    )


def test_each_host_finds_its_place_and_passes_every_argument(tmp_path):
    doc = document(
        load_model("llama-2-13b"),
        cluster_from_data(MIXED),
        tp=2,
        pp=4,
        layers=[14, 14, 6, 6],
        workload={"precision": "fp16", "params_dtype": "fp16"},
    )
    files = export_megatron(doc)
    write(tmp_path, files)
    for rank, host in enumerate(["amber", "azure", "violet", "vanilla"]):
        lines = launch(tmp_path, host).stdout.splitlines()
        assert lines[0] == "CDMC=1"
        assert lines[1:11] == [
            "--nnodes",
            "4",
            "--nproc-per-node",
            "8",
            "--node-rank",
            str(rank),
            "--master-addr",
            "amber",
            "--master-port",
            "29500",
        ]
        assert lines[11].endswith("pretrain_gpt.py")
        assert read_arguments(lines[12:]).given == read_arguments(files["train_args.sh"]).given
    assert "--rdzv" not in files["launch_torchrun.sh"]


def test_hostfile_says_which_gpus_run_which_stage():
    doc = document(
        load_model("llama-2-13b"),
        cluster_from_data(MIXED),
        tp=2,
        pp=4,
        workload={"precision": "fp16", "params_dtype": "fp16"},
    )
    assert export_megatron(doc)["hostfile"].splitlines()[1:] == [
        "amber # A100-SXM-80GB, ranks 0-7, stage 0",
        "azure # A100-SXM-80GB, ranks 8-15, stage 1",
        "violet # V100-SXM2-32GB, ranks 16-23, stage 2",
        "vanilla # V100-SXM2-32GB, ranks 24-31, stage 3",
    ]


def test_a_stranger_is_told_and_overrides_work(tmp_path, llama):
    write(tmp_path, export_megatron(document(llama, load_cluster("16xH100"), tp=2)))
    refused = launch(tmp_path, "stranger")
    assert refused.returncode == 2
    assert "stranger is not in" in refused.stderr
    assert "--node-rank\n1\n" in launch(tmp_path, "stranger", NODE_RANK="1", MASTER_ADDR="10.0.0.1").stdout
    (tmp_path / "short").write_text("only-one\n")
    short = launch(tmp_path, "only-one", HOSTFILE=str(tmp_path / "short"))
    assert short.returncode == 2
    assert "lists 1 hosts, the plan has 2 nodes" in short.stderr
    missing = launch(tmp_path, "stranger", MEGATRON_LM=str(tmp_path))
    assert "no pretrain_gpt.py" in missing.stderr


def test_one_node_starts_anywhere(tmp_path, llama):
    write(tmp_path, export_megatron(document(llama, load_cluster("8xH100"))))
    done = launch(tmp_path, "anything")
    assert "--node-rank\n0\n--master-addr\n127.0.0.1" in done.stdout
    assert done.stdout.startswith("CDMC=unset\n")  # neither TP nor CP


@pytest.mark.parametrize(
    ("cluster", "choices", "line"),
    [
        ("8xH100", {"tp": 2}, "export CUDA_DEVICE_MAX_CONNECTIONS=1"),
        ("8xH100", {"cp": 2}, "export CUDA_DEVICE_MAX_CONNECTIONS=1"),
        ("8xB200", {"tp": 2}, "# Nothing to set for this plan."),
        ("8xH100", {}, "# Nothing to set for this plan."),
        ("8xH100", {"tp": 2, "sharding": "fsdp"}, "unset CUDA_DEVICE_MAX_CONNECTIONS"),
    ],
)
def test_environment(llama, cluster, choices, line):
    assert export_megatron(document(llama, load_cluster(cluster), **choices))["env.sh"].splitlines()[-1] == line


def test_hostile_names_run_nothing(tmp_path):
    model = load_model("llama-3.1-8b").model_copy(update={"name": HOSTILE})
    write(tmp_path, export_megatron(document(model, load_cluster("8xH100"), tp=2), "slurm"))
    launch(tmp_path, "host")
    for script in ("train_args.sh", "env.sh"):
        subprocess.run(["bash", script], cwd=tmp_path, check=True)
    assert not (tmp_path / "pwned").exists()
    lines = (tmp_path / "job.sbatch").read_text().splitlines()
    assert [line for line in lines if "evil" in line] == [
        line for line in lines if line.startswith("#SBATCH --job-name=")
    ]
    assert all(" " not in line.split("=", 1)[1] for line in lines if line.startswith("#SBATCH") and "=" in line)


@pytest.mark.parametrize("name", ["a b", "", "-x", "a#b", "a\nb"])
def test_what_cannot_be_a_host_name_is_refused(llama, name):
    doc = document(llama, load_cluster("16xH100"))
    with pytest.raises(SpecError, match="is not a host name"):
        export_megatron(doc, hosts=["good", name])


def test_given_hosts_replace_placeholders(llama):
    doc = document(llama, load_cluster("16xH100"))
    assert "placeholder" in export_megatron(doc)["hostfile"]
    files = export_megatron(doc, "slurm", hosts=["n7", "n3"])
    assert [line.split()[0] for line in files["hostfile"].splitlines()[1:]] == ["n7", "n3"]
    assert "#SBATCH --nodelist=n7,n3" in files["job.sbatch"]
    with pytest.raises(SpecError, match="lists 1 names for the 2 nodes"):
        export_megatron(doc, hosts=["n7"])


def test_slurm_takes_any_order_only_where_nodes_are_alike(tmp_path, llama):
    alike = export_megatron(document(llama, load_cluster("16xH100")), "slurm")["job.sbatch"]
    assert "scontrol show hostnames" in alike
    mixed = load_cluster("1x8xH100-SXM+1x8xA100-80GB")
    files = write(tmp_path, export_megatron(document(llama, mixed, pp=2), "slurm"))
    done = subprocess.run(["bash", "job.sbatch"], cwd=files, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "replace the placeholders" in done.stderr


def test_jobset_gives_every_pool_its_place_in_the_plan():
    numerics = {"precision": "fp16", "params_dtype": "fp16"}
    doc = document(load_model("llama-2-13b"), cluster_from_data(MIXED), tp=2, pp=4, workload=numerics)
    spec = yaml.safe_load(export_megatron(doc, "kubernetes")["jobset.yaml"])["spec"]
    jobs = [job["template"]["spec"] for job in spec["replicatedJobs"]]
    assert [job["completions"] for job in jobs] == [2, 2]
    pods = [job["template"]["spec"] for job in jobs]
    assert [pod["nodeSelector"]["meshwright/pool"] for pod in pods] == [pool.name for pool in doc.inputs.cluster.pools]
    for offset, pod in zip((0, 2), pods, strict=True):
        script = pod["containers"][0]["command"][2].replace("exec bash /plan/launch_torchrun.sh", "echo $NODE_RANK")
        done = subprocess.run(
            ["bash", "-c", script], env={"JOB_COMPLETION_INDEX": "1"}, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == str(offset + 1)


def test_every_degree_is_written_and_the_split_only_where_needed(llama):
    def flags(**choices):
        return export_megatron(document(llama, load_cluster("16xH100"), **choices))["train_args.sh"]

    for name in ("tensor-model", "pipeline-model", "context", "expert-model", "expert-tensor"):
        assert f"--{name}-parallel-size " in flags()
    assert "layout" not in flags(pp=4)
    assert "--num-virtual-stages-per-pipeline-rank 2" in flags(pp=4, vpp=2)
    assert "--pipeline-model-parallel-layout 'Et*5|(t*9|)*3t*0L'".replace("t*0", "") not in flags(pp=4)
    assert "--pipeline-model-parallel-layout 'Et*5|(t*9|)*2t*9L'" in flags(pp=4, layers=[5, 9, 9, 9])


def test_plan_json_is_the_document(llama):
    doc = document(llama, load_cluster("8xH100"))
    assert PlanDocument.parse(json.loads(export_megatron(doc)["plan.json"])) == doc


def test_what_megatron_cannot_hold_is_named():
    doc = document(load_model("gemma-2-9b"), load_cluster("8xH100"))
    with pytest.raises(SpecError, match="4 norms in a layer, gated activation gelu_pytorch_tanh"):
        export_megatron(doc)


def test_documents_without_plan_and_unknown_launchers_are_faults(llama):
    doc = document(llama, load_cluster("8xH100"))
    with pytest.raises(SpecError, match="no plan to export"):
        export_megatron(doc.model_copy(update={"plan": None, "status": "infeasible"}))
    with pytest.raises(SpecError) as caught:
        export_megatron(doc, "mpirun")
    assert set(caught.value.faults[0].alternatives) == set(LAUNCHERS)


def test_devices_must_cover_every_rank_once(llama):
    doc = document(llama, load_cluster("16xH100"))
    (device,) = doc.plan.devices
    for changed in ({"ranks": "0-7"}, {"ranks": "8-15", "nodes": "0"}, {"nodes": "0"}, {"nodes": "0-2"}):
        plan = doc.plan.model_copy(update={"devices": (device.model_copy(update=changed),)})
        with pytest.raises(SpecError):
            export_megatron(doc.model_copy(update={"plan": plan}))


def test_the_registry_serves_the_default_target(llama):
    assert EXPORTERS["megatron"] is export_megatron

"""Plan Llama 3.1 70B on 64 H100 from Python and print what the answer says.

Run: python examples/plan_llama_3_1_70b_on_64_h100.py
"""

from __future__ import annotations

from meshwright.planner.request import PlanRequest
from meshwright.planner.search import plan
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.model_io import load_model
from meshwright.specs.targets import load_target
from meshwright.specs.workload import Workload


def main() -> None:
    request = PlanRequest(
        model=load_model("llama-3.1-70b"),
        cluster=load_cluster("64xH100"),
        workload=Workload(global_batch_size=512, seq_length=8192),
        target=load_target("megatron@0.19"),
    )
    document = plan(request)
    if document.plan is None or document.estimate is None:
        print(document.reason)
        return
    chosen, estimate = document.plan, document.estimate
    print(f"tp {chosen.tp}, pp {chosen.pp}, cp {chosen.cp}, dp {chosen.dp}, micro-batch {chosen.micro_batch_size}")
    print(f"step {estimate.step_time_s:.2f} s, MFU {estimate.mfu:.1%}")
    print(f"{estimate.tokens_per_s_per_gpu:,.0f} tokens a second and GPU")
    for index, stage in enumerate(estimate.stages):
        print(f"stage {index}: {stage.reserved_bytes / 2**30:.1f} of {stage.limit_bytes / 2**30:.1f} GiB")
    for reason in document.explanation:
        print(f"- {reason.message}")


if __name__ == "__main__":
    main()

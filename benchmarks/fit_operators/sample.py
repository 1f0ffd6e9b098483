"""Draw the operator sample in benchmarks/data/operators from the full tables; needed only to renew that sample.

    python -m benchmarks.fit_operators.sample OPDB_DIR PROFILES_CSV

OPDB_DIR holds parquet tables distilled from github.com/ai-dynamo/aiconfigurator @095f58a5 (Apache-2.0, NVIDIA): one row
a measured shape. PROFILES_CSV holds operators measured by SimuMax (Apache-2.0), Sailor and Aceso (MIT), and AMD-AGI
Primus (MIT). Whole (n, k) groups are held out of the GEMM sample for the tests: ``tests/data/operators_held_out.csv``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "data" / "operators"
HELD_OUT = ROOT.parent / "tests" / "data" / "operators_held_out.csv"
#: Rows drawn for each GPU and precision (or kernel).
ROWS = {"gemm": 3600, "attention": 1200, "mla": 300, "moe": 900, "scan": 250, "convolution": 60}
#: (n, k) pairs that no fit sees: projections of common widths.
HELD_OUT_PAIRS = ((4096, 4096), (12288, 4096), (5120, 8192), (2048, 7168), (28672, 8192), (1024, 5120))
HELD_OUT_TOKENS = (1024, 4096, 16384)
#: The kernel of each GPU that is closest to a training run's: no paged cache where there is a choice.
ATTENTION_KERNELS = {
    "a100_sxm": "flash_attention", "h100_sxm": "fa3", "h200_sxm": "fa3", "b200_sxm": "trtllm_mha",
    "b300_sxm": "vllm_flashinfer_trtllmprefill", "gb200": "trtllm_mha", "gb300": "trtllm_mha", "l40s": "flashinfer",
    "rtx_pro_6000_server": "flashinfer",
}  # fmt: skip
DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4"}


def draw(rows: pd.DataFrame, count: int) -> pd.DataFrame:
    return rows.sample(min(count, len(rows)), random_state=0)


def gemm(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(sample, held out): microseconds of the bare product where quantising was measured apart (fp8)."""
    rows = pd.read_parquet(folder / "gemm.parquet")
    rows = rows[rows.dtype.isin(DTYPES) & (rows.m >= 64) & (rows.gpu != "b60")].copy()
    rows["gpu"], rows["dtype"] = rows.gpu.astype(str), rows.dtype.map(DTYPES).astype(str)
    burst = rows[rows["mode"] == "burst"].copy()
    burst["us"] = burst.lat_med_us.fillna(burst.latency_us)
    separate = burst.dtype == "fp8"
    burst.loc[separate, "us"] = (burst.latency_us - burst.quant_us.fillna(0.0))[separate]
    burst = burst[burst.us > 0]
    pairs = pd.MultiIndex.from_frame(burst[["n", "k"]]).isin(HELD_OUT_PAIRS)
    held = burst[pairs & burst.m.isin(HELD_OUT_TOKENS)]
    burst = burst[~pairs]
    columns = ["gpu", "dtype", "m", "n", "k", "us"]
    sample = pd.concat([draw(r, ROWS["gemm"]) for _, r in burst.groupby(["gpu", "dtype"])])[columns]
    return sample, held[columns]


def sustained(folder: Path) -> pd.DataFrame:
    """Sustained over burst microseconds of the same shapes, by GPU, precision and log2 of the FLOP."""
    rows = pd.read_parquet(folder / "gemm.parquet")
    rows = rows[rows.dtype.isin(DTYPES) & (rows[["m", "n", "k"]].min(axis=1) >= 512)].copy()
    rows["gpu"], rows["dtype"] = rows.gpu.astype(str), rows.dtype.map(DTYPES).astype(str)
    burst = rows[rows["mode"] == "burst"].copy()
    burst["us"] = burst.lat_med_us.fillna(burst.latency_us)
    keys = ["gpu", "dtype", "m", "n", "k"]
    both = rows[rows["mode"] == "sustained"].merge(burst[[*keys, "us"]], on=keys)
    both["speed"] = both.us / both.latency_us
    both["log2_flops"] = np.floor(np.log2(2.0 * both.m * both.n * both.k)).astype(int)
    table = both.groupby(["gpu", "dtype", "log2_flops"]).speed.agg(["median", "size"]).reset_index()
    return table.rename(columns={"median": "speed", "size": "rows"}).round(3)


def attention(folder: Path) -> pd.DataFrame:
    rows = pd.read_parquet(folder / "attention_ctx.parquet")
    rows = rows[(rows.dtype == "bfloat16") & rows.causal & (rows.seq >= 512) & rows.head_dim.isin((64, 128, 256))]
    parts = [draw(rows[(rows.gpu == g) & (rows.kernel == k)], ROWS["attention"]) for g, k in ATTENTION_KERNELS.items()]
    latent = pd.read_parquet(folder / "mla_ctx.parquet")
    latent = latent[(latent.op == "mla_attn_kernel") & (latent.kv_dtype == "bfloat16") & (latent.seq >= 512)]
    latent = pd.concat([draw(r, ROWS["mla"]) for _, r in latent.groupby("gpu", observed=True)])
    latent = latent.assign(head_dim=192, kv_heads=latent.heads, window=0)
    both = pd.concat([*parts, latent]).rename(columns={"latency_us": "us"})
    return both[["gpu", "batch", "seq", "heads", "kv_heads", "head_dim", "window", "us"]].astype({"gpu": str})


def moe(folder: Path) -> pd.DataFrame:
    """Whole MoE layers with balanced tokens; rows marked as un-tuned kernels (about 5 times slower) are left out."""
    rows = pd.read_parquet(folder / "moe.parquet")
    rows = rows[(rows.distribution == "balanced") & ~rows.suspect & rows.gated & (rows.moe_ep <= rows.num_experts)]
    rows = rows[(rows.num_tokens * rows.topk / rows.num_experts >= 16) & rows.dtype.isin(DTYPES)]
    kernels = ["moe_torch_flow_cutlass", "deepgemm", "sglang_fused_moe_triton"]
    parts = []
    for _, r in rows.groupby(["gpu", "dtype"], observed=True):
        kernel = [k for k in kernels if (r.kernel == k).sum() >= 300]
        if kernel:
            wanted = "deepgemm" if "deepgemm" in kernel else kernel[0]
            parts.append(draw(r[r.kernel == wanted], ROWS["moe"]))
    out = pd.concat(parts).rename(columns={"latency_us": "us"})
    out["dtype"] = out.dtype.map(DTYPES).astype(str)
    columns = ["num_tokens", "hidden", "inter", "topk", "num_experts", "moe_tp", "moe_ep", "us"]
    return out[["gpu", "dtype", *columns]].astype({"gpu": str})


def other(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """(scans, casts, convolutions): chunked scans, fp8 casts of (m, k) matrices, short convolutions before scans."""
    rows = pd.read_parquet(folder / "other.parquet").rename(columns={"latency_us": "us"})
    rows = rows.astype({"gpu": str, "op": str, "kernel": str})
    scan = rows[rows.op.isin(("gdn", "kda")) & ~rows.kernel.str.startswith("causal_conv1d")]
    scan = pd.concat([draw(r, ROWS["scan"]) for _, r in scan.groupby(["gpu", "kernel"])])
    casts = rows[rows.op.str.startswith("quant_fp8")]
    scan_columns = ["gpu", "op", "kernel", "batch", "seq", "k_heads", "v_heads", "head_dim", "us"]
    casts = casts[["gpu", "op", "m", "k", "us"]]
    # The CUDA kernel that training runs too (TensorRT-LLM's); gated DeltaNet's rows are of a Triton one.
    short = rows[(rows.op == "mamba2") & (rows.kernel == "causal_conv1d_fn") & (rows.batch * rows.seq >= 8192)]
    short = pd.concat([draw(r, ROWS["convolution"]) for _, r in short.groupby("gpu")])
    return scan[scan_columns], casts, short[[*scan_columns, "d_state"]]


def profiles(path: Path) -> pd.DataFrame:
    """Training kernels: products by layout, grouped products, attention both ways, norms and activations."""
    rows = pd.read_csv(path, low_memory=False)
    wanted = ["matmul", "group_matmul", "sdp_fwd", "sdp_bwd", "enc-MLP-GEMM-1", "enc-MLP-GEMM-2", "enc-attention-qkv",
              "enc-1st-layernorm", "enc-2nd-layernorm", "enc-MLP-gelu", "final-layernorm"]  # fmt: skip
    rows = rows[rows.op.isin(wanted)].copy()
    rows["output"] = rows.notes.str.extract(r"out=(\w+)")[0]
    columns = ["source_repo", "gpu", "precision", "op", "stage", "groups_or_batch", "m", "k", "n", "seq", "heads",
               "kv_heads", "head_dim", "layout", "output", "time_us", "tflops", "in_mb", "out_mb"]  # fmt: skip
    return rows[columns]


def main(folder: Path, csv: Path) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    products, held = gemm(folder)
    held.sort_values(["gpu", "dtype", "n", "k", "m"]).to_csv(HELD_OUT, index=False)
    scans, casts, short = other(folder)
    tables = {
        "gemm": products, "attention": attention(folder), "moe": moe(folder), "scan": scans, "cast": casts,
        "convolution": short,
    }  # fmt: skip
    for name, table in tables.items():
        for column in table.columns:
            if pd.api.types.is_integer_dtype(table[column]):
                table[column] = table[column].astype("int32")
        table["us"] = table.us.astype("float32")
        sort = [c for c in table.columns if c != "us"]
        table.sort_values(sort).to_parquet(OUT / f"{name}.parquet", index=False, compression="zstd")
    profiles(csv).to_csv(OUT / "profiles.csv.gz", index=False)
    sustained(folder).to_csv(OUT / "sustained.csv", index=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

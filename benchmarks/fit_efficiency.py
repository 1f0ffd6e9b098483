"""Fit cost_models/data/efficiency.json and gemm_corrections.json on the operators in benchmarks/data/operators.

    python -m benchmarks.fit_efficiency            # print the errors
    python -m benchmarks.fit_efficiency --check    # and fail if the shipped constants are not what the fit gives
    python -m benchmarks.fit_efficiency --write    # and replace them

Needs the extra ``fit``; two minutes on two cores. All errors are in percent: median and 95th percentile of
|predicted / measured - 1|, on rows that the fit did not see where it says so.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from .fit_operators import attention, gemm, grouped, unseen
from .fit_operators.data import FOLDER

DATA = Path(__file__).resolve().parents[1] / "cost_models" / "data"
BLACKWELL = ("b200", "b300", "gb200", "gb300")
#: Difference between hosts, runs and clocks that no shape explains (aiconfigurator: sd 4 to 10% on large products).
HOSTS = 0.05
#: A constant may differ by this share between versions of the optimisers before ``--check`` fails.
TOLERANCE = 0.03


def shipped(constants: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Precisions of workloads: on Blackwell, fp8 with block scales runs on the units of mxfp8."""
    out: dict[str, dict[str, Any]] = {}
    for family, by_dtype in constants.items():
        own = {dtype: by_dtype[dtype] for dtype in ("bf16", "fp8", "nvfp4") if dtype in by_dtype}
        if family in BLACKWELL and "fp8_block" in by_dtype:
            own["mxfp8"] = by_dtype["fp8_block"]
        elif family == "rtx_pro_6000":
            own["mxfp8"] = by_dtype["fp8"]
        out[family] = own
    return out


def grouped_constants(
    plain: dict[str, dict[str, Any]], layouts: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants of grouped products by family and precision, and the errors of both fits."""
    hosts = {family: own["host"] for family, own in layouts.items()}
    trained, report = grouped.fit_training(plain, hosts)
    inferred, more = grouped.fit_inference(plain)
    each = float(f"{np.mean([own['group_s'] for own in trained.values()]):.3g}")
    out = {
        family: {dtype: {**own, "group_s": each} for dtype, own in by_dtype.items()}
        for family, by_dtype in shipped(inferred).items()
    }
    for family in BLACKWELL:
        share = trained["b200"]["eff"] / plain["b200"]["bf16"]["eff"]
        eff = float(f"{share * plain[family]['bf16']['eff']:.4g}")
        out[family]["bf16"] = {**trained["b200"], "eff": eff}
    out["a100"] = {"bf16": trained["a100"]}
    return out, {**report, **more}


def regenerate() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(efficiency.json, gemm_corrections.json, errors)."""
    base = json.loads((FOLDER / "families.json").read_text())
    plain, tables, report = gemm.fit_all()
    layouts = gemm.fit_layouts(plain, tables)
    sustained = gemm.fit_sustained()
    group, group_report = grouped_constants(plain, layouts)
    forward, attention_report = attention.fit_forward()
    training, training_report = attention.fit_training(forward)
    core = {kind: attention.complete(forward[kind], training[kind], BLACKWELL) for kind in forward}
    scans, scan_report = attention.fit_scans()
    streams, stream_report = attention.fit_streams()
    short, short_report = attention.fit_convolutions()
    sigma, kin_sigma, unseen_report = unseen.leave_one_out(plain)
    products = shipped(plain)
    default_gemm = _medians(products, gemm.NAMES)
    fitted_elsewhere = {name: own["gemm"] for name, own in base["families"].items() if "gemm" in own}
    levels, level_report = unseen.fit_levels(default_gemm, fitted_elsewhere)

    defaults: dict[str, Any] = dict(base["defaults"])
    defaults["gemm"] = default_gemm
    defaults["grouped"] = _medians(group, (*grouped.NAMES, "launch_s", "throttle", "group_s"))
    for kind, by_family in core.items():
        defaults[kind] = _median_attention(by_family)
    for name in ("scan", "scan_kda"):
        defaults[name] = scans["h100"][name]
    defaults["convolution"] = short["h100"]["convolution"]
    for dtype in ("fp8", "nvfp4"):
        mean = float(np.mean([own[dtype] for own in sustained.values() if dtype in own]))
        defaults["sustained"] = {**defaults["sustained"], dtype: round(mean, 3)}
    defaults["sustained"]["mxfp8"] = defaults["sustained"]["fp8"]
    defaults["weight_gradient"] = round(float(np.mean([own["weight_gradient"] for own in layouts.values()])), 3)
    defaults["sigma"] = {**sigma, "mxfp8": sigma["fp8"]}

    families: dict[str, Any] = {}
    for family, given in base["families"].items():
        own = {k: v for k, v in given.items() if k not in ("gemm_eff", "attention_eff", "sustained", "like")}
        if family in products:
            own["gemm"], own["grouped"] = products[family], group[family]
        else:
            known = {**levels.get(family, {}), **given.get("gemm", {})}
            if "gemm_eff" in given:
                known["bf16"] = {**default_gemm["bf16"], "eff": given["gemm_eff"]}
            # Other precisions, and grouped products, keep the family's distance from the default.
            level = known["bf16"]["eff"] / default_gemm["bf16"]["eff"]
            own["gemm"] = {**_scaled(default_gemm, level), **known}
            own["grouped"] = _scaled(defaults["grouped"], level)
        for kind, by_family in core.items():
            if family in by_family:
                own[kind] = by_family[family]
            elif "attention_eff" in given:
                scale = given["attention_eff"] / defaults["attention"]["eff"][1]
                own[kind] = {"eff": [round(scale * e, 3) for e in defaults[kind]["eff"]]}
        own |= scans.get(family, {})
        own |= short.get(family, {})
        own |= {k: v for k, v in streams.get(family, {}).items() if k not in given}
        own_sustained = sustained.get(family) or sustained.get(given.get("like", ""))
        if own_sustained:
            own["sustained"] = {**own_sustained, **({"mxfp8": own_sustained["fp8"]} if "fp8" in own_sustained else {})}
        elif "sustained" in given:
            own["sustained"] = given["sustained"]
        if family in layouts or family in BLACKWELL:
            own["weight_gradient"] = layouts.get(family, layouts["b200"])["weight_gradient"]
        spread = {}
        for dtype in own.get("gemm", {}):
            at = report.get(f"{family}/{'fp8_block' if dtype == 'mxfp8' and family in BLACKWELL else dtype}")
            if family == "rtx_pro_6000" and dtype == "mxfp8":
                at = report[f"{family}/fp8"]
            at = at or level_report.get(f"{family}/{dtype}")
            if at:
                spread[dtype] = round(float(np.hypot(at["sigma"], HOSTS)), 3)
        if spread:
            own["sigma"] = spread
        kin = kin_sigma.get(unseen.GENERATION.get(family, ""))
        if kin:
            own["sigma_of_kin"] = {**kin, **({"mxfp8": kin["fp8"]} if "fp8" in kin else {})}
        families[family] = own
    shipped_tables = {}
    for key, values in tables.items():
        family, dtype = key.split("/")
        if dtype == "fp8_block":
            if family in BLACKWELL:
                shipped_tables[f"{family}/mxfp8"] = values
        else:
            shipped_tables[key] = values
    efficiency = {"sources": base["sources"], "defaults": defaults, "families": families}
    corrections = {
        "about": "thousandths of log(measured / formula) at the knots of cost_models/gemm.py, flat over (m, n, k)",
        "source": base["sources"]["gemm"],
        "tables": shipped_tables,
    }
    errors = {
        "gemm": report, "gemm of types measured by level": level_report, "layouts": layouts, "sustained": sustained,
        "grouped": group_report, "attention": attention_report, "attention, SimuMax": training_report,
        "scan": scan_report, "stream": stream_report,
        "convolution": short_report, "one type from the others": unseen_report,
    }  # fmt: skip
    return efficiency, corrections, errors


def _scaled(constants: dict[str, dict[str, float]], level: float) -> dict[str, dict[str, float]]:
    return {dtype: {**own, "eff": float(f"{level * own['eff']:.4g}")} for dtype, own in constants.items()}


def _medians(constants: dict[str, dict[str, Any]], names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    dtypes = {dtype for own in constants.values() for dtype in own}
    return {
        dtype: unseen.median_constants([own[dtype] for own in constants.values() if dtype in own], names)
        for dtype in sorted(dtypes)
    }


def _median_attention(core: dict[str, dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in next(iter(core.values())).items():
        middle = np.median([own[name] for own in core.values()], axis=0)
        out[name] = [round(float(v), 4) for v in middle] if isinstance(value, list) else float(f"{middle:.4g}")
    return out


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(new, dict) and isinstance(old, dict):
        keys = sorted(set(old) | set(new))
        return [line for key in keys for line in _differences(old.get(key), new.get(key), f"{path}/{key}")]
    if isinstance(new, list) and isinstance(old, list) and len(old) == len(new):
        return [
            line for i, pair in enumerate(zip(old, new, strict=True)) for line in _differences(*pair, f"{path}[{i}]")
        ]
    if isinstance(new, (int, float)) and isinstance(old, (int, float)):
        step = 5.0 if path.startswith("/tables") else 0.0  # thousandths
        return [] if abs(new - old) <= TOLERANCE * abs(old) + step else [f"{path}: shipped {old}, fitted {new}"]
    return [] if old == new else [f"{path}: shipped {old}, fitted {new}"]


def _print(value: Any, indent: int = 0) -> None:
    for key, item in value.items():
        if isinstance(item, dict) and any(isinstance(v, dict) for v in item.values()):
            print(" " * indent + str(key))
            _print(item, indent + 2)
        else:
            text = ", ".join(f"{k} {v}" for k, v in item.items()) if isinstance(item, dict) else str(item)
            print(" " * indent + f"{key}: {text}")


def main(arguments: list[str]) -> int:
    efficiency, corrections, errors = regenerate()
    _print(errors)
    documents = {"efficiency.json": efficiency, "gemm_corrections.json": corrections}
    if "--write" in arguments:
        (DATA / "efficiency.json").write_text(json.dumps(efficiency, indent=1) + "\n")
        lines = [f'  "{key}": {json.dumps(values)}' for key, values in corrections["tables"].items()]
        head = json.dumps({k: v for k, v in corrections.items() if k != "tables"}, indent=1)[:-2]
        (DATA / "gemm_corrections.json").write_text(head + ',\n "tables": {\n' + ",\n".join(lines) + "\n }\n}\n")
    if "--check" in arguments:
        lines = []
        for name, fitted in documents.items():
            lines += [f"{name}{line}" for line in _differences(json.loads((DATA / name).read_text()), fitted)]
        print(*(lines or ["the shipped constants are those of the fit"]), sep="\n")
        return 1 if lines else 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

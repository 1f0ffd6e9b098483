"""Tables of runs and models as people write them: read, or refused with a reason."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from meshwright.cost_models.backtest import inputs
from meshwright.cost_models.backtest.architectures import model_of
from meshwright.cost_models.backtest.bulk import price_row, price_rows
from meshwright.cost_models.backtest.inputs import is_judged, is_moe, read_models, read_runs, row_fault
from meshwright.cost_models.backtest.rows import measured_s, read_rows
from meshwright.specs.errors import SpecError

from .backtest_cases import MODELS, row

HEADER = b"id,model,gpu,num_gpus,seq_len,global_batch"


def fault(path: Path) -> str:
    with pytest.raises(SpecError) as found:
        read_runs(path)
    (only,) = found.value.faults
    assert only.pointer == "/runs"
    return only.message


def test_byte_order_marks_line_ends_blank_lines_and_quotes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_bytes(b"\xef\xbb\xbf\r\n" + HEADER + b',notes\r\n1,m,H100,8,1024,8,"a, b"\r\n\r\n2,m,H100,8\r\n')
    first, second = read_runs(path)
    assert (first["id"], first["notes"], first["global_batch"]) == ("1", "a, b", "8")
    assert (second["num_gpus"], second["seq_len"], second["notes"]) == ("8", "", "")


def test_packed_files_are_read_as_they_are_unpacked(tmp_path: Path) -> None:
    runs, models = tmp_path / "runs.csv.gz", tmp_path / "models.json.gz"
    runs.write_bytes(gzip.compress(HEADER + b"\n1,m,H100,8,1024,8\n"))
    models.write_bytes(gzip.compress(b'{"m": {"num_layers": 2}}'))
    assert read_runs(runs) == list(read_rows(runs))
    assert read_runs(runs)[0]["gpu"] == "H100"
    assert read_models(models) == {"m": {"num_layers": 2}}


def test_a_broken_or_swelling_packed_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.csv.gz"
    path.write_bytes(HEADER)
    assert "no whole gzip file" in fault(path)
    path.write_bytes(gzip.compress(HEADER * 50)[:-9])
    assert "no whole gzip file" in fault(path)
    path.write_bytes(gzip.compress(bytes(100_000)))
    monkeypatch.setattr(inputs, "MAX_BYTES", 1000)
    assert "holds more than 1000 bytes" in fault(path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"\n\r\n", "is empty"),
        (HEADER, "holds no rows"),
        (HEADER + b"\n\xff\xfe\n", "is not UTF-8 text (byte 43)"),
        (b"id,model,num_gpus\n1,m,8\n", "lacks the columns gpu_type or gpu, seq_len, global_batch"),
        (HEADER + b",model\n1,m,H100,8,1024,8,n\n", "two columns 'model'"),
        (HEADER + b"\n1," + b"m" * 200_000 + b"\n", "is not CSV: field larger than field limit (131072) at line 2"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_once(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_bytes(data)
    assert words in fault(path)


def test_no_file_a_folder_and_a_device_are_refused(tmp_path: Path) -> None:
    assert "does not exist" in fault(tmp_path / "none.csv")
    assert "is a directory" in fault(tmp_path)
    assert "regular file" in fault(Path("/dev/null"))


@pytest.mark.parametrize(("text", "words"), [("[]", "object"), ("{}", "object"), ("{", "JSON"), ('{"a": NaN}', "NaN")])
def test_models_that_are_no_object_of_architectures_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "models.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=words) as found:
        read_models(path)
    assert found.value.faults[0].pointer == "/models"


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"tp": "two"}, "tp is 'two', no whole number"),
        ({"tp": "-2"}, "tp is '-2'"),
        ({"micro_batch": "1.5"}, "micro_batch is '1.5'"),
        ({"seq_len": "1e400"}, "seq_len is '1e400'"),
        ({"pp": "99999999"}, "above 1024"),
        ({"num_gpus": ""}, "num_gpus is not stated"),
        ({"model": "other"}, "model 'other' is not in the models file"),
        ({"gpu_type": "H999"}, "unknown GPU type"),
        ({"gpu_type": "H100+A100"}, "'H100+A100' names several types"),
        ({"gpu_type": "H100+A100", "gpus_per_node": ""}, "'H100+A100' names several types"),
        ({"gpu_type": "4*H100", "gpus_per_node": ""}, "several types"),
        ({"gpu_type": "mixed"}, "several types"),
        ({"precision": "int3"}, "precision 'int3' is unknown"),
        ({"model_overrides": "{"}, "model_overrides is no JSON"),
        ({"model_overrides": '{"num_layers": 1000000000}'}, "1000000000 layers"),
        ({"model_overrides": '{"hidden_size": "wide"}'}, "hidden_size 'wide', no whole number"),
        ({"model_overrides": '{"csa_compress_ratios": "[1]*1000*1000*1000"}'}, "repeats repeats"),
        ({"other_flags": "pp_layout=" + "(" * 7 + "t" + ")*500" * 7, "pp": "2"}, "layout is too long"),
        ({"\0extra": "7"}, "more cells than the header names"),
    ],
)
def test_a_row_that_cannot_be_priced_says_why_and_nothing_else(cells: dict[str, str], words: str) -> None:
    outcome = price_row(row(**cells), MODELS)
    assert (outcome.id, outcome.status) == ("a", "unsupported")
    assert words in outcome.reason
    assert outcome.step_time_s is None


def test_deepseek_chooses_groups_of_experts_and_others_do_not() -> None:
    """n_group 8 and topk_group 4 in DeepSeek-V3's config.json."""
    sizes = {"hidden_size": 7168, "num_experts": 256, "topk": 8, "moe_ffn_hidden_size": 2048}

    def groups(**changes: int) -> tuple[int | None, int | None]:
        moe = model_of("model", {**MODELS["experts"], **sizes, **changes}, []).moe
        assert moe is not None
        return moe.num_expert_groups, moe.top_k_groups

    assert groups() == (8, 4)
    assert groups(hidden_size=6144) == (None, None)


@pytest.mark.parametrize("entry", [3, None, [], {"num_layers": "many"}, {}, {"num_layers": 2, "hidden_size": True}])
def test_a_broken_model_costs_only_its_own_rows(entry: object) -> None:
    first, second = price_rows([row(model="broken"), row()], MODELS | {"broken": entry})
    assert (first.status, second.status) == ("unsupported", "ok")


def test_words_for_not_stated_are_blank_cells() -> None:
    blank = price_row(row(ep="", vp="", cp=""), MODELS)
    assert price_row(row(ep="n/a", vp="None", cp="0"), MODELS).step_time_s == blank.step_time_s
    assert not row_fault(row(ep="n/a", vp="None", cp="0"), MODELS)


def test_measured_time_is_stated_or_follows_from_the_throughput() -> None:
    assert measured_s({"step_time_s": "2.5", "tokens_per_s_per_gpu": "7"}) == 2.5
    # 64 sequences of 1000 tokens by 8 GPUs at 4000 tokens a second each
    cells = {"global_batch": "64", "seq_len": "1000", "num_gpus": "8", "tokens_per_s_per_gpu": "4000"}
    assert measured_s(cells) == pytest.approx(2.0)
    assert measured_s({"measured_iter_time_s": "1.25"}) == 1.25
    assert measured_s({"step_time_s": "-1", "tokens_per_s_per_gpu": "5"}) is None


def test_what_is_judged_and_what_has_experts() -> None:
    assert is_judged({})
    assert is_judged({"task": "pretrain", "quality": "B"})
    assert not is_judged({"task": "lora", "quality": "A"})
    assert not is_judged({"task": "pretrain", "quality": "suspect"})
    assert is_moe(row(model="experts"), MODELS)
    assert not is_moe(row(), MODELS)


def test_processes_change_nothing_but_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.cost_models.backtest.bulk.WORTH_PROCESSES", 2)
    rows = [row(id=i, global_batch=64 * (i % 5 + 1), tp="x" if i == 7 else "1") for i in range(40)]
    alone, together = list(price_rows(rows, MODELS)), list(price_rows(rows, MODELS, processes=2))
    assert [(o.id, o.reason, o.step_time_s) for o in together] == [(o.id, o.reason, o.step_time_s) for o in alone]
    assert [o.id for o in together] == [str(i) for i in range(40)]

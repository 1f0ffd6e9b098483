"""Small parts of the command line."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.api.cli import run
from meshwright.api.internal_error import incident_of
from meshwright.api.options import field_name
from meshwright.api.strict_json import JSONSyntaxError, parse_json
from meshwright.api.units import duration_s, fraction, integer
from meshwright.specs.errors import SpecError


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30), ("30s", 30), ("500ms", 0.5), ("2m", 120), ("1.5h", 5400), ("2 min", 120)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-3s", "1e3", "nan", "inf", "3d", "3s3", "٣s"])
def test_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        duration_s(text)


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.05", 0.05), ("12.5 %", 0.125), ("0", 0.0)])
def test_shares(text: str, share: float) -> None:
    assert fraction(text) == pytest.approx(share, rel=1e-15)


def test_text_that_is_no_integer_stays_text() -> None:
    assert [integer(text) for text in ("8", "-8", "+8", "8.0", "1e3", "x", "", "9" * 31)] == [
        8,
        -8,
        8,
        "8.0",
        "1e3",
        "x",
        "",
        "9" * 31,
    ]


@pytest.mark.parametrize(
    ("pointer", "name"),
    [
        ("", ""),
        ("/model", "MODEL"),
        ("/model/hidden_size", "MODEL.hidden_size"),
        ("/cluster/pools/0/gpu", "--cluster.pools.0.gpu"),
        ("/workload/seq_length", "--seq-length"),
        ("/workload/lora/rank", "--lora-rank"),
        ("/degrees/micro_batch_size", "--micro-batch-size"),
        ("/fix/tp", "--fix tp"),
        ("/env/A", "--env A"),
        ("/--vocab-size", "--vocab-size"),
        ("/deadline_s", "--deadline"),
        ("/document/inputs/model", "PLAN.inputs.model"),
        ("/model/a~1b~0c", "MODEL.a/b~c"),
    ],
)
def test_pointers_are_told_as_options(pointer: str, name: str) -> None:
    assert field_name(pointer) == name


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(_VALUES)
def test_plain_json_is_read_as_the_standard_library_reads_it(value: object) -> None:
    import json

    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


@given(st.binary(max_size=40) | st.text(alphabet='[]{}",:0123456789eE+-.NaInfity tru\\u', max_size=40))
def test_any_bytes_are_read_or_refused(raw: bytes | str) -> None:
    try:
        value = parse_json(raw)
    except SpecError:
        return  # any other exception fails the test
    assert not isinstance(value, float) or math.isfinite(value)


def test_places_of_wrong_numbers() -> None:
    text = '{"a": [1, NaN, {"b/c": 1e400}], "d": 99999999999999999999, "e": -9223372036854775807}'
    with pytest.raises(SpecError) as error:
        parse_json(text)
    assert [fault.pointer for fault in error.value.faults] == ["/a/1", "/a/2/b~1c", "/d"]
    with pytest.raises(JSONSyntaxError, match="line 2, column 3"):
        parse_json("{\n  x: 1}")


def test_help_says_what_is_required_when(capsys: pytest.CaptureFixture[str]) -> None:
    texts = {}
    for command in ("plan", "estimate", "check"):
        run([command, "--help"])
        texts[command] = " ".join(capsys.readouterr().out.split())
    assert "or YAML file. Required. " in texts["plan"]
    assert "Required. " not in texts["estimate"]
    assert texts["estimate"].count("Required with MODEL; comes with PLAN") == 2
    assert "Tells also whether the plan fits" in texts["check"]
    assert "Required unless" not in texts["check"]
    assert "tf32" in texts["plan"]


@pytest.mark.parametrize("argv", [[], ["--help"], ["plan", "--help"], ["estimate", "-h"], ["catalog", "--help"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Usage: meshwright")
    assert err == ""
    if argv[1:]:
        assert f"meshwright {argv[0]} " in out.split("Examples:")[1]


def test_internal_errors_are_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(kind: str) -> object:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("meshwright.api.catalog.entries", broken)
    codes = {run(["catalog", "gpus"]) for _ in range(2)}
    out, err = capsys.readouterr()
    assert codes == {70}
    assert out == ""
    first, second = err.splitlines()
    assert first == second
    assert first.startswith("error: internal error ")
    assert "secret" not in err
    assert "Traceback" not in err


def test_ids_of_internal_errors_differ_by_place() -> None:
    def divide() -> float:
        return 1 / 0

    def remainder() -> float:
        return 1 % 0

    errors: list[BaseException] = []
    for work in (divide, divide, remainder):
        try:
            work()
        except ZeroDivisionError as error:
            errors.append(error)
    assert incident_of(errors[0]) == incident_of(errors[1])
    assert incident_of(errors[0]) != incident_of(errors[2])


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(kind: str) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshwright.api.catalog.entries", interrupted)
    assert run(["catalog", "gpus"]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err.strip() == "interrupted"

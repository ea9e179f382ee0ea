"""Delimited text: it loads right, or fails with file, row and column. Python's csv module is the judge."""

from __future__ import annotations

import csv
import datetime
import io
import re
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kme_dist.data.ingest import ingest
from kme_dist.data.notation import Notation, suggestion
from kme_dist.data.readers import MISSING_TEXTS
from kme_dist.data.reading import read_table
from kme_dist.errors import AssumptionWarning, DataError

TOKENS = st.sampled_from(
    [
        *rb"""1 2.5 -3e2 word NA ? " "" "q" "a,b" , , , ; 0x1F 1_000 inf nan 1e999 true ' \\ # +7 .5 5. -""".split(),
        *(b"", b'"x\ny"', b"\n", b"\n", b"\r\n", b"\r", b"\n\n", b"\0", b" ", b"\t", b"9" * 40, b"z" * 3000),
        *(b"\xef\xbb\xbf", b"\xff\xfe", b"\xc3\xa9", b"\xe9"),
    ]
)
ROWS = st.lists(
    st.tuples(st.sampled_from(["1", "2.5", "x", "y z", "NA", ""]), st.integers(-5, 5)), min_size=0, max_size=8
)


def judged(raw: bytes) -> list[list[str]] | None:
    """The rows behind the header by Python's csv module; None when it cannot make a table of them."""
    try:
        text = raw.decode("utf-8-sig")
        rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    except (UnicodeDecodeError, csv.Error):
        return None
    if not rows or len({len(row) for row in rows}) != 1 or "\0" in text:
        return None
    return rows


def check(path, raw: bytes) -> None:
    path.write_bytes(raw)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AssumptionWarning)  # of a text after a closing quote
            table = read_table(path, header=True, missing=0.0, delimiter=",", max_categories=1000, dtype="float32")
    except DataError as error:
        message = str(error)
        assert str(path) in message
        named = re.search(r"row \d+.*column|column '|used twice|is empty|header", message)
        assert named, f"no row and column in: {message}"
        return
    rows = judged(raw)
    assert rows is not None, f"loaded what is no table: {raw!r}"
    names = [name.strip() or f"column_{i}" for i, name in enumerate(rows[0])]
    assert len(table.X) == len(rows) - 1
    for i, name in enumerate(names):
        cells = [row[i] for row in rows[1:]]
        if name in table.feature_names:
            got = table.X[:, table.feature_names.index(name)]
            with np.errstate(over="ignore"):
                want = [0.0 if c in MISSING_TEXTS else {"true": 1.0, "false": 0.0}.get(c.lower()) for c in cells]
                want = [np.float32(c) if w is None else w for w, c in zip(want, cells, strict=True)]
                want = [0.0 if np.isnan(w) else w for w in want]  # "nan " with a blank is missing as well
            np.testing.assert_array_equal(got, np.array(want, np.float32).reshape(-1))
        else:
            for r, cell in enumerate(cells):
                hot = [f for j, f in enumerate(table.feature_names) if f.startswith(f"{name}=") and table.X[r, j] == 1]
                assert hot == ([] if cell in MISSING_TEXTS else [f"{name}={cell}"])


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TOKENS, max_size=25))
def test_fuzzed_text_loads_right_or_fails_with_its_place(tmp_path, tokens):
    check(tmp_path / "fuzz.csv", b"a,b\n" + b"".join(tokens))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ROWS, st.lists(st.tuples(st.integers(0, 200), TOKENS), max_size=2))
def test_a_good_table_with_a_few_wounds(tmp_path, rows, wounds):
    raw = b"a,b\n" + "".join(f"{a},{b}\n" for a, b in rows).encode()
    for position, token in wounds:
        at = position % (len(raw) + 1)
        raw = raw[:at] + token + raw[at:]
    check(tmp_path / "wounded.csv", raw)


@pytest.mark.parametrize(
    ("raw", "place"),
    [
        (b"a,b\n1,2\n3\n", r"row 1 \(line 3\), column 1: 1 fields instead of 2"),
        (b"a,b\n1,2\n3,4,5\n", r"row 1 \(line 3\), column 2: 3 fields instead of 2"),
        (b"a,b\n1,2\n\n\n3,\x00\n", r"row 1 \(line 5\), column 'b': a NUL byte"),
        (b"a,b\n1,2\n3,\xe9\n", r"row 1 .*column 'b'.* not utf-8"),
        (b'a,b\n1,2\n3,"4\n5,6\n', r"row 1 .*column 'b': a quote opens and never closes"),
        (
            b"a,b\n" + b"1,2\n" * 300_000 + b"3,four\n",
            r"row 300000 \(line 300002\), column 'b': 'four' is not a number",
        ),
        (b"a,b\n1,2\n3," + b"x" * (3 << 20) + b"\n", r"row 1 .*column 'b': a field of 3145728 characters"),
        (b"a,a\n1,2\n", r"column name 'a' is used twice"),
        (b"", r"the file is empty"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path, raw, place):
    path = tmp_path / "bad.csv"
    path.write_bytes(raw)
    with pytest.raises(DataError, match=place) as caught:
        read_table(path, header=True)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_late_class_that_breaks_the_label_type_is_named(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"a,y\n" + b"1,0\n" * 300_000 + b"1,2.5\n")
    with pytest.raises(DataError, match=r"row 300000 .*column 'y': '2.5' is not an integer"):
        read_table(path, label="y")


@pytest.mark.parametrize(
    ("raw", "options"),
    [
        ("a;b\n1;2\n3;4\n", {}),
        ("a|b\n1|2\n3|4\n", {}),
        ("a\tb\n1\t2\n3\t4\n", {}),
        ("a,b\r\n1,2\r\n3,4\r\n", {}),
        ("\ufeffa,b\n1,2\n3,4\n", {}),
        ("'a'~'b'\n'1'~2\n3~4\n", {"delimiter": "~", "quote": "'"}),
        ('"a","b"\n"1","2"\n"3","4"\n', {}),
        ("a,b\n1,2\n\n3,4", {}),
        ("1,2\n3,4\n", {"header": False}),
        ("a,b\n 1, 2\n3 ,4 \n", {}),
        ("\n\r\na,b\n1,2\n3,4\n", {}),
        ('"a\nof two lines",b\n1,2\n3,4\n', {}),
    ],
)
def test_dialects(tmp_path, raw, options):
    path = tmp_path / "t.csv"
    path.write_text(raw, encoding="utf-8", newline="")
    np.testing.assert_array_equal(read_table(path, **options).X, [[1, 2], [3, 4]])


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "cp1252"])
def test_other_encodings_are_read_when_named(tmp_path, encoding):
    path = tmp_path / "t.csv"
    path.write_bytes("a,café\n1,été\n2,né\n".encode(encoding))
    assert read_table(path, encoding=encoding, label="café").class_names == ["né", "été"]


def test_a_damaged_gzip_file_is_one_line(tmp_path):
    import gzip

    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 100_000)[:-2000])
    with pytest.raises(DataError, match=r"t\.csv\.gz"):
        read_table(path)


def test_quoted_newlines_across_blocks_are_kept(tmp_path):
    path = tmp_path / "t.csv"
    verse = "line\n" * 30
    path.write_text("a,b\n" + f'1,"{verse}"\n2,three\n' * 2000)
    table = read_table(path, label="b", block_bytes=500)
    assert table.class_names == [verse, "three"]
    np.testing.assert_array_equal(table.X[:, 0], [1, 2] * 2000)


def test_a_first_group_of_0_is_no_group_of_thousands():
    assert Notation(thousands=",").accepts("1,126")
    assert not Notation(thousands=",").accepts("0,126")
    assert suggestion(["-0,472", "1,126"]) == "set `decimal` to ','"


def test_plain_numbers_beside_a_given_notation_are_no_categories(tmp_path):
    rows = "".join(f'"{i},5";{i}.25;{"ab"[i % 2]}\n' for i in range(40))
    (tmp_path / "t.csv").write_text("x;z;y\n" + rows)
    with pytest.raises(DataError, match=r"the column 'z' holds numbers such as .* none in the given notation"):
        ingest(tmp_path / "t.csv", tmp_path / "d.zarr", label="y", decimal=",", delimiter=";")


@pytest.mark.parametrize("form", ["%d/%m/%Y", "%m/%d/%y", "%d.%m.%Y", "%d/%m/%Y %H:%M"])
def test_dates_whose_day_and_month_may_be_mixed_up_are_refused(tmp_path, form):
    days = [datetime.datetime(2024, 1, 1) + datetime.timedelta(days=9 * i) for i in range(40)]
    rows = "".join(f"{day.strftime(form)},{i},{'ab'[i % 2]}\n" for i, day in enumerate(days))
    (tmp_path / "t.csv").write_text("when,x,y\n" + rows)
    with pytest.raises(DataError, match=r"column 'when' holds dates such as .* day or the month .* 2024-04-03"):
        ingest(tmp_path / "t.csv", tmp_path / "d.zarr", label="y")
    ingest(tmp_path / "t.csv", tmp_path / "d.zarr", label="y", categories=["when"])


def test_texts_that_only_look_like_dates_are_categories(tmp_path):
    rows = "".join(f"{'1/2/3' if i % 3 else 'a/b/c'},{i},{'ab'[i % 2]}\n" for i in range(40))
    (tmp_path / "t.csv").write_text("part,x,y\n" + rows)
    assert read_table(tmp_path / "t.csv", label="y").X.shape == (40, 3)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("{}\u00a0000", "set `thousands` to ' '"),
        ("{}\u202f000", "set `thousands` to ' '"),
        *((form, "look like numbers; write them as 1234.5, or list the column in `categories`") for form in (
            "\u2212{}.5", "<{}.5", "> {}", "({})", "{}-", "{}.0D+02", "≥{}", "~{}", "{}*",
        )),
        ("{} kg", "look like numbers with the unit 'kg'; write"),
        ("{}.5EUR", "look like numbers with the unit 'EUR'"),
    ],
)  # fmt: skip
def test_texts_that_look_like_numbers_are_no_silent_categories(tmp_path, form, said):
    values = [form.format(i) for i in range(1, 30)]
    (tmp_path / "t.csv").write_text("b,y\n" + "".join(f"{value},{i % 2}\n" for i, value in enumerate(values)), "utf-8")
    with pytest.raises(DataError, match=f"column 'b' holds texts such as .*{re.escape(said)}"):
        read_table(tmp_path / "t.csv", label="y")
    assert len(read_table(tmp_path / "t.csv", label="y", categories=["b"]).feature_names) == 29
    if "thousands" in said:
        table = read_table(tmp_path / "t.csv", label="y", thousands=" ")
        np.testing.assert_array_equal(table.X[:, 0], 1000 * np.arange(1, 30))


def test_digits_of_other_scripts_are_refused_as_numbers(tmp_path):
    texts = [str(i).translate({ord("0") + d: 0x0660 + d for d in range(10)}) for i in range(29)]
    (tmp_path / "t.csv").write_text("b,y\n" + "".join(f"{text},{i % 2}\n" for i, text in enumerate(texts)), "utf-8")
    with pytest.raises(DataError, match=r"column 'b' holds texts such as '.*', which look like numbers"):
        read_table(tmp_path / "t.csv", label="y")


def test_a_few_values_with_a_unit_are_categories_which_is_said(tmp_path):
    (tmp_path / "t.csv").write_text("b,y\n1 kg,0\n2 kg,1\n1 kg,1\n")
    with pytest.warns(AssumptionWarning, match=r"column 'b' holds numbers with the unit 'kg' such as '1 kg'"):
        assert read_table(tmp_path / "t.csv", label="y").feature_names == ["b=1 kg", "b=2 kg"]
    assert read_table(tmp_path / "t.csv", label="y", categories=["b"]).feature_names == ["b=1 kg", "b=2 kg"]


@pytest.mark.parametrize(
    "values", [["<30", "30-60", ">60"], ["1a", "2b"], ["A1", "A2"], ["1-2", "3-4"], ["1.2.3", "1.2.4"]]
)
def test_categories_with_digits_stay_categories(tmp_path, values):
    (tmp_path / "t.csv").write_text("b,y\n" + "".join(f"{value},{i % 2}\n" for i, value in enumerate(values)))
    assert read_table(tmp_path / "t.csv", label="y").feature_names == [f"b={value}" for value in sorted(values)]


def test_a_header_without_a_newline_is_a_table_without_rows(tmp_path):
    (tmp_path / "t.csv").write_text("a,b,y")
    table = read_table(tmp_path / "t.csv", label="y")
    assert (table.feature_names, table.X.shape) == (["a", "b"], (0, 2))


@pytest.mark.parametrize(
    ("content", "what"), [(b"PAR1\x15", "Parquet"), (b"PK\3\4-\0", "zip"), (b"\x1f\x8b\x08", "gzip")]
)
def test_a_binary_file_under_the_name_of_a_text_is_called_what_it_is(tmp_path, content, what):
    (tmp_path / "t.csv").write_bytes(content + bytes(range(256)))
    with pytest.raises(DataError, match=f"the content is .*{what}.*, not text; name the file after its content"):
        read_table(tmp_path / "t.csv")


@pytest.mark.parametrize("name", ["", "Unnamed: 0"])
def test_an_index_of_pandas_as_a_feature_is_said(tmp_path, name):
    (tmp_path / "t.csv").write_text(f"{name},b,y\n0,1.5,p\n1,2.5,q\n")
    column = name or "column_0"
    with pytest.warns(
        AssumptionWarning, match=f"column '{column}', which has no name of its own, is a feature; .*exclude"
    ):
        assert read_table(tmp_path / "t.csv", label="y").feature_names == [column, "b"]
    assert read_table(tmp_path / "t.csv", label="y", exclude=[column]).feature_names == ["b"]


def test_text_after_a_closing_quote_is_said(tmp_path):
    (tmp_path / "t.csv").write_text('x,y\n1,"p"x\n2,px\n3,"q, ""r"""\n')
    with pytest.warns(AssumptionWarning, match="text follows the closing quote of a field in line 2 .*quote=''"):
        assert read_table(tmp_path / "t.csv", label="y").class_names == ["px", 'q, "r"']
    (tmp_path / "t.csv").write_text('x,y\n1,5" pipe\n2,"p"\n')
    assert read_table(tmp_path / "t.csv", label="y").class_names == ['5" pipe', "p"]


def test_true_and_1_are_not_one_class(tmp_path):
    (tmp_path / "t.csv").write_text("x,y\n1,True\n2,1\n3,0\n")
    with pytest.raises(
        DataError, match="the labels 'y' mix true and false with '0'; write them in one way, or set `task`"
    ):
        read_table(tmp_path / "t.csv", label="y")
    assert read_table(tmp_path / "t.csv", label="y", task="classification").class_names == ["0", "1", "True"]
    (tmp_path / "t.csv").write_text("x,y\n" + "1,True\n2,False\n" * 100_000 + "3,1\n")
    with pytest.raises(DataError, match=r"row 200000 .*column 'y': '1' is not true or false, as this column requires"):
        read_table(tmp_path / "t.csv", label="y")


@pytest.mark.parametrize("values", [["1", "1.0", "2"], ["0.0", "1.0"]])
def test_a_regression_on_a_few_numbers_is_said(tmp_path, values):
    lines = [f"{i},{values[i % len(values)]}" for i in range(30)]
    (tmp_path / "t.csv").write_text("\n".join(["x,y", *lines]))
    said = r"the labels 'y' are numbers with a decimal point, .* only 2 different values \(.*\); set `task` to class"
    with pytest.warns(AssumptionWarning, match=said):
        assert read_table(tmp_path / "t.csv", label="y").class_names is None
    with pytest.warns(AssumptionWarning, match=said):
        ingest(tmp_path / "t.csv", tmp_path / "d.zarr", label="y")
    assert read_table(tmp_path / "t.csv", label="y", task="regression").class_names is None

"""Functions of the class: values, mappings, files, and arithmetic that is never run as code."""

from __future__ import annotations

import json

import pytest

from kme_dist.errors import ConfigError
from kme_dist.models.expressions import class_values, evaluate


@pytest.mark.parametrize(
    ("text", "y", "value"),
    [
        ("(y - 3) ** 2", 5, 4),
        ("y * 2 + 1", 3, 7),
        ("-y // 2 % 5", 3, 3),
        ("1 if y >= 3 else 0", 2, 0),
        ("1 < y < 4 and not y == 2", 3, 1),
        ("max(y, 2) - min(y, 2) + abs(-y)", 5, 8),
        ("sqrt(exp(log(y)))", 16, 4),
    ],
)
def test_arithmetic(text, y, value):
    assert evaluate(text, y) == pytest.approx(value)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "y.__class__",
        "(lambda: 1)()",
        "[c for c in (1, 2)]",
        "open('x')",
        "max(*[1])",
        "x + 1",
        "'text'",
        "y +",
        "1 / (y - y)",
        "9 ** 9 ** 9 ** 9",
        "y" * 2000,
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(ConfigError):
        evaluate(text, 3)


def test_forms_of_values(tmp_path):
    classes = ["cat", "dog", "eel"]
    assert class_values([1, 2, 3], classes).tolist() == [1, 2, 3]
    assert class_values({"dog": 2, "cat": 1, "eel": 0}, classes).tolist() == [1, 2, 0]
    assert class_values(len, classes).tolist() == [3, 3, 3]
    file = tmp_path / "g.yaml"
    file.write_text("values: {cat: 1.5}\ndefault: 0\n")
    assert class_values(file, classes).tolist() == [1.5, 0, 0]
    file.write_text(json.dumps({"values": {"1": 10, "2": 20}}))
    assert class_values(str(file), [1, 2]).tolist() == [10, 20]
    file.write_text("expression: y ** 2\n")
    assert class_values(file, [1, 2, 3]).tolist() == [1, 4, 9]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("values: {cat: 1}", "no value for class 'dog'"),
        ("values: {cat: 1, dog: 2, cow: 3}", "'cow' is not a class"),
        ("values: {cat: one, dog: 2}", "must have one number"),
        ("expression: y + 1", "'cat' is not a number"),
        ("expression: y\nvalues: {cat: 1, dog: 2}", "mutually exclusive"),
        ("just text", "expected `values:`"),
        ("values: !!python/object/apply:os.system [true]", "tag"),
        ("values: [1]", "2 classes"),
    ],
)
def test_mistakes_in_files_are_named(tmp_path, content, words):
    file = tmp_path / "g.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=words):
        class_values(file, ["cat", "dog"])


def test_a_class_is_named_as_it_is_written(tmp_path):
    file = tmp_path / "g.yaml"
    file.write_text("values: {007: 1.0}\ndefault: 5\n")
    assert class_values(file, ["007", "7"]).tolist() == [1, 5]
    with pytest.raises(ConfigError, match="'007' is not a class"):
        class_values(file, [7, 8])
    file.write_text("values: {1:30: 1, no: 2, 010: 3, 8: 4}\n")
    assert class_values(file, ["1:30", "no", "010", "8"]).tolist() == [1, 2, 3, 4]
    file.write_text("values: {true: 1, false: 2}\n")
    assert class_values(file, [False, True]).tolist() == [2, 1]
    assert class_values({True: 1, False: 2}, [False, True]).tolist() == [2, 1]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        class_values(tmp_path / "nowhere.yaml", ["cat"])

"""Promises of the configuration: safe, strict, and every mistake named in one line."""

import json
import math
from pathlib import Path

import pytest
import yaml

from kme_dist import MCEClassifier
from kme_dist.config import RUN_KEYS, Config, dump_yaml, json_schema, load_config, parse_config, parse_yaml
from kme_dist.errors import ConfigError
from kme_dist.pipelines import pendulum

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MINIMAL = "data: {source: 'sklearn:iris'}\n"


def load(tmp_path, text, *overrides):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def message(tmp_path, text, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_config_loads_and_says_what_it_is(path):
    if "pendulum" in path.stem:  # an example with a config of its own; complete: every key is there
        found = pendulum.load(path)
        assert found.pendulum.model_fields_set == set(pendulum.PendulumConfig.model_fields)
        assert path.read_text().startswith("# ")
        return
    config = load_config(path)
    MCEClassifier(**{**config.estimator_arguments(), "kernel": "gaussian"})
    assert path.read_text().startswith("# ")


def test_absent_keys_are_left_to_the_estimator(tmp_path):
    assert load(tmp_path, MINIMAL).estimator_arguments() == {}
    config = load(tmp_path, MINIMAL + "learn: {steps: 7, seed: 3}\nfit: {solver: cholesky}\n")
    assert config.estimator_arguments() == {"steps": 7, "random_state": 3, "solver": "cholesky"}


@pytest.mark.parametrize(
    "text",
    ["learn: {steps: null, learning_rate: null, seed: null}", "fit: {solver: null}", "model: {objective: null}"],
)
def test_null_leaves_a_key_to_the_estimator(tmp_path, text):
    config = load(tmp_path, MINIMAL + text + "\n")
    assert config.estimator_arguments() == {}
    defaults = MCEClassifier().get_params()
    assert config.resolved(defaults) == load(tmp_path, MINIMAL).resolved(defaults)


def test_null_switches_scaling_off(tmp_path):
    config = load(tmp_path, MINIMAL + "model: {scaling: null}\n")
    assert config.estimator_arguments() == {"scaling": None}
    defaults = MCEClassifier().get_params()
    assert config.resolved(defaults)["model"]["scaling"] is None
    assert load(tmp_path, MINIMAL).resolved(defaults)["model"]["scaling"] == "auto"


def test_every_estimator_key_of_the_config_is_a_parameter_of_the_estimator():
    known = set(MCEClassifier().get_params())
    for section in ("model", "learn", "fit"):
        keys = set(Config.model_fields[section].annotation.model_fields) - RUN_KEYS
        assert {"random_state" if key == "seed" else key for key in keys} <= known


def test_resolved_config_is_complete_and_loads_to_the_same(tmp_path):
    defaults = MCEClassifier().get_params()
    once = load_config(CONFIGS / "iris_two_attributes.yaml").resolved(defaults)
    again = parse_config(once).resolved(defaults)
    assert again == once
    assert once["model"]["dtype"] == defaults["dtype"]


def test_a_resolved_config_with_a_second_table_loads_again(tmp_path):
    defaults = MCEClassifier().get_params()
    once = load(tmp_path, "data: {source: a.csv, label: 0, test_source: b.csv}\n").resolved(defaults)
    assert parse_config(once).resolved(defaults) == once


def test_overrides_are_yaml_and_win_over_the_file(tmp_path):
    config = load(
        tmp_path,
        MINIMAL + "learn: {steps: 5}\n",
        "learn.steps=200",
        "learn.learning_rate=1e-3",
        "model.kernel={name: gaussian, ard: true}",
        "data.features=[0, petal width (cm)]",
        "output.folder=a=b",
    )
    assert config.learn.steps == 200
    assert config.learn.learning_rate == 0.001
    assert config.model.kernel == {"name": "gaussian", "ard": True}
    assert config.data.features == [0, "petal width (cm)"]
    assert config.output.folder == "a=b"


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.0e-3", "0.001", "1e-03"])
def test_numbers_are_read_as_people_write_them(tmp_path, text):
    assert load(tmp_path, MINIMAL + f"learn: {{learning_rate: {text}}}\n").learn.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learn.setps=3", ["`learn.setps`", "did you mean `learn.steps`"]),
        ("model.steps=3", ["`model.steps`", "did you mean `learn.steps`"]),
        ("modle.kernel=x", ["`modle`", "did you mean `model`"]),
        ("learn.zzz=1", ["`learn.zzz`", "known here: steps, batch_size"]),
        ("data.int=1", ["`data.int`", "known here: source"]),
        ("learn.starts=[{name: a, lenght_scale: 1}]", ["lenght_scale", "length_scale`?"]),
        ("model.objective=rbc", ["`model.objective`", "'rbc'", "'validation'", "mean 'rcb'"]),
        ("learn.steps=1.5", ["`learn.steps`", "1.5", "integer"]),
        ("learn.steps=-1", ["`learn.steps`", "-1", "greater than or equal to 0"]),
        ("learn.steps=many", ["`learn.steps`", "'many'", "integer"]),
        ("model.regularization='1'", ["`model.regularization`", "'1'", "number"]),
        ("model.regularization=.nan", ["`model.regularization`", "nan", "finite"]),
        ("model.regularization=0", ["`model.regularization`", "greater than 0"]),
        ("model.kernel=3", ["`model.kernel`", "string or a mapping"]),
        ("data.features=[a, 2.5]", ["`data.features.1`", "2.5", "integer or a valid string"]),
        ("data.features=[]", ["`data.features`", "at least 1"]),
        ("data.label=-1", ["`data.label`", "-1"]),
        ("data.image_shape=[8]", ["`data.image_shape.1`", "missing"]),
        ("data.image_shape=[8, 0]", ["`data.image_shape.1`", "greater than 0"]),
        ("data.test_fraction=1.0", ["`data.test_fraction`", "less than 1"]),
        ("data.source=sklearn:irsi", ["data.source", "'irsi'", "sklearn:iris"]),
        ("learn.starts=[{name: a}, {name: a}]", ["learn.starts", "'a'"]),
        ("learn.starts=[{name: a, length_scale: -1}]", ["`learn.starts.0.length_scale`", "-1"]),
        ("model=3", ["`model`", "section with keys kernel, objective"]),
        ("data.source.deep=3", ["data.source", "not a mapping"]),
        ("learn.steps", ["section.key=value"]),
        ("=3", ["section.key=value"]),
        ("learn.steps=[1", ["--set learn.steps=[1", "line 1"]),
        ("data.split_seed=2020-01-01", ["`data.split_seed`", "integer"]),
    ],
)
def test_a_mistake_names_the_key_what_was_seen_and_what_is_allowed(tmp_path, override, words):
    line = message(tmp_path, MINIMAL, override)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("text", "overrides", "flags", "origin"),
    [
        (MINIMAL, ["learn.steps=many"], [], "--set learn.steps=many: `learn.steps`"),
        (MINIMAL, ["learn.steps=3", "learn.setps=3"], [], "--set learn.setps=3: unknown key"),
        (MINIMAL, ["learn.steps=a", "learn.steps=b"], [], "--set learn.steps=b: `learn.steps`"),
        (MINIMAL, ["modle.kernel=x"], [], "--set modle.kernel=x: unknown key `modle`"),
        (MINIMAL, ["learn={steps: many}"], [], "--set learn={steps: many}: `learn.steps`"),
        (MINIMAL, ["data.source=sklearn:irsi"], [], "--set data.source=sklearn:irsi: data.source"),
        (MINIMAL, [], ["predict.top_k=-1"], "command line: `predict.top_k`"),
        (MINIMAL + "learn: {steps: many}", ["learn.batch_size=3"], [], "FILE: `learn.steps`"),
        ("data: {source: 'sklearn:irsi'}", ["data.split_seed=1"], [], "FILE: data.source"),
    ],
)
def test_a_mistake_is_blamed_on_whoever_gave_the_key(tmp_path, text, overrides, flags, origin):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, flags)
    assert str(caught.value).startswith(origin.replace("FILE", str(path)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["nothing", "`data:`"]),
        ("- a\n- b\n", ["a list"]),
        ("model: {}\n", ["`data` is missing"]),
        ("data:\n", ["`data` must be a section"]),
        ("data: {}\n", ["`data.source` is missing"]),
        ("data: {sorce: x}\n", ["`data.sorce`", "did you mean `data.source`"]),
        ("learn: {steps: 1}\nlearn: {steps: 2}\n", ["line 2", "`learn` appears twice"]),
        (MINIMAL + "learn:\n  steps: 1\n  steps: 2\n", ["line 4", "`steps` appears twice"]),
        ("data: [unclosed\n", ["line"]),
        ("? [a, b]\n: 1\n", ["line 1", "plain name"]),
        ("1: 2\n" + MINIMAL, ["unknown key `1`"]),
        ("data: {source: '\x00'}", ["not readable as YAML"]),
        ("[" * 4000, ["not readable as YAML"]),
    ],
)
def test_a_broken_file_is_refused_with_its_line(tmp_path, text, words):
    line = message(tmp_path, text)
    for word in words:
        assert word in line


def test_python_tags_are_refused_and_not_run(tmp_path):
    witness = tmp_path / "witness"
    line = message(tmp_path, f"data: {{source: !!python/object/apply:os.mkdir ['{witness}']}}\n")
    assert "line 1" in line
    assert "refused" in line
    assert not witness.exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("007", 7), ("010", 10), ("0o17", 15), ("0x1F", 31), ("-12", -12), ("1e-3", 1e-3), (".5", 0.5), ("1.", 1.0),
        ("-.inf", -math.inf), ("1:30", "1:30"), ("1_000", "1_000"), ("yes", "yes"), ("no", "no"), ("on", "on"),
        ("2026-03-01", "2026-03-01"), ("0b11", "0b11"), ("true", True), ("FALSE", False), ("~", None), ("", None),
        ("{007: 1, 7: 2, 1:30: 3, no: 4}", {"007": 1, "7": 2, "1:30": 3, "no": 4}),
    ],
)  # fmt: skip
def test_values_are_those_of_yaml_1_2_and_keys_are_as_written(text, value):
    found = parse_yaml(text, "a text")
    assert (found, type(found)) == (value, type(value))


def test_what_is_written_as_yaml_is_read_back():
    values = [
        "007",
        "010",
        "0o17",
        "1e3",
        "1:30",
        "1_000",
        "yes",
        "no",
        "2026-03-01",
        "~",
        "",
        "=",
        "<<",
        "0b1",
        ".5",
        "1.",
    ]
    values += [1, 1.5, 1e-5, 1e300, math.inf, True, None, [1], {"a": "1"}]
    found = parse_yaml(dump_yaml(values), "a text")
    assert [(value, type(value)) for value in found] == [(value, type(value)) for value in values]


def test_no_setting_is_read_in_base_60(tmp_path):
    assert "`learn.steps` is '1:30'" in message(tmp_path, MINIMAL + "learn: {steps: 1:30}\n")


def test_a_bomb_of_aliases_stays_small(tmp_path):
    """Written out, the value has ten million words; neither reading nor complaining may write it out."""
    levels = ["&a0 [x, x]", *(f"&a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 7))]
    line = message(tmp_path, f"data: {{source: [{', '.join(levels)}]}}\n")
    assert "`data.source`" in line
    assert len(line) < 500


def test_files_that_cannot_be_configs_are_refused(tmp_path):
    (tmp_path / "digits.yaml").write_text(MINIMAL)
    with pytest.raises(ConfigError, match=r"digts\.yaml does not exist; did you mean .*digits\.yaml"):
        load_config(tmp_path / "digts.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(tmp_path / "binary.yaml")
    (tmp_path / "large.yaml").write_text("#" * 1_000_001)
    with pytest.raises(ConfigError, match="data file"):
        load_config(tmp_path / "large.yaml")


def test_a_second_table_excludes_a_held_out_share(tmp_path):
    line = message(tmp_path, "data: {source: a.csv, test_source: b.csv, test_fraction: 0.3}\n")
    assert "data.test_source" in line
    assert "data.test_fraction" in line


def test_a_config_cannot_be_changed_after_loading(tmp_path):
    config = load(tmp_path, MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.learn.steps = 3


def test_the_schema_describes_every_key_and_is_json():
    schema = json.loads(json.dumps(json_schema()))
    assert set(schema["properties"]) == {"data", "model", "learn", "fit", "predict", "cluster", "output"}
    for definition in schema["$defs"].values():
        assert definition["additionalProperties"] is False
        for key, facts in definition["properties"].items():
            assert facts.get("description"), key


def test_shipped_configs_are_plain_yaml():
    for path in CONFIGS.glob("*.yaml"):
        assert isinstance(yaml.safe_load(path.read_text()), dict)

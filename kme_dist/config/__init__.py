"""The configuration of a run: one YAML file, read safely, checked strictly.

    config = load_config("configs/digits.yaml", overrides=["learn.steps=200"])
    config.learn.steps                  # 200
    config.estimator_arguments()        # for MCEClassifier(**...): only the keys that are set
    json_schema()                       # for editors: `kme-dist config-schema`

The file is plain YAML: no tags, no duplicate keys, and `1e-3` is a number. Every mistake is one
`ConfigError` that names the dotted key, the value found and the values allowed; for an unknown key it
suggests the nearest known one. An absent key has the default of the estimator, so each default is
defined once.
"""

from __future__ import annotations

from kme_dist.config.cluster import ClusterConfig, TlsConfig
from kme_dist.config.files import MAX_CONFIG_BYTES, dump_yaml, json_schema, load_config, parse_config, parse_yaml
from kme_dist.config.sections import (
    BUILT_IN_TABLES,
    RUN_KEYS,
    Config,
    DataConfig,
    FitConfig,
    LearnConfig,
    ModelConfig,
    OutputConfig,
    PredictConfig,
    Start,
)

__all__ = [
    "BUILT_IN_TABLES",
    "MAX_CONFIG_BYTES",
    "RUN_KEYS",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "FitConfig",
    "LearnConfig",
    "ModelConfig",
    "OutputConfig",
    "PredictConfig",
    "Start",
    "TlsConfig",
    "dump_yaml",
    "json_schema",
    "load_config",
    "parse_config",
    "parse_yaml",
]

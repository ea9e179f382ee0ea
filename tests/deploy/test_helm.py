"""The Helm chart: what it renders fits the schemas, is what the plain manifests are, and wrong values are refused."""

from __future__ import annotations

import base64
import importlib.machinery
import importlib.util
import json
import os
from pathlib import Path

import jsonschema
import pytest
import yaml
from deploy_tools import DEPLOY, KUBERNETES, all_containers, all_pods, call, documents, overlay, tool
from test_kubernetes import dask_findings, environment, find, model_findings, schema_findings

CHART = DEPLOY / "helm" / "kme-dist"
GPU = ("--values", CHART / "values-gpu.yaml")
PLAIN = ("--set", "operator.enabled=false")
VARIANTS = {"default": (), "gpu": GPU, "plain": PLAIN, "plain gpu": (*PLAIN, *GPU)}


def helm(*words, release="kme-dist", namespace="kme-dist"):
    return call(tool("helm"), "template", release, CHART, "--namespace", namespace, *words)


def rendered(*words, **options):
    done = helm(*words, **options)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def render_script():
    """deploy/kubernetes/render as a module."""
    loader = importlib.machinery.SourceFileLoader("render", str(KUBERNETES / "render"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("render", loader))
    loader.exec_module(module)
    return module


# --- without helm -----------------------------------------------------------------------------------


def test_the_plain_manifests_were_rendered_from_this_chart():
    header = render_script().header()
    files = [path for path in (KUBERNETES / "base").glob("*.yaml") if path.name not in render_script().OWN]
    assert len(files) >= 10
    for path in files:
        assert path.read_text().startswith(header), f"{path.name} is older than the chart; run `make manifests`"


def test_every_rendered_file_is_applied():
    listed = set(yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text())["resources"])
    assert listed == {path.name for path in (KUBERNETES / "base").glob("*.yaml")} - {"kustomization.yaml"}


@pytest.mark.parametrize("name", ["values.yaml", "values-gpu.yaml"])
def test_values_fit_their_schema(name):
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.Draft7Validator(schema).validate(yaml.safe_load((CHART / name).read_text()))


def test_the_schema_names_every_value_and_no_other():
    def keys(tree):
        return {key: keys(value) for key, value in tree.items()} if isinstance(tree, dict) else None

    def compare(schema, values, path=""):
        assert set(schema["properties"]) - {"global"} == set(values), path
        assert schema["additionalProperties"] is False
        for key, value in values.items():
            if "properties" in schema["properties"][key]:
                compare(schema["properties"][key], value, f"{path}{key}.")

    compare(json.loads((CHART / "values.schema.json").read_text()), yaml.safe_load((CHART / "values.yaml").read_text()))


def test_the_chart_has_the_version_of_the_package():
    import kme_dist

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == kme_dist.__version__
    tags = {image["newTag"] for path in KUBERNETES.glob("overlays/*/kustomization.yaml")
            for image in yaml.safe_load(path.read_text())["images"]}  # fmt: skip
    assert tags == {chart["appVersion"]}


# --- with helm --------------------------------------------------------------------------------------


def test_helm_renders_what_the_plain_manifests_are():
    path = f"{Path(tool('helm')).parent}:{os.environ['PATH']}"
    done = call(KUBERNETES / "render", "--check", env={**os.environ, "PATH": path})
    assert (done.returncode, done.stdout) == (0, ""), "run `make manifests`"


@pytest.mark.parametrize(("name", "words"), [("cpu", ()), ("gpu", GPU)])
def test_helm_and_kustomize_make_the_same_cluster(name, words):
    def named(resources):
        return {(r["kind"], r["metadata"]["name"]): r for r in resources if r["kind"] != "Namespace"}

    ours = named(overlay(name))
    for resource in ours.values():
        del resource["metadata"]["namespace"]  # Helm gives it at installation
    assert named(rendered(*words)) == ours


def test_helm_lint_finds_nothing():
    done = call(tool("helm"), "lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_fits_the_schemas(variant, tmp_path):
    resources = rendered(*VARIANTS[variant])
    assert schema_findings(resources, tmp_path / "resources.yaml") == ""
    if "plain" in variant:
        assert not any(r["apiVersion"].startswith("kubernetes.dask.org") for r in resources)
    else:
        assert dask_findings(resources) == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_has_values_that_kubernetes_knows(variant):
    assert model_findings(rendered(*VARIANTS[variant])) == []


def test_without_the_operator_it_runs_the_same_programs():
    """Scheduler and workers are Deployments; their commands, mounts and certificates are those of the DaskCluster."""
    plain = rendered(*PLAIN)
    cluster = find(rendered(), "DaskCluster")["spec"]
    for role in ("scheduler", "worker"):
        deployment = find(plain, "Deployment", f"kme-dist-{role}")["spec"]
        pod = deployment["template"]["spec"]
        assert deployment["selector"]["matchLabels"] == deployment["template"]["metadata"]["labels"]
        names = [entry for entry in pod["containers"][0]["env"] if entry["name"] == "DASK_WORKER_NAME"]
        assert len(names) == (role == "worker"), "the operator sets it, a Deployment does not"
        for entry in names:
            pod["containers"][0]["env"].remove(entry)
        assert pod == cluster[role]["spec"]
    service = find(plain, "Service", "kme-dist-scheduler")
    assert service["spec"] == cluster["scheduler"]["service"]
    labels = find(plain, "Deployment", "kme-dist-scheduler")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    selectors = [frozenset(d["spec"]["selector"]["matchLabels"].items()) for d in plain if d["kind"] == "Deployment"]
    assert not any(a < b or a == b for n, a in enumerate(selectors) for m, b in enumerate(selectors) if n != m)


def test_another_release_has_names_of_its_own():
    resources = rendered(release="second", namespace="elsewhere")
    text = json.dumps([r for r in resources if r["kind"] not in ("ConfigMap", "PrometheusRule")])
    for word in ("kme-dist-tls", "kme-dist-client-tls", "kme-dist-data", "kme-dist-scheduler", "kme-dist-dask"):
        assert word not in text
    for container in all_containers(resources):
        assert environment(container).get("DASK_SCHEDULER_ADDRESS") in (None, "tls://second-scheduler:8786")
    assert find(resources, "RoleBinding")["subjects"][0]["namespace"] == "elsewhere"


def test_certificates_given_as_files_become_secrets(tmp_path):
    pytest.importorskip("cryptography")
    from kme_dist.ops.certs import make_certificates

    make_certificates(tmp_path)
    files = {"tls.ca": "ca.pem", "tls.cluster.certificate": "cluster.pem", "tls.cluster.key": "cluster-key.pem",
             "tls.client.certificate": "client.pem", "tls.client.key": "client-key.pem"}  # fmt: skip
    words = [word for key, name in files.items() for word in ("--set-file", f"{key}={tmp_path / name}")]
    resources = rendered(*words)
    mounted = {v["secret"]["secretName"] for pod in all_pods(resources) for v in pod["volumes"] if "secret" in v}
    secrets = {r["metadata"]["name"]: r["data"] for r in resources if r["kind"] == "Secret"}
    assert set(secrets) == mounted
    for name, role in (("kme-dist-tls", "cluster"), ("kme-dist-client-tls", "client")):
        assert set(secrets[name]) == {"ca.pem", f"{role}.pem", f"{role}-key.pem"}
        for file, data in secrets[name].items():
            assert base64.b64decode(data) == (tmp_path / file).read_bytes()
    assert not any(r["kind"] == "Secret" for r in rendered())
    for left_out, said in (("tls.client.key", "tls.client.key is missing"), ("tls.ca", "tls.ca is missing")):
        words = [w for k, n in files.items() if k != left_out for w in ("--set-file", f"{k}={tmp_path / n}")]
        done = helm(*words)
        assert done.returncode != 0
        assert said in done.stderr


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("worker.replicas=3", "'worker' not allowed"),
        ("workers.replicas=two", "got string, want integer"),
        ("workers.memoryLimit=4Gi", "'4Gi' does not match"),
        ("nightly.schedule=daily", "'daily' does not match"),
        ("keep.notifyURL=http://plain", "does not match"),
        ("tls.ca=certs/ca.pem", "does not match"),
        ("image.digest=sha256:12", "does not match"),
    ],
)
def test_wrong_values_are_refused(setting, said):
    done = helm("--set", setting)
    assert done.returncode != 0
    assert said in done.stderr


def test_values_reach_the_resources(tmp_path):
    values = tmp_path / "mine.yaml"
    digest = f"sha256:{'0' * 64}"
    values.write_text(f"""
image: {{repository: here/kme, digest: "{digest}", pullSecrets: [registry]}}
storage: {{existingClaim: disk}}
workers: {{replicas: 5, nodeSelector: {{pool: compute}}}}
drivers: {{maxPerUser: 3, tolerations: [{{key: small, operator: Exists}}]}}
keep: {{notifyURL: "https://example.org/hook", limit: 2}}
nightly: {{schedule: "0 4 * * 1", timeZone: Europe/Berlin, config: "data: {{source: mine.zarr}}"}}
monitoring: {{labels: {{release: prometheus}}}}
networkPolicy: {{monitoringNamespace: watch}}
smoke: {{enabled: false}}
""")
    resources = rendered("--values", values)
    assert {container["image"] for container in all_containers(resources)} == {f"here/kme@{digest}"}
    for pod in all_pods(resources):
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert {v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if v["name"] == "data"} <= {"disk"}
    assert not any(r["kind"] in ("PersistentVolumeClaim", "Job") for r in resources)
    worker = find(resources, "DaskCluster")["spec"]["worker"]
    assert (worker["replicas"], worker["spec"]["nodeSelector"]) == (5, {"pool": "compute"})
    drivers = find(resources, "Deployment", "kme-dist-drivers")["spec"]["template"]["spec"]
    assert drivers["tolerations"] == [{"key": "small", "operator": "Exists"}]
    assert drivers["containers"][0]["args"][-2:] == ["--max-per-user", "3"]
    (keep,) = find(resources, "Deployment", "kme-dist-keep")["spec"]["template"]["spec"]["containers"]
    assert keep["args"][-2:] == ["--notify-url", "https://example.org/hook"]
    assert keep["args"][keep["args"].index("--limit") + 1] == "2"
    nightly = find(resources, "CronJob")["spec"]
    assert (nightly["schedule"], nightly["timeZone"]) == ("0 4 * * 1", "Europe/Berlin")
    assert "mine.zarr" in find(resources, "ConfigMap", "kme-dist-config")["data"]["nightly.yaml"]
    for kind in ("ServiceMonitor", "PrometheusRule"):
        assert find(resources, kind)["metadata"]["labels"]["release"] == "prometheus"
    assert "watch" in json.dumps([r["spec"] for r in resources if r["kind"] == "NetworkPolicy"])


def test_parts_can_be_switched_off():
    words = [word for part in ("keep", "nightly", "smoke", "submitter", "monitoring", "networkPolicy", "operator")
             for word in ("--set", f"{part}.enabled=false")]  # fmt: skip
    kinds = {resource["kind"] for resource in rendered(*words)}
    assert kinds == {"ServiceAccount", "ConfigMap", "PersistentVolumeClaim", "Service", "Deployment"}


def test_uninstalling_keeps_the_data():
    claim = find(rendered(), "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_the_package_of_the_chart_is_complete(tmp_path):
    """`helm package` follows the links to files outside the chart."""
    done = call(tool("helm"), "package", CHART, "--destination", tmp_path)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tgz")
    from_archive = call(tool("helm"), "template", "kme-dist", archive, "--namespace", "kme-dist")
    assert from_archive.stdout == helm().stdout != ""


def test_its_notes_say_how_to_check_the_installation():
    done = call(tool("helm"), "install", "kme-dist", CHART, "--namespace", "n", "--dry-run=client", "--hide-secret")
    assert "helm test kme-dist --namespace n" in done.stdout
    assert "create secret generic kme-dist-tls" in done.stdout


def test_documents_of_the_base_are_those_of_the_overlay():
    assert len(overlay("cpu")) == sum(len(documents(path)) for path in (KUBERNETES / "base").glob("*.yaml")) - 1

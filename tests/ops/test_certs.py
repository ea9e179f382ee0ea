"""The private authority: keys for their owner alone, strangers refused on every path into a cluster."""

from __future__ import annotations

import os
import ssl
import stat
import time
from pathlib import Path

import pytest

from kme_dist.cli import app as cli
from kme_dist.config import ClusterConfig
from kme_dist.errors import ConfigError, CorruptError, RetryError
from kme_dist.ops import cluster
from kme_dist.ops.certs import expires_at, make_certificates, tls_files
from kme_dist.ops.cluster import open_client


def test_keys_are_for_their_owner_alone(tmp_path):
    make_certificates(tmp_path / "certs")
    for name in ("ca", "cluster", "client"):
        assert stat.S_IMODE((tmp_path / "certs" / f"{name}-key.pem").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "certs").stat().st_mode) == 0o700
    assert not list((tmp_path / "certs").glob(".*")), "nothing half-written stays"


def test_certificates_are_signed_by_the_authority_and_by_it_alone(tmp_path):
    make_certificates(tmp_path / "ours")
    make_certificates(tmp_path / "theirs")
    ours = tls_files(tmp_path / "ours", "cluster")
    context = ssl.create_default_context(cafile=ours.authority)
    context.load_cert_chain(ours.certificate, ours.key)
    from cryptography import x509

    def load(path):
        return x509.load_pem_x509_certificate(Path(path).read_bytes())

    load(ours.certificate).verify_directly_issued_by(load(ours.authority))
    with pytest.raises(Exception, match=r"(?i)signature|^$"):
        load(tls_files(tmp_path / "theirs").certificate).verify_directly_issued_by(load(ours.authority))


def test_what_is_there_stays_until_it_is_renewed(tmp_path):
    assert make_certificates(tmp_path, days=10)["made"] == ["ca", "cluster", "client"]
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert make_certificates(tmp_path)["made"] == []
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert make_certificates(tmp_path, days=90, renew=True)["made"] == ["cluster", "client"]
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert [name for name in sorted(after) if after[name] == before[name]] == ["ca-key.pem", "ca.pem"]
    assert 89 < (expires_at(tmp_path / "client.pem") - time.time()) / 86_400 <= 90


def test_the_end_of_a_certificate_is_known_from_its_file_and_from_its_text(tmp_path):
    make_certificates(tmp_path, days=10)
    path = tmp_path / "cluster.pem"
    assert expires_at(path) == expires_at(path.read_text()) == pytest.approx(time.time() + 10 * 86400, abs=3600)


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ConfigError, match="must be an integer >= 1"):
        make_certificates(tmp_path, days=0)
    with pytest.raises(ConfigError, match="kme-dist certs"):
        tls_files(tmp_path / "absent")
    make_certificates(tmp_path / "a")
    (tmp_path / "a" / "ca-key.pem").unlink()
    with pytest.raises(ConfigError, match="required to sign certificates"):
        make_certificates(tmp_path / "a", renew=True)
    (tmp_path / "a" / "ca.pem").unlink()
    with pytest.raises(CorruptError, match=r"no ca\.pem"):
        make_certificates(tmp_path / "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be created"):
        make_certificates(tmp_path / "file" / "certs")


def test_the_command_says_what_it_made(tmp_path, capsys):
    assert cli.execute(["certs", str(tmp_path / "c"), "--json"]) == 0
    assert '"made": [' in capsys.readouterr().out
    assert os.path.isfile(tmp_path / "c" / "client.pem")


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory):
    """(address, certificates) of a scheduler with one worker that speaks TLS only."""
    from distributed import LocalCluster

    folder = tmp_path_factory.mktemp("certs")
    make_certificates(folder)
    settings = ClusterConfig(workers=1, dashboard=False, tls=tls_files(folder, "cluster"))
    with LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0", **cluster._listen(settings)
    ) as running:
        yield running.scheduler_address, folder


def settings_for(address, folder):
    return ClusterConfig(kind="address", address=address, tls=tls_files(folder))


def test_who_has_a_certificate_of_the_authority_is_let_in(encrypted, monkeypatch):
    address, folder = encrypted
    assert address.startswith("tls://127.0.0.1:")
    with open_client(settings_for(address, folder)) as client:
        assert client.submit(sum, [1, 2]).result() == 3
    monkeypatch.setenv("KME_TLS", str(folder))
    with open_client(ClusterConfig(kind="address", address=address)) as client:
        assert client.scheduler.address == address


def test_commands_take_the_folder_of_the_certificates(encrypted, tmp_path, monkeypatch, capsys):
    address, folder = encrypted
    monkeypatch.delenv("KME_TLS", raising=False)
    there = ["--scheduler", address, "--tls", str(folder)]
    assert cli.execute(["doctor", *there]) == 0
    seen = []
    for stage in ("learn", "run", "fit"):
        monkeypatch.setattr(f"kme_dist.pipelines.{stage}.run", lambda config, **_: seen.append(config.cluster) or {})
    monkeypatch.setattr("kme_dist.pipelines.plan.run", lambda config, *_, **__: seen.append(config.cluster) or {})
    (tmp_path / "c.yaml").write_text("data: {source: t.zarr}")
    cli.execute(["plan", str(tmp_path / "c.yaml"), "--json", *there])
    cli.execute(["learn", str(tmp_path / "c.yaml"), "--json", *there])
    assert [(found.address, found.tls) for found in seen] == [(address, tls_files(folder))] * 2
    capsys.readouterr()


def test_a_foreign_certificate_is_refused(encrypted, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "CONNECT_S", 2.0)
    make_certificates(tmp_path)
    with (
        pytest.raises(RetryError, match=r"CERTIFICATE_VERIFY_FAILED.* certificates of the same authority"),
        open_client(settings_for(encrypted[0], tmp_path)),
    ):
        pass


def test_who_has_no_certificate_is_refused(encrypted, monkeypatch):
    monkeypatch.setattr(cluster, "CONNECT_S", 2.0)
    address = encrypted[0]
    with (
        pytest.raises(ConfigError, match=r"requires cluster\.tls"),
        open_client(ClusterConfig(kind="address", address=address)),
    ):
        pass
    plain = address.replace("tls://", "tcp://")
    with pytest.raises(RetryError, match="without TLS"), open_client(ClusterConfig(kind="address", address=plain)):
        pass


def test_a_scheduler_without_tls_is_named_at_once_and_always_with_75(tmp_path, capfd):
    """The client of Dask tries for up to 40 s and fails in several ways, some of which look like an invalid address."""
    from distributed import LocalCluster

    make_certificates(tmp_path)
    with LocalCluster(
        n_workers=0, processes=False, dashboard_address="127.0.0.1:0", protocol="tcp://", host="127.0.0.1"
    ) as running:
        address = running.scheduler_address.replace("tcp://", "tls://")
        for _ in range(5):
            began = time.monotonic()
            with pytest.raises(RetryError, match="cannot be reached with TLS"):
                cluster.open_unchecked(settings_for(address, tmp_path))
            assert time.monotonic() - began < cluster.REFUSED_S
    assert "Traceback" not in capfd.readouterr().err


def test_a_listener_that_would_serve_others_in_the_clear_is_refused(tmp_path, capsys):
    for listen in ("0.0.0.0:0", "192.0.2.7:8786"):
        assert cli.execute(["cluster", "--workers", "1", "--listen", listen, "--quiet"]) == 2
        assert "not encrypted" in capsys.readouterr().err
    assert cli.execute(["submit", "x.yaml", "--scheduler", "tcp://192.0.2.7:8786"]) == 2

"""A private certificate authority for one cluster: `kme-dist certs DIR`.

    files = make_certificates("certs")          # existing files are kept
    tls = tls_files("certs", "client")          # section cluster.tls of a configuration

    DIR/ca.pem           the authority; needed by every host of the cluster and every client
        ca-key.pem       signs new certificates; keep it off the cluster
        cluster.pem      certificate of scheduler and workers, with cluster-key.pem
        client.pem       certificate of users of the cluster, with client-key.pem

Dask checks on both sides that the peer's certificate was signed by the authority, and does not check host names: the
authority is the authorisation, so each cluster has its own. Keys are readable by their owner only.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

from kme_dist.config import TlsConfig
from kme_dist.errors import ConfigError, CorruptError

ROLES = ("cluster", "client")
DAYS = 365


def make_certificates(folder: str | Path, *, days: int = DAYS, renew: bool = False) -> dict[str, Any]:
    """Create the authority and certificates that are missing in `folder`; returns what was created and when it expires.

    With `renew` both certificates are reissued, signed by the existing authority.
    """
    if days < 1:
        raise ConfigError(f"--days is {days}; must be an integer >= 1")
    home = Path(folder).expanduser()
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"the folder {home} cannot be created ({error.strerror}); choose another") from None
    made, expiry = [], {}
    if not (home / "ca.pem").exists():
        if any((home / f"{role}.pem").exists() for role in ROLES):
            raise CorruptError(f"{home} contains certificates but no ca.pem; restore it, or use an empty folder")
        _make_authority(home, max(days, 10 * DAYS))
        made.append("ca")
    for role in ROLES:
        if renew or not (home / f"{role}.pem").exists():
            _issue(home, role, days)
            made.append(role)
    for name in ("ca", *ROLES):
        expiry[name] = _certificate(home / f"{name}.pem").not_valid_after_utc.date().isoformat()
    return {"folder": str(home), "made": made, "valid_until": expiry}


def tls_files(folder: str | Path, role: str = "client") -> TlsConfig:
    """The three files of one role; ConfigError when one is missing."""
    home = Path(folder).expanduser()
    files = TlsConfig(
        authority=str(home / "ca.pem"), certificate=str(home / f"{role}.pem"), key=str(home / f"{role}-key.pem")
    )
    for path in (files.authority, files.certificate, files.key):
        if not os.path.isfile(path):
            raise ConfigError(f"{path} does not exist; create the certificates with `kme-dist certs {home}`")
    return files


def expires_at(certificate: str | Path) -> float:
    """When a certificate, by its path or as PEM text, expires, in seconds since 1970."""
    if "-----BEGIN" in str(certificate):
        return float(_x509().load_pem_x509_certificate(str(certificate).encode()).not_valid_after_utc.timestamp())
    return float(_certificate(Path(certificate)).not_valid_after_utc.timestamp())


def _x509() -> Any:
    try:
        from cryptography import x509
    except ModuleNotFoundError:
        raise ConfigError(
            "certificates require the package cryptography; install it with `pip install 'kme-dist[tls]'`"
        ) from None
    return x509


def _certificate(path: Path) -> Any:
    try:
        return _x509().load_pem_x509_certificate(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; create it with `kme-dist certs {path.parent}`") from None
    except ValueError as error:
        raise CorruptError(f"{path} is not a certificate ({error}); restore it or reissue it with --renew") from None


def _make_authority(home: Path, days: int) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec

    x509 = _x509()
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(x509, "kme-dist cluster authority")
    builder = _builder(x509, name, name, key.public_key(), days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    usage = {
        "digital_signature": False,
        "content_commitment": False,
        "key_encipherment": False,
        "data_encipherment": False,
        "key_agreement": False,
        "encipher_only": False,
        "decipher_only": False,
    }
    builder = builder.add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True)
    _store(home, "ca", builder, key, key)


def _issue(home: Path, role: str, days: int) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    x509 = _x509()
    try:
        signer = serialization.load_pem_private_key((home / "ca-key.pem").read_bytes(), password=None)
    except FileNotFoundError:
        raise ConfigError(f"{home / 'ca-key.pem'} does not exist; it is required to sign certificates") from None
    except ValueError as error:
        raise CorruptError(f"{home / 'ca-key.pem'} is not a private key ({error}); restore it from a backup") from None
    authority = _certificate(home / "ca.pem")
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(x509, _name(x509, f"kme-dist {role}"), authority.subject, key.public_key(), days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    # Workers and schedulers are clients of each other too, so every certificate is valid for both sides.
    uses = [x509.oid.ExtendedKeyUsageOID.SERVER_AUTH, x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    _store(home, role, builder, key, signer)


def _name(x509: Any, text: str) -> Any:
    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text)])


def _builder(x509: Any, subject: Any, issuer: Any, public_key: Any, days: int) -> Any:
    today = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(hours=1))  # the clocks of hosts differ
        .not_valid_after(today + datetime.timedelta(days=days))
    )


def _store(home: Path, name: str, builder: Any, key: Any, signer: Any) -> None:
    from cryptography.hazmat.primitives import hashes, serialization

    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    # The certificate last: if it exists, so does its key.
    for path, content, mode in ((home / f"{name}-key.pem", private, 0o600), (home / f"{name}.pem", public, 0o644)):
        aside = path.with_name(f".{path.name}.partial")
        aside.unlink(missing_ok=True)
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(aside, path)

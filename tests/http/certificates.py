"""A private CA, and certificates of it for this host, as PEM files."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_PEM = serialization.Encoding.PEM
_KEY = serialization.PrivateFormat.PKCS8
NOW = datetime.datetime.now(datetime.UTC)


class Authority:
    """A CA that nobody knows but who is told.

    Args:
        folder: For the files.

    Attributes:
        ca_certs: Its own certificate.
    """

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        certificate = self._signed(self._name, self._key, constraints)
        self.ca_certs = str(folder / f"{name}.pem")
        Path(self.ca_certs).write_bytes(certificate.public_bytes(_PEM))

    def issue(self, name: str, *, passphrase: str = "") -> dict[str, str]:
        """Write a certificate for 127.0.0.1 and its key; return the settings that name them."""
        key = ec.generate_private_key(ec.SECP256R1())
        here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        certificate = self._signed(_named(name), key, here)
        locked = serialization.BestAvailableEncryption(passphrase.encode()) if passphrase else None
        files = {each: str(self._folder / f"{name}.{each}") for each in ("certfile", "keyfile")}
        Path(files["certfile"]).write_bytes(certificate.public_bytes(_PEM))
        Path(files["keyfile"]).write_bytes(
            key.private_bytes(_PEM, _KEY, locked or serialization.NoEncryption())
        )
        return files

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType
    ) -> x509.Certificate:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - datetime.timedelta(days=1))
            .not_valid_after(NOW + datetime.timedelta(days=1))
            .add_extension(extension, critical=True)
            .sign(self._key, hashes.SHA256())
        )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

"""Test certificate authority and the certificates that it signs."""

import datetime as dt
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from serve_app.serving.tls import TlsSettings

_DAY = dt.timedelta(days=1)
# Python 3.13 accepts no authority without it.
_SIGNS = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


class Authority:
    """Certificate authority that writes each process's files into a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named("authority")
        certificate = self._signed(
            self._name, self._key, x509.BasicConstraints(ca=True, path_length=None), _SIGNS
        )
        self._ca = _written(folder / "ca.pem", certificate.public_bytes(serialization.Encoding.PEM))

    def process(self, name: str = "ewsjf.internal", expected: str | None = None) -> TlsSettings:
        """Return the TLS settings of one process.

        Args:
            name: name in its certificate.
            expected: name that it requires of peers.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._signed(_named(name), key, x509.SubjectAlternativeName([x509.DNSName(name)]))
        secret = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return TlsSettings(
            ca=self._ca,
            certificate=_written(
                self._folder / f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM)
            ),
            key=_written(self._folder / f"{name}.key", secret),
            name=expected,
        )

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *extensions: x509.ExtensionType
    ) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + _DAY)
            .add_extension(identifier, critical=False)
        )
        for extension in extensions:
            builder = builder.add_extension(
                extension, critical=not isinstance(extension, x509.SubjectAlternativeName)
            )
        return builder.sign(self._key, hashes.SHA256())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _written(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)

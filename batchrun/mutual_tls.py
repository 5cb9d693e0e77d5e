"""Connections that only holders of one secret can open: TLS 1.3, both ends known by one key.

Both ends derive the same P-256 key from the secret (HKDF-SHA256) and show the same self-signed
certificate, byte for byte; each trusts that certificate alone. So the handshake proves the secret
on both sides without sending it, and what was recorded of one connection opens no other. Whoever
connects may see the certificate and try secrets against it, so a secret must be long.
"""

from __future__ import annotations

import os
import secrets
import ssl
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from batchrun.errors import ConfigError
from batchrun.files import write_atomically

MIN_SECRET_CHARS = 32
MAX_SECRET_CHARS = 4096
_OTHERS_MAY_READ = 0o004
_SALT = b"batchrun agent 1"
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_VALID_FROM = datetime(2020, 1, 1, tzinfo=UTC)
_VALID_UNTIL = datetime(9999, 12, 31, tzinfo=UTC)


def read_secret(path: Path) -> bytes:
    """The secret in a file, without the space around it. Raises ConfigError, one line."""
    try:
        with path.open("rb") as file:
            is_open = os.fstat(file.fileno()).st_mode & _OTHERS_MAY_READ
            secret = file.read(MAX_SECRET_CHARS + 1).strip()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the secret: {error.strerror}") from error
    if is_open:
        raise ConfigError(f"{path}: every user can read this secret; run: chmod 600 {path}")
    if not MIN_SECRET_CHARS <= len(secret) <= MAX_SECRET_CHARS:
        raise ConfigError(
            f"{path}: a secret has {MIN_SECRET_CHARS} to {MAX_SECRET_CHARS} characters, at random; "
            "`openssl rand -hex 32` makes one"
        )
    return secret


def read_or_make_secret(path: Path) -> bytes:
    """The secret in a file, which is made, for its owner alone, where there is none.

    Raises ConfigError.
    """
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, secrets.token_hex(32).encode() + b"\n", mode=0o600)
        except OSError as error:
            raise ConfigError(f"{path}: cannot write a secret: {error.strerror}") from error
    return read_secret(path)


def derive_token(secret: bytes, purpose: str) -> str:
    """A secret for another purpose, from which nobody learns the first."""
    return _derive(secret, f"token {purpose}", 32).hex()


def server_context(
    secret: bytes, certificate: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """For whoever listens: lets in holders of the secret alone.

    With `certificate` and `key` (PEM) it shows these instead of what follows from the secret.
    Raises ConfigError when they cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Each connection proves the secret anew: none is taken up again.
    context.num_tickets = 0
    context.verify_mode = ssl.CERT_REQUIRED
    own = _prepare(context, secret)
    context.load_verify_locations(cadata=own)
    if certificate is not None:
        show(context, certificate, key)
    return context


def client_context(secret: bytes, certificate: Path | None = None) -> ssl.SSLContext:
    """For whoever connects: believes the holder of the secret alone, at whatever address.

    With `certificate` (PEM), believes who that one vouches for, under the address that is
    connected to. Raises ConfigError when it cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    own = _prepare(context, secret)
    if certificate is None:
        context.check_hostname = False
        context.load_verify_locations(cadata=own)
        return context
    try:
        context.load_verify_locations(cafile=certificate)
    except OSError as error:
        raise ConfigError(f"{certificate}: not a certificate in PEM: {_reason(error)}") from error
    return context


def _prepare(context: ssl.SSLContext, secret: bytes) -> str:
    """Give a context the identity that follows from the secret; returns the certificate."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    value = int.from_bytes(_derive(secret, "key", 48)) % (_P256_ORDER - 1) + 1
    key = ec.derive_private_key(value, ec.SECP256R1())
    certificate = _certify(key).public_bytes(Encoding.PEM)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    # OpenSSL reads files only; this one is in memory.
    fd = os.memfd_create("batchrun-identity", os.MFD_CLOEXEC)
    try:
        os.write(fd, private + certificate)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return certificate.decode()


def _certify(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """Self-signed, with nothing in it that could differ between two ends."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "batchrun agent")])
    builder = (
        x509
        .CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_VALID_FROM)
        .not_valid_after(_VALID_UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    )
    return builder.sign(key, hashes.SHA256(), ecdsa_deterministic=True)


def show(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    """Show this certificate (PEM) on all connections from now on. Raises ConfigError when it cannot
    be used."""
    # A context has one certificate for each kind of key; callers would choose among them.
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shown.load_verify_locations(cadata=b"".join(context.get_ca_certs(binary_form=True)))
    try:
        shown.load_cert_chain(certificate, key)
    except OSError as error:
        raise ConfigError(
            f"{certificate}: cannot be used with the key {key or 'in it'}: {_reason(error)}"
        ) from error
    context.sni_callback = lambda connection, *_: setattr(connection, "context", shown)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _derive(secret: bytes, purpose: str, num_bytes: int) -> bytes:
    return HKDF(hashes.SHA256(), num_bytes, _SALT, purpose.encode()).derive(secret)

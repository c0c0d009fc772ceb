"""The secret of a job, which only its tasks know.

A launcher makes one for each job that it starts and gives it to the tasks by a file of this user
alone; never by a command line or an environment, which are listed and inherited.
"""

from __future__ import annotations

import hmac
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spartito.errors import UserError
from spartito.names import ENV_SECRET, ENV_SECRET_FILE, ENV_TLS, who_has
from spartito.wire.addresses import is_loopback

LEAST = 16
"""Characters that a secret has at least: a shorter one can be guessed."""


@dataclass(frozen=True, slots=True)
class Key:
    """By what the tasks of a job know each other.

    Attributes:
        secret: The secret; b"" is none, and everybody has that.
        encrypts: Whether what they send by TCP is encrypted too.
    """

    secret: bytes = field(default=b"", repr=False)
    encrypts: bool = False


NO_SECRET = Key()
"""The key of a job without a secret: everybody has it."""

ADVICE = f"Leave both {ENV_SECRET} and {ENV_SECRET_FILE} out, or make one: openssl rand -hex 32"


def new_secret() -> str:
    """A secret for a new job: 32 random bytes, in hex."""
    return secrets.token_hex(32)


def with_secret(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` for all tasks of a job, with a new secret unless it has one."""
    given = env.get(ENV_SECRET) or env.get(ENV_SECRET_FILE)
    return dict(env) if given else {**env, ENV_SECRET: new_secret()}


def without_secret(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` for a process that everybody may look at."""
    return {name: value for name, value in env.items() if name != ENV_SECRET}


def in_file(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """``env`` for one process, which reads its secret from a new file.

    Args:
        env: What has the secret as a variable; without one it stays as it is.
        folder: For the file; of this user alone, and gone after the job.

    Returns:
        The environment, which names the file instead.
    """
    own = dict(env)
    if secret := own.pop(ENV_SECRET, ""):
        descriptor, own[ENV_SECRET_FILE] = tempfile.mkstemp(prefix="secret-", dir=folder)
        with open(descriptor, "w") as file:  # its mode is 0600
            file.write(secret)
    return own


def read_secret(env: Mapping[str, str] | None = None) -> str:
    """The secret that the environment names; empty where it names none.

    Raises `UserError` for one that is too short, or whose file cannot be read.
    """
    variables = os.environ if env is None else env
    text, source = variables.get(ENV_SECRET, "").strip(), ENV_SECRET
    path = variables.get(ENV_SECRET_FILE)
    if not text and path:
        source = f"{ENV_SECRET_FILE}={path}"
        try:
            text = Path(path).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{source} cannot be read: {error}", ADVICE) from error
        if not text:
            raise UserError(f"{source} is empty", ADVICE)
    if not text.isprintable():
        raise UserError(f"{source} has more than one line", ADVICE)
    if text and len(text) < LEAST:
        raise UserError(f"{source} has {len(text)} characters, at least {LEAST} are needed", ADVICE)
    return text


def fingerprint(secret: str) -> str:
    """What tasks show each other to see whether their secrets are equal; "" where none is."""
    return hmac.digest(secret.encode(), b"spartito fingerprint", "sha256").hex() if secret else ""


def check_secrets(fingerprints: Mapping[str, str]) -> None:
    """Raise `UserError` unless the tasks of these names have one secret, or none has any."""
    having = who_has(fingerprints)
    if len(having) > 1:
        listed = ", ".join(
            f"{' and '.join(names)} {'one' if found else 'none'}" for found, names in having.items()
        )
        raise UserError(
            f"the tasks do not have the same secret: {listed}",
            f"Give all tasks the same {ENV_SECRET} or {ENV_SECRET_FILE}, or none; two jobs need "
            "different ports.",
        )


def insecurity(open_hosts: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """What others could do to tasks at these hosts, as `key_among` has them; "" for nothing."""
    key = key_among(open_hosts, env)
    if not open_hosts or key.encrypts:
        return ""
    if key.secret:
        return f"insecure: what tasks send by {open_hosts[0]} is not encrypted ({ENV_TLS}=off)"
    said = (
        f"insecure: this job has no secret, so whoever reaches {open_hosts[0]} can take part in "
        "it, and read what its tasks send"
    )
    if (os.environ if env is None else env).get(ENV_TLS) == "off":
        return f"{said} ({ENV_TLS}=off)"
    return (
        f"{said}. Set {ENV_SECRET} or {ENV_SECRET_FILE} on all tasks (openssl rand -hex 32 makes "
        f"one); if it is meant, --insecure or {ENV_TLS}=off"
    )


def key_among(open_hosts: Sequence[str], env: Mapping[str, str] | None = None) -> Key:
    """The key of tasks at these hosts that others could reach.

    It encrypts where there are any, unless the environment says otherwise by ``SPARTITO_TLS``.

    Args:
        open_hosts: Where they listen, without those that mean one machine alone.
        env: The environment; None is this process's.

    Raises:
        UserError: ``SPARTITO_TLS`` is neither "on" nor "off", or "on" without a secret.
    """
    secret, asked = read_secret(env), (os.environ if env is None else env).get(ENV_TLS, "")
    if asked not in ("", "on", "off"):
        raise UserError(f"{ENV_TLS}={asked!r} is neither on nor off", "Leave it out: off is unsafe")
    if asked == "on" and not secret:
        raise UserError(f"{ENV_TLS}=on, but this job has no secret", f"Set {ENV_SECRET_FILE}.")
    encrypts = bool(secret) and (asked == "on" or (asked == "" and bool(open_hosts)))
    return Key(secret.encode(), encrypts)


def key_at(host: str, env: Mapping[str, str] | None = None) -> Key:
    """The key for what listens at ``host`` alone; ``env`` and errors are those of `key_among`."""
    return key_among([] if is_loopback(host) else [host], env)

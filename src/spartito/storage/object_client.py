"""Connections to object stores by obstore, with the keys and endpoints that users have set.

obstore reads the variables of each cloud (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``) and the identity
of a machine there. The files of ``aws configure`` it does not read: here they are.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Mapping
from configparser import ConfigParser, Error
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from spartito.errors import UserError
from spartito.names import nearest

OBJECTS = frozenset({"s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "http", "https"})
"""Protocols that obstore speaks."""

EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("az", "azure", "abfs", "abfss"), "azure"),
    **dict.fromkeys(("hdfs", "viewfs"), "hdfs"),
    **dict.fromkeys(("http", "https"), "web"),
    "hf": "hf",
}
"""The extra of the package that brings what a protocol needs; others need ``remote``."""

_XML = re.compile(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", re.DOTALL)
_STATUS = re.compile(r"status code: (\d+)")

SECONDS = timedelta(seconds=30)
"""In which obstore itself makes a request again, where it is asked to."""


def by_obstore(url: str) -> bool:
    """Whether a URL is reached by obstore; else fsspec has to know it.

    That is so where it knows the protocol, is installed, and fsspec's own configuration has
    nothing for this protocol.
    """
    scheme = urlsplit(url).scheme
    if scheme not in OBJECTS or importlib.util.find_spec("obstore") is None:
        return False
    try:
        conf: Mapping[str, Any] = importlib.import_module("fsspec.config").conf
    except ImportError:
        return True
    return not conf.get(scheme)


def connect_objects(url: str, retries: int) -> tuple[Any, Any]:
    """obstore, and its store of a URL; nothing is asked of it yet.

    Args:
        url: As ``s3://bucket/folder``.
        retries: How often obstore makes a request again by itself.

    Raises:
        UserError: obstore is not installed, or refuses the URL or the configuration.
    """
    try:
        client: Any = importlib.import_module("obstore")
        made: Any = importlib.import_module("obstore.store").from_url
    except ImportError as error:
        raise no_package(url, error) from error
    options: dict[str, Any] = {"client_options": {"allow_http": True}}
    if url.startswith("s3"):
        options |= aws_options(os.environ)
    retry = {"max_retries": retries, "retry_timeout": SECONDS}
    try:
        return client, made(url.rstrip("/"), retry_config=retry, **options)
    except Exception as error:
        raise UserError(f"{url} cannot be reached: {reason(error)}", "Check the URL.") from error


def aws_options(env: Mapping[str, str]) -> dict[str, str]:
    """Endpoint, keys and region of S3 that obstore does not find in ``env`` by itself.

    Args:
        env: The environment: ``AWS_ENDPOINT_URL_S3`` or ``AWS_ENDPOINT_URL``, ``AWS_PROFILE``,
            ``AWS_SHARED_CREDENTIALS_FILE`` and ``AWS_CONFIG_FILE``.

    Raises:
        UserError: A profile that is named is in neither file, or a file cannot be read.
    """
    found = {}
    if endpoint := env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL"):
        found["endpoint"] = endpoint
    if "AWS_ACCESS_KEY_ID" in env:
        return found
    name = env.get("AWS_PROFILE", "default")
    sections = {
        env.get("AWS_CONFIG_FILE", "~/.aws/config"): "default"
        if name == "default"
        else f"profile {name}",
        env.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"): name,
    }
    facts: dict[str, str] = {}
    for path, section in sections.items():
        parser = ConfigParser(interpolation=None)
        try:
            parser.read(os.path.expanduser(path), encoding="utf-8")
        except (OSError, Error, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}", "aws configure writes it.") from None
        if parser.has_section(section):
            facts |= dict(parser[section])
    if "AWS_PROFILE" in env and not facts:
        raise UserError(
            f"AWS_PROFILE={name!r} is in neither {' nor '.join(sections)}",
            "aws configure --profile NAME writes it.",
        )
    keys = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
    if keys[0] in facts:
        found |= {key.removeprefix("aws_"): facts[key] for key in keys if key in facts}
    if "region" in facts and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & set(env):
        found["region"] = facts["region"]
    if "endpoint_url" in facts:
        found.setdefault("endpoint", facts["endpoint_url"])
    return found


def reason(error: Exception) -> str:
    """What the client of a store says, without what only its makers want to know.

    Args:
        error: What it raised.
    """
    text = str(error).partition("\n\nDebug source")[0].strip() or type(error).__name__
    if _asks_for_keys(text):
        return "no keys of this store were found"
    found = _XML.search(text)
    if found is None:
        return text.splitlines()[0][:400]
    status = _STATUS.search(text)
    return f"{status[1] + ', ' if status else ''}{found[1]}: {found[2]}"


def advice(error: Exception) -> str:
    """What to do about that, in a line.

    Args:
        error: What the client of a store raised.
    """
    if _asks_for_keys(str(error)):
        return (
            "For S3 set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or for what "
            "everybody may read AWS_SKIP_SIGNATURE=true."
        )
    if "libjvm" in str(error):
        return "pip install 'spartito[hdfs]', which reads HDFS without Java."
    return "Is it there, and yours?"


def _asks_for_keys(text: str) -> bool:
    return "169.254.169.254" in text  # where keys are looked for last, which only a cloud has


def no_package(url: str, error: Exception) -> UserError:
    """The error for a URL whose protocol nobody here speaks."""
    scheme = urlsplit(url).scheme
    if "not known" in str(error):
        known = sorted({*OBJECTS, *EXTRAS, "file", "hdfs", "sftp", "webhdfs"})
        return UserError(f"{url} has an unknown protocol, {scheme!r}", nearest(scheme, known))
    extra = EXTRAS.get(scheme, "remote")
    is_absent = scheme in OBJECTS and importlib.util.find_spec("obstore") is None
    why = "the package obstore is not installed" if is_absent else error
    return UserError(
        f"{url} cannot be reached: {why}",
        f"pip install 'spartito[{extra}]'"
        + (f", and the package of {scheme}:// for fsspec." if extra == "remote" else "."),
    )

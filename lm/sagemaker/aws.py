"""Sessions with AWS: a real one, or for a dry run one that answers itself."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
from typing import Any, Iterator, List, Tuple

from lm.catalog.checks import DEFAULT_REGION
from lm.refusal import ConfigError, Problem
from lm.run import RunFailed
from lm.schema import Config

# Placeholders of a dry run, the account that AWS's own documentation uses.
DRY_ACCOUNT = "111122223333"
DRY_ROLE = f"arn:aws:iam::{DRY_ACCOUNT}:role/SET-cluster.role"


@contextlib.contextmanager
def told() -> Iterator[None]:
    """What AWS or the way to it answers as one message: RunFailed. Also a decorator."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (Boto3Error, BotoCoreError, ClientError) as error:
        raise RunFailed(f"AWS: {error}") from error


def import_sagemaker() -> Any:
    """The SageMaker SDK, without its own lines about settings files and its end of life."""
    os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")
    for name in ("sagemaker", "sagemaker.config", "sagemaker.image_uris", "botocore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    import sagemaker

    return sagemaker


def sdk_settings() -> Any:
    """The user's own settings of the SDK, with its telemetry off unless they turn it on."""
    from sagemaker.config import load_sagemaker_config

    settings = load_sagemaker_config() or {"SchemaVersion": "1.0"}
    modules = settings.setdefault("SageMaker", {}).setdefault("PythonSDK", {}).setdefault("Modules", {})
    modules.setdefault("TelemetryOptOut", True)
    return settings


def open_session(config: Config) -> Any:
    """A session with the account, its default bucket the one that cluster.bucket names.

    Raises ConfigError with everything that is missing: credentials, a region, a role.
    """
    cluster = config.cluster
    boto_session, missing = _connect(cluster.region, "cluster.region")
    if cluster.role is None:
        text = "cluster.role, the job's execution role (docs/sagemaker.md), has no value"
        fix = "cluster.role=arn:aws:iam::ACCOUNT:role/NAME, or SAGEMAKER_ROLE"
        missing.append(Problem(("cluster.role",), text, fix))
    if missing:
        last = missing[-1]
        fix = f"{last.fix}; cluster.dry_run=true shows the request without an account"
        raise ConfigError([*missing[:-1], Problem(last.keys, last.text, fix)])
    return _session(boto_session, cluster.bucket)


def session_for(region: str | None, bucket: str | None = None) -> Any:
    """A session for looking at jobs, and at a bucket. Raises ConfigError without credentials or a region."""
    boto_session, missing = _connect(region, "--region")
    if missing:
        raise ConfigError(missing)
    return _session(boto_session, bucket)


def _connect(region: str | None, key: str) -> Tuple[Any, List[Problem]]:
    """A session of boto3's, and what it lacks."""
    import boto3

    boto_session = boto3.Session(region_name=region)
    missing = []
    if boto_session.get_credentials() is None:
        text = "no AWS credentials were found: not in AWS_ACCESS_KEY_ID, ~/.aws or this machine's role"
        missing.append(Problem(("credentials",), text, "aws configure, or aws sso login"))
    if boto_session.region_name is None:
        missing.append(Problem((key,), "no AWS region is set", f"{key}=us-east-1, or AWS_REGION"))
    return boto_session, missing


def dry_session(config: Config) -> Any:
    """A session that reaches no network: S3 takes what it is given, and a job is only looked at."""
    import boto3

    region = config.cluster.region or DEFAULT_REGION
    boto_session = boto3.Session(region_name=region, aws_access_key_id="dry", aws_secret_access_key="run")
    bucket = config.cluster.bucket or f"sagemaker-{region}-{DRY_ACCOUNT}"
    there = f"<Name>{bucket}</Name><CreationDate>2022-01-01T00:00:00Z</CreationDate>"
    listed = f"<Result><Buckets><Bucket>{there}</Bucket></Buckets></Result>"
    created = '{"TrainingJobArn": "arn:aws:sagemaker:::training-job/dry-run"}'
    boto_session.events.register("before-send.s3.ListBuckets", functools.partial(_answer, body=listed))
    boto_session.events.register("before-send.s3.PutObject", _answer)
    boto_session.events.register("before-send.sagemaker", functools.partial(_answer, body=created))
    return _session(boto_session, bucket)


def _session(boto_session: Any, bucket: str | None) -> Any:
    sagemaker = import_sagemaker()
    return sagemaker.Session(boto_session=boto_session, default_bucket=bucket, sagemaker_config=sdk_settings())


class _Body(io.BytesIO):
    """A response's body as botocore reads it."""

    def stream(self, **_: Any) -> Iterator[bytes]:
        yield self.read()


def _answer(request: Any, body: str = "", **_: Any) -> Any:
    """In place of sending: success. To botocore a response here means that nothing is to be sent."""
    from botocore.awsrequest import AWSResponse

    return AWSResponse(request.url, 200, {}, _Body(body.encode()))

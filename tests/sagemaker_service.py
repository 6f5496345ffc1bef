"""SageMaker on this machine: moto's server for the API, S3 and CloudWatch, and a thread that really runs each job.

A job's bundle is downloaded and its entry started as the toolkit would (one process), its lines go to CloudWatch, its
run folder is brought from S3 before and back after, and its end becomes the job's status.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.sagemaker.models import FakeTrainingJob, SageMakerModelBackend
from moto.sagemaker.responses import SageMakerResponse
from moto.server import ThreadedMotoServer

REGION = "us-east-1"
ROLE = "arn:aws:iam::123456789012:role/training"
BUCKET = "training-bucket"
LOG_GROUP = "/aws/sagemaker/TrainingJobs"


class Service:
    """The server, and what tests tell it to do with the next jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[dict[str, Any]] = []
        self.no_capacity_for: list[str] = []  # instance types, one for each job that is to get no machine
        self.hold = threading.Event()  # jobs begin when it is set
        self.hold.set()
        self.stopped: list[str] = []
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.threads: list[threading.Thread] = []
        self.url = ""

    def client(self, name: str) -> Any:
        return boto3.client(name, region_name=REGION, endpoint_url=self.url)

    def created(self, job: FakeTrainingJob) -> None:
        job.failure_reason, job.billable_time_in_seconds, job.training_time_in_seconds = "", 0, 0
        job.training_job_status, job.secondary_status = "InProgress", "Starting"
        if job.resource_config["InstanceType"] in self.no_capacity_for:
            self.no_capacity_for.remove(job.resource_config["InstanceType"])
            reason = "CapacityError: Unable to provision requested ML compute capacity. Please retry."
            job.training_job_status, job.secondary_status, job.failure_reason = "Failed", "Failed", reason
            return
        thread = threading.Thread(target=self._run, args=[job], daemon=True)
        self.threads.append(thread)
        thread.start()

    def stop(self, name: str) -> None:
        self.stopped.append(name)
        (self.folder / name / "stop").touch()  # as the container's shell does on SIGTERM

    def _run(self, job: FakeTrainingJob) -> None:
        self.hold.wait()
        name = job.training_job_name
        root = self.folder / name
        job.secondary_status = "Downloading"
        s3, logs = self.client("s3"), self.client("logs")
        parameters = {key: json.loads(value) for key, value in job.hyper_parameters.items()}
        self._download(s3, parameters["sagemaker_submit_directory"], root / "source.tar.gz")
        with tarfile.open(root / "source.tar.gz") as bundle:
            bundle.extractall(root / "code", filter="data")
        (root / "output").mkdir()
        variables = {
            "SM_HPS": json.dumps({key: value for key, value in parameters.items() if not key.startswith("sagemaker")}),
            "SM_MODEL_DIR": str(root / "model"),
            "SM_OUTPUT_DATA_DIR": str(root / "output/data"),
        }
        for channel in job.input_data_config:
            folder = root / "input/data" / channel["ChannelName"]
            self._download_all(s3, channel["DataSource"]["S3DataSource"]["S3Uri"], folder)
            variables[f"SM_CHANNEL_{channel['ChannelName'].upper()}"] = str(folder)
        checkpoints = root / "checkpoints"
        self._download_all(s3, job.checkpoint_config["S3Uri"], checkpoints)
        job.secondary_status = "Training"
        began = time.time()
        process = self.processes[name] = subprocess.Popen(
            [sys.executable, "-u", "entry.py", "--config", parameters["config"], "--mp_parameters", '{"a": 1}'],
            cwd=root / "code",
            env={**os.environ, **variables, "PYTHONPATH": "", "TRAINING_JOB_NAME": name},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        stream = f"{name}/algo-1-{int(began)}"
        logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=stream)
        assert process.stdout is not None
        for line in process.stdout:
            event = {"timestamp": int(time.time() * 1000), "message": line.rstrip("\n") or " "}
            logs.put_log_events(logGroupName=LOG_GROUP, logStreamName=stream, logEvents=[event])
        status = process.wait()
        job.secondary_status = "Uploading"
        for gone in self._keys(s3, job.checkpoint_config["S3Uri"]):  # a file that was deleted there goes from S3 too
            if not (checkpoints / gone).exists():
                s3.delete_object(Bucket=BUCKET, Key=f"{job.checkpoint_config['S3Uri'].split('/', 3)[3]}{gone}")
        for path in (path for path in checkpoints.rglob("*") if path.is_file()):
            key = f"{job.checkpoint_config['S3Uri']}{path.relative_to(checkpoints)}"
            s3.upload_file(str(path), *key.removeprefix("s3://").split("/", 1))
            # what SageMaker's uploader leaves where it was interrupted
            s3.put_object(Bucket=BUCKET, Key=key.split("/", 3)[3] + ".sagemaker-uploading", Body=b"")
        self._upload_model(s3, root, f"{job.output_data_config['S3OutputPath']}/{name}/output/model.tar.gz")
        job.billable_time_in_seconds = job.training_time_in_seconds = int(time.time() - began) + 1
        if name in self.stopped:
            job.training_job_status = job.secondary_status = "Stopped"
        elif status == 0:
            job.training_job_status = job.secondary_status = "Completed"
        else:
            job.failure_reason = f"AlgorithmError: {(root / 'output/failure').read_text()[:1024]}"
            job.training_job_status = job.secondary_status = "Failed"

    def _download(self, s3: Any, uri: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        s3.download_file(*uri.removeprefix("s3://").split("/", 1), str(target))

    def _keys(self, s3: Any, uri: str) -> list[str]:
        bucket, prefix = uri.removeprefix("s3://").split("/", 1)
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [entry["Key"][len(prefix) :] for page in pages for entry in page.get("Contents", [])]

    def _download_all(self, s3: Any, uri: str, folder: Path) -> None:
        bucket, prefix = uri.removeprefix("s3://").split("/", 1)
        folder.mkdir(parents=True, exist_ok=True)
        for name in self._keys(s3, uri):
            self._download(s3, f"s3://{bucket}/{prefix}{name}", folder / name)

    def _upload_model(self, s3: Any, root: Path, uri: str) -> None:
        if (root / "model").exists():
            with tarfile.open(root / "model.tar.gz", "w:gz") as archive:
                archive.add(root / "model", ".")
            s3.upload_file(str(root / "model.tar.gz"), *uri.removeprefix("s3://").split("/", 1))


def start_service(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    """A running service, with this process's AWS variables pointing at it."""
    service = Service(folder)
    create = SageMakerModelBackend.create_training_job

    def create_and_run(backend: SageMakerModelBackend, *arguments: Any, **named: Any) -> FakeTrainingJob:
        job = create(backend, *arguments, **named)
        service.created(job)
        return job

    def stop_training_job(response: SageMakerResponse) -> str:  # moto has none
        service.stop(response._get_param("TrainingJobName"))
        return "{}"

    monkeypatch.setattr(SageMakerModelBackend, "create_training_job", create_and_run)
    monkeypatch.setattr(SageMakerResponse, "stop_training_job", stop_training_job, raising=False)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    service.url = "http://{}:{}".format(*server.get_host_and_port())
    for key, value in {
        "AWS_ENDPOINT_URL": service.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "SAGEMAKER_ROLE": ROLE,
    }.items():
        monkeypatch.setenv(key, value)
    urllib.request.urlopen(urllib.request.Request(f"{service.url}/moto-api/reset", method="POST")).close()
    service.client("s3").create_bucket(Bucket=BUCKET)
    service.client("logs").create_log_group(logGroupName=LOG_GROUP)
    service.server = server  # type: ignore[attr-defined]
    return service


assert DEFAULT_ACCOUNT_ID == "123456789012"

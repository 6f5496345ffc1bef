"""Folders in S3: a prepared set on its way up, a run folder on its way back, and whether its checkpoint is whole."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from lm.data.shards import MANIFEST
from lm.run import STATE, RunFailed, RunFolder

CHECKPOINT = re.compile(r"checkpoints/step-(\d{8,})/(.+)")
LAST = {MANIFEST, STATE}  # without which a prepared set or a checkpoint is none
# Fetched whatever their size here.
SMALL = ("metrics.jsonl", "attempts.jsonl", "summary.json", "plan.json", "log.txt", "sample.txt")
OF_THIS_MACHINE = ("config.yaml", "mlflow.json")  # which have the folders and the MLflow run of where they were written
# What SageMaker leaves beside a file while it uploads it, and what a save in progress is named.
IN_TRANSIT = re.compile(r"(^|/)\.|\.sagemaker-upload(ing|ed)$|\.partial$")


def split(uri: str) -> Tuple[str, str]:
    """The bucket and the key of s3://BUCKET/KEY."""
    bucket, _, key = uri.partition("://")[2].partition("/")
    return bucket, key.rstrip("/")


class Storage:
    """S3 by one session's client."""

    def __init__(self, session: Any, console: Console) -> None:
        self.client, self.console = session.boto_session.client("s3"), console

    def sizes(self, uri: str) -> Dict[str, int]:
        """Bytes by key below a folder, the keys relative to it."""
        bucket, key = split(uri)
        found = {}
        for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{key}/"):
            for entry in page.get("Contents", []):
                found[entry["Key"][len(key) + 1 :]] = entry["Size"]
        return found

    def read_json(self, uri: str) -> Optional[Dict[str, Any]]:
        """A JSON file, or None where there is none."""
        bucket, key = split(uri)
        try:
            return json.loads(self.client.get_object(Bucket=bucket, Key=key)["Body"].read())
        except self.client.exceptions.NoSuchKey:
            return None

    def upload(self, folder: Path, uri: str, what: str) -> None:
        """Uploads a folder, its manifest or checkpoint.json last.

        Where that last file is there, only files whose sizes differ: without it nothing there is to be trusted.
        """
        there = self.sizes(uri)
        if not LAST.intersection(there):
            there = {}
        files = [path for path in folder.rglob("*") if path.is_file() and not IN_TRANSIT.search(path.name)]
        sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
        wanted = [name for name, size in sizes.items() if there.get(name) != size]
        wanted.sort(key=lambda name: (name in LAST, name))
        bucket, key = split(uri)
        with self._bar(f"upload {what}", sum(sizes[name] for name in wanted)) as advance:
            for name in wanted:
                self.client.upload_file(str(folder / name), bucket, f"{key}/{name}", Callback=advance)

    def download_run(self, uri: str, run: RunFolder) -> None:
        """Brings a run folder home: its files, and of its checkpoints the newest whole one and the best.

        Files are written aside and renamed. A checkpoint that is here already, by its checksums' list, stays.
        """
        there = {name: size for name, size in self.sizes(uri).items() if not IN_TRANSIT.search(name)}
        steps = self._missing_steps(run, self._whole(uri, there))

        def is_wanted(name: str) -> bool:
            match = CHECKPOINT.fullmatch(name)
            if match is not None:
                return int(match[1]) in steps
            here = run.path / name
            known = here.exists() and (name in OF_THIS_MACHINE or here.stat().st_size == there[name])
            return not name.startswith("checkpoints/") and (name in SMALL or not known)

        wanted = sorted((name for name in there if is_wanted(name)), key=lambda name: (Path(name).name == STATE, name))
        bucket, key = split(uri)
        with self._bar("download the run", sum(there[name] for name in wanted)) as advance:
            for name in wanted:
                target = run.path / name
                target.parent.mkdir(parents=True, exist_ok=True)
                aside = target.with_name(f"{target.name}.partial")
                self.client.download_file(bucket, f"{key}/{name}", str(aside), Callback=advance)
                os.replace(aside, target)

    def newest_step(self, uri: str) -> Optional[int]:
        """The step of the newest checkpoint in S3 that has all of its files, or None."""
        return max(self._whole(uri, self.sizes(uri)), default=None)

    def _whole(self, uri: str, there: Dict[str, int]) -> Dict[int, Dict[str, Any]]:
        """What checkpoint.json says of each checkpoint whose files are all there in their sizes, by step.

        SageMaker uploads a checkpoint's files in any order, so checkpoint.json alone says nothing.
        """
        found = {}
        for name in there:
            match = CHECKPOINT.fullmatch(name)
            if match is None or match[2] != STATE:
                continue
            folder = name[: -len(STATE)]
            content = self.read_json(f"{uri}/{name}") or {}
            files = content.get("files", {})
            if files and all(there.get(f"{folder}{file}") == said["bytes"] for file, said in files.items()):
                found[int(match[1])] = content
        return found

    @staticmethod
    def _missing_steps(run: RunFolder, whole: Dict[int, Dict[str, Any]]) -> List[int]:
        """The newest checkpoint and the best by validation loss, where the same are not here."""
        losses = {step: content["progress"]["val_loss"] for step, content in whole.items()}
        measured = {step: loss for step, loss in losses.items() if loss is not None}
        wanted = {max(whole)} if whole else set()
        wanted |= {min(measured, key=measured.__getitem__)} if measured else set()
        here = {step: json.loads((folder / STATE).read_text()) for step, folder in run.whole_checkpoints()}
        return [step for step in wanted if here.get(step) != whole[step]]

    @contextlib.contextmanager
    def _bar(self, what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        columns = [TextColumn("[bold]{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn()]
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as bar:
            task = bar.add_task(what, total=total_bytes)
            yield lambda count: bar.advance(task, count)
        if total_bytes and not self.console.is_terminal:
            self.console.print(f"{what}: {total_bytes:,} bytes")


def verify_newest(run: RunFolder, step: Optional[int]) -> str:
    """Holds the newest downloaded checkpoint to its checksums; returns what was found, in words.

    step: of the checkpoint that the run's summary names, which may be an earlier job's; None where it saved none.
    Raises RunFailed.
    """
    whole = run.whole_checkpoints()
    if not whole:
        if step is not None:
            raise RunFailed(f"the job saved a checkpoint at step {step}, and S3 has none")
        return "none was saved"
    found, newest = whole[0]
    if step is not None and found < step:
        raise RunFailed(f"the job's last checkpoint is of step {step}, and the newest whole one in S3 of step {found}")
    for file, expected in json.loads((newest / STATE).read_text())["files"].items():
        with open(newest / file, "rb") as opened:
            checksum = hashlib.file_digest(opened, "sha256")
        if checksum.hexdigest() != expected["sha256"]:
            raise RunFailed(f"{newest / file}, as it is in S3, has not the checksum that it was written with")
    return f"step {found}, in S3 with the checksums that it was written with"

"""Checkpoints that a kill cannot spoil: written aside, synced, renamed, checksummed, restored whole or not at all.

    checkpoints/step-00000100/weights.safetensors       the model, float32
    checkpoints/step-00000100/optimizer.safetensors     moments, step, loss scale
    checkpoints/step-00000100/checkpoint.json           written last: step, position, identity, checksums
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import tensorflow as tf

from lm.data.mixture import mixture_identity
from lm.data.shards import Manifest
from lm.refusal import ConfigError, Problem
from lm.run import STATE, RunFailed, sync_folder, whole_checkpoints, write_whole
from lm.schema import Config
from lm.tensors import NotFinite, digest, names_in, read, write

FORMAT = 1
NAME = re.compile(r"step-(\d{8,})")
log = logging.getLogger("lm")


@dataclass
class Progress:
    """Where a run is. sequences: consumed so far, the whole position in the data."""

    step: int = 0
    sequences: int = 0
    skipped_steps: int = 0
    nonfinite_steps: int = 0  # in a row, up to now
    val_loss: Optional[float] = None  # measured at this very step
    best_val_loss: Optional[float] = None
    seconds: Dict[str, float] = field(default_factory=dict)  # of wall time by kind, up to now (lm.stopwatch)
    kwh: float = 0.0  # of all hosts and attempts, as far as they were saved
    saved_at: Optional[float] = None  # by the clock, in seconds since 1970

    def count(self, line: Dict[str, Any], sequences: int) -> None:
        """One more step, as its line reports it.

        Not finite is a loss, or gradients under a loss scale of 1, which no smaller scale can mend.
        """
        self.step += 1
        self.sequences += sequences
        self.val_loss = None
        self.skipped_steps += line["skipped"]
        hopeless = not math.isfinite(line["loss"]) or (line["skipped"] and line["loss_scale"] <= 1.0)
        self.nonfinite_steps = self.nonfinite_steps + 1 if hopeless else 0

    def measure(self, val_loss: float) -> None:
        """An evaluation at this step."""
        if math.isfinite(val_loss):
            self.val_loss = val_loss
            self.best_val_loss = min(val_loss, math.inf if self.best_val_loss is None else self.best_val_loss)

    @property
    def is_best(self) -> bool:
        """Whether this step has the lowest validation loss so far."""
        return self.val_loss is not None and self.val_loss == self.best_val_loss


class Incomplete(Exception):
    """A checkpoint that cannot be used; the message says why."""


def identity(config: Config, manifest: Manifest) -> Dict[str, Any]:
    """What a checkpoint must have in common with the run that resumes it."""
    shape = dataclasses.asdict(config.model)
    model = {f"model.{key}": value for key, value in shape.items() if key not in ("name", "recompute")}
    return {
        **model,
        "run.seed": config.run.seed,  # of the order of the data
        "train.precision": config.train.precision,  # the loss scale is of no use to another
        "dataset.vocabulary_size": config.dataset.vocabulary_size,
        "optimizer.name": config.optimizer.name,
        "optimizer.moments_dtype": config.optimizer.moments_dtype,
        "tokenizer": manifest.tokenizer_sha256[:8],
        "dataset": manifest.fingerprint(),
        **mixture_identity(config.mixture),
    }


class Checkpoints:
    """The checkpoints of one run.

    folder: theirs. identity: as above. keep: how many of the newest stay; the best by validation loss stays too.
    """

    def __init__(self, folder: Path, identity: Dict[str, Any], keep: int) -> None:
        self.folder, self.identity, self.keep = folder, identity, keep

    def save(self, progress: Progress, variables: Dict[str, tf.Variable]) -> None:
        """Writes a checkpoint, then removes those that keep lets go.

        Raises RunFailed where a weight is not finite: what cannot be trained on is not saved as if it could.
        """
        name = f"step-{progress.step:08d}"
        aside = self.folder / f".{name}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        files = {}
        weights = {name: v for name, v in variables.items() if not _is_state(name)}
        state = {name: v for name, v in variables.items() if _is_state(name)}
        for file, part in (("weights.safetensors", weights), ("optimizer.safetensors", state)):
            try:
                files[file] = write(aside / file, part)
            except NotFinite as bad:
                shutil.rmtree(aside)
                raise RunFailed(f"step {progress.step}: {bad} is not finite, so no checkpoint was written") from None
        content = {
            "format": FORMAT,
            "progress": dataclasses.asdict(progress),
            "identity": self.identity,
            "files": files,
        }
        write_whole(aside / STATE, json.dumps(content, indent=1))
        target = self.folder / name
        if target.exists():
            os.rename(target, self._out_of_the_way(target))
        os.rename(aside, target)
        sync_folder(self.folder)
        self._let_go(progress.step)

    def restore(self, variables: Dict[str, tf.Variable]) -> Optional[Progress]:
        """Restores the newest complete checkpoint and returns where it stood; None where there is none at all.

        Skipped ones are logged with the reason. Raises ConfigError where the checkpoint is of another model,
        tokenizer or dataset, and RunFailed where there are checkpoints and none is usable.
        """
        skipped = []
        for path in self._newest_first():
            try:
                content = self._read(path)
            except Incomplete as reason:
                skipped.append(f"{path.name}: {reason}")
                log.warning("skipped checkpoint %s: %s", path, reason)
                continue
            self._refuse_other(path, content["identity"])
            stored = names_in([path / file for file in content["files"]])
            missing = sorted(set(variables) - set(stored))
            extra = sorted(set(stored) - set(variables))
            if missing or extra:
                raise RunFailed(f"{path} lacks {missing[:3]} and has {extra[:3]} that this run does not know")
            try:
                read(stored, variables)
            except ValueError as error:
                raise RunFailed(f"{path}: {error}") from None
            return Progress(**content["progress"])
        if skipped:
            reasons = "\n  ".join(skipped)
            raise RunFailed(
                f"none of the checkpoints in {self.folder} is usable; run.resume=never starts again:\n  {reasons}"
            )
        return None

    def steps(self) -> List[int]:
        """The steps of the complete-looking checkpoints, newest first; their checksums are not read."""
        return [step for step, _ in whole_checkpoints(self.folder)]

    def _newest_first(self) -> List[Path]:
        found = [path for path in self.folder.glob("step-*") if NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: path.name, reverse=True)

    def _read(self, path: Path) -> Dict[str, Any]:
        """What checkpoint.json says, once every file has its checksum. Raises Incomplete."""
        if not (path / STATE).exists():
            raise Incomplete(f"no {STATE}")
        try:
            content = json.loads((path / STATE).read_text())
        except ValueError:
            raise Incomplete(f"{STATE} is not JSON") from None
        if content.get("format") != FORMAT:
            raise Incomplete(f"format {content.get('format')}, this version reads {FORMAT}")
        for file, expected in content["files"].items():
            if not (path / file).exists():
                raise Incomplete(f"no {file}")
            found = digest(path / file)
            if found != expected:
                sizes = f"{found['bytes']:,} bytes, {expected['bytes']:,} were written"
                raise Incomplete(f"{file} is damaged ({sizes})")
        return content

    def _refuse_other(self, path: Path, stored: Dict[str, Any]) -> None:
        problems = []
        for key in sorted(set(stored) | set(self.identity)):
            old, new = stored.get(key), self.identity.get(key)
            if old != new:
                text = f"{key} is {new}, and {path} was written with {old}"
                problems.append(Problem((key,), text, "the settings of that run, or run.resume=never"))
        if problems:
            raise ConfigError(problems)

    def _own(self, path: Path) -> Optional[Dict[str, Any]]:
        """A checkpoint's content if this run wrote it, as far as its checkpoint.json tells."""
        try:
            content = json.loads((path / STATE).read_text())
        except (OSError, ValueError):
            return None
        return content if content.get("identity") == self.identity else None

    def _out_of_the_way(self, target: Path) -> Path:
        """Where a folder that has a new checkpoint's name goes: an own one to be removed, any other to be kept."""
        if self._own(target):
            return target.with_name(f".{target.name}.old")
        number = 1
        while (kept := target.with_name(f"{target.name}.replaced{number}")).exists():
            number += 1
        return kept

    def _let_go(self, step: int) -> None:
        """Removes checkpoints of this run that are older than a step just saved and its predecessors.

        Those of later steps are what a resume skipped as damaged: they neither count nor go. A folder that this run
        did not write is never touched.
        """
        own = []
        for path in self._newest_first():
            content = self._own(path)
            if content and content["progress"]["step"] <= step:
                own.append((path, content["progress"]["val_loss"]))
        measured = [(loss, path) for path, loss in own if loss is not None]
        best = min(measured)[1] if measured else None
        for path, _ in own[self.keep :]:
            if path != best:
                doomed = path.with_name(f".{path.name}.old")
                os.rename(path, doomed)  # a kill in the middle of a removal leaves no half checkpoint behind
                shutil.rmtree(doomed)
        for left in self._left_by_kills():
            shutil.rmtree(left, ignore_errors=True)

    def _left_by_kills(self) -> Iterator[Path]:
        for path in self.folder.glob(".step-*"):
            if re.fullmatch(r"\.step-\d{8,}\.(partial|old)", path.name):
                yield path


def _is_state(name: str) -> bool:
    return name.split(".")[0] not in ("embedding", "blocks", "final_norm", "head")

"""What is sent to a job: this package as git sees it, the resolved configuration, and an entry that reads its path."""

from __future__ import annotations

import dataclasses
import fnmatch
import shutil
import subprocess
from pathlib import Path
from typing import List

from lm.config import to_yaml
from lm.container import is_reachable
from lm.plan import human_bytes
from lm.refusal import ConfigError, Problem
from lm.schema import Config

PACKAGE = Path(__file__).resolve().parents[1]
CONFIG, ENTRY, REQUIREMENTS = "config.yaml", "entry.py", "requirements.txt"
LIMIT_BYTES = 16 * 2**20  # the package has less than one; anything above got in by mistake
LARGEST = 5
# Never sent, though git may know them.
SECRETS = (".env", ".env.*", "*.pem", "*.key", "*.p12", "id_rsa*", "id_ed25519*", "credentials*", ".netrc", ".aws")
ENTRY_TEXT = '''"""What SageMaker's toolkit runs on every rank; its arguments are ignored, see lm.container."""

import sys

from lm.container import main

sys.exit(main())
'''


def make_bundle(config: Config, folder: Path) -> List[Path]:
    """Fills a folder with what a job is sent; returns the secrets that were left out.

    Raises ConfigError where the files are too many bytes, with the largest of them.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    files = _files()
    secret = [path for path in files if is_secret(path)]
    kept = [path for path in files if path not in secret]
    _refuse_large(kept)
    for path in kept:
        target = folder / path.relative_to(PACKAGE.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    (folder / CONFIG).write_text(as_yaml(config))
    (folder / ENTRY).write_text(ENTRY_TEXT)
    wanted = (Path(__file__).parent / REQUIREMENTS).read_text().splitlines(keepends=True)
    tracked = is_reachable(config.tracking.uri)
    (folder / REQUIREMENTS).write_text("".join(line for line in wanted if tracked or "mlflow" not in line))
    return secret


def without_secrets(config: Config) -> Config:
    """The configuration as it is written anywhere: the job's variables, which may be keys, are in the request alone."""
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, environment=[]))


def as_yaml(config: Config) -> str:
    """What a job reads and `lm attach` finds."""
    return to_yaml(without_secrets(config))


def is_secret(path: Path) -> bool:
    """Whether a file's name, or that of a folder it is in, is one that keys are kept under."""
    parts = path.relative_to(PACKAGE.parent).parts if path.is_relative_to(PACKAGE.parent) else path.parts
    return any(fnmatch.fnmatch(part, pattern) for part in parts for pattern in SECRETS)


def _files() -> List[Path]:
    """The package's files: what git tracks or would add, so .gitignore holds; without git, all but caches."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", str(PACKAGE)]
    try:
        listed = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        listed = None
    if listed is not None and listed.returncode == 0 and listed.stdout:
        paths = [PACKAGE.parent / name for name in listed.stdout.split("\0") if name]
        return sorted(path for path in paths if path.is_file())
    return sorted(path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _refuse_large(paths: List[Path]) -> None:
    sizes = sorted(((path.stat().st_size, path) for path in paths), reverse=True)
    total = sum(size for size, _ in sizes)
    if total > LIMIT_BYTES:
        largest = ", ".join(f"{path.relative_to(PACKAGE.parent)} {human_bytes(size)}" for size, path in sizes[:LARGEST])
        text = f"the code to send has {human_bytes(total)}, above {human_bytes(LIMIT_BYTES)}; the largest: {largest}"
        raise ConfigError([Problem(("bundle",), text, "move them out of lm/, or name them in .gitignore")])

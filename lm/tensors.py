"""Files of named tensors in the safetensors format (huggingface.co/docs/safetensors), one in memory at a time.

bfloat16 is stored as its 16 bits, because NumPy has no such type.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import tensorflow as tf
from safetensors import safe_open

STORED_AS = {"float32": "F32", "bfloat16": "U16", "int64": "I64"}


class NotFinite(Exception):
    """A value that is no number; the message is the variable's name."""


def write(path: Path, variables: Dict[str, tf.Variable]) -> Dict[str, Any]:
    """Writes a safetensors file to the disk, one variable in memory at a time; returns its size and checksum.

    The format (huggingface.co/docs/safetensors): the header's length in 8 bytes, the header in JSON, the values. The
    package's own save_file wants every value twice. Raises NotFinite.
    """
    ordered = sorted(variables.items(), key=lambda item: -item[1].dtype.size)  # so that each lies on its own multiple
    header, end = {}, 0
    for name, variable in ordered:
        start, end = end, end + variable.shape.num_elements() * variable.dtype.size
        shape = variable.shape.as_list()
        header[name] = {"dtype": STORED_AS[variable.dtype.name], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    checksum = hashlib.sha256()
    with open(path, "wb") as file:

        def put(data: Any) -> None:
            file.write(data)
            checksum.update(data)

        put(len(text).to_bytes(8, "little") + text)
        for name, variable in ordered:
            array = np.ascontiguousarray(_to_numpy(variable))
            if not np.isfinite(array).all():
                raise NotFinite(name)
            put(array.data)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return {"bytes": size, "sha256": checksum.hexdigest()}


def names_in(paths: List[Path]) -> Dict[str, Path]:
    """The names of the tensors in some files, and which file has each."""
    stored: Dict[str, Path] = {}
    for path in paths:
        with safe_open(str(path), framework="np") as file:
            stored.update(dict.fromkeys(file.keys(), path))
    return stored


def read(stored: Dict[str, Path], variables: Dict[str, tf.Variable]) -> None:
    """Assigns every variable its value, one in memory at a time. Raises ValueError where the shapes differ."""
    for path in sorted(set(stored.values())):
        with safe_open(str(path), framework="np") as file:
            for name in names_in([path]):
                _assign(name, variables[name], file.get_tensor(name))


def _assign(name: str, variable: tf.Variable, array: Any) -> None:
    if tuple(variable.shape) != array.shape:
        raise ValueError(f"{name} has shape {tuple(variable.shape)}, the file's has {array.shape}")
    if variable.dtype == tf.bfloat16:
        variable.assign(tf.bitcast(tf.constant(array), tf.bfloat16))
    else:
        variable.assign(array)


def _to_numpy(variable: tf.Variable) -> Any:
    if variable.dtype == tf.bfloat16:
        return np.asarray(tf.bitcast(variable, tf.uint16))
    return np.asarray(variable.numpy())  # a scalar too is an array


def digest(path: Path) -> Dict[str, Any]:
    """A file's size and checksum."""
    checksum = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**24):
            checksum.update(block)
    return {"bytes": path.stat().st_size, "sha256": checksum.hexdigest()}

"""Traces on disk, by what they depend on: an estimate made once is there for the next process."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from gctutor.results import source_hash, version_of
from gctutor.roofline import Work
from gctutor.steptrace import BY_SITE, Kernel, Run, Segment, StepTrace


def cache_folder() -> Path:
    """Where traces are kept: `$GCTUTOR_CACHE`, else `gctutor` in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gctutor"
    return Path(os.environ.get("GCTUTOR_CACHE", default))


@functools.cache
def _code() -> str:
    versions = [version_of(name) for name in ("torch", "transformers", "liger-kernel", "peft")]
    return json.dumps([*versions, source_hash()])


def fingerprint(*parts: Any) -> str:
    """A name for what depends on `parts` (JSON values), the libraries' versions and the package's source."""
    text = json.dumps([*parts, _code()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def store(step: StepTrace, path: Path) -> None:
    """Write a trace to `path`, whole or not at all."""
    data = dataclasses.asdict(step)
    for name in BY_SITE:
        data[name] = [[layer, site, size] for (layer, site), size in data[name].items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(gzip.compress(json.dumps(data).encode(), mtime=0))
    part.replace(path)


def load(path: Path) -> StepTrace | None:
    """The stored trace, or None when there is none or it is unreadable (it is then traced again)."""
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
        segments = tuple(
            Segment(s["layer"], s["phase"], Run(_kernel(k) for k in s["kernels"])) for s in data.pop("segments")
        )
        for name in BY_SITE:
            data[name] = {(layer, site): size for layer, site, size in data[name]}
        return StepTrace(segments=segments, **data)
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None


def _kernel(data: dict[str, Any]) -> Kernel:
    of = tuple((layer, tuple(part)) for layer, part in data["freed_of"])
    return Kernel(
        **{
            **data,
            "work": Work(*data["work"]),
            "born": tuple(data["born"]),
            "freed": tuple(data["freed"]),
            "freed_of": of,
        }
    )

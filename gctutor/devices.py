"""GPU data sheets and calibrated profiles, read from `data/`: what the roofline needs to know of a device."""

from __future__ import annotations

import functools
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gctutor.errors import UserError, unknown

DATA = Path(__file__).resolve().parent.parent / "data"


class Efficiency(BaseModel):
    """Share of the data sheet's rate that real kernels reach; assumed until `gctutor calibrate` has measured it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    gemm: float = 0.75
    attention_forward: float = 0.55
    attention_backward: float = 0.45
    bandwidth: float = 0.85


class Device(BaseModel):
    """One device. Rates are dense (no sparsity), per second; `usable_bytes` is what a process can allocate.

    `reported_gib` is the total capacity PyTorch reports for the card (GiB), from which `usable_bytes` was derived.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    aliases: tuple[str, ...] = ()
    kind: Literal["cuda", "rocm", "cpu"] = "cuda"
    usable_bytes: int
    reported_gib: float | None = None
    bf16_flop_per_s: float
    fp32_flop_per_s: float
    bandwidth_bytes_per_s: float
    host_link_bytes_per_s: float
    launch_s: float = 5e-6
    efficiency: Efficiency = Efficiency()
    source: str
    profile: str = "data sheet with assumed efficiencies"

    def ridge(self) -> float:
        """The arithmetic intensity (FLOP/byte) where compute and memory time are equal, by the device's rates."""
        return self.bf16_flop_per_s / self.bandwidth_bytes_per_s


@functools.cache
def list_devices() -> tuple[Device, ...]:
    """Every device of `data/devices.toml`, in the file's order, with its calibrated profile where there is one."""
    path = DATA / "devices.toml"
    devices = [_device(entry, path) for entry in _toml(path)["device"]]
    return tuple(_calibrated(device) for device in devices)


def _calibrated(device: Device) -> Device:
    path = DATA / "profiles" / f"{slug(device.name)}.toml"
    return _device({**device.model_dump(), **_toml(path)}, path) if path.exists() else device


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path.name} is not valid TOML: {error}.") from error


def _device(entry: dict[str, Any], path: Path) -> Device:
    try:
        return Device.model_validate(entry)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise UserError(f"{path.name}: {entry.get('name')!r} has a bad {field}: {first['msg']}.") from error


def slug(name: str) -> str:
    """A file name of a device or policy: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def find_device(name: str) -> Device:
    """The device meant by `name`; `UserError` for an unknown or an ambiguous one.

    Case, spaces, dashes and the maker's name do not matter, and part of a name will do if its whole words name one
    device only ("L40" is not L40S: another card).
    """
    wanted = _squash(name)
    devices = list_devices()
    exact = [d for d in devices if wanted in {_squash(d.name), *map(_squash, d.aliases)}]
    if len(exact) == 1:
        return exact[0]
    words = _words(name)
    partial = [d for d in devices if words and any(words <= _words(text) for text in (d.name, *d.aliases))]
    if len(partial) == 1:
        return partial[0]
    if partial:
        raise UserError(f"{name!r} could be {', '.join(d.name for d in partial)}: name one of them.")
    raise unknown("device", name, [d.name for d in devices])


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower())) - {"nvidia", "amd", "geforce"}


def _squash(name: str) -> str:
    return re.sub(r"nvidia|amd|geforce|[^a-z0-9]", "", name.lower())

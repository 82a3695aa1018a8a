"""Data sheets: complete, dense, derived as the file says, and found by the names people use."""

import math

import pytest

from gctutor import devices
from gctutor.devices import find_device, list_devices
from gctutor.errors import UserError

GPUS = [
    "H100 SXM",
    "H100 PCIe",
    "H200",
    "A100 40GB",
    "A100 80GB",
    "L40S",
    "L4",
    "RTX 4090",
    "RTX 5090",
    "B200",
    "MI300X",
]


@pytest.fixture
def data_folder(tmp_path, monkeypatch):
    """An empty data folder; the cached devices are forgotten before and after."""
    monkeypatch.setattr(devices, "DATA", tmp_path)
    list_devices.cache_clear()
    yield tmp_path
    list_devices.cache_clear()


def test_every_device_is_listed():
    assert [device.name for device in list_devices()] == [*GPUS, "cpu"]


@pytest.mark.parametrize("name", GPUS)
def test_usable_bytes_are_the_reported_capacity_less_a_context(name):
    device = find_device(name)
    derived = device.reported_gib * 2**30 - 0.6e9
    assert device.usable_bytes == math.floor(derived / 1e8) * 1e8


@pytest.mark.parametrize("name", GPUS)
def test_every_figure_has_a_source(name):
    source = find_device(name).source
    assert "data sheet" in source or "white paper" in source
    assert "PCIe Gen" in source


@pytest.mark.parametrize(
    ("name", "tflops"), [("H100", 989.4), ("H200", 989.4), ("A100 80GB", 312), ("RTX 4090", 165.2)]
)
def test_rates_are_dense(name, tflops):
    assert find_device(name).bf16_flop_per_s == tflops * 1e12


def test_host_link_is_four_fifths_of_the_coded_pcie_rate():
    for device in list_devices()[:-1]:
        giga_transfers = {"Gen4": 16, "Gen5": 32}[device.source.split("PCIe ")[-1].split()[0]]
        one_way = giga_transfers * 1e9 * 16 / 8 * 128 / 130
        assert device.host_link_bytes_per_s == pytest.approx(0.8 * one_way, rel=1e-3)


def test_ridge_is_rate_over_bandwidth():
    assert find_device("H100").ridge() == pytest.approx(989.4e12 / 3.35e12)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100", "H100 SXM"),
        ("h100-sxm", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("a100-80gb", "A100 80GB"),
        ("L4", "L4"),
        ("4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("mi300x", "MI300X"),
        ("CPU", "cpu"),
    ],
)
def test_names_are_matched_forgivingly(text, name):
    assert find_device(text).name == name


def test_every_alias_and_name_finds_its_own_device():
    for device in list_devices():
        assert all(find_device(name) is device for name in (device.name, *device.aliases))


@pytest.mark.parametrize(
    ("text", "candidates"), [("A100", ["A100 40GB", "A100 80GB"]), ("RTX", ["RTX 4090", "RTX 5090"])]
)
def test_ambiguous_name_is_refused_with_the_candidates(text, candidates):
    with pytest.raises(UserError, match="could be " + ", ".join(candidates)):
        find_device(text)


@pytest.mark.parametrize(("text", "near"), [("L40", "L40S"), ("H20", "H200"), ("MI300", "MI300X"), ("", "choose from")])
def test_another_card_is_not_taken_for_a_similar_one(text, near):
    with pytest.raises(UserError, match=near):
        find_device(text)


def write_device(folder, **changes):
    figures = {
        "name": '"toy"',
        "usable_bytes": 1,
        "bf16_flop_per_s": 1.0,
        "fp32_flop_per_s": 1.0,
        "bandwidth_bytes_per_s": 1.0,
        "host_link_bytes_per_s": 1.0,
        "source": '"none"',
        **changes,
    }
    text = "[[device]]\n" + "".join(f"{key} = {value}\n" for key, value in figures.items())
    (folder / "devices.toml").write_text(text)


def test_calibrated_profile_replaces_assumed_figures(data_folder):
    write_device(data_folder)
    (data_folder / "profiles").mkdir()
    (data_folder / "profiles" / "toy.toml").write_text('profile = "calibrated"\n[efficiency]\ngemm = 0.9\n')
    device = find_device("toy")
    assert device.efficiency.gemm == 0.9
    assert device.profile == "calibrated"


@pytest.mark.parametrize("changes", [{"usable_bytes": '"many"'}, {"colour": '"green"'}])
def test_bad_entry_is_one_sentence(data_folder, changes):
    write_device(data_folder, **changes)
    with pytest.raises(UserError, match=rf"devices.toml: 'toy' has a bad {next(iter(changes))}") as caught:
        list_devices()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("profile", ["efficiency = 3", "not toml"])
def test_bad_profile_is_one_sentence(data_folder, profile):
    write_device(data_folder)
    (data_folder / "profiles").mkdir()
    (data_folder / "profiles" / "toy.toml").write_text(profile)
    with pytest.raises(UserError, match=r"toy\.toml"):
        list_devices()

"""Calibration: what is timed, and a profile that estimates find, use and name."""

import tomllib

import pytest
import torch

from gctutor import calibration, cli, devices
from gctutor.devices import find_device, list_devices
from gctutor.workload import Workload

CPU_PROFILE = {
    "profile": "calibrated some day",
    "launch_s": 1.5e-5,
    "fp32_flop_per_s": 5e10,
    "bf16_flop_per_s": 2e10,
    "bandwidth_bytes_per_s": 9e9,
    "efficiency": {"gemm": 1.0, "attention_forward": 0.25, "attention_backward": 0.5, "bandwidth": 1.0},
}


@pytest.fixture
def profiles(tmp_path, monkeypatch):
    """The data sheets with a folder of profiles of its own; cached devices are forgotten before and after."""
    (tmp_path / "devices.toml").write_text((devices.DATA / "devices.toml").read_text())
    monkeypatch.setattr(devices, "DATA", tmp_path)
    list_devices.cache_clear()
    yield tmp_path / "profiles"
    list_devices.cache_clear()


@pytest.fixture
def clock(monkeypatch):
    """No waiting: every call is made once and takes a hundredth of a second."""

    def seconds_of(call, device):
        call()
        return 0.01

    monkeypatch.setattr(calibration, "seconds_of", seconds_of)


def test_a_profile_is_found_used_and_named(profiles):
    path = calibration.save(CPU_PROFILE, "cpu")
    assert path == profiles / "cpu.toml" and tomllib.loads(path.read_text()) == CPU_PROFILE
    card = find_device("cpu")
    assert (card.profile, card.launch_s, card.efficiency.attention_forward) == ("calibrated some day", 1.5e-5, 0.25)
    assert card.usable_bytes == 8_000_000_000  # the rest is still the data sheet's


def test_an_estimate_says_which_profile_it_used(profiles):
    from gctutor.estimation import estimate

    tiny = Workload("nano@1", 1, 16, precision="fp32")
    before = estimate(tiny, "none", "cpu")
    calibration.save({**CPU_PROFILE, "fp32_flop_per_s": 1e9, "launch_s": 1e-9}, "cpu")
    after = estimate(tiny, "none", "cpu")
    assert after.provenance["profile"] == "calibrated some day" != before.provenance["profile"]
    assert after.step_s > before.step_s and after.activation_bytes == before.activation_bytes


def test_a_cpus_profile_holds_its_rates(clock):
    stages = []
    profile = calibration.calibrate("cpu", stages.append)
    assert stages == list(calibration.STAGES[:-1])  # a CPU has no link to itself
    assert profile["efficiency"]["gemm"] == profile["efficiency"]["bandwidth"] == 1.0
    devices.Device.model_validate({**find_device("cpu").model_dump(), **profile})
    flop = 2 * 256 * (512 * 512 + 512 * 128 + 2 * 512 * 1536 + 512 * 2048)
    assert profile["fp32_flop_per_s"] == pytest.approx(flop / 0.05)  # five products
    assert "calibrated 2" in profile["profile"] and "CPU" in profile["profile"]


def test_attention_counts_half_of_the_square_and_backward_two_and_a_half_forwards(clock):
    forward, backward = calibration.attention(Workload("nano", 1, 256, precision="fp32"), "cpu")
    assert forward == 4 * 8 * 256 * 256 * 64 / 2 / 0.01
    assert backward == 2.5 * forward


def test_streams_count_what_is_read_and_written(clock):
    timings = calibration.streams(Workload("nano", 1, 256, precision="fp32"), "cpu")
    assert [work for work, _ in timings] == [n * 256 * 1536 * 4 for n in (2, 3, 2)]


def test_a_rate_weighs_by_time():
    assert calibration.rate([(100.0, 1.0), (100.0, 3.0)]) == 50.0


def test_timing_repeats_short_calls_and_warms_up():
    calls = []
    seconds = calibration.seconds_of(lambda: calls.append(1), "cpu")
    assert 0 < seconds < calibration.SAMPLE_S
    assert len(calls) > 10 * calibration.SAMPLES


def test_the_command_writes_where_it_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibration, "calibrate", lambda device, progress: CPU_PROFILE)
    assert cli.main(["calibrate", "--device", "cpu", "--save", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == (tmp_path / "cpu.toml").read_text().strip()
    assert cli.main(["calibrate", "--device", "H100"]) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: its products, bandwidth and host link")
def test_a_gpus_shares_are_shares():
    profile = calibration.calibrate("cuda")
    assert all(0 < share <= 1.1 for share in profile["efficiency"].values())
    assert profile["host_link_bytes_per_s"] > 1e9 and 1e-7 < profile["launch_s"] < 1e-3

"""`choose_device`, and its messages on machines without a usable GPU. The tests replace functions of torch to simulate
different machines."""

import logging
import warnings

import pytest
import torch

from hotset.base.errors import ConfigError
from hotset.engine.loading import choose_device


def no_gpu() -> bool:
    return False


def old_driver() -> bool:
    warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old (found 10010)", stacklevel=1)
    return False


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Makes torch report CUDA and two usable GPUs. Tests change single functions through the returned MonkeyPatch."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Old GPU")
    return monkeypatch


def test_a_usable_gpu_is_chosen_silently(machine: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_device(None) == torch.device("cuda")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert choose_device("cpu") == torch.device("cpu")
    assert not caplog.records


@pytest.mark.parametrize(
    ("function", "replacement", "reason"),
    [
        ("is_available", no_gpu, "no GPU was found"),
        ("is_available", old_driver, "driver is too old for CUDA 13.0"),
        (
            "get_device_capability",
            lambda index: (7, 0),
            "Old GPU has compute capability 7.0, but Hotset needs 8.0 or newer",
        ),
    ],
)
def test_without_a_usable_gpu_the_cpu_is_chosen_with_one_warning(
    machine: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, function: str, replacement: object, reason: str
) -> None:
    machine.setattr(torch.cuda, function, replacement)
    with caplog.at_level(logging.WARNING):
        assert choose_device(None) == torch.device("cpu")
    assert [reason in record.getMessage() for record in caplog.records] == [True]
    with pytest.raises(ConfigError, match=reason):
        choose_device("cuda")


def test_a_gpu_is_refused_if_torch_has_no_cuda(machine: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    machine.setattr(torch.version, "cuda", None)
    machine.setattr(torch.cuda, "is_available", no_gpu)
    assert choose_device(None) == torch.device("cpu")
    assert not caplog.records
    with pytest.raises(ConfigError, match="built without CUDA; use --device cpu"):
        choose_device("cuda")


def test_a_gpu_number_that_does_not_exist_is_refused(machine: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="GPU 2 does not exist: this machine has 2"):
        choose_device("cuda:2")


@pytest.mark.parametrize("name", ["gpu", "mps"])
def test_an_unsupported_device_is_refused_with_its_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--device '{name}'"):
        choose_device(name)

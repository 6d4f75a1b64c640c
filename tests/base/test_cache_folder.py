"""Where files are kept that could be made again, and which folders are refused."""

import os
from pathlib import Path

import pytest

from hotset.base.cache_folder import cache_folder, make_private


def test_variables_decide_about_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    for name in ("HOTSET_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_folder("kernels") == Path("/home/ada/.cache/hotset/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache_folder("kernels") == Path("/home/ada/.cache/hotset/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "/fast")
    assert cache_folder("kernels") == Path("/fast/hotset/kernels")
    monkeypatch.setenv("HOTSET_CACHE_DIR", "/faster")
    assert cache_folder("kernels") == Path("/faster/kernels")


def test_a_new_folder_is_private_and_an_old_one_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache" / "kernels"
    make_private(folder)
    make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o750)
    with pytest.raises(PermissionError, match="chmod 700"):
        make_private(folder)
    folder.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(NotADirectoryError, match="is not a folder"):
        make_private(link)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        make_private(folder)
